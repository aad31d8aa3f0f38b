"""`evaluate-global`: evaluations also measure the global model that clients receive beside their personal models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corolla.experiments.compare import load, result_rows
from corolla.experiments.paper_table import figures
from corolla.experiments.result_table import single_runs, text_table
from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Run, config

BESIDE = sorted(name for name, method in METHODS.items() if method.global_beside_personal)


def evaluations(folder: RunFolder) -> list[dict[str, Any]]:
    return [record["evaluation"] for record in read_metrics(folder.path)]


@pytest.mark.parametrize("method", ["ditto", "apfl"])
@pytest.mark.parametrize("batchnorm", [False, True], ids=["mlp", "batchnorm"])
def test_the_global_model_is_fedavgs(run: Run, method: str, batchnorm: bool) -> None:
    # what these methods' clients upload is FedAvg's, bit for bit
    setting = {
        "evaluate_every": 1,
        "model": "tests.small_models:batchnorm" if batchnorm else "mlp",
        "validation_ratio": 0.2,
    }
    plain = evaluations(run(method="fedavg", run_name="plain", **setting))
    tested = evaluations(run(method=method, run_name="tested", evaluate_global=True, **setting))
    without = evaluations(run(method=method, run_name="without", **setting))
    for theirs, ours, unasked in zip(plain, tested, without, strict=True):
        for name in ("accuracy", "validation-accuracy"):
            assert {i: row[f"{name}-global"] for i, row in ours["clients"].items()} == {
                i: row[name] for i, row in theirs["clients"].items()
            }
            assert ours[f"{name}-global"] == theirs[name]
        assert ours["accuracy-global-pooled"] == theirs["accuracy-pooled"]
        assert ours["digest"] == unasked["digest"]
        for part in (ours, *ours["clients"].values()):
            for name in [name for name in part if "-global" in name]:
                del part[name]
        assert ours == unasked


@pytest.mark.parametrize("method", [name for name in BESIDE if name not in ("ditto", "apfl")])
def test_other_methods_measure_what_their_clients_receive(run: Run, method: str) -> None:
    folder = run(method=method, evaluate_global=True, num_server_rounds=3, train_samples=60)
    (last,) = [record["evaluation"] for record in read_metrics(folder.path) if "evaluation" in record]
    summary = read_summary(folder.path)
    assert summary["final-accuracy-global"] == last["accuracy-global"]
    assert summary["final-accuracy-global-pooled"] == last["accuracy-global-pooled"]
    # a FedAvg run from the global model's file, without a step that changes it, evaluates the same model
    weights = str((folder.path / "models" / "global.safetensors").resolve())
    same = run(run_name="same", initial_weights=weights, learning_rate=1e-30, num_server_rounds=1, train_samples=60)
    (expected,) = [record["evaluation"] for record in read_metrics(same.path)]
    assert [row["accuracy-global"] for row in last["clients"].values()] == [
        row["accuracy"] for row in expected["clients"].values()
    ]


def test_every_metric_of_the_task_and_clients_that_never_train(run: Run) -> None:
    folder = run(method="ditto", evaluate_global=True, metrics="all", holdout_clients=0.3, finetune_epochs=1)
    plain = run(method="fedavg", run_name="plain", metrics="all", holdout_clients=0.3)
    ours, theirs = evaluations_of(folder), evaluations_of(plain)
    names = [metric["name"] for metric in json.loads((folder.path / "run.json").read_text())["metrics"]]
    assert len(names) > 1
    for name in names:
        assert ours[f"{name}-global"] == theirs[name]
        assert ours["unseen"][f"{name}-global"] == theirs["unseen"][name]
        assert read_summary(folder.path)[f"final-{name}-global"] == theirs[name]


def evaluations_of(folder: RunFolder) -> dict[str, Any]:
    return next(record["evaluation"] for record in read_metrics(folder.path) if "evaluation" in record)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"method": "fedavg"},
            "evaluate-global: method fedavg has no global model beside its clients' personal models",
        ),
        ({"method": "fedper"}, "evaluate-global: method fedper has no global model beside"),
        ({"method": "fedcac"}, "evaluate-global: method fedcac has no global model beside"),
        ({"method": "ditto", "private": True}, "evaluate-global: the server of a private run would learn"),
        ({"method": "ditto", "report_accuracy": False}, "evaluate-global: clients send no metrics"),
    ],
)
def test_runs_that_cannot_honour_it_refuse_it_by_name(keys: dict[str, Any], message: str) -> None:
    asked = config(evaluate_global=True, **keys)
    with pytest.raises(UserError, match=message):
        METHODS[asked.method].check(asked)
    METHODS[asked.method].check(config(**keys))


def test_the_page_names_the_methods() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    section = page.partition("## The global model")[2].partition("`evaluate-global")[0]
    assert sorted(section.split("`")[1::2]) == BESIDE


def test_tables_have_a_column_where_it_was_asked_for(run: Run) -> None:
    folders = [
        run(method="ditto", run_name="asked", evaluate_global=True).path,
        run(method="fedavg", run_name="plain").path,
    ]
    runs, _ = load(folders, METHOD_PARAMS)
    header, *rows = text_table(result_rows([[run] for run in runs]))
    value = 100 * read_summary(folders[0])["final-accuracy-global"]
    at = header.index("final-accuracy-global")
    assert [row[at] for row in rows] == [f"{value:.2f}", "n/a"]
    assert single_runs(runs)[0][:5] == ["method", "final", "pooled", "global", "best"]
    assert "global" not in single_runs(runs[1:])[0]
    found = figures(RecordedRun(folders[0]))
    assert found["global, mean, last"] == read_summary(folders[0])["final-accuracy-global"]
    assert "global, pooled, last" in found and not any(name.startswith("global") for name in figures(runs[1]))
