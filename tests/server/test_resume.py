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

from fl_app import software
from fl_app.keys import specs
from fl_app.machine import made_with
from strategies import METHOD_PARAMS
from tests.conftest import Command, Run
from tests.facts import mentions

COROLLA = str(Path(sys.executable).parent / "corolla")
COMMON = ["num-server-rounds=7", "checkpoint-every=2", "fraction-train=0.5", "local-epochs=1", "evaluate-every=3"]


def resume(folder: Path, *more: str) -> list[str]:
    return ["run", "--in-process", "--resume", str(folder), "--set", f"state-dir={folder.parent / 'state'}", *more]


def start(folder: Path, *sets: str) -> list[str]:
    pairs = [*COMMON, *sets, f"run-name={folder.name}", f"state-dir={folder.parent / 'state'}"]
    options = [word for pair in pairs for word in ("--set", pair)]
    return ["run", "--in-process", "--clients", "6", "--output-dir", str(folder.parent), *options]


def kill_after(words: list[str], text: str) -> None:
    """Run the command in a process of its own, and SIGKILL that as soon as it has printed `text`."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([COROLLA, *words], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if text in line:
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # what may differ between two runs of the same experiment
    for record in lines:
        del record["seconds"]
        for client in record["clients"].values():
            del client["seconds"]
    return json.loads((folder / "summary.json").read_text()), lines


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(["method=fedavg"], id="fedavg", marks=pytest.mark.nightly),
        pytest.param(["method=local"], id="local", marks=pytest.mark.nightly),
        pytest.param(
            ["method=fedcac", "fedcac.beta=3", "model=resnet8", "train-samples=10", "test-samples=10"],
            id="fedcac-batchnorm",
        ),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(command: Command, tmp_path: Path, sets: list[str]) -> None:
    code, _, err = command(*start(tmp_path / "whole", *sets))
    assert code == 0, err
    kill_after(start(tmp_path / "killed", *sets), "round 5/7: accuracy")
    assert not (tmp_path / "killed" / "summary.json").exists()
    code, out, err = command(*resume(tmp_path / "killed"))
    assert code == 0, err
    assert "resumed after round 4" in out
    (expected, expected_rounds), (got, got_rounds) = read(tmp_path / "whole"), read(tmp_path / "killed")
    assert got["digest"] == expected["digest"] is not None
    assert got_rounds == expected_rounds
    assert got["final-accuracy"] == expected["final-accuracy"]
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("whole", "killed"))
    assert (first["starts"], second["starts"]) == (0, 1) and first["figures"] == second["figures"]
    assert first["made-with"] == second["made-with"] == [made_with() | {"code": software.code_hash(), "from-round": 1}]


def test_resuming_what_is_no_run_is_refused(command: Command, tmp_path: Path) -> None:
    code, _, err = command(*resume(tmp_path / "nothing"))
    assert code == 2
    assert mentions(err, "run folder")


def test_a_run_that_is_still_going_is_not_resumed(command: Command, tmp_path: Path) -> None:
    assert command(*start(tmp_path / "one", "method=fedavg"))[0] == 0
    with (tmp_path / "one" / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, _, err = command(*resume(tmp_path / "one", "--set", "num-server-rounds=9"))
    assert code == 2
    assert mentions(err, "still being", "another process")
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["rounds"] == 7


def test_fewer_rounds_than_there_are_are_refused_and_change_nothing(command: Command, tmp_path: Path) -> None:
    assert command(*start(tmp_path / "killed", "method=fedavg", "num-server-rounds=4"))[0] == 0
    # as if it had been killed then
    (tmp_path / "killed" / "summary.json").unlink()
    before = (tmp_path / "killed" / "config.toml").read_text()
    code, _, err = command(*resume(tmp_path / "killed", "--set", "num-server-rounds=2"))
    assert code == 2 and mentions(err, "run has 4 rounds", "already", "got 2")
    assert (tmp_path / "killed" / "config.toml").read_text() == before


COUNTING = sorted(name for name, cls in METHOD_PARAMS.items() if any(spec.counts_rounds for spec in specs(cls, name)))


@pytest.mark.parametrize("method", COUNTING)
def test_a_round_that_a_key_names_is_the_same_in_a_run_continued_with_more_rounds(run: Run, method: str) -> None:
    counting = {spec.name: 2 for spec in specs(METHOD_PARAMS[method], method) if spec.counts_rounds}
    settings = {"method": method, method: {name.partition(".")[2].replace("-", "_"): n for name, n in counting.items()}}
    straight = run(num_server_rounds=5, run_name="straight", **settings)
    begun = run(num_server_rounds=3, run_name="begun", keep_state=True, **settings)
    resumed = run(num_server_rounds=5, run_name="begun", resume=str(begun.path), **settings)
    assert read(resumed.path)[0]["digest"] == read(straight.path)[0]["digest"] is not None


def test_a_command_with_other_rounds_under_a_schedule_or_with_none_to_do_changes_nothing(
    command: Command, tmp_path: Path
) -> None:
    one = tmp_path / "one"
    assert command(*start(one, "method=fedavg", "schedule=cosine", "num-server-rounds=2"))[0] == 0
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in one.rglob("*") if path.is_file()}
    code, _, err = command(*resume(one, "--set", "num-server-rounds=4"))
    assert code == 2 and mentions(err, "num-server-rounds", "2 in the run", "now 4", "schedule =", "2 rounds")
    code, out, _ = command(*resume(one))
    assert code == 0 and "nothing to resume" in out
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
