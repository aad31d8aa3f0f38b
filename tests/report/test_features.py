"""Confusion matrices and the map of features: what the clients' final models say about their own test samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import corolla
from corolla.api.recorded_run import client_answers
from corolla.experiments.exported.loading import ClientAnswers
from corolla.experiments.runs import RecordedRun
from corolla.report.arrays import read_run, read_runs
from corolla.report.groups import grouped
from corolla.report.model_pictures import MOST_CELLS, of_features
from fl_app import exit_codes
from fl_app.errors import UserError
from tests.conftest import Command
from tests.report.builders import folder, record
from tests.report.read import frame_with


@pytest.fixture(scope="module")
def fedper(start: Callable[..., Path]) -> Path:
    return start("fedper-run", method="fedper", num_clients=4, collect_personal_models=True, num_server_rounds=2)


def drawn_clients(count: int, classes: int = 4, samples: int = 30, width: int = 6) -> list[ClientAnswers]:
    draw = np.random.default_rng(1)
    found = []
    for client in range(count):
        truth, predicted = draw.integers(0, classes, (2, samples))
        found.append(
            ClientAnswers(client, classes, truth, predicted, draw.normal(size=(samples, width)).astype(np.float32))
        )
    return found


def test_the_diagonals_are_the_accuracies_that_the_clients_reported(fedper: Path) -> None:
    confusion, features = of_features(read_run(fedper), client_answers(fedper))
    cells = frame_with(confusion, "whose")
    reported = RecordedRun(fedper).last_evaluation[1]["clients"]
    for client, row in reported.items():
        own = cells[cells["whose"] == client]
        right = own[own["class"] == own["predicted"]]["samples"].sum() / own["samples"].sum()
        assert right == pytest.approx(row["accuracy"])
        assert own.groupby("class")["value"].sum().tolist() == pytest.approx([1.0] * own["class"].nunique())
    all_of_them = cells[cells["whose"] == "all clients"]["samples"].sum()
    points = frame_with(features, "x")
    assert all_of_them == len(points) == 40
    assert {*points["client"].astype(str)} == {*reported}


def test_the_features_are_what_the_classifier_takes(fedper: Path) -> None:
    import torch

    for own in client_answers(fedper):
        model = corolla.load(fedper).model(own.client)
        layer = [part for part in model.network.modules() if isinstance(part, torch.nn.Linear)][-1]
        with torch.no_grad():
            answers = layer(torch.from_numpy(own.features)).argmax(1)
        assert answers.tolist() == own.predicted.tolist()


def test_groups_of_features_stay_groups(fedper: Path) -> None:
    client = drawn_clients(1, samples=60)[0]
    client.features[30:] += 50
    points = frame_with([*of_features(read_run(fedper), [client])][1], "x")[["x", "y"]].to_numpy()
    middles = [points[:30].mean(axis=0), points[30:].mean(axis=0)]
    nearest = [int(np.argmin([np.linalg.norm(place - middle) for middle in middles])) for place in points]
    assert nearest == [0] * 30 + [1] * 30


@pytest.mark.parametrize("shape", [(30, 1), (4, 6), (0, 6)])
def test_features_without_a_map_leave_the_confusion_matrices(fedper: Path, shape: tuple[int, int]) -> None:
    client = drawn_clients(1, samples=max(1, shape[0]))[0]
    features = np.arange(len(client.truth) * shape[1], dtype=np.float32).reshape(-1, shape[1])
    given = dataclasses.replace(client, features=features if shape[0] else np.full_like(features, np.nan))
    (panel,) = of_features(read_run(fedper), [given])
    assert panel.name == "confusion-1"


def test_features_that_are_not_finite_are_left_out(fedper: Path) -> None:
    clients = drawn_clients(2)
    clients[1].features[3:] = np.nan
    points = frame_with([*of_features(read_run(fedper), clients)][1], "x")
    assert points["client"].value_counts().to_dict() == {0: 30, 1: 3}


def test_models_without_one_layer_as_classifier_have_confusion_matrices_alone(fedper: Path) -> None:
    clients = [ClientAnswers(0, 2, np.array([0, 1]), np.array([0, 0]), None)]
    (panel,) = of_features(read_run(fedper), clients)
    assert frame_with(panel, "whose")["samples"].sum() == 4


def test_a_hundred_clients_of_a_hundred_classes_stay_bounded(fedper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a map of a thousand takes seconds
    monkeypatch.setattr("corolla.report.model_pictures.MOST_SAMPLES", 300)
    clients = drawn_clients(100, classes=100, samples=600)
    confusion, shown = of_features(read_run(fedper), clients)
    cells, points = frame_with(confusion, "whose"), frame_with(shown, "x")
    assert len(cells) <= MOST_CELLS and len(points) <= 300
    assert cells[cells["whose"] == "all clients"]["samples"].sum() == 60_000
    chosen = cells["whose"].nunique() - 1
    assert 0 < chosen < 100 and f"{chosen} of the 100 clients" in confusion.caption
    assert points["client"].nunique() == 100
    assert sum(len(json.dumps(panel.spec)) for panel in (confusion, shown)) < 2_000_000


def test_the_page_has_the_pictures_on_request_alone(
    fedper: Path, command: Command, tmp_path: Path, undrawn: None
) -> None:
    def figures(*words: str) -> Sequence[str]:
        code, _, err = command("report", fedper, "--output", tmp_path, *words)
        assert code == 0, err
        return [
            name for name in ("confusion-1", "features-1") if f'id="{name}"' in (tmp_path / "report.html").read_text()
        ]

    assert figures() == []
    assert figures("--features") == ["confusion-1", "features-1"]


def test_a_notebook_has_them_when_it_asks(fedper: Path) -> None:
    plot = corolla.load(fedper).plot
    assert "confusion" not in dir(plot)
    assert plot.confusion().to_dict()["params"] and plot.features().to_dict()["encoding"]["x"]


REFUSED = {
    "unfinished": ({}, "holds no models"),
    "node": ({"dataset": "node", "classes": "a,b"}, "dataset = node"),
    "regression": ({"dataset": "table:t.csv", "target": "y", "task": "regression"}, "task regression"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_tested_is_refused_by_name(kind: str, tmp_path: Path, command: Command) -> None:
    config, why = REFUSED[kind]
    rows = {str(i): {"accuracy-before": 0.5} for i in range(2)}
    evaluation = {"accuracy": 0.5, "clients": {i: {"accuracy": 0.5} for i in rows}}
    run = folder(tmp_path / "run", [record(1, rows, evaluation=evaluation)], num_clients=2, **config)
    if kind != "unfinished":
        (run / "models").mkdir()
        (run / "models" / "global.safetensors").touch()
    code, _, err = command("report", run, "--features", "--output", tmp_path / "out")
    assert code == exit_codes.BAD_INPUT and str(run) in err and why in err
    assert not (tmp_path / "out").exists()


def test_clients_whose_models_the_run_does_not_hold_are_refused(start: Callable[..., Path]) -> None:
    run = start("not-collected", method="fedper", num_clients=2)
    with pytest.raises(UserError, match="collect-personal-models"):
        client_answers(run)


def test_global_models_are_tested_where_clients_use_them(start: Callable[..., Path]) -> None:
    run = start("global", method="fedavg", num_clients=3)
    assert [own.client for own in client_answers(run)] == [0, 1, 2]
    assert len(grouped(read_runs([run]))) == 1
