"""`corolla run --replay RUN`: the same bits, from the recorded arrivals alone."""

from __future__ import annotations

import json
from pathlib import Path

from fl_app.server.run_folder import read_config, read_summary
from tests.conftest import Command
from tests.facts import mentions

KEYS = {
    "num-server-rounds": 3,
    "train-samples": 16,
    "local-epochs": 1,
    "speeds": "lognormal:1",
    "quorum": 0.5,
    "staleness": 1,
    "fedcac.beta": 2,
}


def test_the_command_repeats_a_run(command: Command, tmp_path: Path) -> None:
    sets = [word for name, value in KEYS.items() for word in ("--set", f"{name}={value}")]
    places = ["--in-process", "--set", f"state-dir={tmp_path / 'state'}"]
    first, second = tmp_path / "first", tmp_path / "second"
    code, _, err = command(
        "run", *places, *sets, "--clients", 4, "--output-dir", tmp_path, "--set", f"run-name={first.name}"
    )
    assert code == 0, err
    again = ["run", *places, "--replay", first, "--output-dir", tmp_path, "--set", f"run-name={second.name}"]
    code, _, err = command(*again)
    assert code == 0, err
    assert read_summary(first)["digest"] == read_summary(second)["digest"]
    # these would need other arrivals
    for changed in ("seed=5", "quorum=0.8", "method=fedavg", "speeds=lognormal:2", "num-clients=5"):
        code, _, err = command(*again, "--set", changed)
        assert code == 2 and f"{changed.split('=')[0]}: " in err and mentions(err, "must be as"), err
    code, _, err = command(*again[:-1], "run-name=more", "--set", "num-server-rounds=4")
    assert code == 2 and mentions(err, "no arrivals", "round 4", "repeat fewer", "--set num-server-rounds=3", "got 4")
    code, _, err = command(*again[:-1], "run-name=fewer", "--set", "num-server-rounds=2")
    assert code == 0, err
    code, _, err = command("run", *places, "--replay", second, "--output-dir", tmp_path)
    assert code == 2 and "recorded no arrivals" in err
    # the arrivals decide, not the speeds
    assert read_config(second)["speeds"] == "none" and read_config(second)["quorum"] == 0.5


def test_runs_that_cannot_be_repeated(command: Command, tmp_path: Path) -> None:
    code, _, err = command("run", "--replay", tmp_path / "nothing")
    assert code == 2 and "replay: " in err and mentions(err, "run folder")
    code, _, err = command("run", "fedavg.toml", "--replay", tmp_path, "--superlink", "x")
    assert code == 2 and mentions(err, "leave out fedavg.toml", "--superlink")
    code, _, err = command("run", "--replay", tmp_path, "--scale", "small")
    assert code == 2 and "leave out --scale" in err
    code, _, err = command("run", "--set", f"replay={json.dumps(str(tmp_path))}")
    assert code == 2 and mentions(err, "replay", "set by `corolla", "run --replay`")
