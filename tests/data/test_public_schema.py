"""With `dp-epsilon` names and shapes of features and outputs follow from no record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fl_app import data
from fl_app.errors import DataError, UserError
from tests.conftest import config
from tests.facts import rejected

ROWS = 40
G = np.random.default_rng(0)
FRAME = pandas.DataFrame(
    {
        "age": G.normal(50, 9, ROWS).round(2),
        "ward": ["icu", "surgery", "icu", ""] * (ROWS // 4),
        "code": [1, 2] * (ROWS // 2),
        "y": ["u", "v"] * (ROWS // 2),
    }
)
DECLARED = {"categorical": "ward=icu|surgery, code=1|2", "impute": "age", "classes": "u,v"}


def opened(tmp_path: Path, frame: pandas.DataFrame, source: str = "node", **more: Any) -> data.Prepared:
    path = tmp_path / "t.csv"
    frame.to_csv(path, index=False)
    raw = {"target": "y", "data_dir": str(tmp_path / "root"), "dp_epsilon": 1.0, **DECLARED, **more}
    named = {"dataset": "node"} if source == "node" else {"dataset": f"table:{path}", "partition": "iid"}
    return data.prepare_for(config(**{"train_samples": 0, "test_samples": 0, **raw, **named}), str(path))


def changed(column: str, value: object, row: int = 5) -> pandas.DataFrame:
    frame = FRAME.astype({column: object})
    frame.loc[row, column] = value
    return frame


@pytest.mark.parametrize("source", ["node", "table"])
@pytest.mark.parametrize(
    ("column", "value"),
    [("ward", "gynaecology"), ("ward", None), ("code", 3), ("code", 2.5), ("code", "x"), ("age", None)],
)
def test_a_record_changes_neither_names_nor_shapes(tmp_path: Path, source: str, column: str, value: object) -> None:
    before, after = opened(tmp_path, FRAME, source), opened(tmp_path, changed(column, value), source)
    assert after.info.facts.features == before.info.facts.features
    assert after.info.facts.features == ("age", "age missing", "ward=icu", "ward=surgery", "code=1", "code=2")
    assert (after.x_train.shape, after.info.classes) == (before.x_train.shape, before.info.classes)
    # all other records have the same features; `age` may have another median
    differing = (np.asarray(before.x_train[:, 1:]) != np.asarray(after.x_train[:, 1:])).any(axis=1)
    assert (
        differing.sum() + (np.asarray(before.x_test[:, 1:]) != np.asarray(after.x_test[:, 1:])).any(axis=1).sum() <= 1
    )
    for side in (after.x_train, after.x_test):
        assert set(np.unique(np.asarray(side[:, 1:]))) <= {0.0, 1.0}


def test_a_column_that_numbers_the_rows_stays_whatever_a_record_is(tmp_path: Path) -> None:
    numbered = FRAME.assign(id=np.arange(ROWS))
    names = [opened(tmp_path, frame).info.facts.features for frame in (numbered, numbered.replace({"id": {5: 900}}))]
    assert names[0] == names[1] and "id" in names[0]


@pytest.mark.parametrize(
    ("less", "key"),
    [({"categorical": "ward, code=1|2"}, "categorical"), ({"classes": ""}, "classes")],
)
def test_what_is_not_declared_is_refused(tmp_path: Path, less: dict[str, str], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}: "):
        opened(tmp_path, FRAME, "table", **less)
    # without dp-epsilon the records may decide
    assert opened(tmp_path, FRAME, "table", dp_epsilon=0.0, **less)


@pytest.mark.parametrize("value", [None, "many", "2024-01-01", 1e300])
@pytest.mark.parametrize("promise", [{"dp_epsilon": 1.0}, {"private": True, "dp_epsilon": 0.0}])
def test_a_number_that_cannot_be_read_is_the_median_of_the_training_rows(
    tmp_path: Path, value: object, promise: dict[str, Any]
) -> None:
    """It makes no feature, refuses nothing, and changes no other record; the remarks name it."""
    whole = opened(tmp_path, FRAME, impute="", **promise)
    place = next(k for k, x in enumerate(np.asarray(whole.x_train)) if x[0] == np.float32(FRAME["age"][5]))
    found = opened(tmp_path, changed("age", value), impute="", **promise)
    others = np.delete(np.asarray(whole.x_train), place, 0)
    assert np.array_equal(np.delete(np.asarray(found.x_train), place, 0), others)
    assert found.x_train[place, 0] == np.float32(np.median(others[:, 0].astype(np.float64)))
    assert found.info.facts.features == whole.info.facts.features
    assert any("column 'age'" in line for line in found.info.remarks)


def test_a_plain_run_still_refuses_an_unknown_word(tmp_path: Path) -> None:
    with rejected(DataError, "dataset", "column ward", "hold"):
        opened(tmp_path, changed("ward", "gynaecology"), dp_epsilon=0.0)
