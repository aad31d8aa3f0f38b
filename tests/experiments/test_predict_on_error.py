"""`corolla predict --on-error row`: bad rows come back empty, with their reason; labels keep their type."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris

import corolla
from corolla.experiments.exported import predict
from corolla.experiments.exported.export import export
from strategies import METHODS
from tests.conftest import Command, Run


@pytest.fixture
def iris(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    """A run on a table with integer labels and a column of words, and its model."""
    x, y = load_iris(return_X_y=True, as_frame=True)
    frame = x.assign(place=np.where(np.arange(150) % 2, "field", "garden"), kind=y)
    frame.columns = [name.removesuffix(" (cm)") for name in frame.columns]
    frame.to_csv(tmp_path / "iris.csv", index=False)
    folder = run(
        dataset=f"table:{tmp_path / 'iris.csv'}",
        target="kind",
        categorical="place",
        impute="petal width",
        partition="iid",
        train_samples=30,
        num_server_rounds=6,
        learning_rate=0.1,
    )
    return folder.path, export(folder.path, METHODS, None, tmp_path / "iris.pt")[0]


def test_bad_rows_come_back_empty_with_their_reason(iris: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    rows = pd.read_csv(tmp_path / "iris.csv").iloc[40:60].drop(columns="kind").astype({"sepal width": object})
    want = json.loads(command("predict", iris[1], written(rows, tmp_path), "--json")[1])["predictions"]
    bad = rows.assign(extra=1)
    bad.iloc[3, 0], bad.iloc[7, 4], bad.iloc[11, 1], bad.iloc[12, 3] = np.nan, "pond", "wide", np.nan
    code, _, err = command("predict", iris[1], written(bad, tmp_path))
    assert code == 2 and "extra" in err
    code, out, err = command("predict", iris[1], written(bad, tmp_path), "--json", "--on-error", "row")
    found = json.loads(out)["predictions"]
    assert code == 0 and "extra" in err and len(found) == 20
    for k, row in enumerate(found):
        if k in (3, 7, 11):
            word = {3: "sepal length", 7: "pond", 11: "wide"}[k]
            assert row["class"] is None and word in row["error"] and row["input"] == want[k]["input"]
            assert row["input"] in row["error"]
        elif k != 12:
            assert row["class"] == want[k]["class"] and not row["error"]
    # what training filled in is filled in
    assert found[12]["class"] in (0, 1, 2)
    code, out, _ = command("predict", iris[1], written(bad.iloc[[3]], tmp_path), "--json", "--on-error", "row")
    assert code == 0 and [row["error"] != "" for row in json.loads(out)["predictions"]] == [True]


def written(rows: pd.DataFrame, tmp_path: Path) -> Path:
    rows.to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path / "rows.csv"


def test_one_bad_value_spoils_no_other_row(run: Run, tmp_path: Path) -> None:
    """Whatever kind its column has: booleans, dates, numbers, words."""
    frame = pd.DataFrame({"hot": np.arange(60) % 3 == 0, "size": np.arange(60) / 7, "kind": np.arange(60) % 2})
    frame["day"], frame["place"] = pd.date_range("2026-01-01", periods=60).astype(str), np.where(frame["hot"], "a", "b")
    frame.to_csv(tmp_path / "table.csv", index=False)
    setting = {
        "partition": "iid",
        "train_samples": 20,
        "test_samples": 5,
        "num_clients": 2,
        "num_server_rounds": 1,
        "categorical": "place",
    }
    folder = run(**setting, dataset=f"table:{tmp_path / 'table.csv'}", target="kind")
    _, card = export(folder.path, METHODS, None, tmp_path / "model.pt")
    rows = frame.drop(columns="kind").head(6).astype(object)
    want = predict.read_inputs([written(rows, tmp_path)], card).samples
    for column, value in [("hot", "maybe"), ("day", "soon"), ("size", "large"), ("place", "c"), ("hot", None)]:
        bad = rows.copy()
        bad.loc[2, column] = value
        found = predict.read_inputs([written(bad, tmp_path)], card, on_error="row")
        assert [*found.bad] == [2] and (found.samples == np.delete(want, 2, axis=0)).all()


def test_a_row_with_more_values_than_columns_is_a_bad_row(
    iris: tuple[Path, Path], tmp_path: Path, command: Command
) -> None:
    """So is one whose number Python alone reads, as for a table without bad rows."""
    path = written(pd.read_csv(tmp_path / "iris.csv").iloc[40:50].drop(columns="kind"), tmp_path)
    want = json.loads(command("predict", iris[1], path, "--json")[1])["predictions"]
    header, *lines = path.read_text().splitlines()
    lines[2] += ",7,8"
    lines[5] = "5_0" + lines[5][3:]
    path.write_text("\n".join([header, *lines]))
    assert command("predict", iris[1], path)[0] == 2
    code, out, err = command("predict", iris[1], path, "--json", "--on-error", "row")
    assert code == 0, err
    for k, row in enumerate(json.loads(out)["predictions"]):
        assert row["input"] == want[k]["input"] and bool(row["error"]) == (k in (2, 5))
        assert row["class"] == (None if row["error"] else want[k]["class"])
        assert k != 2 or "7 values in 5 columns" in row["error"]


def test_a_bad_sample_of_an_npz(run: Run, tmp_path: Path, command: Command) -> None:
    x, y = load_iris(return_X_y=True)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    folder = run(dataset=f"npz:{tmp_path / 'd.npz'}", partition="iid", train_samples=30)
    file, _ = export(folder.path, METHODS, None, tmp_path / "d.pt")
    x[4, 2] = np.nan
    np.savez(tmp_path / "new.npz", x=x[:9], y=y[:9])
    assert command("predict", file, tmp_path / "new.npz")[0] == 2
    code, out, _ = command("predict", file, tmp_path / "new.npz", "--json", "--on-error", "row")
    told = json.loads(out)
    assert code == 0 and [k for k, row in enumerate(told["predictions"]) if row["error"]] == [4]
    assert told["measured"]["samples"] == 8


def test_integers_in_integers_out(iris: tuple[Path, Path], tmp_path: Path) -> None:
    frame = pd.read_csv(tmp_path / "iris.csv")
    assert (corolla.load(iris[0]).model().predict(frame) == frame["kind"]).mean() > 0.6
