"""What a run was made with, in run.json; other code or packages are named, and refused on demand."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fl_app
from fl_app import machine, software
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.machine import made_with
from fl_app.server.run_folder import CONFIG, MADE_WITH, RUN, RunFolder, read_about
from fl_app.transport import wire
from strategies import METHOD_PARAMS
from tests.conftest import Run
from tests.facts import each_mentions, mentions, rejected
from tests.server.fake_grid import exchange, properties, three

ROOT = Path(fl_app.__file__).resolve().parent.parent


def copy_of_the_code(directory: Path, packages: tuple[str, ...] = software.COMPUTING) -> Path:
    for package in packages:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def test_the_hash_depends_on_the_code_alone(tmp_path: Path) -> None:
    copy = copy_of_the_code(tmp_path / "copy")
    assert software.code_hash(copy) == software.code_hash()
    (copy / "fl_app" / "__pycache__").mkdir()
    (copy / "fl_app" / "__pycache__" / "a.pyc").touch()
    software.code_hash.cache_clear()
    assert software.code_hash(copy) == software.code_hash()
    edited = copy / "strategies" / "baselines" / "fedavg.py"
    edited.write_text(edited.read_text() + "\n")
    software.code_hash.cache_clear()
    assert software.code_hash(copy) != software.code_hash()


def test_only_facts_that_both_sides_know_differ() -> None:
    before = {"code": "a" * 64, "torch": "2.5.1", "numpy": "2.1"}
    assert software.differences(before, before) == "" == software.differences({}, before)
    assert software.differences(before, {"numpy": "2.1", "flwr": "1.39.0"}) == ""
    now = before | {"code": "b" * 64, "torch": "2.6.0"}
    assert mentions(
        software.differences(before, now), f"code {'b' * 12}", f"not {'a' * 12}", "torch 2.6.0", "not 2.5.1"
    )


# a resumed run


@pytest.fixture
def begun(run: Run) -> dict[str, Any]:
    """Keys with which a run of two rounds goes on to three."""
    path = run(keep_state=True).path
    return {"keep_state": True, "num_server_rounds": 3, "resume": str(path)}


def test_a_run_resumed_by_an_edited_copy_says_so(
    run: Run, begun: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copy_of_the_code(tmp_path / "copy")
    (copy / "strategies" / "baselines" / "fedavg.py").write_text("# edited\n")
    before, now = software.code_hash(), software.code_hash(copy)
    monkeypatch.setattr(software, "code_hash", lambda: now)
    path = Path(begun["resume"])

    def files() -> dict[Path, bytes]:
        # but what is written of every start
        return {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name not in ("log.txt", "events.jsonl")}

    before_the_start = files()
    with rejected(UserError, "", "resume", f"code {now[:12]}", f"not {before[:12]}", "rounds before"):
        run(**begun, strict=True)
    assert files() == before_the_start
    run(**begun)
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING and r.message.startswith("resume: ")]
    assert len(said) == 1 and mentions(said[0], "digest may", "undisturbed run")
    assert said[0] in (path / "log.txt").read_text()
    assert [(made["code"], made["from-round"]) for made in read_about(path)[MADE_WITH]] == [(before, 1), (now, 3)]


def test_a_run_resumed_by_the_same_code_says_nothing_and_keeps_no_trace(
    run: Run, begun: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run(**begun, strict=True)
    assert not [r for r in caplog.records if r.message.startswith("resume: ")]
    path = Path(begun["resume"])
    assert len(read_about(path)[MADE_WITH]) == 1 and "strict = false" in (path / CONFIG).read_text()


# four processes that import PyTorch
@pytest.mark.nightly
def test_an_edited_copy_of_the_code_resumes_to_another_digest_and_is_named(tmp_path: Path) -> None:
    copy = copy_of_the_code(tmp_path / "copy", (*software.COMPUTING, "corolla", "deploy"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    environment = os.environ | {"PYTHONPATH": str(copy), "COROLLA_STATE_DIR": str(tmp_path / "state")}

    def corolla(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "corolla", *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    small = ["--in-process", "--set", "keep-state=true", "--clients", "2", "--set", "train-samples=20"]
    for name, rounds in (("whole", 3), ("edited", 2)):
        ended = corolla("run", *small, "--set", f"run-name={name}", "--set", f"num-server-rounds={rounds}")
        assert ended.returncode == 0, ended.stderr
    edited = copy / "strategies" / "base" / "server_half.py"
    edited.write_text(edited.read_text() + "\nSERVER_RATE = 0.5\n")
    more = ["run", "--in-process", "--set", "num-server-rounds=3", "--resume", "edited"]
    refused = corolla(*more, "--strict")
    assert refused.returncode == 2 and "(--strict)" in refused.stderr
    ended = corolla(*more)
    assert ended.returncode == 0 and mentions(" ".join((ended.stdout + ended.stderr).split()), "digest may differ")
    assert [made["from-round"] for made in read_about(tmp_path / "runs" / "edited")[MADE_WITH]] == [1, 3]


# clients


def answer(client_id: int, **facts: str) -> dict[str, Any]:
    return properties(client_id, software=json.dumps({**software.announced(), "wire": wire.WIRE_VERSION, **facts}))


def test_clients_with_other_software_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = {50: answer(2, torch="1.0"), 77: answer(0, torch="1.0"), 91: answer(1)}
    e = exchange(nodes, min_available_clients=2)
    e.registry.wait()
    torch = software.used()["torch"]
    assert each_mentions(
        e.registry.notes(), ("clients 0", "2", "torch 1.0", f"not {torch}", "server", "results may differ")
    )
    assert e.registry.notes() == []
    # one that comes back with another version is named again
    del nodes[91]
    e.registry.refresh()
    nodes[92] = answer(1, corolla="0.1")
    e.registry.refresh()
    assert each_mentions(
        [r.message for r in caplog.records if "as the server" in r.message],
        ("client 1", "corolla 0.1", f"not {software.announced()['corolla']}", "server", "results may differ"),
    )


def test_a_client_that_sends_no_versions_takes_part_unnamed() -> None:
    for text in ("{", "[1]", '{"torch": 1}', "null"):
        e = exchange(three() | {91: properties(1, software=text)})
        e.registry.wait()
        assert e.registry.client_ids == [0, 1, 2] and e.registry.notes() == []


def test_a_client_whose_messages_have_another_version_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    e = exchange(three() | {91: answer(1, wire="2", corolla="9.9")}, min_available_clients=2)
    e.registry.wait()
    assert e.registry.client_ids == [0, 2]
    assert e.registry.left_out == [
        {
            "who": "client 1",
            "cause": "it writes messages of version 2, the server of version 1: install the same Corolla on both (it has 9.9)",
        }
    ]


def test_versions_cannot_write_to_a_terminal() -> None:
    found = software.told(json.dumps({"torch": "\x1b[31m" + "9" * 100, "code": "a" * 100, "else": "x"}))
    assert found == {"torch": "[31m" + "9" * 36, "code": "a" * 64}


# run.json says with what a run was made, and with what it went on -----------------------------------------------------


def test_versions_and_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = {name: metadata.version(name) for name in machine.PACKAGES}
    assert made_with() == {"python": platform.python_version(), **packages, "cpu": machine.cpu()}
    cpus = tmp_path / "cpuinfo"
    cpus.write_text("processor\t: 0\nmodel name\t: A: CPU\nmodel name\t: another\n")
    monkeypatch.setattr(machine, "_CPUS", cpus)
    assert machine.cpu() == "A: CPU"
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "none")
    assert machine.cpu() == (platform.processor() or platform.machine()) != ""
    monkeypatch.setattr(machine, "PACKAGES", ("numpy", "no-such-package"))
    assert set(machine.versions()) == {"python", "numpy"}


def test_a_run_goes_on_with_its_secret_alone(tmp_path: Path) -> None:
    config = parse({"method": "fedavg", "output-dir": str(tmp_path), "run-name": "a"}, METHOD_PARAMS)
    folder = RunFolder.create(config, "0123456789ab")
    folder.close()
    secret = folder.path / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and "0123456789ab" not in (folder.path / RUN).read_text()
    again = replace(config, resume=str(folder.path))
    resumed = RunFolder.resume(again)
    resumed.close()
    assert (resumed.secret, resumed.experiment) == ("0123456789ab", folder.experiment)
    for change in (lambda: secret.write_text("another"), secret.unlink):
        change()
        with pytest.raises(UserError, match="resume: .*secret"):
            RunFolder.resume(again)


def test_what_a_run_goes_on_with_is_noted_where_it_is_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = parse({"method": "fedavg", "output-dir": str(tmp_path), "run-name": "a"}, METHOD_PARAMS)
    folder = RunFolder.create(config, "0123456789ab")
    first = made_with() | {"code": software.code_hash(), "from-round": 1}
    assert read_about(folder.path)[MADE_WITH] == [first]
    folder.close()

    def go_on() -> object:
        again = RunFolder.resume(replace(config, resume=str(folder.path)))
        again.continue_with(config, done=4)
        again.close()
        return read_about(folder.path)[MADE_WITH]

    assert go_on() == [first]
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "another"})
    second = {"torch": "another", "cpu": machine.cpu(), "code": software.code_hash(), "from-round": 5}
    assert go_on() == [first, second] and go_on() == [first, second]
