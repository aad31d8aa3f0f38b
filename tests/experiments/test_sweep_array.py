"""A sweep as a Slurm job array: cut off and submitted again, every run goes on, and none is repeated."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corolla.api.settings import ready
from corolla.cli.sweeps import run_points
from corolla.experiments import sweep
from fl_app.errors import UserError
from fl_app.server import checkpoint
from strategies import METHOD_PARAMS
from tests import slurm
from tests.conftest import Command
from tests.facts import mentions, rejected

SWEEP = """
[settings]
dataset = "digits"
num-clients = 3
num-server-rounds = 60
train-samples = 24
test-samples = 10
local-epochs = 1
batch-size = 8
device = "cpu"
checkpoint-every = 1
state-dir = "state"

[grid]
method = ["fedcac", "fedavg"]
"""


@pytest.fixture
def corolla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> Callable[..., str]:
    """The command in a directory of its own: what it says when all is well."""
    monkeypatch.chdir(tmp_path)

    def invoke(*words: str) -> str:
        code, out, err = command(*words)
        assert code == 0, err
        return out

    return invoke


def digests(directory: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text())["digest"] for path in directory.glob("*/summary.json")}


def cut_off(script: Path, directory: Path, task: int, folder: Path, how: signal.Signals) -> str:
    """Start a task and end it once it has a checkpoint; its output."""
    job = slurm.sbatch(script, directory=directory, task=task)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and job.poll() is None and max(checkpoint.rounds(folder), default=0) < 1:
        time.sleep(0.002)
    job.send_signal(how)
    out = job.communicate()[0]
    assert checkpoint.rounds(folder)[-1] >= 1 and not (folder / "summary.json").exists(), out
    return str(out)


@pytest.mark.parametrize(
    "how",
    [
        # as Slurm at the end of a job's time
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_an_array_goes_on_where_it_was_cut_off(
    corolla: Callable[..., str], tmp_path: Path, how: signal.Signals
) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    said = corolla("sweep", "s.toml", "--in-process", "--slurm", "--set", "learning-rate=0.05", "--jobs", "2")
    script = tmp_path / "runs" / "s" / "array.sbatch"
    assert f"sbatch {script}" in said and digests(script.parent) == {}
    asked = slurm.options(script)
    assert asked["--array"] == "0-1%2" and asked["--cpus-per-task"] == "1" and "--gpus-per-task" not in asked
    names = corolla("sweep", "s.toml", "--dry-run", "--set", "learning-rate=0.05").split()
    folders = [script.parent / name for name in names]

    cut_off(script, tmp_path, 0, folders[0], how)
    whole = slurm.sbatch(script, directory=tmp_path, task=1)
    out = whole.communicate()[0]
    assert whole.returncode == 0 and set(digests(script.parent)) == {names[1]}, out
    written = (folders[1] / "metrics.jsonl").stat().st_mtime_ns
    assert not (script.parent / "results.csv").exists()

    for task in slurm.tasks(script):
        done_before = checkpoint.rounds(folders[task])[-1]
        again = slurm.sbatch(script, directory=tmp_path, task=task)
        out = again.communicate()[0]
        assert again.returncode == 0, out
        if task == 1:
            assert f"finished before: {folders[1]}" in out
        else:
            assert f"resumes {folders[task]}" in out and f"resumed after round {done_before}" in out
    assert (folders[1] / "metrics.jsonl").stat().st_mtime_ns == written
    assert (script.parent / "results.csv").exists() and not (
        script.parent / "unfinished"
    ).exists()  # the last one's table

    corolla("sweep", "s.toml", "--in-process", "--output-dir", "plain", "--set", "learning-rate=0.05")
    assert digests(script.parent) == digests(tmp_path / "plain") and len(digests(script.parent)) == 2


def test_a_run_without_a_checkpoint_is_set_aside(corolla: Callable[..., str], command: Command, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("60", "1").replace(', "fedavg"', ""))
    (name,) = corolla("sweep", "s.toml", "--dry-run").split()
    (tmp_path / "runs" / "s" / name).mkdir(parents=True)
    assert "unfinished, set aside" in corolla("sweep", "s.toml", "--in-process", "--only", name)
    assert (tmp_path / "runs" / "s" / "unfinished" / name).is_dir() and digests(tmp_path / "runs" / "s")
    code, _, err = command("sweep", "s.toml", "--only", "fedprox")
    assert code == 2 and mentions(err, "s.toml has no", "run 'fedprox'")


def test_a_run_goes_on_under_the_name_that_another_version_gave_it(
    corolla: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "s.toml").write_text(SWEEP.replace("60", "3").replace(', "fedavg"', ""))
    monkeypatch.setenv(sweep.VARIABLE, "")
    directory = tmp_path / "runs" / "s"
    (point,) = sweep.expand(sweep.read_sweep(Path("s.toml")), METHOD_PARAMS, directory, {}, ready)
    assert run_points([point], None, False, until=2) == {}
    before = directory / "fedcac-000000"
    (directory / point.name).rename(before)
    said = corolla("sweep", "s.toml", "--in-process", "--only", point.name)
    assert f"resumes {before} after round 2" in said and said.count("round 2/3: acc") == 1 == said.count(
        "round 3/3: acc"
    )
    assert set(digests(directory)) == {before.name} and "finished before" in corolla(
        "sweep", "s.toml", "--only", point.name
    )


def test_single_runs_share_a_directory_that_a_whole_sweep_has_alone(tmp_path: Path) -> None:
    with sweep.locked(tmp_path, shared=True), sweep.locked(tmp_path, shared=True):
        with rejected(UserError, "", "another `corolla sweep`", "running"), sweep.locked(tmp_path):
            pass
    with sweep.locked(tmp_path), rejected(UserError, "", "another `corolla sweep`", "running"):
        with sweep.locked(tmp_path, shared=True):
            pass
