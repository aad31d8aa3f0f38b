"""Deployments whose disks are full, damaged or lost, of the server and of a client; see test_faults.py."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fl_app.processes import end_processes
from fl_app.reasons import Reason
from tests.disks import full_disk
from tests.e2e.conftest import MODELS, BackgroundRun, Cluster, Lab, corolla, rounds, settings, wait_for
from tests.e2e.faults import COMMON, EVERY_REPLY, assert_nothing_is_lost, causes, failures

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

# The server


# three runs of real processes
@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_full_disk_under_the_superlinks_database_is_named_and_the_run_goes_on_after_it(
    warm_cluster: Cluster, tmp_path: Path
) -> None:
    cluster, config = warm_cluster, COMMON | EVERY_REPLY | {"model": "gated:large"}
    with full_disk(tmp_path, free=64 << 20) as disk:
        cluster.database = disk / "superlink.db"
        cluster.start(3)
        cluster.wait_for_nodes()
        # a round's messages have 25.6 MB
        # room for the app, not for that
        (disk / "filler").write_bytes(bytes((53 << 20) - cluster.database.stat().st_size))
        refused = corolla(
            *("run", "--superlink", "test", "--clients", "3", "--output-dir", str(tmp_path)),
            *settings({"run-name": "refused", **config}),
            environment=cluster.environment,
            directory=MODELS,
        )
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "25.6 MB, 12.8 MB of it" in " ".join(refused.stderr.split())
        assert not (tmp_path / "refused").exists()
        (disk / "filler").unlink()
        for client_id in range(3):
            cluster.hold(client_id, training=1)
        run = BackgroundRun(cluster, tmp_path / "full", 3, config)
        for client_id in range(3):
            cluster.training(client_id, 1)
        fill(disk / "filler")
        for client_id in range(3):
            cluster.release(client_id, training=1)
        assert run.process.wait(timeout=800) == 2, run.log
        # the pages of the round's messages are free again: an attempt that follows finds too few
        said = f"superlink.database: (the disk of {cluster.database} is full|{cluster.database} has room for )"
        assert re.search(said, " ".join(run.log.split())) and "Traceback" not in run.log
        (disk / "filler").unlink()
        resumed = corolla("run", "--superlink", "test", "--resume", str(run.folder), environment=cluster.environment)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert failures(run) == []
        assert_nothing_is_lost(run, tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_a_machine_that_is_lost_between_two_rounds_goes_on_from_a_backup(lab: Lab, tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    state = machine / "client-state"
    lab.environment |= {"COROLLA_STATE_DIR": str(state), "COROLLA_SITE_DIR": str(machine / "notes")}
    lab.inventory = machine / "lab.yaml"
    (machine / "runs").mkdir(parents=True)
    lab.write(
        superlink={"database": str(machine / "superlink.db")},
        tls=True,
        hosts=[{"host": "local", "supernodes": 2, "gpus": [], "warm": True}],
    )
    assert lab.cluster("keys").returncode == 0
    up = lab.cluster("up")
    assert up.returncode == 0, up.stdout + up.stderr
    run = BackgroundRun(lab, machine / "runs" / "lost", 2, COMMON | {"num-server-rounds": 5}, superlink="lab")
    wait_for(lambda: run.recorded() >= 2 or run.process.poll() is not None, seconds=600)
    # the run goes on meanwhile
    kept = lab.cluster("backup", str(tmp_path / "backup.tar"), "--runs", str(machine / "runs"))
    assert kept.returncode == 0, kept.stdout + kept.stderr
    run.process.kill()
    # they end without a word to the SuperLink, which counts its nodes as connected for a minute
    end_processes(lab.started(), 1)
    for place in (machine, tmp_path / "state", tmp_path / "flwr"):
        shutil.rmtree(place)
    restored = corolla("cluster", "restore", str(tmp_path / "backup.tar"), environment=lab.environment)
    assert restored.returncode == 0, restored.stdout + restored.stderr
    (tmp_path / "flwr").mkdir()
    up = lab.cluster("up")
    assert up.returncode == 0, up.stdout + up.stderr
    resumed = corolla("run", "--superlink", "lab", "--resume", str(run.folder), environment=lab.environment)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed after round" in resumed.stdout
    assert [sorted(r["clients"]) for r in rounds(run.folder)] == [["0", "1"]] * 5
    assert_nothing_is_lost(run, tmp_path)
    down = lab.cluster("down")
    assert down.returncode == 0, down.stdout + down.stderr


# Client state

UNWRITABLE = Reason("deployment", "state-dir", "writable").sentence


@pytest.mark.nightly
def test_unwritable_state_directory_fails_that_client_by_name(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    cluster.start_superlink()
    sound = cluster.environment["COROLLA_STATE_DIR"]
    for client_id in range(3):
        cluster.environment["COROLLA_STATE_DIR"] = str(tmp_path / "file" / "state") if client_id == 1 else sound
        cluster.start_supernode(client_id, 3)
    run = BackgroundRun(cluster, tmp_path / "unwritable", 3, COMMON | {"num-server-rounds": 2})
    run.finish()
    for record in rounds(run.folder):
        assert [f["client"] for f in record["failures"]] == [1]
        assert record["failures"][0]["cause"] == UNWRITABLE
        assert sorted(record["clients"]) == ["0", "2"]
    assert_nothing_is_lost(run, tmp_path)


@pytest.mark.nightly
def test_full_disk_fails_that_client_by_name_and_leaves_its_last_state(cluster: Cluster, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    cluster.start_superlink()
    for client_id in (0, 2):
        cluster.start_supernode(client_id, 3)
    cluster.environment["COROLLA_STATE_DIR"] = str(disk)
    cluster.start_supernode(1, 3, inside=own_disk(disk))
    for training in (2, 3):
        cluster.hold(1, training)
    run = BackgroundRun(cluster, tmp_path / "full", 3, COMMON)
    cluster.training(1, 2)
    # only that SuperNode sees its disk
    seen = Path(f"/proc/{cluster.processes['supernode-1'].pid}/root{disk}")
    before = hashes(seen)
    assert len(before) == 1
    fill(seen / "filler")
    cluster.release(1, training=2)
    run.wait_for_round(2)
    (seen / "filler").unlink()
    # the state of round 1 is as it was, and there is no part of another one
    assert hashes(seen) == before
    cluster.release(1, training=3)
    run.finish()
    assert failures(run) == [(2, 1, 0)]
    assert causes(run) == UNWRITABLE and "No space left on device" in cluster.log("supernode-1")
    assert_nothing_is_lost(run, tmp_path)


def own_disk(directory: Path) -> list[str]:
    """Words before a command that give it 64 kB of memory as a disk, which is gone when the command ends; or skip."""
    if not shutil.which("unshare"):
        pytest.skip("a full disk needs unshare (util-linux) to mount a small one")
    enter = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    words = [*enter, "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"', str(directory)]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"a full disk needs the right to mount a small one: {tried.stderr.strip()}")
    return words


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))


def hashes(directory: Path) -> dict[str, str]:
    files = [p for p in directory.rglob("*") if p.is_file()]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.nightly
def test_truncated_state_is_never_used_but_the_one_before(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(3)
    # keeps round 2 open while what client 1 has left in it is cut
    cluster.hold(0, training=2)
    run = BackgroundRun(cluster, tmp_path / "truncated", 3, COMMON)
    states = Path(cluster.environment["COROLLA_STATE_DIR"])
    file = wait_for(lambda: next(states.glob("*/client-0001/000002-*.state"), None))
    before = next(states.glob("*/client-0001/000001-*.state"))
    file.write_bytes(file.read_bytes()[:-1])
    cluster.release(0, training=2)
    run.finish()
    assert failures(run) == []
    used = [{i: row.get("state-used") for i, row in r["clients"].items()} for r in rounds(run.folder)]
    assert used == [dict.fromkeys("012")] * 2 + [{"0": None, "1": before.stem, "2": None}]
    assert f"continued from {before.stem}" in " ".join(run.log.split())


@pytest.mark.nightly
def test_truncated_state_with_none_before_fails_that_client_by_name(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(3)
    for training in (1, 2):
        # keeps the rounds open while the file is cut, and while it is put back
        cluster.hold(0, training)
    run = BackgroundRun(cluster, tmp_path / "truncated", 3, COMMON)
    states = Path(cluster.environment["COROLLA_STATE_DIR"])
    file = wait_for(lambda: next(states.glob("*/client-0001/000001-*.state"), None))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    cluster.release(0, training=1)
    wait_for(lambda: "client 1 dropped" in run.log or run.process.poll() is not None)
    file.write_bytes(whole)
    cluster.release(0, training=2)
    run.finish()
    assert failures(run) == [(2, 1, 0)]
    assert causes(run) == Reason("deployment", "state-dir", "state").sentence
    assert f"state of {file.stem} is damaged (checksum): {file}" in " ".join(cluster.log("supernode-1").split())
    assert_nothing_is_lost(run, tmp_path)
