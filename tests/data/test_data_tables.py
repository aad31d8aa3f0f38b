"""What becomes of each column of a table: index columns, words, dates, booleans, missing values, separators, numbers far off."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fl_app import data
from fl_app.data.encoding import DATE, Encoding
from fl_app.data.parsing import FROM_ZERO
from fl_app.data.table import samples_of_rows
from fl_app.data.table_files import places_in, read_rows
from fl_app.errors import DataError, UserError
from tests.conftest import Command, config
from tests.facts import each_mentions, mentions, rejected
from tests.hospitals import write

ROWS = 60
G = np.random.default_rng(0)
FRAME = pandas.DataFrame({"a": G.normal(size=ROWS), "b": G.normal(size=ROWS), "y": ["u", "v"] * (ROWS // 2)})


def opened(tmp_path: Path, text: str, **more: Any) -> data.Prepared:
    """Open a CSV file's text."""
    path = tmp_path / "t.csv"
    path.write_text(text)
    raw = {"dataset": f"table:{path}", "target": "y", "data_dir": str(tmp_path / "root"), **more}
    raw |= {"partition": "by-column" if "client" in more else "iid"}
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
    assert each_mentions(info.remarks, ("column 'd'", "whole number", "set exclude"))
    assert opened(tmp_path, csv(frame), exclude="d,a").info.facts.features == ("b", "c")
    with rejected(UserError, "exclude", "t.csv", "'e'", "a, b, y, c, d"):
        opened(tmp_path, csv(frame), exclude="e")


@pytest.mark.parametrize(
    "slip, told",
    [
        ({"client": "hosptal"}, "client: .*; did you mean hospital"),
        ({"client": "HOSPITAL"}, "client: .*; did you mean hospital"),
        ({"target": "outcme"}, "target: .*; did you mean outcome"),
        ({"exclude": "patient_id,admited", "impute": ""}, "exclude: .*; did you mean admitted"),
        ({"categorical": "wards"}, "categorical: .*; did you mean ward"),
        ({"impute": "cpr=3"}, "impute: .*; did you mean crp"),
    ],
)
def test_a_mistyped_column_is_one_problem(tmp_path: Path, slip: dict[str, str], told: str) -> None:
    table = write(tmp_path / "h.csv", 60)
    keys = {"target": "outcome", "client": "hospital", "exclude": "patient_id", "categorical": "ward"} | slip
    with pytest.raises(UserError, match=rf"{told}\?$") as caught:
        opened(tmp_path, table.read_text(encoding="utf-8"), **keys)
    assert "problems" not in str(caught.value) and "\n" not in str(caught.value)


DATES = ["2024-02-28", "2024-02-29", "2024-02-30"] * (ROWS // 3)
WITH_COMMAS = csv(sep=";", decimal=",")
# a text, keys, and the error's key and facts
REFUSED: dict[str, tuple[str, dict[str, str], str, tuple[str, ...]]] = {
    "a column without a name that is not the first": (
        csv(FRAME.assign(c=1.5)).replace("a,b,y,c", "a,b,y,", 1),
        {},
        "dataset",
        ("column 4", "a name"),
    ),
    "nothing but an index": (
        csv(FRAME[["y"]].assign(id=np.arange(ROWS))),
        {},
        "dataset",
        ("y", "nothing to learn", "id (it numbers"),
    ),
    "an empty column": (csv(FRAME.assign(c=np.nan)), {}, "dataset", ("column c", "no value", "for training")),
    "infinity": (
        csv(FRAME.assign(a=[np.inf] + [1.0] * (ROWS - 1))),
        {},
        "dataset",
        ("column a", "finite", "inf in row 2"),
    ),
    "a word to fill in": (csv(), {"impute": "a=high"}, "impute", ("column=number", "a=high")),
    "a date that is none": (
        csv(FRAME.assign(day=DATES)),
        {},
        "dataset",
        ("column day", "'2024-02-30' in row 4", "20 rows"),
    ),
    "labels of 0.0 and 1.0": (
        csv(FRAME.assign(y=[0.0, 1.0] * (ROWS // 2))),
        {},
        "dataset",
        ("float64", "0, 1", "whole numbers"),
    ),
    "labels that are no labels": (csv(FRAME.assign(y=FRAME.a)), {}, "dataset", ("float64", "task = regression")),
    # most numbers of such a column may be below 1000, and have no comma
    **{
        f"thousands, 1 of {of}": (
            csv(FRAME.assign(c=["1,153" if k % of == 0 else "222" for k in range(ROWS)])),
            {},
            "dataset",
            ("column c", "'1,153' in row 2", "thousands", "decimal comma"),
        )
        for of in (1, 4)
    },
    "another separator, and rows that do not parse": (
        "a;note;y\n1;x;u\n2;x, y, z;v\n",
        {},
        "separator",
        ("set separator = ';'",),
    ),
    "decimal commas": (WITH_COMMAS, {}, "separator", ("set separator = ';'",)),
    "decimal commas with their separator": (
        WITH_COMMAS,
        {"separator": ";"},
        "dataset",
        ("column a", "decimal comma"),
    ),
    "commas at the ends of rows": (
        csv().replace("u\n", "u,\n").replace("v\n", "v,\n"),
        {},
        "dataset",
        ("3 names", "(a, b, y)", "separators"),
    ),
    "a separator of two": (csv(), {"separator": ";;"}, "separator", ("one character", "';;'")),
    "rows of one quoted empty cell": (
        csv() + '""\n\n""\n  \nNA\n',
        {"exclude": "a,b"},
        "dataset",
        ("column y", "row 62", "3 of 63 rows"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    text, keys, key, facts = REFUSED[case]
    with rejected(UserError, key, *facts):
        opened(tmp_path, text, **keys)


# Words, dates, booleans, missing values


def test_every_problem_of_a_file_is_named_in_one_error(tmp_path: Path) -> None:
    days = pandas.date_range("2024-01-01", periods=ROWS).strftime("%d.%m.%Y")
    frame = FRAME.assign(day=days, sex=["m", "f"] * (ROWS // 2), dose=[1.0, None, 2.5] * (ROWS // 3), ok=FRAME.a > 0)
    frame.loc[4, "y"] = None
    with pytest.raises(UserError) as caught:
        opened(tmp_path, csv(frame), impute="a", client="site", exclude="e,y")
    # the header is row 1, as a spreadsheet counts
    of_each = [
        ("client: ", "'site'", "a, b, y, day, sex, dose, ok"),
        ("exclude: ", "'e'"),
        ("exclude: ", "'y'", "target"),
        ("column y", "in every row", "row 6"),
        ("column day", "'01.01.2024' in row 2", "year-month-day"),
        ("column sex", "'m' in row 2", "'sex' to categorical"),
        ("column dose", "row 3", "20 of 60 rows"),
    ]
    text = str(caught.value)
    assert "t.csv: 7 problems:\n" in text and all(mentions(text, *facts) for facts in of_each)


def test_rows_are_counted_as_a_spreadsheet_counts_them(tmp_path: Path) -> None:
    """pandas skips empty lines, which are rows of a spreadsheet; a line break within quotes makes no row."""
    lines = csv(FRAME.assign(note="n")).splitlines()
    lines[5] = lines[5].replace(",n", ',"two\nlines"')
    lines.insert(3, "")
    lines[20] = "1,2,,n"
    with rejected(UserError, "dataset", "column y", "in every row", "row 21"):
        opened(tmp_path, "\n".join(lines) + "\n", exclude="note")


def test_words_become_features_of_0_and_1(tmp_path: Path) -> None:
    frame = FRAME.assign(sex=["m", "f"] * (ROWS // 2), ok=FRAME.a > 0)
    p = opened(tmp_path, csv(frame), categorical="sex", test_ratio=0.0)
    assert p.info.facts.features == ("a", "b", "sex=f", "sex=m", "ok")
    assert p.x_train[:3, 2:4].tolist() == [[0, 1], [1, 0], [0, 1]]
    assert p.x_train[:, 4].tolist() == (frame.a > 0).astype(float).tolist()
    assert each_mentions(p.info.remarks, ("column 'sex'", "2 words", "f, m"), ("column 'ok'", "boolean", "0 and 1"))
    fixed = opened(tmp_path, csv(frame), categorical="sex=m|f|x", test_ratio=0.0)
    assert fixed.info.facts.features == ("a", "b", "sex=m", "sex=f", "sex=x", "ok")
    assert fixed.x_train[:3, 2:5].tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    with rejected(UserError, "dataset", "column sex", "m, x", "'f' in row 3"):
        opened(tmp_path, csv(frame), categorical="sex=m|x")


def test_a_column_that_a_key_declares_is_no_index(tmp_path: Path) -> None:
    text = csv(FRAME.assign(code=np.arange(ROWS)))
    for key in ("code", "code=" + "|".join(map(str, range(ROWS)))):
        assert len(opened(tmp_path, text, categorical=key).info.facts.features) == 2 + ROWS
    assert opened(tmp_path, text, impute="code=0").info.facts.features == ("a", "b", "code", "code missing")


def test_a_missing_word_is_none_of_the_words(tmp_path: Path) -> None:
    """Codes stay what they are: one missing beside them must not make 1 into 1.0."""
    p = opened(tmp_path, csv(FRAME.assign(code=[1, None, 2] * (ROWS // 3))), categorical="code", test_ratio=0.0)
    assert p.info.facts.features == ("a", "b", "code=1", "code=2")
    assert p.x_train[:3, 2:].tolist() == [[1, 0], [0, 0], [0, 1]]
    assert mentions(p.info.remarks[:1], "1, 2; missing in 20 of 60 rows", "0")


def test_missing_numbers_are_the_median_of_the_training_rows(tmp_path: Path) -> None:
    """The test rows' own values are far off, and must not count."""
    dose = np.where(np.arange(ROWS) % 3 == 1, np.nan, np.arange(ROWS) % 7.0)
    first = opened(tmp_path, csv(FRAME.assign(dose=dose)))
    assert first.info.facts.features == ("a", "b", "dose", "dose missing")
    place = {
        (float(np.float32(a)), float(np.float32(b))): k for k, (a, b) in enumerate(zip(FRAME.a, FRAME.b, strict=True))
    }
    tested = [place[float(a), float(b)] for a, b in first.x_test[:, :2]]
    dose[tested] = np.where(np.isnan(dose[tested]), np.nan, 1000.0)
    p = opened(tmp_path, csv(FRAME.assign(dose=dose)))
    trained = np.setdiff1d(np.arange(ROWS), tested)
    median = float(np.nanmedian(dose[trained]))
    assert p.info.facts.encodings[2].fill == median < 7
    for x, rows in ((p.x_train, trained), (p.x_test, np.array(sorted(tested)))):
        gone = np.isnan(dose[rows])
        assert gone.any() and x[:, 3].tolist() == gone.astype(float).tolist()
        assert x[:, 2].tolist() == np.where(gone, median, dose[rows]).tolist()
    assert each_mentions(
        p.info.remarks, ("column 'dose'", "20 of 60 rows", f"{median:g}, the median", "'dose missing'")
    )
    given = opened(tmp_path, csv(FRAME.assign(dose=dose)), impute="dose=2.5,a", test_ratio=0.0)
    assert given.info.facts.features == ("a", "a missing", "b", "dose", "dose missing")
    assert set(given.x_train[np.isnan(dose), 3]) == {2.5} and not given.x_train[:, 1].any()


def test_booleans_and_dates_may_be_missing_too(tmp_path: Path) -> None:
    frame = FRAME.assign(ok=[True, None, False, True] * (ROWS // 4), day=["2024-03-01", "", "2024-03-02"] * (ROWS // 3))
    p = opened(tmp_path, csv(frame), impute="ok=1,day=2024-02-29", test_ratio=0.0)
    assert p.info.facts.features == ("a", "b", "ok", "ok missing", "day", "day missing")
    assert p.x_train[:4, 2:4].tolist() == [[1, 0], [1, 1], [0, 0], [1, 0]]
    # 2024-03-01 is day 19783 of Unix' time; three days so far from 0 are stored less the first
    assert (p.x_train[:3, 4].astype(float) + p.info.facts.shift[4]).tolist() == [19783, 19782, 19784]


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S+00:00"])
def test_dates_are_days(tmp_path: Path, form: str) -> None:
    when = pandas.date_range("1969-12-31", periods=ROWS, freq="36h" if "H" in form else "2D")
    p = opened(tmp_path, csv(FRAME.assign(day=when.strftime(form))), test_ratio=0.0)
    assert p.x_train[:, 2].tolist() == [-1 + k * (1.5 if "H" in form else 2) for k in range(ROWS)]
    assert each_mentions(p.info.remarks, ("column 'day'", "date", "1970-01-01"))


def test_different_numbers_in_every_row_are_said_despite_gaps(tmp_path: Path) -> None:
    """With one missing, pandas reads whole numbers as floating-point ones."""
    ids = [1000.0 + 7 * k for k in range(ROWS)]
    frame = FRAME.assign(id=[None, *ids[1:]], code=[f"P{k}" for k in range(ROWS)])
    lines = opened(tmp_path, csv(frame), categorical="code").info.remarks
    assert mentions(lines, "column 'id'", "whole number", "set exclude")
    assert mentions(lines, "column 'code'", "word", "set exclude")
    with rejected(UserError, "dataset", "column code", "60 words in 60 rows"):
        opened(tmp_path, csv(frame))


def test_odd_spellings_are_said(tmp_path: Path) -> None:
    y = ["yes", "no", "Yes", "no ", "NO", "maybe"] * (ROWS // 6)
    frame = FRAME.assign(y=y, site=["Bern", "bern", "Zug"] * (ROWS // 3), ward=["icu", "ICU"] * (ROWS // 2))
    info = opened(tmp_path, csv(frame), client="site", categorical="ward").info
    assert info.classes == ("NO", "Yes", "maybe", "no", "no ", "yes")
    assert each_mentions(
        info.remarks[1:],
        ("column 'ward'", "spelling", "word", "'ICU' and 'icu'"),
        ("column 'y'", "spelling", "class", "'NO' and 'no' and 'no ', 'Yes' and 'yes'"),
        ("column 'site'", "spelling", "client", "'Bern' and 'bern'"),
    )
    plain = opened(tmp_path, csv(FRAME.assign(y=["1", "1.0", "two"] * (ROWS // 3)))).info
    assert each_mentions(plain.remarks, ("column 'y'", "spelling", "class", "'1' and '1.0'"))


def test_numbers_that_are_hardly_classes_are_said(tmp_path: Path) -> None:
    lines = opened(tmp_path, csv(FRAME.assign(y=np.arange(ROWS) % 21))).info.remarks
    assert each_mentions(lines, ("column 'y'", "21 numbers", "class", "task = regression"))
    assert not opened(tmp_path, csv(FRAME.assign(y=np.arange(ROWS) % 20))).info.remarks
    words = [f"class {k % 21}" for k in range(ROWS)]
    assert not opened(tmp_path, csv(FRAME.assign(y=words))).info.remarks


def test_of_new_rows_the_one_without_a_date_is_named() -> None:
    """Not the first row, whose text is a date."""
    rows = {"day": np.array(["2026-01-02", None, "2026-13-45", "soon"], dtype=object)}
    with pytest.raises(DataError) as refused:
        samples_of_rows(Path("new.csv"), [Encoding("day", DATE)], rows, [], [], FROM_ZERO)
    assert "2026-13-45" in str(refused.value) and "2026-01-02" not in str(refused.value)


def test_dates_and_decimals_of_a_parquet_file(tmp_path: Path) -> None:
    from decimal import Decimal

    frame = FRAME.assign(c=[Decimal(k) / 4 for k in range(ROWS)])
    path = tmp_path / "t.parquet"
    raw = {"dataset": f"table:{path}", "target": "y", "data_dir": str(tmp_path / "root"), "test_ratio": 0.0}
    frame.to_parquet(path)
    p = data.prepare_for(config(**raw))
    assert p.x_train[:, 2].tolist() == [k / 4 for k in range(ROWS)]
    frame.assign(day=pandas.date_range("2024-01-01", periods=ROWS)).to_parquet(path)
    p = data.prepare_for(config(**raw))
    assert p.x_train[:, 3].tolist() == [19723 + k for k in range(ROWS)]
    with rejected(UserError, "separator", "no CSV file"):
        data.prepare_for(config(**raw, separator=";"))


@pytest.mark.parametrize(
    ("names", "features", "line"),
    [
        (["c"], ("c", "a", "b"), "the file has an index named c: it is read as the first column"),
        ([None], ("a", "b"), "the file has an index without a name, which is left out"),
        (["c", None], ("c", "a", "b"), "the file has an index named c: it is read as the first column"),
        (["c", "d"], ("c", "d", "a", "b"), "the file has an index named c, d: it is read as the first columns"),
    ],
)
def test_the_index_of_a_parquet_file_is_not_lost_without_a_word(
    tmp_path: Path, names: list[str | None], features: tuple[str, ...], line: str
) -> None:
    path = tmp_path / "t.parquet"
    levels = [G.normal(size=ROWS) for _ in names]
    index = (
        pandas.MultiIndex.from_arrays(levels, names=names) if len(names) > 1 else pandas.Index(levels[0], name=names[0])
    )
    FRAME.set_index(index).to_parquet(path)
    p = data.prepare_for(config(dataset=f"table:{path}", target="y", data_dir=str(tmp_path / "root"), test_ratio=0.0))
    assert p.info.facts.features == features and line in p.info.remarks
    if "c" in features:
        assert p.x_train[:, 0].tolist() == levels[0].astype(np.float32).tolist()


@pytest.mark.parametrize("name", ["None", "NA", "null"])
def test_words_for_missing_values_may_be_names(tmp_path: Path, name: str) -> None:
    text = csv(FRAME.assign(y=[name, "ok"] * (ROWS // 2), site=["x", name] * (ROWS // 2)))
    with rejected(UserError, "dataset", "column y", "row 2", f"'{name}' in the file", "set na-values = empty"):
        opened(tmp_path, text, client="site")
    info = opened(tmp_path, text, client="site", na_values="empty").info
    assert set(info.classes) == {name, "ok"} and set(info.groups) == {"x", name}
    with rejected(UserError, "dataset", "column y", "row 3", "'ok' in"):
        opened(tmp_path, text, na_values="ok,x")


# Separators


@pytest.mark.parametrize(("sign", "key"), [(";", ";"), ("\t", "tab"), ("|", "|")])
def test_another_separator_is_named_and_taken(tmp_path: Path, sign: str, key: str) -> None:
    with rejected(UserError, "separator", "one column", f"set separator = {key!r}"):
        opened(tmp_path, csv(sep=sign))
    assert opened(tmp_path, csv(sep=sign), separator=key).info.facts.features == ("a", "b")
    with pytest.raises(UserError, match="set separator = ','"):
        opened(tmp_path, csv(), separator=key)


def test_rows_that_do_not_parse_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        opened(tmp_path, "a,b,y\n1,2,u\n1,2,3,u\n")
    assert "\n" not in str(caught.value) and mentions(str(caught.value), "3 fields in line 3, saw 4", "commas")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a,y\n1,k\xe4se\n".encode("latin-1"), "UTF-8"),
        ("a,y\n1,u\n".encode("utf-16"), "UTF-8"),
        (b"", "empty"),
        (b"\n\n", "empty"),
    ],
    ids=["latin-1", "utf-16", "empty", "empty lines"],
)
def test_files_without_a_readable_header_are_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with rejected(UserError, "dataset", path, told):
        data.prepare(f"table:{path}", tmp_path / "root", target="y")


@pytest.mark.parametrize("suffix", ["CSV", "Parquet"])
def test_suffixes_of_tables_may_be_in_any_case(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    FRAME.to_csv(path, index=False) if suffix == "CSV" else FRAME.to_parquet(path)
    keys = {"separator": ","} if suffix == "CSV" else {}
    assert data.prepare(f"table:{path}", tmp_path / "root", target="y", **keys).info.facts.features == ("a", "b")
    assert list(read_rows(path)) == ["a", "b", "y"] and places_in(path).number(0) == 2


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
    assert mentions(line, "stored minus", "float32")


def test_ordinary_numbers_are_stored_as_they_are(tmp_path: Path) -> None:
    frame = FRAME.assign(kelvin=288 + G.random(ROWS), year=2021 + np.arange(ROWS) % 3)
    p = opened(tmp_path, csv(frame), test_ratio=0.0)
    assert p.info.facts.shift == () and p.info.remarks == []
    assert np.array_equal(p.x_train[:, 2:], frame[["kelvin", "year"]].to_numpy(np.float32))


def test_tiny_numbers_and_lost_ones_are_named(tmp_path: Path) -> None:
    p = opened(tmp_path, csv(FRAME.assign(t=FRAME.a * 1e-40)), test_ratio=0.0)
    assert "t is stored" in p.info.remarks[0]
    ratio = p.x_train[:, 2] / FRAME.a
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
    x = (1709251200 + G.random((ROWS, 2)) * 100).astype(np.float32)
    x[:, 1] = G.normal(size=ROWS)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(ROWS) % 2, x_test=x[:9], y_test=np.arange(9) % 2)
    info = data.prepare(f"npz:{tmp_path / 'd.npz'}", tmp_path / "root").info
    assert mentions(info.remarks[-1:], "feature 0 of x_train", "4 steps of float32")


def test_constant_is_judged_by_a_columns_own_scale(tmp_path: Path) -> None:
    one = np.array([-1.0, 1.0] * (ROWS // 2))
    info = opened(tmp_path, csv(FRAME[["y"]].assign(a=one, b=one[::-1])), test_ratio=0.0).info
    assert info.std == (1.0, 1.0) and not info.constant and info.spread == (1.0, 1.0) and info.remarks == []
    info = opened(tmp_path, csv(FRAME.assign(a=1e-20 * FRAME.a, c=0.1)), test_ratio=0.0).info
    assert info.still == (False, False, True) and info.spread[0] == pytest.approx(1e-20 * FRAME.a.std(ddof=0))
    assert each_mentions(info.remarks, ("constant", ": c"))
    assert opened(tmp_path, csv(FRAME[["y"]].assign(c=1e9)), test_ratio=0.0).info.constant


def test_targets_far_from_zero_keep_apart(tmp_path: Path) -> None:
    y = 1709251200 + G.random(ROWS) * 10
    p = opened(tmp_path, csv(FRAME.assign(y=y)), test_ratio=0.0, task="regression")
    np.testing.assert_allclose(p.y_train[:, 0], y - y.min(), atol=1e-5)
    assert p.info.facts.target_shift == (y.min(),) and "y is stored minus 1709251200" in p.info.remarks[0]


def test_a_site_whose_numbers_lie_far_off_needs_mean_std(tmp_path: Path) -> None:
    FRAME.assign(t=1709251200 + G.random(ROWS)).to_csv(tmp_path / "site.csv", index=False)
    raw = {"dataset": "node", "classes": "u,v", "target": "y", "data_dir": str(tmp_path / "root"), "num_clients": 1}
    with rejected(UserError, "normalize", "mean-std", "site.csv"):
        data.open_client(config(**raw, normalize="unit"), 0, data_path=str(tmp_path / "site.csv"))
    part = data.open_client(config(**raw), 0, data_path=str(tmp_path / "site.csv"))
    assert part.x_train[:, 2].max() < 1.1


# Data sets of Hugging Face


def test_lists_and_maps_are_named_by_column_and_row(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = {"a": [[1.0, 2.0], [3.0], [4.0, 5.0]], "m": [{"k": 1}, {"k": 2}, {"k": 3}], "y": ["u", "v", "u"]}
    Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UserError) as caught:
        data.prepare_for(config(dataset=f"hf:{tmp_path / 'd'}", target="y", data_dir=str(tmp_path / "root")))
    text = str(caught.value)
    assert mentions(text, "column a", "shape [2] in row 0", "shape [1] in row 1")
    assert mentions(text, "column m", "map of k", "row 0")


def test_an_empty_test_split_is_named(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_dict({"a": [1.0, 2.5, 3.0], "y": ["u", "v", "u"]})
    DatasetDict(train=whole, test=whole.select([])).save_to_disk(str(tmp_path / "d"))
    with rejected(UserError, "dataset", "no rows", "split test", "test-ratio"):
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
    assert shown["b"] == ["left out", "exclude"]
    assert shown["id"][0] == "left out" and "numbers" in shown["id"][1]
    assert shown["sex"][0] == "feature" and "2 words" in shown["sex"][1]
    assert mentions(err, "warning", "column 'id'", "left out")


@pytest.mark.parametrize("others", [["a", "b"], []])
def test_integers_from_2_63_on_are_numbers(tmp_path: Path, others: list[str]) -> None:
    """pandas reads such a column as uint64. Read as int64 its values would be negative."""
    values = [2**63 + 2**57 * (7 * k % ROWS) for k in range(ROWS)]
    p = opened(tmp_path, csv(FRAME[[*others, "y"]].assign(n=values)))
    k = p.info.facts.features.index("n")
    assert set(np.concatenate([p.x_train[:, k], p.x_test[:, k]])) == {np.float32(value) for value in values}
    assert any(line.startswith("n: read as") for line in p.info.remarks)
    near = [2**64 - 1 - 4096 * (7 * k % ROWS) for k in range(ROWS)]
    p = opened(tmp_path, csv(FRAME.assign(n=near)))
    assert len(set(np.concatenate([p.x_train[:, 2], p.x_test[:, 2]]))) == ROWS


def test_words_of_large_whole_numbers_differ(tmp_path: Path) -> None:
    """A missing value makes the column floating point; int64 does not hold its values."""
    text = csv(FRAME.assign(n=[None, *[1e20, 3e20, 2e30] * 19, 1e20, 3e20]))
    assert opened(tmp_path, text, categorical="n").info.facts.features[2:] == ("n=1e+20", "n=2e+30", "n=3e+20")


# What somebody else may have written


def in_parquet(tmp_path: Path, frame: pandas.DataFrame, **more: Any) -> data.Prepared:
    frame.to_parquet(tmp_path / "t.parquet")
    return opened(tmp_path, "", dataset=f"table:{tmp_path / 't.parquet'}", **more)


BYTES = [bytes([255, k % 3]) for k in range(ROWS)]


def test_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    frame = FRAME.assign(c=BYTES)
    with rejected(UserError, "dataset", "column c", r"'\\xff\x00' in row 2"):
        in_parquet(tmp_path, frame)
    assert len(in_parquet(tmp_path, frame, categorical="c").info.facts.features) == 5
    assert len(in_parquet(tmp_path, FRAME.assign(y=BYTES)).info.classes) == 3
    groups = in_parquet(tmp_path, frame, client="c").groups
    assert groups is not None and groups.names == tuple(rf"\xff{chr(k)}" for k in range(3))


@pytest.mark.parametrize("role", ["client", "target"])
def test_a_list_is_no_client_and_no_target(tmp_path: Path, role: str) -> None:
    frame = FRAME.assign(c=[[1, 2] if k % 2 else [3] for k in range(ROWS)])
    with rejected(UserError, "dataset", "column c", "shape [1] in row 2", "shape [2] in row 3"):
        in_parquet(tmp_path, frame, **{role: "c"})


def test_an_index_that_is_not_in_the_file(tmp_path: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.Table.from_pandas(FRAME).replace_schema_metadata(
        {b"pandas": b'{"index_columns": ["zz"], "columns": [], "column_indexes": []}'}
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with rejected(UserError, "dataset", "t.parquet", "KeyError: 'zz'"):
        opened(tmp_path, "", dataset=f"table:{tmp_path / 't.parquet'}")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_missing_value_is_shown_as_written_beside_long_and_odd_cells(tmp_path: Path, mark: str) -> None:
    frame = FRAME.assign(**{"ä\n1": "w"})
    frame.loc[0, "ä\n1"] = "é" * 200_000 + '"\n,'
    frame.loc[5, "y"] = "NA"
    text = mark + csv(frame[["ä\n1", "a", "y"]]).replace("\n0.", "\n\n0.")
    with rejected(UserError, "dataset", "column y", "'NA' in"):
        opened(tmp_path, text, categorical="ä\n1")


def saved(tmp_path: Path) -> Path:
    """Return a folder in which datasets saved the frame."""
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_pandas(FRAME)).save_to_disk(str(tmp_path / "d"))
    return tmp_path / "d"


def test_a_link_that_leads_nowhere_beside_saved_data(tmp_path: Path) -> None:
    (path := saved(tmp_path)).joinpath("link").symlink_to("/nowhere")
    assert opened(tmp_path, "", dataset=f"hf:{path}").info.facts.features == ("a", "b")


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}", "1", '{"features": 3, "_data_files": 3}'])
def test_damaged_descriptions_of_saved_data(tmp_path: Path, name: str, content: str) -> None:
    (path := saved(tmp_path)).joinpath("train", name).write_text(content)
    try:
        opened(tmp_path, "", dataset=f"hf:{path}")
    except UserError as error:
        assert str(error).startswith(f"dataset: {path} is no data set that datasets saved (")
    else:
        # datasets reads a split without a description
        assert (name, content) == ("dataset_info.json", "{}")


def test_a_csv_file_is_read_once_for_all_refused_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = FRAME.assign(**{f"c{k}": G.normal(size=ROWS).round(3) for k in range(30)})
    frame.loc[ROWS - 1, [f"c{k}" for k in range(30)]] = np.nan
    read, calls = pandas.read_csv, []
    monkeypatch.setattr(pandas, "read_csv", lambda *words, **keys: (calls.append(words), read(*words, **keys))[1])
    with pytest.raises(UserError, match="30 problems:\n  column c0 must have a number in every row, row 61 has none"):
        opened(tmp_path, csv(frame), impute="a")
    # the table, and its header
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("columns", "settings", "problem"),
    [
        ({"h": ["1_03", *range(ROWS - 1)]}, {}, r"column h must hold numbers, got '1_03' in row 2; correct it,"),
        ({"h": ["１２", *range(ROWS - 1)]}, {}, r"column h must hold numbers, got '１２' in row 2; correct it,"),
        ({}, {"target": "a,y", "task": "regression"}, r"t.csv: column y must hold numbers, got 'u' in row 2$"),
        (
            {"d": pandas.date_range("2024-01-01", periods=ROWS)},
            {"target": "d", "task": "regression", "categorical": "y"},
            "column d must hold numbers, got dates; write them as days",
        ),
        (
            {},
            {"target": "a,a", "task": "regression", "categorical": "y"},
            "^target: must name every column once, got 'a,a'",
        ),
        ({}, {"categorical": "a", "exclude": "a"}, "^categorical: 'a' is left out by exclude"),
        ({" a ": G.normal(size=ROWS)}, {"target": "x"}, "has no column 'x'; it has a, b, y, ' a '$"),
        (
            {" w ": G.normal(size=ROWS)},
            {"target": "w"},
            "has no column 'w'; .*the name ' w ' has a blank at its end: rename",
        ),
    ],
)
def test_columns_that_cannot_be_used_are_named(
    tmp_path: Path, columns: dict[str, Any], settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        opened(tmp_path, csv(FRAME.assign(**columns)), **settings)


# Other forms of text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.tsv", "t.csv.gz", "T.CSV.GZ", "v.1.tsv.gz"])
def test_tab_separated_and_packed_text_is_read_as_csv_is(tmp_path: Path, name: str) -> None:
    frame = FRAME.assign(site=["07", "7"] * (ROWS // 2), ward=["icu", "a,b"] * (ROWS // 2))
    plain = opened(tmp_path, csv(frame), client="site", categorical="ward")
    frame.to_csv(path := tmp_path / name, index=False, sep="\t" if "tsv" in name else ",", compression="infer")
    if name.isupper():
        path.write_bytes(gzip.compress(csv(frame).encode()))
    raw = {"dataset": f"table:{path}", "target": "y", "client": "site", "categorical": "ward", "partition": "by-column"}
    own = {"data_dir": str(tmp_path / "root"), "train_samples": 0, "test_samples": 0}
    found = data.prepare_for(config(**raw, **own))
    assert found.sha256 == plain.sha256 and found.info.remarks == plain.info.remarks
    columns, places = read_rows(path), places_in(path)
    assert list(columns["ward"][:2]) == ["icu", "a,b"] and places.number(0) == 2


def test_a_site_may_have_packed_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    FRAME.to_csv(path, index=False)
    site = config(dataset="node", target="y", classes="u,v", data_dir=str(tmp_path / "root"))
    assert data.prepare_for(site, str(path)).info.num_train == 45


@pytest.mark.parametrize("form", ["t.csv.gz", "t.tsv"])
def test_a_missing_prefix_or_a_wrong_cell_is_told_in_packed_text_too(tmp_path: Path, form: str) -> None:
    separator = "\t" if form.endswith("tsv") else ","
    FRAME.assign(a=[*FRAME["a"][:-1].astype(str), "n.a.!"]).to_csv(tmp_path / form, index=False, sep=separator)
    with pytest.raises(UserError, match="mean table:"):
        config(dataset=str(tmp_path / form))
    with pytest.raises(UserError, match=r"'n\.a\.!' in row 61"):
        data.prepare_for(config(dataset=f"table:{tmp_path / form}", target="y", data_dir=str(tmp_path / "root")))
