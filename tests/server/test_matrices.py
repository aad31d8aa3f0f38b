"""Numbers between clients: taken out of notes, kept in files of their own, read from there and from earlier runs' records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import corolla
from corolla.report import arrays
from corolla.report.arrays import read_run
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.figures import Figure, Links, Matrix, Scalars
from fl_app.server import matrices
from fl_app.server.run_folder import read_metrics
from strategies import METHOD_PARAMS
from tests.conftest import Run
from tests.facts import mentions, rejected
from tests.report.read import last_matrix

FIGURES: tuple[Figure, ...] = (Matrix("m", ""), Links("l", ""), Scalars("s", ""))
IDS = [7, 2, 31]


def rows(found: matrices.Between) -> dict[int, dict[int, Any]]:
    """A matrix by client ids, without what is missing."""
    return {
        int(i): {int(j): v for j, v in zip(found.columns, row, strict=True) if v == v}
        for i, row in zip(found.rows, found.values.tolist(), strict=True)
    }


@pytest.mark.parametrize(
    ("whole", "own"),
    [
        ([[1, 2, 3], [4, None, 6], [7, 8, 9.5]], {}),
        (np.array([[1, 2, 3], [4, np.nan, 6], [7, 8, 9.5]]), {}),
        (None, {7: [1, 2, 3], 2: [4, float("inf"), 6], 31: np.array([7, 8, 9.5])}),
        (None, {7: {"7": 1, "2": 2, "31": 3}, 2: {"7": 4, "2": None, "31": 6}, 31: {"2": 8, "7": 7, "31": 9.5}}),
    ],
)
def test_matrices_in_all_forms(tmp_path: Path, whole: Any, own: dict[int, Any]) -> None:
    notes = matrices.divided(
        {"m": whole, "x": 1} if whole is not None else {"x": 1}, {i: {"m": v} for i, v in own.items()}, IDS, FIGURES
    )
    assert notes.round == {"x": 1} and notes.clients == {i: {} for i in IDS}
    assert rows(notes.between["m"]) == {7: {7: 1, 2: 2, 31: 3}, 2: {7: 4, 31: 6}, 31: {7: 7, 2: 8, 31: 9.5}}
    assert matrices.save(tmp_path, 4, IDS, notes.between) == []
    assert rows(matrices.read(tmp_path, 4)["m"]) == rows(notes.between["m"])
    with np.load(tmp_path / "matrices" / "round-4.npz") as file:
        assert file["clients"].tolist() == IDS and file["m"].dtype == np.float16 and set(file) == {"clients", "m"}


def test_tables_of_some_clients_and_links(tmp_path: Path) -> None:
    own = {7: {"m": {"99": 1e6}, "l": [31, 99], "s": 1}, 31: {"m": {}, "l": []}}
    notes = matrices.divided({}, own, IDS, FIGURES)
    # the round's other clients are 0, foreign ones unknown
    expected = {7: {7: 0, 2: 0, 31: 0, 99: 1e6}, 31: {7: 0, 2: 0, 31: 0}}
    assert rows(notes.between["m"]) == expected
    assert notes.clients == {7: {"l": 2, "s": 1}, 2: {}, 31: {"l": 0}}
    matrices.save(tmp_path, 1, IDS, notes.between)
    found = matrices.read(tmp_path, 1)
    assert rows(found["m"]) == expected
    linked = found["l"]
    assert linked.values.dtype == bool and linked.rows.tolist() == [7, 31]
    assert {int(i): linked.columns[row].tolist() for i, row in zip(linked.rows, linked.values, strict=True)} == {
        7: [31, 99],
        31: [],
    }


@pytest.mark.parametrize("note", [3.5, "text", [[1, 2], [3, 4]], [[1, 2], [3], [4, 5]], [["a"] * 3] * 3])
def test_what_is_no_matrix_stays(note: Any) -> None:
    notes = matrices.divided({"m": note, "other": [[1] * 3] * 3}, {7: {"l": ["a"]}, 2: {"l": 4}}, IDS, FIGURES)
    assert notes.round == {"m": note, "other": [[1] * 3] * 3} and not notes.between
    assert notes.clients == {7: {"l": ["a"]}, 2: {"l": 4}, 31: {}}


def test_none_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "LARGEST", 9)
    found = matrices.divided({"m": np.eye(3)}, {i: {"l": [99]} for i in IDS}, IDS, FIGURES).between
    assert matrices.save(tmp_path, 1, IDS, found) == ["l"]
    assert set(matrices.read(tmp_path, 1)) == {"m"}
    monkeypatch.setattr(matrices, "LARGEST", 8)
    assert matrices.save(tmp_path, 2, IDS, found) == ["m", "l"] and matrices.rounds(tmp_path) == [1]


@pytest.mark.parametrize("form", ["whole", "rows", "tables"])
def test_matrices_above_the_limit_are_not_even_made(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "LARGEST", 8)
    monkeypatch.setattr(matrices, "_floats", None)
    monkeypatch.setattr(matrices, "linked", None)
    whole = {"m": np.eye(3)} if form == "whole" else {}
    noted: dict[str, Any] = {"whole": {}, "rows": {"m": np.eye(3)[0]}, "tables": {"m": {"7": 1.0}}}
    own = {i: {"l": IDS, "n": [1, 2], **noted[form]} for i in IDS}
    notes = matrices.divided(whole, own, IDS, FIGURES)
    assert matrices.save(tmp_path, 2, IDS, notes.between) == ["m", "l"]
    assert [found.values.shape for found in notes.between.values()] == [(3, 3), (3, 3)]
    # the other notes, and the number of links, stay
    assert notes.round == {} and notes.clients == {i: {"l": 3, "n": [1, 2]} for i in IDS}


def test_a_list_of_one_number_per_client_is_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "LARGEST", 8)
    notes = matrices.divided({"m": [1.0, 2.0, 3.0]}, {}, IDS, FIGURES)
    assert notes.round == {"m": [1.0, 2.0, 3.0]} and not notes.between


def test_a_damaged_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    matrices.save(tmp_path, 1, IDS, matrices.divided({"m": np.eye(3)}, {}, IDS, FIGURES).between)
    path = tmp_path / "matrices" / "round-1.npz"
    path.write_bytes(path.read_bytes()[:-40])
    assert matrices.read(tmp_path, 1) == {} and mentions(caplog.text, "round-1.npz cannot be", "read")


# Runs ------------------------------------------------------------------------------------------------------------------

NOTING = {
    "fedcac": ("overlap", "collaborators"),
    "feddac": ("overlap", "collaborators", "neighbours"),
    "feddwa": ("neighbours",),
    "fedamp": ("attention",),
    "fedfomo": ("affinity",),
    "apple": ("relations",),
    "fedpac": ("head-weights",),
}


@pytest.mark.parametrize("method", NOTING)
def test_rounds_that_have_matrices(run: Run, method: str) -> None:
    settings = {"method": method, "num_clients": 5, "fraction_train": 0.6, "num_server_rounds": 7}
    folder = run(record_matrices=3, **settings)
    assert matrices.rounds(folder.path) == [3, 6, 7]
    for record in read_metrics(folder.path):
        found = matrices.read(folder.path, record["round"])
        assert set(found) == (set(NOTING[method]) if record["round"] in (3, 6, 7) else set())
        assert all(one.rows.tolist() == [int(i) for i in record["clients"]] for one in found.values())
        # as many numbers as clients
        line = json.dumps({k: v for k, v in record.items() if k != "evaluation"})
        assert not set(NOTING[method]) - {"collaborators"} & set(record) and "[[" not in line
        assert all(type(row.get("collaborators", 0)) is int for row in record["clients"].values())
    reported = read_run(folder.path)
    (name, *_) = NOTING[method]
    ids, values = last_matrix(reported, name) or ([], np.zeros(0))
    assert ids and not np.isnan(values).all()
    if "collaborators" in NOTING[method]:
        _, counts = arrays.scalars(reported, "collaborators") or ([], np.zeros(0))
        assert counts.shape[1] == 7
    frame = corolla.load(folder.path).matrix(name, round=6)
    assert frame.index.tolist() == matrices.read(folder.path, 6)[name].rows.tolist()
    with rejected(UserError, "run", f"no matrix {name}", "round 5"):
        corolla.load(folder.path).matrix(name, round=5)


@pytest.mark.parametrize(
    ("clients", "chosen", "rounds"), [(100, {}, 1), (101, {}, 10), (101, {"record-matrices": 1}, 1)]
)
def test_many_clients_have_them_more_seldom(clients: int, chosen: dict[str, int], rounds: int) -> None:
    assert parse({"num-clients": clients, **chosen}, METHOD_PARAMS).record_matrices == rounds
