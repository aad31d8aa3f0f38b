"""Columns and labels go by name: parts in another order, renamed columns, one rule for labels, sites that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fl_app import data
from fl_app.errors import DataError, UserError
from fl_app.server.run_folder import read_summary
from tests.conftest import Command, config
from tests.data.test_data import start
from tests.facts import rejected

WORDS = {"partition": "iid", "train_samples": 0, "test_samples": 0, "num_clients": 2, "target": "y"}


def saved(
    path: Path, train: dict[str, Any], test: dict[str, Any], names: tuple[list[str], list[str]] | None = None
) -> str:
    """Save both parts as `datasets` does. names: the ClassLabels of y in either part."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    def part(columns: dict[str, Any], labels: list[str] | None) -> Dataset:
        if labels is None:
            return Dataset.from_dict(columns)
        kinds = {name: ClassLabel(names=labels) if name == "y" else Value("float64") for name in columns}
        return Dataset.from_dict(columns, features=Features(kinds))

    first, second = names or (None, None)
    # a DatasetDict has one set of features: each part is saved by itself
    both = DatasetDict()
    dict.__setitem__(both, "train", part(train, first))
    dict.__setitem__(both, "test", part(test, second))
    both.save_to_disk(str(path))
    return f"hf:{path}"


def opened(tmp_path: Path, dataset: str, **more: Any) -> data.Prepared:
    return data.prepare_for(config(dataset=dataset, data_dir=str(tmp_path / "root"), **{**WORDS, **more}))


def test_the_columns_of_a_test_part_go_by_name(tmp_path: Path) -> None:
    train = {"age": [1.0, 2.0, 3.0], "bp": [10.0, 20.0, 31.0], "y": ["u", "v", "u"]}
    test = {"y": ["v", "u"], "bp": [50.0, 60.0], "age": [5.0, 6.0]}
    p = opened(tmp_path, saved(tmp_path / "d", train, test))
    assert p.x_train.tolist() == [[1, 10], [2, 20], [3, 31]] and p.x_test.tolist() == [[5, 50], [6, 60]]
    assert p.y_test.tolist() == [1, 0] and p.info.facts.features == ("age", "bp")


@pytest.mark.parametrize("other", ["pressure", None])
def test_other_columns_in_a_test_part_are_refused_with_both_lists(tmp_path: Path, other: str | None) -> None:
    train = {"age": [1.0, 2.0, 3.0], "bp": [10.0, 20.0, 31.0], "y": ["u", "v", "u"]}
    test = {"age": [1.0], "y": ["u"]} | ({other: [2.0]} if other else {})
    with rejected(DataError, "dataset", "train has age", "test has"):
        opened(tmp_path, saved(tmp_path / "d", train, test))


def test_class_labels_go_by_name(tmp_path: Path) -> None:
    x = {"age": [1.0, 2.0, 3.5], "bp": [0.0, 1.0, 3.0]}
    dataset = saved(tmp_path / "d", x | {"y": [0, 1, 2]}, x | {"y": [0, 1, 2]}, (["a", "b", "c"], ["c", "a", "b"]))
    p = opened(tmp_path, dataset)
    assert p.info.classes == ("a", "b", "c")
    assert p.y_train.tolist() == [0, 1, 2] and p.y_test.tolist() == [2, 0, 1]
    # names in the user's own order
    named = opened(tmp_path, dataset, classes="c,b,a")
    assert named.y_train.tolist() == [2, 1, 0] and named.info.classes == ("c", "b", "a")
    foreign = saved(tmp_path / "e", x | {"y": [0, 1, 2]}, x | {"y": [0, 1, 2]}, (["a", "b", "c"], ["a", "b", "z"]))
    with rejected(DataError, "dataset", "hold labels among", "got 'z'"):
        opened(tmp_path, foreign)


def test_a_class_label_without_a_value_is_missing(tmp_path: Path) -> None:
    x = {"age": [1.0, 2.0, 3.5]}
    with rejected(DataError, "dataset", "column y", "every row", "row 1 has none"):
        opened(tmp_path, saved(tmp_path / "d", x | {"y": [0, -1, 1]}, x | {"y": [0, 1, 1]}, (["a", "b"], ["a", "b"])))


def write(tmp_path: Path, source: str, y_train: list[Any], y_test: list[Any]) -> str:
    """Write labels with one feature as a source has them."""
    draw = np.random.default_rng(0)
    x_train, x_test = draw.normal(size=len(y_train)), draw.normal(size=len(y_test))
    if source == "npz":
        np.savez(tmp_path / "d.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
        return f"npz:{tmp_path / 'd.npz'}"
    if source == "hf":
        return saved(tmp_path / "d", {"x": x_train.tolist(), "y": y_train}, {"x": x_test.tolist(), "y": y_test})
    frame = pandas.DataFrame({"x": np.r_[x_train, x_test], "y": [*y_train, *y_test]})
    frame.to_csv(tmp_path / "d.csv", index=False)
    return f"table:{tmp_path / 'd.csv'}"


@pytest.mark.parametrize("source", ["npz", "table", "hf"])
@pytest.mark.parametrize(
    "values",
    [[0, 1], [False, True], ["no", "yes"], [1, 2], [-1, 1], [3, 10]],
    ids=["int", "bool", "str", "from 1", "signs", "gaps"],
)
def test_labels_follow_one_rule(tmp_path: Path, source: str, values: list[Any]) -> None:
    target = {"target": ""} if source == "npz" else {}
    p = opened(tmp_path, write(tmp_path, source, values * 6, values * 2), **target)
    assert p.info.classes == tuple(map(str, values)) and set(p.y_train) == {0, 1} and p.y_train.dtype == np.int64
    single = tmp_path / "single"
    single.mkdir()
    with pytest.raises(UserError, match="must hold at least two classes, got|class 0 has no"):
        opened(tmp_path, write(single, source, values[:1] * 6, values[:1] * 2), **target)


@pytest.mark.parametrize("source", ["npz", "hf"])
@pytest.mark.parametrize("values", [[0, 1, 2], ["a", "b", "c"]], ids=["int", "str"])
def test_a_class_of_the_test_part_alone_is_refused(tmp_path: Path, source: str, values: list[Any]) -> None:
    target = {"target": ""} if source == "npz" else {}
    with pytest.raises(UserError, match="hold labels among|class 2 has no samples|class 2 must be below 2"):
        opened(tmp_path, write(tmp_path, source, values[:2] * 6, values), **target)


def test_integers_are_names_where_names_are_integers(tmp_path: Path) -> None:
    dataset = write(tmp_path, "table", [1, 2, 3] * 6, [])
    assert opened(tmp_path, dataset, test_ratio=0.0).y_train.tolist() == [0, 1, 2] * 6
    turned = opened(tmp_path, dataset, test_ratio=0.0, classes="3,2,1")
    assert turned.info.classes == ("3", "2", "1") and turned.y_train.tolist() == [2, 1, 0] * 6
    with rejected(DataError, "dataset", "hold labels among 2", "3", "got '1'"):
        opened(tmp_path, dataset, classes="2,3")


# Sites ----------------------------------------------------------------------------------------------------------------


def site(path: Path, columns: list[str], rename: dict[str, str] | None = None, seed: int = 0) -> str:
    draw = np.random.default_rng(seed)
    frame = pandas.DataFrame({"age": draw.normal(size=40), "bp": draw.normal(size=40), "y": ["u", "v"] * 20})
    frame[columns].rename(columns=rename or {}).to_csv(path, index=False)
    return str(path)


NODE = {"classes": "u,v", "target": "y", "method": "fedavg", "num_server_rounds": 1}


def test_sites_may_have_their_columns_in_any_order(tmp_path: Path) -> None:
    sites = [site(tmp_path / "a.csv", ["age", "bp", "y"]), site(tmp_path / "b.csv", ["y", "bp", "age"])]
    assert read_summary(start(tmp_path, sites, **NODE).path)["failures"] == 0


@pytest.mark.parametrize(
    ("columns", "rename", "message"),
    [
        (["age", "bp", "y"], {"bp": "pressure"}, "its features are age, pressure; the others' are age, bp"),
        (["age", "y"], {}, "its features are age; the others' are age, bp"),
    ],
)
def test_sites_with_other_features_are_named(
    tmp_path: Path, columns: list[str], rename: dict[str, str], message: str
) -> None:
    sites = [site(tmp_path / f"{k}.csv", ["age", "bp", "y"], seed=k) for k in range(2)]
    with pytest.raises(UserError, match=message):
        start(tmp_path, [site(tmp_path / "o.csv", columns, rename), *sites][::-1], **NODE)


def test_the_words_of_a_category_are_compared_too(tmp_path: Path) -> None:
    for name, words in (("a", ["m", "f"]), ("b", ["m", "x"])):
        frame = pandas.DataFrame({"sex": words * 20, "y": ["u", "v", "v", "u"] * 10})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    with rejected(UserError, "", "features are sex=m", "sex=x", "others' are sex=f", "sex=m"):
        start(tmp_path, [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], **NODE, categorical="sex")


def test_no_word_of_a_category_is_left_out(tmp_path: Path) -> None:
    for name, words in (("a", ["m", "f"]), ("b", ["m", "f"]), ("c", ["m", "f", "x"])):
        frame = pandas.DataFrame({"sex": words * 12, "y": (["u", "v", "v", "u"] * 10)[: len(words) * 12]})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    with rejected(UserError, "", "client 2", "features are sex=f", "sex=m", "sex=x", "others' are sex=f", "sex=m"):
        three = NODE | {"num_clients": 3, "min_available_clients": 3}
        start(tmp_path, [str(tmp_path / f"{name}.csv") for name in "abc"], **three, categorical="sex")


def test_private_sites_tell_tags_of_their_names_alone(tmp_path: Path) -> None:
    sites = [site(tmp_path / f"{k}.csv", ["age", "bp", "y"], seed=k) for k in range(4)]
    private = NODE | {"private": True, "num_clients": 4, "min_available_clients": 4}
    folder = start(tmp_path, sites, **private, run_name="alike")
    assert read_summary(folder.path)["failures"] == 0
    told = "".join(path.read_text() for path in folder.path.glob("*.json*"))
    assert "feature-names" not in told and '"bp"' not in told
    sites[2] = site(tmp_path / "other.csv", ["bp", "y"])
    with rejected(UserError, "", "client 2", "columns or classes", "other names") as caught:
        start(tmp_path, sites, **private, run_name="other")
    assert "age" not in str(caught.value)


# Whole runs -----------------------------------------------------------------------------------------------------------


def accuracy(command: Command, *sets: str) -> float:
    """Final accuracy, in [0, 1], of FedAvg with two clients."""
    keys = ("method=fedavg", "partition=iid", "train-samples=0", "test-samples=0", "normalize=mean-std", "target=y")
    more = ("num-server-rounds=10", "run-name=r", *sets)
    code, _, err = command("run", "--in-process", "--clients", "2", *(f"--set={key}" for key in (*keys, *more)))
    assert code == 0, err
    found: float = read_summary(Path("runs/r"))["final-accuracy"]
    return found


def test_a_run_on_a_test_part_in_another_order(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By position a model that is always right is right in less than half of the rows."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 300)
    near, far = y * 4 - 2 + draw.normal(size=300) * 0.3, 50 - y * 40 + draw.normal(size=300)
    train = {"near": near[:200], "far": far[:200], "y": y[:200]}
    test = {"y": y[200:], "far": far[200:], "near": near[200:]}
    assert accuracy(command, f"dataset={saved(tmp_path / 'd', train, test)}") == 1.0


def test_a_run_on_a_timestamp(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are less than a step of float32 there."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 300)
    frame = pandas.DataFrame({"t": 1709251200 + 10 * y + draw.normal(size=300), "y": y})
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert accuracy(command, "dataset=table:t.csv") == 1.0
