"""`test-after`: a table's test part by time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fl_app import data
from fl_app.data.prepared import Prepared
from fl_app.errors import UserError
from tests.conftest import Run


def prepared(tmp_path: Path, after: str, **more: Any) -> Prepared:
    rows = np.random.default_rng(0).permutation(40)
    frame = pd.DataFrame({"x": rows * 1.5 + 0.25, "day": rows * 2.0, "kind": np.where(rows % 2, "odd", "even")})
    frame["when"] = (pd.Timestamp("2026-06-01") + pd.to_timedelta(rows, "D")).strftime("%Y-%m-%d")
    frame["plant"] = np.where(rows < 10, "celle", "verden")
    frame.to_csv(tmp_path / "t.csv", index=False)
    setting = {"target": "kind", "test_ratio": 0.25, "test_after": after, "exclude": ("plant",), **more}
    return data.prepare(f"table:{tmp_path / 't.csv'}", tmp_path / "data", **setting)


def days(found: Prepared) -> tuple[list[float], list[float]]:
    place = found.info.facts.features.index("day")
    train, test = (sorted((side[:, place] / 2).tolist()) for side in (found.x_train, found.x_test))
    return train, test


@pytest.mark.parametrize(
    ("after", "first"), [("day:48.5", 25), ("day:48", 25), ("when:2026-06-20", 20), ("day", 30), ("when", 30)]
)
def test_the_rows_after_a_value_and_the_last_ones(tmp_path: Path, after: str, first: int) -> None:
    train, test = days(prepared(tmp_path, after))
    assert train == list(range(first)) and test == list(range(first, 40))


def test_the_last_rows_of_each_client(tmp_path: Path) -> None:
    _, test = days(prepared(tmp_path, "when", client="plant", exclude=()))
    assert test == [8, 9, *range(32, 40)]


@pytest.mark.parametrize(
    ("after", "more", "words"),
    [
        ("dai:3", {}, "day"),
        ("kind:odd", {}, "numbers or dates"),
        ("day:2026-06-20", {}, "day:VALUE"),
        ("when:soon", {}, "when:VALUE"),
        ("day:99", {}, "no row"),
        ("day:19", {"client": "plant", "exclude": ()}, "verden"),
        ("day:-1", {}, "no row for training"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, after: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepared(tmp_path, after, **more)


@pytest.mark.parametrize(
    ("cell", "words"),
    [("", "row 6 has none"), ("24.06.2026", "'24.06.2026' in row 6")],
    ids=["none", "other"],
)
def test_a_row_has_the_number_that_a_spreadsheet_shows(tmp_path: Path, cell: str, words: str) -> None:
    prepared(tmp_path, "when")
    frame = pd.read_csv(tmp_path / "t.csv", dtype=str)
    frame.loc[4, "when"] = cell or None
    frame.to_csv(tmp_path / "cells.csv", index=False)
    with pytest.raises(UserError, match=words):
        data.prepare(f"table:{tmp_path / 'cells.csv'}", tmp_path, target="kind", test_after="when", exclude=("plant",))


def test_a_run_by_time(run: Run, tmp_path: Path) -> None:
    prepared(tmp_path, "day")
    setting = {"dataset": f"table:{tmp_path / 't.csv'}", "target": "kind", "client": "plant", "partition": "by-column"}
    folder = run(**setting, num_clients=2, test_after="day")
    assert '"test-samples": 2' in (folder.path / "clients.json").read_text()
    with pytest.raises(UserError, match="test-after"):
        run(test_after="day", run_name="digits")
