"""Kinds of figures: declarations in run folders, and what was recorded as arrays, by hand."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from corolla.report import arrays
from corolla.report.arrays import read_run
from fl_app.figures import Figure, Groups, Layers, Links, Matrix, Scalars, from_json, to_json
from strategies import METHODS
from tests.facts import mentions
from tests.report.builders import folder, record
from tests.report.read import last_matrix


def test_what_methods_record_by_hand(tmp_path: Path) -> None:
    rounds = [
        record(
            1,
            {
                "0": {
                    "accuracy-before": 0,
                    "collaborators": [1, 3],
                    "personal-parameters": {"a.weight": 0, "b.weight": 0},
                },
                "1": {"accuracy-before": 0, "collaborators": [0]},
            },
            overlap=[[1, 0.25], [0.25, 1]],
            **{"macro-classes": {"a": 2, "b": 1}},
        ),
        record(
            3,
            {
                "1": {"accuracy-before": 0, "collaborators": []},
                "3": {
                    "accuracy-before": 0,
                    "collaborators": [1],
                    "personal-parameters": {"a.weight": 1, "a.bias": 2, "b.weight": 9},
                },
            },
            overlap=[[1, 0.75], [0.75, 1]],
            **{"macro-classes": {"a": 3, "b": 1}},
        ),
    ]
    run = read_run(folder(tmp_path / "r", rounds))
    nan = np.nan
    ids, overlap = last_matrix(run, "overlap") or ([], np.zeros(0))
    assert ids == [0, 1, 3]
    np.testing.assert_array_equal(overlap, [[1, 0.25, nan], [0.25, 1, 0.75], [nan, 0.75, 1]])
    ids, grid = arrays.scalars(run, "collaborators") or ([], np.zeros(0))
    assert ids == [0, 1, 3]
    np.testing.assert_array_equal(grid, [[2, nan, nan], [1, nan, 0], [nan, nan, 1]])
    names, shares = arrays.layers(run, Layers("personal-parameters", "", shares=True)) or ([], np.zeros(0))
    assert names == ["a", "b"]
    np.testing.assert_array_equal(shares, [[nan, nan, 0.25], [nan, nan, 0.75]])
    names, clusters = arrays.layers(run, Layers("macro-classes", "")) or ([], np.zeros(0))
    np.testing.assert_array_equal(clusters, [[2, nan, 3], [1, nan, 1]])
    assert run.missing == [2]
    assert arrays.layers(run, Layers("high-dispersion", "")) is None


def test_other_forms_of_records_by_hand(tmp_path: Path) -> None:
    rounds = [
        record(
            1,
            {
                "0": {
                    "accuracy-before": 0,
                    "weights": {"2": 0.5},
                    "alpha": 0.25,
                    "cluster": 1,
                    "density": {"a": 1, "b": 0},
                },
                "2": {"accuracy-before": 0, "weights": [3.0, None], "alpha": None, "cluster": "x", "density": {"a": 0}},
            },
            loss=2.0,
        ),
        record(2, {"2": {"accuracy-before": 0, "alpha": float("inf"), "cluster": [1], "density": 3}}, loss="much"),
        record(4, {"2": {"accuracy-before": 0, "alpha": 0.75, "cluster": 0}}, loss=1, cluster={"0": 1, "2": 1}),
    ]
    run = read_run(folder(tmp_path / "r", rounds))
    nan = np.nan
    ids, weights = last_matrix(run, "weights") or ([], np.zeros(0))
    assert ids == [0, 2]
    np.testing.assert_array_equal(weights, [[0, 0.5], [3, nan]])
    ids, alpha = arrays.scalars(run, "alpha") or ([], np.zeros(0))
    assert ids == [0, 2]
    np.testing.assert_array_equal(alpha, [[0.25, nan, nan, nan], [nan, nan, nan, 0.75]])
    ids, loss = arrays.scalars(run, "loss") or ([], np.zeros(0))
    assert ids == []
    np.testing.assert_array_equal(loss, [[2, nan, nan, 1]])
    found = arrays.groups(run, "cluster")
    assert found is not None and found[0] == [0, 2] and found[2] == ["1", "x"]
    np.testing.assert_array_equal(found[1], [[0, nan, nan, 0], [1, nan, nan, 0]])
    names, density = arrays.layers(run, Layers("density", "")) or ([], np.zeros(0))
    assert names == ["a", "b"]
    np.testing.assert_array_equal(density, [[0.5], [0]])
    assert last_matrix(run, "alpha") is arrays.scalars(run, "x") is None
    assert arrays.groups(run, "loss") is arrays.scalars(run, "x") is None


ALL: tuple[Figure, ...] = (
    Matrix("overlap", "Who overlaps", "share", "How much.", heading="Overlap", value="overlap"),
    Links("neighbours", "Neighbours", "neighbours"),
    Layers("density", "Density", "%", percent=True, name="masks", beside=Layers("clusters", "Clusters", whole=True)),
    Scalars("alpha", "Share of the own model", "alpha"),
    Groups("cluster", "Clusters"),
)


@pytest.mark.parametrize("figures", [ALL, *(method.figures for method in METHODS.values() if method.figures)])
def test_declarations_come_back_from_json(figures: tuple[Figure, ...]) -> None:
    assert from_json(json.loads(json.dumps(to_json(figures)))) == figures
    names = [figure.file_name for figure in figures]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "item",
    [
        None,
        3,
        {},
        {"kind": "sankey", "record": "x", "title": "y"},
        {"kind": "matrix", "title": "y"},
        {"kind": "matrix", "record": "x"},
        {"kind": "links", "record": 1, "title": "y"},
        {"kind": [], "record": "x", "title": "y"},
        {"kind": "layers", "record": "x", "title": "y", "percent": "yes"},
        {"kind": "layers", "record": "x", "title": "y", "beside": {"kind": "matrix", "record": "z", "title": ""}},
    ],
)
def test_what_is_no_declaration_is_left_out_and_logged(item: object, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("corolla")
    log.addHandler(caplog.handler)
    try:
        assert from_json([item, *to_json(ALL[1:2])])[0].record == "neighbours"
    finally:
        log.removeHandler(caplog.handler)
    assert mentions(caplog.text, "not a figure", "drawn")
    assert from_json(item) == ()


def test_a_name_cannot_leave_the_folder_of_pictures() -> None:
    assert Links("../../x y", "").file_name == Links("x", "", name="/x.y").file_name == "-x-y"
