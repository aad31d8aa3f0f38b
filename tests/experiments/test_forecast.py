"""How long a sweep will take: paces by hand, and a real sweep that measures its first rounds and goes on from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corolla.experiments import forecast, sweep
from corolla.experiments.forecast import Forecast, RecordedPaces, RoundSeconds, duration, evaluations, pace, seconds_of
from corolla.experiments.runs import RecordedRun
from corolla.presets import read_preset
from fl_app import machine
from fl_app.config import parse
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS
from tests.conftest import Command, config
from tests.experiments.test_sweep import SMALL, points, write
from tests.facts import mentions


def folder(path: Path, seconds: Sequence[dict[str, float]], clients: dict[str, Any] | None = None) -> RecordedRun:
    path.mkdir(parents=True)
    records = [{"round": t, "seconds": each, "clients": clients or {}} for t, each in enumerate(seconds, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return RecordedRun(path)


def test_the_first_round_is_left_out_and_evaluations_stand_apart(tmp_path: Path) -> None:
    seconds = [{"round": 60.0}, {"round": 2.0}, {"round": 14.0, "evaluate": 10.0}, {"round": 3.0}]
    assert pace(folder(tmp_path / "a", seconds), config()) == RoundSeconds(3.0, 10.0)
    assert pace(folder(tmp_path / "b", seconds[:1]), config()) is None


def test_an_evaluation_that_was_not_yet_is_reckoned_from_a_rounds_clients(tmp_path: Path) -> None:
    # two of ten clients; 16 seconds in a round of 8: two at a time
    spent = {
        "merge": 1.0,
        "evaluate": 2.0,
        "train": 5.0,
    }
    run = folder(tmp_path / "a", [{"round": 9.0}, {"round": 8.0}], {"0": {"seconds": spent}, "1": {"seconds": spent}})
    plain = pace(run, config(num_clients=10, local_epochs=5))
    assert plain is not None and plain.evaluation == pytest.approx(10 * (1 + 1) / 2)
    tuned = pace(run, config(num_clients=10, local_epochs=5, finetune_epochs=3))
    assert tuned is not None and tuned.evaluation == pytest.approx(10 * (1 + 2 + 3) / 2)
    assert pace(folder(tmp_path / "b", [{"round": 9.0}, {"round": 8.0}]), config()) == RoundSeconds(8.0, 0.0)


def test_evaluations_that_are_left() -> None:
    assert [evaluations(config(num_server_rounds=10, evaluate_every=4), t) for t in (0, 3, 4, 8, 10)] == [3, 3, 2, 1, 0]
    assert [evaluations(config(num_server_rounds=10), t) for t in (0, 9, 10)] == [1, 1, 0]


def test_settings_share_a_pace_over_seeds_and_take_the_mean_of_others_without_one(tmp_path: Path) -> None:
    found = points(write(tmp_path / "s.toml", SMALL.format(rounds=20)))
    fedavg, _, local, _ = found
    known = {
        sweep.identity(fedavg.parsed): folder(tmp_path / "a", [{"round": 1.0}] * 20),  # finished
        sweep.identity(local.parsed): folder(tmp_path / "b", [{"round": 3.0}] * 5),
    }
    assert Forecast(found, known).unmeasured() == []
    assert Forecast(found, known).seconds(1) == pytest.approx(20 * 1 + 15 * 3 + 20 * 3)
    assert Forecast(found, known).seconds(2) == pytest.approx((20 * 1 + 15 * 3 + 20 * 3) / 2)
    assert Forecast(found, known).seconds(9) == pytest.approx(60)  # no run is cut in two
    del known[sweep.identity(local.parsed)]
    assert [point.name for point in Forecast(found, known).unmeasured()] == [local.name]
    assert Forecast(found, known).seconds(1) == pytest.approx(20 * 1 + 40 * 1)
    assert Forecast(found, {}).seconds(1) is None
    short = points(write(tmp_path / "s.toml", SMALL.format(rounds=19)))
    assert Forecast(short, {}).unmeasured() == []  # over before it is measured


def test_durations_are_words() -> None:
    found = {seconds: duration(seconds) for seconds in (3.2, 89, 95, 3600, 33600)}
    assert found == {3.2: "3 s", 89: "89 s", 95: "2 min", 3600: "1 h 0 min", 33600: "9 h 20 min"}


def test_a_sweep_says_how_long_it_takes_from_rounds_that_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(sweep.VARIABLE, "")
    monkeypatch.setattr(forecast, "WORTH", 4)
    text = SMALL.format(rounds=8).replace('"fedavg", "local"', '"fedobp"').replace("seed = [0, 1]", "seed = [0]")
    write(tmp_path / "s.toml", text)
    code, out, err = command("sweep", "s.toml", "--in-process")
    assert code == 0 and "stopped after" not in err and "resumes" not in out
    words = (
        "1 run, 0 finished before, 1 to do",
        "first 2 rounds of 1 run",
        "round 2/8",
        "\nabout ",
        "resumed after round 2",
    )
    said = [out.index(each) for each in (*words, "round 3/8")]
    assert said == sorted(said) and out.count("round 2/8: acc") == 1 and out.count("round 3/8: acc") == 1
    (run,) = (tmp_path / "runs" / "s").glob("fedobp*")
    assert list(RecordedRun(run).rounds) == list(range(1, 9)) and RecordedRun(run).about["starts"] == 1

    assert command("sweep", "s.toml", "--in-process", "--only", run.name, "--output-dir", "plain")[0] == 0
    assert RecordedRun(tmp_path / "plain" / run.name).about["starts"] == 0
    assert RecordedRun(run).summary["digest"] == RecordedRun(tmp_path / "plain" / run.name).summary["digest"]
    code, out, _ = command("sweep", "s.toml", "--in-process")
    assert code == 0 and mentions(out, "1 finished before", "0 to do") and "about " not in out


def recorded(path: Path, cpu: str, seconds: float, **changes: Any) -> RecordedRun:
    """Write an interrupted run of the demo on a machine with this CPU."""
    run = folder(path, [{"round": 60.0}, {"round": seconds}, {"round": seconds}])
    (path / "config.toml").write_text(to_toml(parse({**read_preset("demo"), **changes}, METHOD_PARAMS).resolved))
    (path / "run.json").write_text(json.dumps({"made-with": [{"cpu": cpu}]}))
    return RecordedRun(run.path, METHOD_PARAMS)


def test_a_recorded_round_is_that_of_runs_which_do_the_same_work(tmp_path: Path) -> None:
    demo = parse(read_preset("demo"), METHOD_PARAMS)
    for name, changes in {"seed": {"seed": 3}, "rounds": {"num-server-rounds": 7, "evaluate-every": 2}}.items():
        paces = RecordedPaces([recorded(tmp_path / name, machine.cpu(), 2.0, **changes)])
        assert paces.of(demo) == RoundSeconds(2.0, 0.0), name
    assert seconds_of(demo, RoundSeconds(2.0, 5.0)) == 15 * 2 + 5
    for name, cpu, changes in (("epochs", machine.cpu(), {"local-epochs": 1}), ("elsewhere", "another", {})):
        assert RecordedPaces([recorded(tmp_path / name, cpu, 2.0, **changes)]).of(demo) is None
    assert RecordedPaces([folder(tmp_path / "old", [{"round": 1.0}] * 3)]).of(demo) is None


def test_presets_tell_what_a_column_costs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "runs" / "demo" / "a", machine.cpu(), 240.0)
    code, out, _ = command("presets", "demo", "--cost")
    assert code == 0 and "demo" in out and "about 1 h 0 min a seed" in out
    assert json.loads(command("presets", "demo", "--cost", "--json")[1])[0]["seconds"] == 15 * 240.0
    name = "fedcac/cifar10-pathological-2"
    code, out, _ = command("presets", f"{name}/fed[ap]*", "--cost")
    assert mentions(out, f"{name} 3 methods not measured", "CIFAR-10")
    how = f"to measure what is not measured, for example: corolla sweep --preset '{name}/*' --forecast (it runs"
    assert out.splitlines()[-1].startswith(how)
    changes = {**read_preset(f"{name}/fedper"), "num-server-rounds": 3}
    recorded(tmp_path / "runs" / "b", machine.cpu(), 7.2, **changes)
    # 500 rounds of 7.2 s are an hour; the other two cost as much
    assert mentions(command("presets", f"{name}/fed[ap]*", "--cost")[1], "about 3 h 0", "(1 measured)")
