"""Keeps the benchmark scripts from rotting. What they measure is checked by their short forms, which start real processes."""

from __future__ import annotations

import ast
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import deployment, gpu_check, loopback, methods, peers, scale, simulation, startup
from strategies import METHODS
from tests.facts import mentions


def test_gpu_check_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With smaller images and batches than on a GPU."""
    monkeypatch.setattr(gpu_check, "SHAPES", {"cnn": (28, 1), "resnet8": (8, 3)})
    monkeypatch.setattr(gpu_check, "BATCH", 20)
    results, wrong = gpu_check.check_device(torch.device("cpu"), small=True)
    assert wrong == []
    for model in ("cnn", "resnet8"):
        assert results[model]["float32: one step's difference from the CPU"] == 0
        assert 0 < results[model]["bfloat16: one step's difference from the CPU"] < 0.5
        assert all(rate > 0 for rate in results[model]["samples per second"].values())
    assert results["whole run"]["accuracy on the CPU"] > 0.5


def test_gpu_check_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    gpu_check.main()
    assert capsys.readouterr().out == "no GPU: nothing checked\n"


def test_generated_programs_are_programs(tmp_path: Path) -> None:
    app = deployment.write_stock_app(tmp_path)
    components = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
    assert all((app / f"{reference.split(':')[0]}.py").is_file() for reference in components.values())
    for code in (
        deployment.CLIENT,
        deployment.SERVER,
        startup.WATCH,
        startup.MODEL,
        loopback.TINY_MODEL,
        peers.DATA + peers.FLOWER,
        peers.DATA + peers.PFL,
    ):
        ast.parse(code)


def test_rounds_by_hand() -> None:
    clients = {"0": {"seconds": {"train": 3.0, "evaluate": 0.5}}, "1": {"seconds": {"train": 5.0, "evaluate": 0.5}}}
    r = simulation.Round(5.0, {"seconds": {"round": 4.75, "wait": 4.5, "personalize": 0.25}, "clients": clients})
    assert r.phases == 4.75
    assert r.client_phases(2) == {"train": 4.0, "evaluate": 0.5}
    told = {name: (k + 1.0, k / 2) for k, name in enumerate(startup.PARTS)}
    assert startup.parts(told, 0) == dict.fromkeys(startup.PARTS.values(), 1.0)
    assert sum(startup.parts(told, 1).values()) == 2.0


def test_counted_passes_by_hand() -> None:
    # FedAvg's 5 epochs take 30 s, 10 of them forward: a forward pass 2 s, a backward pass 4 s
    taken = {"fedavg": 30.0, methods.FORWARD: 10.0, methods.SOLVE: 0.5}
    assert methods.Passes().seconds(taken) == 30
    assert methods.Passes(2, 1).seconds(taken) == 40
    assert methods.Passes(1, 0, 0, 1, 8).seconds(taken) == 10 + 4 + 4
    assert str(methods.Passes(2, 1, 0.8, 0)) == "2 E + 0.8 forward, E backward"
    assert str(methods.Passes(1, 0, 0, 1, 8)) == "E forward, 1 backward, 8 solves"


@pytest.mark.nightly
def test_every_method_has_a_row_in_the_table_of_methods() -> None:
    seconds = methods.measure("mlp", side=8, channels=1, batch=8, steps=2, repeats=1)
    text, ratios = methods.seconds_table({"mlp": seconds})
    rows = text.splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == list(METHODS)
    assert len({row.count("|") for row in rows}) == 1 and set(methods.COUNTED) <= {*METHODS, "feddpa"}
    assert ratios["mlp: fedavg, measured / counted"] == 1 and all(ratio > 0 for ratio in ratios.values())


@pytest.mark.parametrize(("text", "parameters"), [(loopback.TINY_MODEL, 250), (loopback.LARGE_MODEL, 11_200_010)])
def test_the_models_of_deployments(text: str, parameters: int) -> None:
    names: dict[str, Any] = {}
    exec(text, names)
    module = names["build"](1, 10, 8)
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


def test_a_method_that_refuses_a_model_has_no_figure() -> None:
    taken = dict.fromkeys((*(name for name in METHODS if name != "fedma"), methods.FORWARD, methods.SOLVE), 1.0)
    text, ratios = methods.seconds_table({"resnet8": taken})
    (row,) = (line for line in text.splitlines() if "`fedma`" in line)
    assert row.endswith("| – | – |") and len(ratios) == len(METHODS) - 1


def test_the_law_of_a_cost_by_hand() -> None:
    def costs(**values: tuple[float, ...]) -> dict[int, dict[str, float]]:
        return {n: {name: own[k] for name, own in values.items()} for k, n in enumerate((100, 1000, 10_000))}

    found = costs(start=(0.1, 10.0, 1000.0), round=(0.001, 0.01, 0.02), report=(1.0, 1.0, 20.0))
    assert scale.exponent(found, "start") == pytest.approx(2)
    # below the floor all is the same
    assert scale.exponent(found, "round") == pytest.approx(0)
    # what is constant hides it at first: the two largest count, not the line through all
    assert scale.exponent(found, "report") == pytest.approx(math.log10(20))
    # N log N
    assert scale.exponent({n: {"start": n * math.log(n)} for n in scale.SHORT}, "start") < scale.TOLERANCE
    assert math.isnan(scale.exponent({100: {"start": 1.0}}, "start"))
    assert "| start | 0.1 | 10.0 | 1000.0 | N^2.0 |" in scale.table(found).splitlines()


def test_sizes_beyond_the_budget_are_not_tried() -> None:
    cubic = {100: {"start": 0.5}, 1000: {"start": 500.0}}
    assert mentions(
        scale.too_long(cubic, 2000, 900), "start would take", "4,000 processor seconds", "the budget is 900"
    )
    assert scale.too_long(cubic, 1100, 900) == "" == scale.too_long({100: {"start": 0.5}}, 10_000, 900)


def test_a_contender_is_timed_between_its_rounds(tmp_path: Path) -> None:
    rounds = f"for k in range({peers.FIRST + peers.COUNTED}): print('round', k, flush=True); sum(range(100_000))"
    # it goes on for a while, so that its processor time can be asked for after the last round that counts
    code = f"{rounds}\nsum(range(20_000_000))"
    found = peers.pace([sys.executable, "-c", code], tmp_path)
    assert 0 < found["rounds a minute"] < float("inf") and found["processor seconds a round"] >= 0
    with pytest.raises(SystemExit, match="printed 0 rounds"):
        peers.pace([sys.executable, "-c", "print('nothing')"], tmp_path)


@pytest.mark.nightly
def test_costs_of_few_clients_are_measured() -> None:
    found, left_out = scale.measured((3, 6), 60)
    assert left_out == [] and list(found) == [3, 6]
    assert all(set(costs) == set(scale.COSTS) for costs in found.values())
    assert all(costs["start"] > 0 and costs["report"] > 0 for costs in found.values())
