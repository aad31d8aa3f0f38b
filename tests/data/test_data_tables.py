"""What becomes of each column of a table: index columns, words, dates, booleans, missing values, separators, numbers far off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fl_app import data
from fl_app.errors import UserError
from tests.conftest import Command, config

ROWS = 60
G = np.random.default_rng(0)
FRAME = pandas.DataFrame({"a": G.normal(size=ROWS), "b": G.normal(size=ROWS), "y": ["u", "v"] * (ROWS // 2)})


def opened(tmp_path: Path, text: str, **more: Any) -> data.Prepared:
    """Open a CSV file's text."""
    path = tmp_path / "t.csv"
    path.write_text(text)
    raw = {"dataset": f"table:{path}", "target": "y", "data_dir": str(tmp_path / "root"), "partition": "iid", **more}
    return data.prepare_for(config(**{"train_samples": 0, "test_samples": 0, **raw}))


def csv(frame: pandas.DataFrame = FRAME, index: bool = False, **more: Any) -> str:
    text = frame.to_csv(index=index, **more)
    assert isinstance(text, str)
    return text


# Columns that are no features


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        (csv(index=True), "Unnamed: 0", "an index that a program saved"),
        (csv(FRAME.assign(**{"Unnamed: 0": G.random(ROWS)})), "Unnamed: 0", "an index that a program saved"),
        (csv(FRAME.assign(id=np.arange(ROWS))), "id", "it numbers the rows"),
        (csv(FRAME.assign(patient=1000 + G.permutation(ROWS))), "patient", "it numbers the rows"),
        (csv(FRAME.assign(n=np.arange(ROWS)[::-1] + 0.0)), "n", "it numbers the rows"),
        ("".join(f"{line},\n" for line in csv().splitlines()), "Unnamed: 3", "empty and without a name"),
    ],
)
def test_index_columns_are_left_out_with_one_line(tmp_path: Path, text: str, name: str, why: str) -> None:
    info = opened(tmp_path, text).info
    assert info.facts.features == ("a", "b") and info.input_shape == (2,)
    (line,) = info.remarks
    assert line.startswith(f"column {name!r} is left out: {why}")
    assert next(use for use in info.facts.columns if use[0] == name)[1] == "left out"


def test_whole_numbers_with_gaps_or_repetitions_are_features(tmp_path: Path) -> None:
    frame = FRAME.assign(c=np.arange(ROWS) % 7, d=np.arange(ROWS) * 3)
    info = opened(tmp_path, csv(frame)).info
    assert info.facts.features == ("a", "b", "c", "d")
    assert info.remarks == ["column 'd' has another whole number in every row: if they name the rows, set exclude"]
    assert opened(tmp_path, csv(frame), exclude="d,a").info.facts.features == ("b", "c")
    with pytest.raises(UserError, match="exclude: .* has no column 'e'; it has a, b, y, c, d"):
        opened(tmp_path, csv(frame), exclude="e")


def test_a_column_without_a_name_is_refused_unless_it_is_the_first(tmp_path: Path) -> None:
    text = csv(FRAME.assign(c=1.5)).replace("a,b,y,c", "a,b,y,", 1)
    with pytest.raises(UserError, match="column 4 must have a name"):
        opened(tmp_path, text)


def test_nothing_but_an_index_is_nothing_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no columns but y: nothing to learn from; left out: id \(it numbers the rows\)"
    ):
        opened(tmp_path, csv(FRAME[["y"]].assign(id=np.arange(ROWS))))


# Words, dates, booleans, missing values


def test_every_unfit_column_is_named_in_one_error(tmp_path: Path) -> None:
    days = pandas.date_range("2024-01-01", periods=ROWS).strftime("%Y-%m-%d")
    frame = FRAME.assign(day=days, sex=["m", "f"] * (ROWS // 2), dose=[1.0, None, 2.5] * (ROWS // 3), ok=FRAME.a > 0)
    with pytest.raises(UserError) as caught:
        opened(tmp_path, csv(frame))
    text = str(caught.value)
    assert "3 columns cannot be features" in text
    assert "column day must hold numbers, got the date '2024-01-01' in row 0" in text
    assert "column sex must hold numbers, got 'm' in row 0; encode it (categorical = 'sex'" in text
    assert "column dose must have a finite number in every row, row 1 has not; 20 of 60 rows" in text
    p = opened(tmp_path, csv(frame), exclude="day,dose", categorical="sex", test_ratio=0.0)
    assert p.info.facts.features == ("a", "b", "sex=f", "sex=m", "ok")
    assert p.x_train[:3, 2:4].tolist() == [[0, 1], [1, 0], [0, 1]]
    assert p.x_train[:, 4].tolist() == (frame.a > 0).astype(float).tolist()
    assert p.info.remarks == [
        "column 'sex': one of 2 words, each a feature of 0 and 1: f, m",
        "column 'ok': boolean, as 0 and 1",
    ]


def test_dates_and_decimals_of_a_parquet_file(tmp_path: Path) -> None:
    from decimal import Decimal

    frame = FRAME.assign(c=[Decimal(k) / 4 for k in range(ROWS)])
    path = tmp_path / "t.parquet"
    raw = {"dataset": f"table:{path}", "target": "y", "data_dir": str(tmp_path / "root"), "test_ratio": 0.0}
    frame.to_parquet(path)
    p = data.prepare_for(config(**raw))
    assert p.x_train[:, 2].tolist() == [k / 4 for k in range(ROWS)]
    frame.assign(day=pandas.date_range("2024-01-01", periods=ROWS)).to_parquet(path)
    with pytest.raises(UserError, match=r"column day must hold numbers, got dates \(2024-01-01"):
        data.prepare_for(config(**raw))
    with pytest.raises(UserError, match="separator: .* is no CSV file"):
        data.prepare_for(config(**raw, separator=";"))


@pytest.mark.parametrize("name", ["None", "NA", "null"])
def test_words_for_missing_values_may_be_names(tmp_path: Path, name: str) -> None:
    text = csv(FRAME.assign(y=[name, "ok"] * (ROWS // 2), site=["x", name] * (ROWS // 2)))
    message = f"column y must have a value in every row, row 0 has none .'{name}' in the file.*set na-values = empty"
    with pytest.raises(UserError, match=message):
        opened(tmp_path, text, client="site")
    info = opened(tmp_path, text, client="site", na_values="empty").info
    assert set(info.classes) == {name, "ok"} and set(info.groups) == {"x", name}
    with pytest.raises(UserError, match="column y must have a value in every row, row 1 has none .'ok' in the file"):
        opened(tmp_path, text, na_values="ok,x")


# Separators


@pytest.mark.parametrize(("sign", "key"), [(";", ";"), ("\t", "tab"), ("|", "|")])
def test_another_separator_is_named_and_taken(tmp_path: Path, sign: str, key: str) -> None:
    with pytest.raises(UserError, match="separator: .* pandas made one column of its header") as caught:
        opened(tmp_path, csv(sep=sign))
    assert f"set separator = {key!r}" in str(caught.value)
    assert opened(tmp_path, csv(sep=sign), separator=key).info.facts.features == ("a", "b")
    with pytest.raises(UserError, match="set separator = ','"):
        opened(tmp_path, csv(), separator=key)


def test_decimal_commas_and_commas_at_the_ends_of_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set separator = ';'"):
        opened(tmp_path, csv(sep=";", decimal=","))
    with pytest.raises(
        UserError, match="column a must hold numbers, got .* a decimal comma; write numbers with a point"
    ):
        opened(tmp_path, csv(sep=";", decimal=","), separator=";")
    header, *rows = csv().splitlines()
    with pytest.raises(UserError, match=r"more values than the 3 names of its header \(a, b, y\).*end no row with"):
        opened(tmp_path, "\n".join([header, *(f"{row}," for row in rows)]))
    with pytest.raises(UserError, match="separator: must be one character or tab, got ';;'"):
        opened(tmp_path, csv(), separator=";;")


# Numbers


@pytest.mark.parametrize(
    "values",
    [1709251200 + G.integers(0, 1000, ROWS), 1709251200 + G.random(ROWS) * 100, 2**60 + G.integers(0, 9, ROWS)],
    ids=["int64", "float64", "large int64"],
)
@pytest.mark.parametrize("source", ["table", "one column", "npz"])
def test_numbers_far_from_zero_keep_apart(tmp_path: Path, values: np.ndarray, source: str) -> None:
    if source == "npz":
        y = np.arange(ROWS) % 2
        np.savez(tmp_path / "d.npz", x_train=values, y_train=y, x_test=values[:9], y_test=y[:9])
        p = data.prepare(f"npz:{tmp_path / 'd.npz'}", tmp_path / "root")
        column = p.x_train[:, 0]
    else:
        frame = FRAME.assign(t=values)
        p = opened(tmp_path, csv(frame if source == "table" else frame[["t", "y"]]), test_ratio=0.0)
        column = p.x_train[:, -1]
    exact = (values - values.min()).astype(np.float64)
    np.testing.assert_allclose(np.asarray(column, np.float32), exact, atol=1e-5 * exact.max())
    assert p.info.std[-1] == pytest.approx(exact.std(), rel=1e-5)
    (line,) = p.info.remarks
    assert "is stored less" in line and "float32 does not keep its values apart" in line


def test_ordinary_numbers_are_stored_as_they_are(tmp_path: Path) -> None:
    frame = FRAME.assign(kelvin=288 + G.random(ROWS), year=2021 + np.arange(ROWS) % 3)
    p = opened(tmp_path, csv(frame), test_ratio=0.0)
    assert p.info.facts.shift == () and p.info.remarks == []
    assert np.array_equal(p.x_train[:, 2:], frame[["kelvin", "year"]].to_numpy(np.float32))


def test_tiny_numbers_and_lost_ones_are_named(tmp_path: Path) -> None:
    p = opened(tmp_path, csv(FRAME.assign(t=FRAME.a * 1e-40)), test_ratio=0.0)
    assert "t is stored divided by" in p.info.remarks[0]
    ratio = p.x_train[:, 2] / FRAME.a
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
    x = (1709251200 + G.random((ROWS, 2)) * 100).astype(np.float32)
    x[:, 1] = G.normal(size=ROWS)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(ROWS) % 2, x_test=x[:9], y_test=np.arange(9) % 2)
    info = data.prepare(f"npz:{tmp_path / 'd.npz'}", tmp_path / "root").info
    assert info.remarks[-1].startswith("feature 0 of x_train: the spread is below 4 steps of float32 there")


def test_constant_is_judged_by_a_columns_own_scale(tmp_path: Path) -> None:
    one = np.array([-1.0, 1.0] * (ROWS // 2))
    info = opened(tmp_path, csv(FRAME[["y"]].assign(a=one, b=one[::-1])), test_ratio=0.0).info
    assert info.std == (1.0, 1.0) and not info.constant and info.spread == (1.0, 1.0) and info.remarks == []
    info = opened(tmp_path, csv(FRAME.assign(a=1e-20 * FRAME.a, c=0.1)), test_ratio=0.0).info
    assert info.still == (False, False, True) and info.spread[0] == pytest.approx(1e-20 * FRAME.a.std(ddof=0))
    assert info.remarks == ["constant in the training part: c"]
    assert opened(tmp_path, csv(FRAME[["y"]].assign(c=1e9)), test_ratio=0.0).info.constant


def test_targets_far_from_zero_keep_apart(tmp_path: Path) -> None:
    y = 1709251200 + G.random(ROWS) * 10
    p = opened(tmp_path, csv(FRAME.assign(y=y)), test_ratio=0.0, task="regression")
    np.testing.assert_allclose(p.y_train[:, 0], y - y.min(), atol=1e-5)
    assert p.info.facts.target_shift == (y.min(),) and "y is stored less 1709251200" in p.info.remarks[0]


def test_a_site_whose_numbers_lie_far_off_needs_mean_std(tmp_path: Path) -> None:
    FRAME.assign(t=1709251200 + G.random(ROWS)).to_csv(tmp_path / "site.csv", index=False)
    raw = {"dataset": "node", "classes": "u,v", "target": "y", "data_dir": str(tmp_path / "root"), "num_clients": 1}
    with pytest.raises(UserError, match="normalize: must be mean-std, for .*site.csv holds numbers far from zero"):
        data.open_client(config(**raw), 0, data_path=str(tmp_path / "site.csv"))
    part = data.open_client(config(**raw, normalize="mean-std"), 0, data_path=str(tmp_path / "site.csv"))
    assert part.x_train[:, 2].max() < 1.1


# Data sets of Hugging Face


def test_lists_and_maps_are_named_by_column_and_row(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = {"a": [[1.0, 2.0], [3.0], [4.0, 5.0]], "m": [{"k": 1}, {"k": 2}, {"k": 3}], "y": ["u", "v", "u"]}
    Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UserError) as caught:
        data.prepare_for(config(dataset=f"hf:{tmp_path / 'd'}", target="y", data_dir=str(tmp_path / "root")))
    text = str(caught.value)
    assert "column a must hold numbers, got a list of shape [2] in row 0 and a list of shape [1] in row 1" in text
    assert "column m must hold numbers, got a map of k in row 0" in text


def test_an_empty_test_split_is_named(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_dict({"a": [1.0, 2.5, 3.0], "y": ["u", "v", "u"]})
    DatasetDict(train=whole, test=whole.select([])).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UserError, match="has no rows in its split test; take it away, and test-ratio divides train"):
        data.prepare_for(config(dataset=f"hf:{tmp_path / 'd'}", target="y", data_dir=str(tmp_path / "root")))


@pytest.mark.parametrize("wide", [False, True], ids=["numbers", "lists"])
def test_float64_of_a_saved_data_set_stays_exact(tmp_path: Path, wide: bool) -> None:
    from datasets import Dataset

    values = 1709251200 + G.random((ROWS, 2)) * 10
    rows = {"t": values.tolist()} if wide else {"t": values[:, 0].tolist(), "a": values[:, 1].tolist()}
    Dataset.from_dict({**rows, "y": FRAME.y.tolist()}).save_to_disk(str(tmp_path / "d"))
    raw = {"dataset": f"hf:{tmp_path / 'd'}", "target": "y", "data_dir": str(tmp_path / "root"), "test_ratio": 0.0}
    p = data.prepare_for(config(**raw))
    np.testing.assert_allclose(p.x_train, values - values.min(0), atol=1e-5)


def test_data_show_lists_every_column(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = FRAME.assign(id=np.arange(ROWS), site=["s1", "s2"] * (ROWS // 2), sex=["m", "f", "f"] * (ROWS // 3))
    frame.to_csv(tmp_path / "t.csv", index=False)
    sets = ["dataset=table:t.csv", "target=y", "client=site", "partition=by-column", "categorical=sex", "exclude=b"]
    code, out, err = command("data", "show", "--clients", "2", *[word for pair in sets for word in ("--set", pair)])
    assert code == 0, err
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    shown = {row[0]: row[1:] for row in rows}
    assert shown["a"] == ["feature", "number"] and shown["y"][0] == "target" and shown["site"][0] == "client"
    assert shown["b"] == ["left out", "exclude"] and shown["id"] == ["left out", "it numbers the rows"]
    assert shown["sex"][0] == "feature" and shown["sex"][1].startswith("one of 2 words")
    assert "warning: column 'id' is left out: it numbers the rows" in err
