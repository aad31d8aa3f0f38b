"""What `--resume` is told, and what it refuses before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import corolla as api
from fl_app.errors import UserError
from fl_app.server.events import Event
from fl_app.server.run_folder import ask_to_stop
from tests.conftest import Command
from tests.facts import mentions, rejected

SMALL = ["method=ditto", "num-server-rounds=2", "local-epochs=1", "train-samples=20", "checkpoint-every=1"]
STARTED = "starting server and clients"


def sets(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.fixture
def stopped(corolla: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two rounds, runs/k3, that was stopped after its first."""
    from corolla.api import live

    def stop(display: live.Display, event: Event) -> None:
        whole(display, event)
        if display.folder:
            ask_to_stop(display.folder)

    whole = live.Display.take
    with monkeypatch.context() as patch:
        patch.setattr(live.Display, "take", stop)
        with pytest.raises(KeyboardInterrupt):
            api.run(in_process=True, clients=2, progress=False, run_name="k3", **keywords())
    assert (Path("runs/k3") / "config.toml").is_file() and not (Path("runs/k3") / "summary.json").exists()
    return Path("runs/k3")


def keywords() -> dict[str, object]:
    pairs = (pair.split("=") for pair in SMALL)
    return {key.replace("-", "_"): int(value) if value.isdecimal() else value for key, value in pairs}


def test_what_a_resumed_run_does_not_take_is_named(corolla: Command, stopped: Path) -> None:
    Path("own.toml").write_text('method = "ditto"\n')
    code, _, err = corolla("run", "own.toml", "--in-process", "--resume", "k3", "--scale", "small")
    assert code == 2 and mentions(err, "run folder runs/k3", "leave out own.toml", "--scale", "changed (--set)")
    code, _, err = corolla("run", "own.toml", "--in-process", "--resume", "k4")
    assert code == 2 and mentions(err, "resume", "k4", "run folder")


@pytest.mark.parametrize("name", ["k3", "runs/k3", "runs/k3/"])
def test_a_run_is_named_as_it_is_called_or_by_its_path(corolla: Command, stopped: Path, name: str) -> None:
    code, out, err = corolla("run", "--in-process", "--resume", name)
    assert code == 0 and "resumed after round 1" in out, err
    assert json.loads((stopped / "summary.json").read_text())["rounds"] == 2


def test_a_folder_of_that_name_that_is_no_run_is_not_taken_for_one(corolla: Command, stopped: Path) -> None:
    Path("k3").mkdir()
    assert corolla("run", "--in-process", "--resume", "k3")[0] == 0
    # everything that takes a run takes its name
    assert api.load("k3").path == stopped.resolve()
    assert corolla("compare", "k3")[0] == 0
    code, out, err = corolla("export", "k3")
    assert code == 0 and Path("k3-global.pt").is_file(), err


def test_a_name_that_no_run_has_is_refused_with_the_nearest(corolla: Command, stopped: Path) -> None:
    code, out, err = corolla("run", "--in-process", "--resume", "k33")
    assert code == 2 and out == ""
    assert mentions(err, "resume", "k33", "runs/k33", "mean k3?")
    with rejected(UserError, "", "k33", "no such file", "runs/k33 is not a", "run either", "did you mean"):
        api.load(Path("k33"))


@pytest.mark.parametrize("how", [["--in-process"], []], ids=["in-process", "simulation"])
def test_fewer_rounds_than_done_are_refused_before_the_start(corolla: Command, stopped: Path, how: list[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in stopped.rglob("*")}
    code, out, err = corolla("run", *how, "--resume", "k3", *sets("num-server-rounds=1"))
    assert code == 2 and out == "" and mentions(err, "num-server-rounds", "run has 1 round", "already", "got 1")
    assert {path: path.stat().st_mtime_ns for path in stopped.rglob("*")} == before
    assert corolla("run", "--in-process", "--resume", "k3")[0] == 0
    code, out, err = corolla("run", *how, "--resume", "k3", *sets("num-server-rounds=1"))
    assert code == 2 and out == "" and mentions(err, "num-server-rounds", "run has 2 rounds", "already", "got 1")
    code, out, _ = corolla("run", *how, "--resume", "k3", *sets("num-server-rounds=2"))
    assert code == 0 and mentions(out, "run is complete", "nothing to resume")


def test_removed_state_is_missed_before_the_start(corolla: Command, stopped: Path) -> None:
    experiment = json.loads((stopped / "run.json").read_text())["experiment"]
    assert corolla("state", "remove", experiment)[0] == 0
    for how in (["--in-process"], []):
        code, out, err = corolla("run", *how, "--resume", "k3")
        assert code == 2 and out == ""
        assert (
            mentions(err, "resume", "state of clients 0", "1 after round 1", "not under")
            and "`corolla state remove`" in err
        )


def test_a_run_without_a_checkpoint_is_refused_before_the_start(corolla: Command, stopped: Path) -> None:
    for path in (stopped / "checkpoints").iterdir():
        path.unlink()
    code, out, err = corolla("run", "--in-process", "--resume", "k3")
    assert code == 2 and out == "" and mentions(err, "no sound checkpoint")
