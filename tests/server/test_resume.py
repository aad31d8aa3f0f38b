"""Runs that are killed and resumed end with the bits of an undisturbed run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_app.server import checkpoint

COROLLA = str(Path(sys.executable).parent / "corolla")
COMMON = ["num-server-rounds=7", "checkpoint-every=2", "fraction-train=0.5", "local-epochs=1", "evaluate-every=3"]


def command(tmp_path: Path, *arguments: str) -> list[str]:
    return [COROLLA, "run", "--in-process", *arguments, "--set", f"state-dir={tmp_path / 'state'}"]


def start(tmp_path: Path, name: str, sets: list[str]) -> list[str]:
    options = [word for pair in [*COMMON, *sets, f"run-name={name}"] for word in ("--set", pair)]
    return command(tmp_path, "--clients", "6", "--output-dir", str(tmp_path), *options)


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def kill_after(words: list[str], text: str) -> None:
    """SIGKILL the process as soon as it has printed `text`."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if text in line:
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in lines:  # what may differ between two runs of the same experiment
        del record["seconds"]
        for client in record["clients"].values():
            del client["seconds"]
    return json.loads((folder / "summary.json").read_text()), lines


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(["method=fedavg"], id="fedavg", marks=pytest.mark.long),
        pytest.param(["method=local"], id="local", marks=pytest.mark.long),
        pytest.param(["method=fedcac", "fedcac.beta=3", "model=resnet8", "train-samples=40"], id="fedcac-batchnorm"),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, sets: list[str]) -> None:
    whole = run(start(tmp_path, "whole", sets))
    assert whole.returncode == 0, whole.stderr
    kill_after(start(tmp_path, "killed", sets), "round 5/7: accuracy")
    assert not (tmp_path / "killed" / "summary.json").exists()
    resumed = run(command(tmp_path, "--resume", str(tmp_path / "killed")))
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after round 4" in resumed.stdout
    (expected, expected_rounds), (got, got_rounds) = read(tmp_path / "whole"), read(tmp_path / "killed")
    assert got["digest"] == expected["digest"] is not None
    assert got_rounds == expected_rounds
    assert got["final-accuracy"] == expected["final-accuracy"]
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("whole", "killed"))
    assert (first["starts"], second["starts"]) == (0, 1) and first["figures"] == second["figures"]


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over_and_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    sets = ["method=local"]
    assert run(start(tmp_path, "whole", sets)).returncode == 0
    kill_after(start(tmp_path, "killed", sets), "round 5/7: accuracy")
    newest = tmp_path / "killed" / checkpoint.DIRECTORY / "round-000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = run([*command(tmp_path, "--resume", str(tmp_path / "killed"))])
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint of round 4 is damaged" in resumed.stdout
    assert "resumed after round 2" in resumed.stdout
    assert read(tmp_path / "killed")[0]["digest"] == read(tmp_path / "whole")[0]["digest"]

    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "killed").rglob("*") if p.is_file()}

    before = files()
    again = run(command(tmp_path, "--resume", str(tmp_path / "killed")))
    assert again.returncode == 0 and "nothing to resume" in again.stdout
    assert files() == before


@pytest.mark.long
def test_a_changed_key_is_refused_and_more_rounds_are_not(tmp_path: Path) -> None:
    sets = ["method=fedavg", "model=mlp"]
    assert run(start(tmp_path, "one", sets)).returncode == 0
    more = ["--set", "learning-rate=0.2", "--set", "num-server-rounds=8"]
    changed = run(command(tmp_path, "--resume", str(tmp_path / "one"), *more))
    assert changed.returncode == 2
    assert "learning-rate: 0.1 in the run, now 0.2" in changed.stderr
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["rounds"] == 7
    longer = run(command(tmp_path, "--resume", str(tmp_path / "one"), "--set", "num-server-rounds=9"))
    assert longer.returncode == 0, longer.stderr
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["rounds"] == 9
    whole = run(start(tmp_path, "nine", [*sets, "num-server-rounds=9"]))
    assert whole.returncode == 0, whole.stderr
    assert read(tmp_path / "one")[0]["digest"] == read(tmp_path / "nine")[0]["digest"]


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    done = run(command(tmp_path, "--resume", str(tmp_path / "nothing")))
    assert done.returncode == 2
    assert "is not a run folder" in done.stderr


def test_a_run_that_is_still_going_is_not_resumed(tmp_path: Path) -> None:
    assert run(start(tmp_path, "one", ["method=fedavg"])).returncode == 0
    with (tmp_path / "one" / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = run(command(tmp_path, "--resume", str(tmp_path / "one"), "--set", "num-server-rounds=9"))
    assert done.returncode == 2
    assert "is still being run by another process" in done.stderr
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["rounds"] == 7


def test_fewer_rounds_than_there_are_are_refused_and_change_nothing(tmp_path: Path) -> None:
    kill_after(start(tmp_path, "killed", ["method=fedavg"]), "round 5/7: accuracy")
    before = (tmp_path / "killed" / "config.toml").read_text()
    done = run(command(tmp_path, "--resume", str(tmp_path / "killed"), "--set", "num-server-rounds=2"))
    assert done.returncode == 2 and "the run has 4 rounds already, got 2" in done.stderr
    assert (tmp_path / "killed" / "config.toml").read_text() == before
