"""A server or a site that lost its machine goes on from a backup, to the same bits."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import backup, inventory
from deploy.audit import Audit, verify
from deploy.backup import KeptPath
from fl_app.errors import DeploymentError, UserError
from fl_app.server.run_folder import read_summary
from tests.conftest import Command, Run
from tests.facts import each_mentions, rejected


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of everything that this machine keeps."""
    there = tmp_path / "machine"
    for name, place in (("STATE_HOME", "state"), ("STATE_DIR", "client-state"), ("SITE_DIR", "notes")):
        monkeypatch.setenv(f"COROLLA_{name}", str(there / place))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(there / "config"))
    there.mkdir()
    return there


def cluster(machine: Path) -> Path:
    """An inventory with keys and a database."""
    file = machine / "lab.yaml"
    link = {"database": str(machine / "superlink.db")}
    file.write_text(yaml.safe_dump({"superlink": link, "hosts": [{"host": "local", "supernodes": 2}]}))
    (machine / "lab-keys").mkdir(mode=0o700)
    (machine / "lab-keys" / "ca.key").write_text("secret")
    (machine / "lab-keys" / "ca.key").chmod(0o600)
    return file


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_machine_lost_between_two_rounds(run: Run, machine: Path, tmp_path: Path, command: Command) -> None:
    # the clients keep their heads
    settings = {
        "method": "fedper",
        "state_dir": str(machine / "client-state"),
        "keep_state": True,
        "checkpoint_every": 1,
    }
    straight = run(num_server_rounds=3, run_name="straight", **settings)
    begun = run(num_server_rounds=2, run_name="lost", output_dir=str(machine / "runs"), **settings)
    file = cluster(machine)
    site = machine / "state" / "sites" / "lab" / "supernode-0"
    Audit(site).append("start", site="", rules="")
    (machine / "notes").mkdir(mode=0o700)
    (machine / "notes" / "hash-key").write_bytes(b"k" * 32)
    (machine / "notes" / "hash-key").chmod(0o600)
    with sqlite3.connect(machine / "superlink.db") as live:
        live.execute("PRAGMA journal_mode = WAL")
        live.execute("CREATE TABLE nodes (id)")
        live.execute("INSERT INTO nodes VALUES (7)")
        live.commit()
        archive = tmp_path / "backup.tar"
        code, out, err = command("cluster", "backup", file, archive, "--runs", machine / "runs")
        assert code == 0, err
        # the rows above are in the write-ahead log alone, and later ones do not count
        live.execute("INSERT INTO nodes VALUES (8)")
    live.close()
    assert archive.stat().st_mode & 0o777 == 0o600 and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    kept = contents(machine)

    code, _, err = command("cluster", "restore", archive)
    assert code == 2 and "are not overwritten" in err and str(machine / "lab-keys") in err
    assert contents(machine) == kept
    shutil.rmtree(machine)
    code, out, err = command("cluster", "restore", archive)
    assert code == 0 and f"client state: {machine / 'client-state' / begun.experiment}" in out, err

    with sqlite3.connect(machine / "superlink.db") as restored:
        assert restored.execute("SELECT id FROM nodes").fetchall() == [(7,)]
    restored.close()
    back = contents(machine)
    databases = {name for name in kept if name.startswith("superlink.db")}
    assert {n: c for n, c in back.items() if n not in databases} == {
        n: c for n, c in kept.items() if n not in databases
    }
    for secret in (machine / "lab-keys" / "ca.key", machine / "superlink.db", machine / "notes" / "hash-key"):
        assert secret.stat().st_mode & 0o077 == 0
    assert (machine / "lab-keys").stat().st_mode & 0o777 == 0o700
    assert len(verify(site).hashes) == 1
    resumed = run(num_server_rounds=3, resume=str(begun.path), **settings)
    assert read_summary(resumed.path)["digest"] == read_summary(straight.path)["digest"] is not None


def test_a_site_keeps_its_own(machine: Path, tmp_path: Path, command: Command) -> None:
    site = machine / "state" / "sites" / "bern"
    Audit(site).append("start", site="", rules="")
    (site / "node.key").write_text("secret")
    state = machine / "client-state" / "0123456789abcdef0123456789abcdef" / "client-0000" / "000001-0.state"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"weights")
    rules = machine / "config" / "corolla" / "site.toml"
    rules.parent.mkdir(parents=True)
    rules.write_text(f'site-dir = "{machine / "own"}"\n')
    rules.chmod(0o600)
    (machine / "notes").mkdir()
    (machine / "notes" / "budget.json").write_text("{}")
    # no part of it
    (machine / "client-state" / "clusters").mkdir()
    archive = tmp_path / "site.tar"
    code, out, err = command("node", "backup", archive)
    assert code == 0, err
    kinds = [line.split(":")[0].strip() for line in out.splitlines()[1:]]
    assert each_mentions(kinds, ("site",), ("rules",), ("notes of budgets", "answers"), ("client state",))
    kept = contents(machine)
    shutil.rmtree(machine)
    code, _, err = command("node", "restore", archive)
    assert code == 0, err
    assert contents(machine) == kept


def test_nothing_is_written_over_and_nothing_is_kept_of_nothing(machine: Path, tmp_path: Path) -> None:
    with rejected(DeploymentError, "backup", "nothing on", "machine"):
        backup.write(tmp_path / "a.tar", backup.of_site())
    part = KeptPath("keys", machine)
    (tmp_path / "there.tar").touch()
    with rejected(DeploymentError, "", "there.tar exists already"):
        backup.write(tmp_path / "there.tar", [part])
    with pytest.raises(UserError, match="lies in"):
        backup.write(machine / "a.tar", [part])
    found = inventory.read_inventory(cluster(machine))
    (machine / "superlink.db").write_text("no database, and long enough to be looked at" * 100)
    with rejected(DeploymentError, "superlink.database", "cannot be copied"):
        backup.write(tmp_path / "a.tar", backup.of_server(found, machine / "lab.yaml", []))
    assert not (tmp_path / "a.tar").exists()


@pytest.mark.parametrize("damage", ["cut", "other", "outside", "link", "missing"])
def test_a_damaged_or_hostile_archive_changes_nothing(machine: Path, tmp_path: Path, damage: str) -> None:
    keys, archive = machine / "keys", tmp_path / "a.tar"
    keys.mkdir()
    (keys / "ca.key").write_bytes(bytes(50_000))
    backup.write(archive, [KeptPath("keys", keys), KeptPath("inventory", keys)])
    with tarfile.open(archive) as tar:
        members = [(m, tar.extractfile(m).read() if m.isfile() else b"") for m in tar]  # type: ignore[union-attr]
    if damage == "cut":
        archive.write_bytes(archive.read_bytes()[:-60_000])
    elif damage == "other":
        archive.write_bytes(b"x" * 2000)
    else:
        with tarfile.open(archive, "w") as tar:
            for member, content in members:
                if damage != "missing" or not member.name.startswith("1"):
                    tar.addfile(member, io.BytesIO(content))
            extra = tarfile.TarInfo("0/../../outside" if damage == "outside" else "0/link")
            if damage == "link":
                extra.type, extra.linkname = tarfile.SYMTYPE, "/etc/passwd"
            if damage != "missing":
                tar.addfile(extra)
    shutil.rmtree(keys)
    with pytest.raises(UserError):
        backup.read(archive)
    assert list(machine.iterdir()) == []


SOUND = {"what": "keys", "path": "@/keys"}


@pytest.mark.parametrize(
    "parts, names",
    [
        ([SOUND, SOUND], []),
        ([SOUND, {**SOUND, "path": "@/keys/inside"}], []),
        ([{**SOUND, "path": "/"}], []),
        ([{**SOUND, "path": "keys"}], []),
        ([{**SOUND, "path": "@/../keys"}], []),
        ([{**SOUND, "path": "@/a\0b"}], []),
        ([{**SOUND, "path": "@/a\x1b[2J"}], []),
        ([{**SOUND, "what": "a\nb"}], []),
        ([{**SOUND, "path": ["@"]}], []),
        ([{**SOUND, "path": "@/" + "long" * 100}], ["0"]),
        ([], []),
        ({}, []),
        ([SOUND], ["9" * 5000]),
        ([SOUND], ["00"]),
        ([SOUND], ["0", "0/../../outside"]),
        ([SOUND], ["0", "/outside"]),
        ([SOUND], ["0", ""]),
        # a directory there would be in the way of the site's rules
        ([{**SOUND, "path": "@/config/site.toml/x"}], ["0", "other"]),
        ([{**SOUND, "path": "@/config/site.toml/x"}, {**SOUND, "path": "@/config/y/z"}], ["0"]),
        # the second one cannot be put back
        ([SOUND, {**SOUND, "path": "@/file/inside"}], ["0", "1"]),
    ],
)
def test_a_forged_backup_changes_nothing(machine: Path, tmp_path: Path, parts: Any, names: list[str]) -> None:
    (machine / "file").write_text("there")
    about = json.dumps({"format": backup.FORMAT, "parts": parts}).replace("@", str(machine)).encode()
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in [(backup.MANIFEST, about), *((name, b"") for name in names)]:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), tarfile.REGTYPE if content else tarfile.DIRTYPE
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(UserError):
        backup.read(archive)
    assert list(machine.iterdir()) == [machine / "file"] and sorted(tmp_path.iterdir()) == [archive, machine]


def test_a_restore_that_fails_in_the_middle_is_undone(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, archive = [KeptPath("keys", machine / name) for name in ("a", "b")], tmp_path / "a.tar"
    for part in parts:
        part.path.mkdir()
    backup.write(archive, parts)
    for part in parts:
        part.path.rmdir()
    rename = os.rename

    def fails(source: Any, target: Any) -> None:
        if target == parts[1].path:
            raise OSError(28, "No space left on device", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(UserError, match="No space left"):
        backup.read(archive)
    assert list(machine.iterdir()) == []


def test_a_checkpoint_written_meanwhile_is_kept_before_the_records(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("checkpoints/round-1.json", "metrics.jsonl"):
        (run / name).touch()
    seen = []
    for path in backup._ordered(tmp_path):
        if path.name == "round-1.json":
            (run / "checkpoints" / "round-2.json").touch()
        seen.append(str(path.relative_to(tmp_path)))
    assert seen == ["run", "run/checkpoints", *(f"run/checkpoints/round-{k}.json" for k in (1, 2)), "run/metrics.jsonl"]


def test_links_are_kept_as_what_they_lead_to(machine: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "r1" / "checkpoints").mkdir(parents=True)
    (elsewhere / "r1" / "checkpoints" / "round-1.json").write_text("{}")
    (elsewhere / "lab.yaml").write_text("hosts: [{host: local, supernodes: 1}]\n")
    (machine / "lab.yaml").symlink_to(elsewhere / "lab.yaml")
    runs = machine / "runs"
    (runs / "r2").mkdir(parents=True)
    (runs / "r1").symlink_to(elsewhere / "r1")
    (runs / "r2" / "one").write_text("the same")
    os.link(runs / "r2" / "one", runs / "r2" / "two")
    # back to a directory above: its content is there once
    (elsewhere / "r1" / "loop").symlink_to(runs)
    (elsewhere / "r1" / "itself").symlink_to(".")
    state = machine / "client-state" / "0123456789abcdef0123456789abcdef"
    state.mkdir(parents=True)
    (state / "planted").symlink_to(elsewhere / "lab.yaml")
    archive = tmp_path / "a.tar"
    found = inventory.read_inventory(machine / "lab.yaml")
    backup.write(archive, backup.of_server(found, machine / "lab.yaml", [runs]))
    shutil.rmtree(machine)
    shutil.rmtree(elsewhere)
    backup.read(archive)
    hosts = b"hosts: [{host: local, supernodes: 1}]\n"
    same = {"runs/r2/one": b"the same", "runs/r2/two": b"the same"}
    assert contents(machine) == {"lab.yaml": hosts, "runs/r1/checkpoints/round-1.json": b"{}", **same}
    assert not any(path.is_symlink() for path in machine.rglob("*"))


def test_no_link_that_an_application_makes_meanwhile_is_followed(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces a file, a directory and the whole state by links to a secret, while the first file is packed."""
    secret = tmp_path / "secrets"
    secret.mkdir()
    (secret / "node.key").write_text("secret")
    root = machine / "client-state"
    state, other = root / "0123456789abcdef0123456789abcdef", root / "fedcba9876543210fedcba9876543210"
    for path in (state / "d" / "node.key", state / "f0", state / "f1", other / "node.key"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("own")
    (root / ("a" * 32)).symlink_to(secret)
    add = tarfile.TarFile.addfile

    def and_then(self: tarfile.TarFile, member: tarfile.TarInfo, content: Any = None) -> None:
        add(self, member, content)
        if member.name.endswith("f0"):
            (state / "f1").unlink()
            (state / "f1").symlink_to(secret / "node.key")
            for directory in (state / "d", other):
                shutil.rmtree(directory)
                directory.symlink_to(secret)

    monkeypatch.setattr(tarfile.TarFile, "addfile", and_then)
    archive = tmp_path / "a.tar"
    backup.write(archive, backup.of_site([root]))
    assert b"secret" not in archive.read_bytes()
    shutil.rmtree(root)
    backup.read(archive)
    assert contents(root) == {"0123456789abcdef0123456789abcdef/f0": b"own"} and other.is_dir()


def written_by_applications(machine: Path) -> tuple[Path, Path, Path]:
    """A started site's directory, its state and its notes."""
    site = machine / "state" / "sites" / "lab" / "supernode-0"
    Audit(site).append("start", site="", rules="")
    state = site / "state" / "0123456789abcdef0123456789abcdef"
    notes = machine / "notes"
    for directory in (state, notes, site / "tmp", site / "flwr"):
        directory.mkdir(parents=True)
    return site, state, notes


def test_nothing_but_files_is_kept_of_what_applications_write(machine: Path, tmp_path: Path, command: Command) -> None:
    secret = tmp_path / "secrets"
    (secret / "below").mkdir(parents=True)
    for path in (secret / "id_ed25519", secret / "below" / "key"):
        path.write_text("secret")
    site, state, notes = written_by_applications(machine)
    (site / "node.key").write_text("own key")
    for place in (state, notes, site / "tmp", site / "state"):
        (place / "one").write_text("own")
        (place / "key").symlink_to(secret / "id_ed25519")
        (place / "all").symlink_to(secret)
        (place / "loop").symlink_to(".")
        (place / "away").symlink_to(tmp_path / "not-there")
        os.mkfifo(place / "pipe")
        os.mknod(place / "socket", 0o600 | stat.S_IFSOCK)
    (site / "flwr" / "config.toml").write_text("settings")
    archive = tmp_path / "a.tar"
    code, _, err = command("node", "backup", archive)
    assert code == 0, err
    assert b"secret" not in archive.read_bytes()
    shutil.rmtree(machine)
    backup.read(archive)
    lab = "state/sites/lab/supernode-0"
    names = {f"{lab}/audit.jsonl", f"{lab}/audit.head", f"{lab}/node.key", f"{lab}/state/one", "notes/one"}
    found = {name for name in contents(machine) if not name.endswith(".lock")}
    assert found == names | {f"{lab}/state/{state.name}/one"}
    assert not any(path.is_symlink() for path in machine.rglob("*"))


def test_a_link_of_the_site_itself_is_refused(machine: Path, tmp_path: Path) -> None:
    """It would be missing after a restore."""
    site, _, _ = written_by_applications(machine)
    (site / "node.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError) as refused:
        backup.write(tmp_path / "a.tar", backup.of_site())
    assert str(site / "node.key") in str(refused.value)
    assert not (tmp_path / "a.tar").exists()


def test_a_file_without_an_end_is_refused_by_name(machine: Path, tmp_path: Path) -> None:
    _, state, _ = written_by_applications(machine)
    with (state / "endless").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(UserError) as refused:
        backup.write(tmp_path / "a.tar", backup.of_site())
    assert str(state / "endless") in str(refused.value) and str(1 << 43) in str(refused.value)
    assert not (tmp_path / "a.tar").exists()


def test_a_file_that_is_cut_meanwhile_does_not_end_a_backup(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, state, notes = written_by_applications(machine)
    (state / "cut").write_bytes(b"x" * 100_000)
    (notes / "kept").write_text("kept")
    look = tarfile.TarFile.gettarinfo

    def cut(self: tarfile.TarFile, *given: Any, **named: Any) -> tarfile.TarInfo:
        found = look(self, *given, **named)
        if found.name.endswith("/cut"):
            os.truncate(state / "cut", 10)
        return found

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", cut)
    backup.write(tmp_path / "a.tar", backup.of_site())
    with tarfile.open(tmp_path / "a.tar") as tar:
        sizes = {Path(member.name).name: member.size for member in tar}
    assert sizes["cut"] == 100_000 and sizes["kept"] == 4


@pytest.mark.parametrize("variable", ["COROLLA_STATE_DIR", "COROLLA_SITE_DIR", "COROLLA_STATE_HOME", "host"])
def test_what_applications_write_is_no_part_of_the_servers_files(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Of the server's files links are followed: one of an application would bring another file into the archive."""
    place = machine / "lab-keys" / "more"
    file = cluster(machine)
    if variable == "host":
        hosts = [{"host": "local", "supernodes": 2, "environment": {"COROLLA_STATE_DIR": str(place)}}]
        file.write_text(yaml.safe_dump({"hosts": hosts}))
    else:
        monkeypatch.setenv(variable, str(place))
    where = place / "sites" / "lab" / "supernode-0" if variable == "COROLLA_STATE_HOME" else place
    where.mkdir(parents=True)
    (where / "link").symlink_to(tmp_path / "id_ed25519")
    (tmp_path / "id_ed25519").write_text("secret")
    with rejected(DeploymentError, "backup", "lab-keys/more", "lies in", "lab-keys (keys)", "where links"):
        backup.of_server(inventory.read_inventory(file), file, [])


def test_a_link_that_cannot_be_kept_is_named(machine: Path, tmp_path: Path) -> None:
    runs, archive = machine / "runs", tmp_path / "archives" / "a.tar"
    runs.mkdir()
    archive.parent.mkdir()
    (runs / "r1").symlink_to(machine / "away")
    found = inventory.read_inventory(cluster(machine))
    with rejected(DeploymentError, "backup", "runs/r1", "link", "away", "not there"):
        backup.write(archive, [KeptPath("run folders", runs)])
    (machine / "away").symlink_to(archive.parent)
    with rejected(DeploymentError, "a.tar", "lies in", "runs/r1", "which is kept"):
        backup.write(archive, [KeptPath("run folders", runs)])
    (machine / "more").symlink_to(machine / "not-there")
    with rejected(DeploymentError, "backup", "more", "link", "not-there", "not there"):
        backup.of_server(found, machine / "lab.yaml", [machine / "more"])
    os.mkfifo(machine / "pipe")
    with rejected(DeploymentError, "backup", "inventory", "pipe", "nor a directory"):
        backup.write(archive, [KeptPath("inventory", machine / "pipe")])
    assert list(archive.parent.iterdir()) == []


def test_a_link_in_the_way_of_a_restore_is_named_before_anything_changes(machine: Path, tmp_path: Path) -> None:
    keys, runs, archive = machine / "keys", machine / "runs", tmp_path / "a.tar"
    for part in (keys, runs):
        part.mkdir()
    backup.write(archive, [KeptPath("keys", keys), KeptPath("run folders", runs)])
    for part in (keys, runs):
        part.rmdir()
    runs.symlink_to(machine / "away")
    with pytest.raises(UserError, match="are not overwritten"):
        backup.read(archive)
    assert list(machine.iterdir()) == [runs]
