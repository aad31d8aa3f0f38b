"""Names in a CSV file (clients, classes, categories) are its text: different texts stay different, plain numbers stay numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app import data
from fl_app.data.prepared import open_or_convert, save
from fl_app.data.spelling import spellings
from fl_app.errors import DataError, UserError
from fl_app.server.run_folder import read_summary
from tests.conftest import config
from tests.data.test_data import start
from tests.data.test_data_folder import write_folder
from tests.data.test_data_npz import write_npz
from tests.facts import mentions, rejected

ROWS = 48


def write(path: Path, **columns: Sequence[str]) -> str:
    """Write a CSV file of a feature `x` and of columns whose texts repeat, and return its path."""
    x = np.random.default_rng(0).normal(size=ROWS)
    rows = [",".join(["x", *columns])]
    rows += [",".join([str(x[k]), *(texts[k % len(texts)] for texts in columns.values())]) for k in range(ROWS)]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def opened(tmp_path: Path, columns: dict[str, Sequence[str]], **more: Any) -> data.Prepared:
    raw = {"dataset": f"table:{write(tmp_path / 't.csv', **columns)}", "target": "y", "test_ratio": 0.0, **more}
    raw |= {"partition": "by-column" if "client" in more else "iid", "data_dir": str(tmp_path / "root")}
    return data.prepare_for(config(**{"train_samples": 0, "test_samples": 0, **raw}))


APART = [
    (["7", "07", "12", "3"], "'07' and '7'"),
    (["12E2", "1200", "3"], "'1200' and '12E2'"),
    (["0.10", "0.1", "3"], "'0.1' and '0.10'"),
    (["+1", "1", "2"], "'+1' and '1'"),
    (["True", "TRUE", "False"], "'TRUE' and 'True'"),
    ([" 5", "5", "6"], "' 5' and '5'"),
]


@pytest.mark.parametrize(("texts", "said"), APART)
def test_names_that_mean_one_number_stay_apart(tmp_path: Path, texts: list[str], said: str) -> None:
    for role, what in (("client", "client"), ("categorical", "word")):
        p = opened(tmp_path, {"s": texts, "y": ["u", "v", "v"]}, **{role: "s"})
        names = p.info.groups or p.info.facts.encodings[1].words
        assert names == tuple(sorted(texts))
        assert mentions(p.info.remarks, "column 's'", "each spelling", f"separate {what}", said, "use one spelling")
    if "." in said or "E" in said.replace("TRUE", ""):
        # numbers with a point are rather something to predict
        with pytest.raises(UserError, match="float64; "):
            opened(tmp_path, {"y": texts})
        assert opened(tmp_path, {"y": texts}, classes=",".join(texts)).info.classes == tuple(texts)
    else:
        p = opened(tmp_path, {"y": texts})
        assert p.info.classes == tuple(sorted(texts))
        assert [p.info.classes[label] for label in p.y_train[: len(texts)]] == texts


def test_leading_zeros_are_kept(tmp_path: Path) -> None:
    p = opened(tmp_path, {"s": ["001", "000", "002"], "y": ["01", "02"]}, client="s")
    assert p.info.groups == ("000", "001", "002") and p.info.classes == ("01", "02") and not p.info.remarks


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["10", "9", "-1", "0"], ("-1", "0", "9", "10")),
        ([" 10", " 9"], ("9", "10")),
        (["TRUE", "FALSE"], ("False", "True")),
        (["12345678901234567890", "12345678901234567891"], ("12345678901234567890", "12345678901234567891")),
    ],
)
def test_plain_numbers_and_booleans_stay_what_they_are(
    tmp_path: Path, texts: list[str], names: tuple[str, ...]
) -> None:
    p = opened(tmp_path, {"s": texts, "y": texts}, client="s")
    assert p.info.groups == p.info.classes == names and not p.info.remarks
    assert p.groups and set(p.groups.train) == set(range(len(names)))
    floats = opened(tmp_path, {"s": ["10.0", "9.0"], "y": ["u", "v", "v"]}, client="s")
    assert floats.info.groups == ("9.0", "10.0")


def test_missing_names_are_still_missing(tmp_path: Path) -> None:
    with rejected(DataError, "dataset", "column y", "every row", "row 3", "'NA'", "file"):
        opened(tmp_path, {"y": ["01", "NA", "1"]})
    with rejected(DataError, "dataset", "column s", "every row", "row 4 has none"):
        opened(tmp_path, {"s": ["01", "1", ""], "y": ["u", "v"]}, client="s")
    p = opened(tmp_path, {"w": ["01", "", "1"], "y": ["u", "v"]}, categorical="w")
    assert p.info.facts.features == ("x", "w=01", "w=1") and p.x_train[1, 1:].tolist() == [0, 0]
    p = opened(tmp_path, {"w": ["01", "99", "1"], "y": ["u", "v"]}, categorical="w", na_values="99")
    assert p.info.facts.features == ("x", "w=01", "w=1")


def test_classes_that_are_listed_go_by_their_text(tmp_path: Path) -> None:
    """These rows have only classes that are plain numbers; the third class is a word."""
    assert set(opened(tmp_path, {"y": ["10", "2"]}, classes="2,10,A1").y_train) == {0, 1}
    assert set(opened(tmp_path, {"y": ["1", "0"]}, classes="no,yes").y_train) == {0, 1}


def test_a_site_with_numbers_alone_fits_the_others(tmp_path: Path) -> None:
    sites = [
        write(tmp_path / "a.csv", ward=["01", "A1", "10"], y=["05", "B"]),
        write(tmp_path / "b.csv", ward=["01"], y=["10", "05"]),
        write(tmp_path / "c.csv", ward=["10"], y=["10"]),
    ]
    keys = {"classes": "05,10,B", "target": "y", "method": "fedavg", "num_server_rounds": 1}
    folder = start(tmp_path, sites, **keys, categorical="ward=01|10|A1")
    assert read_summary(folder.path)["failures"] == 0


# Names that look alike ------------------------------------------------------------------------------------------------

ALIKE = [
    ("Cat", "cat"),
    ("cat", "cat "),
    ("big  cat", "big cat"),
    ("big\u00a0cat", "big cat"),
    ("caf\u00e9", "cafe\u0301"),
    ("\uff23at", "Cat"),
    ("\u0421at", "cat"),
    ("\u039fslo", "Oslo"),
    ("x\u2010ray", "x-ray"),
    ("x\u2212ray", "x-ray"),
    ("don\u2019t", "don't"),
    ("ca\u200bt", "cat"),
    ("STRASSE", "stra\u00dfe"),
    ("7", "07"),
    ("\uff17", "7"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_names_that_look_alike_have_a_line(one: str, other: str) -> None:
    (line,) = spellings("classes", [one, other, "dog"], "class")
    shown = line.partition(": ")[2]
    # a person can tell them apart in the line itself
    assert len({*shown.split(": ")[1].partition(";")[0].split(" and ")}) == 2 and "dog" not in line


def test_names_that_differ_to_a_person_have_none() -> None:
    names = ["cat", "cats", "c-at", "cat_", "c\u00e4t", "kat", "1", "11", "1a", "\u043a\u043e\u0442", "a.1", "a.10"]
    assert spellings("classes", names, "class") == []


def test_every_kind_of_name_has_the_line(tmp_path: Path) -> None:
    """Folders' classes, arrays' classes and clients, tables' clients and columns, features of saved data sets."""
    from datasets import ClassLabel, Dataset, Features, Value

    write_folder(tmp_path / "images", {"Cat": 2, "cat": 2, "dog": 2})
    words = ["Cat", "cat", "dog"] * 4
    write_npz(
        tmp_path / "d.npz", y_train=np.array(words), y_test=np.array(words[:6]), ward_train=words, ward_test=words[:6]
    )
    write(tmp_path / "t.csv", **{"age": ["1", "2"], "Age ": ["3", "5"], "y": words, "ward": words})
    labels = Features({"x": Value("float32"), "y": ClassLabel(names=["Cat", "cat", "dog"])})
    Dataset.from_dict({"x": [0.5] * 12, "y": [0, 1, 2] * 4}, labels).save_to_disk(str(tmp_path / "saved"))
    for source, keys, kinds in (
        ("folder:images", {}, {"class"}),
        ("npz:d.npz", {"client": "ward"}, {"class", "client"}),
        ("table:t.csv", {"target": "y", "client": "ward"}, {"class", "client", "column"}),
        ("hf:saved", {"target": "y"}, {"class"}),
    ):
        partition = "by-column" if "client" in keys else "iid"
        raw = {
            "dataset": source.replace(":", f":{tmp_path}/"),
            "partition": partition,
            "train_samples": 0,
            "test_samples": 0,
        }
        info = data.prepare_for(config(**raw, **keys, data_dir=str(tmp_path / "root"))).info
        said = {line.partition("separate ")[2].partition(":")[0] for line in info.remarks if "each spelling" in line}
        assert said == kinds, source


def test_classes_of_a_benchmark_have_none(tmp_path: Path) -> None:
    """EMNIST has the classes A and a."""
    request = data.DataRequest("emnist", tmp_path, tmp_path / "root")

    def convert(directory: Path) -> list[str]:
        save(
            directory, (np.zeros((2, 1, 8, 8), np.uint8), np.arange(2), np.zeros((0, 1, 8, 8), np.uint8), np.arange(0))
        )
        return ["A", "a"]

    assert open_or_convert(request, "emnist", [], convert).info.remarks == []
