"""A part of the user's own data that is not read has a line, whatever the form of the part; what is read has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image

from fl_app import data
from fl_app.errors import DataError, UserError
from tests.conftest import config
from tests.data.test_data_folder import write_folder
from tests.data.test_data_npz import write_npz
from tests.facts import mentions, rejected

ROWS = pandas.DataFrame({"a": np.arange(40) % 7, "y": ["u", "v"] * 20})


def opened(dataset: str, tmp_path: Path, **more: Any) -> data.DatasetInfo:
    target = "" if dataset.startswith(("folder", "npz")) else "y"
    raw = {"partition": "iid", "data_dir": str(tmp_path / "root"), "train_samples": 0, "test_samples": 0, **more}
    return data.check(config(dataset=dataset, target=target, **raw))


def save_splits(path: Path, **sizes: int) -> Path:
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_pandas(ROWS[:n]) for name, n in sizes.items()}).save_to_disk(str(path))
    return path


def of_saved(path: Path) -> tuple[str, list[str]]:
    return f"hf:{save_splits(path / 'd', train=30, validation=10)}", ["split validation (10 rows)"]


def of_one_split(path: Path) -> tuple[str, list[str]]:
    return f"hf:{save_splits(path / 'd', train=30, test=10, dev=5) / 'train'}", ["split dev", "split test"]


def of_folder(path: Path) -> tuple[str, list[str]]:
    folder = write_folder(path / "images", {"a": 2, "b": 2})
    write_folder(folder / "val", {"a": 3})
    Image.new("RGB", (8, 8)).save(folder / "one.PNG")
    (folder / "readme").mkdir()
    (folder / "readme.txt").write_text("no image")
    return f"folder:{folder}", ["one.PNG", "val/ (6 images)"]


def of_arrays(path: Path) -> tuple[str, list[str]]:
    return f"npz:{write_npz(path / 'd.npz', x_val=[1], hospital_train=[2])}", [
        "the array x_val",
        "the array hospital_train",
    ]


def of_tables(path: Path) -> tuple[str, list[str]]:
    for name in ("My-Train.csv", "my-train.parquet", "my-test.csv", "my-VALID.csv.gz", "my-values.csv", "other.csv"):
        if name.endswith("parquet"):
            ROWS.to_parquet(path / name)
        else:
            ROWS.to_csv(path / name, index=False)
    return f"table:{path / 'My-Train.csv'}", ["my-VALID.csv.gz", "my-test.csv"]


def of_shards(path: Path) -> tuple[str, list[str]]:
    for k in range(2):
        ROWS.to_parquet(path / f"part-0000{k}-of-00002.parquet")
    return f"table:{path / 'part-00000-of-00002.parquet'}", ["part-00001-of-00002.parquet"]


@pytest.mark.parametrize("write", [of_saved, of_one_split, of_folder, of_arrays, of_tables, of_shards])
def test_a_part_that_is_not_read_has_one_line(write: Callable[[Path], tuple[str, list[str]]], tmp_path: Path) -> None:
    dataset, parts = write(tmp_path)
    (line,) = [line for line in opened(dataset, tmp_path).remarks if line.startswith("not read in ")]
    assert line.endswith(f": {', '.join(parts)}")


def test_a_part_that_comes_later_has_its_line(tmp_path: Path) -> None:
    ROWS.to_csv(tmp_path / "train.csv", index=False)
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    saved = save_splits(tmp_path / "saved", train=30)
    sources = [f"table:{tmp_path / 'train.csv'}", f"folder:{folder}", f"hf:{saved}"]
    assert [opened(dataset, tmp_path).remarks for dataset in sources] == [[], [], []]
    ROWS.to_csv(tmp_path / "test.csv", index=False)
    write_folder(folder / "more", {"a": 1})
    save_splits(saved, train=30, extra=3)
    assert [len(opened(dataset, tmp_path).remarks) for dataset in sources] == [1, 1, 1]


def test_a_sites_table_is_not_another_part_of_the_next_sites(tmp_path: Path) -> None:
    for name in ("clinic1.csv", "clinic2.csv", "clinic2-test.csv", "clinic2-train.csv"):
        ROWS.to_csv(tmp_path / name, index=False)
    site = config(dataset="node", target="y", classes="u,v", data_dir=str(tmp_path / "root"))
    assert data.prepare_for(site, str(tmp_path / "clinic1.csv")).info.remarks == []
    (line,) = data.prepare_for(site, str(tmp_path / "clinic2-train.csv")).info.remarks
    assert line.endswith(": clinic2-test.csv")


def test_a_folder_that_must_not_be_listed_hides_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a confined application, which may read the table alone."""
    ROWS.to_csv(tmp_path / "train.csv", index=False)

    listed = Path.iterdir

    def refused(path: Path) -> Iterator[Path]:
        if path == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    with monkeypatch.context() as here:
        here.setattr(Path, "iterdir", refused)
        assert opened(f"table:{tmp_path / 'train.csv'}", tmp_path).remarks == []


def test_a_split_without_rows_is_named_though_it_is_not_read(tmp_path: Path) -> None:
    with rejected(DataError, "dataset", "no rows", "split validation"):
        opened(f"hf:{save_splits(tmp_path / 'd', train=30, validation=0)}", tmp_path)


def test_an_own_partition_names_arrays_that_no_client_has(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, train_idx=[[0], [1]], test_idx_0=[0], test_idx_1=[1], train_idx_0=[5], valid_idx=[[2], [3]])
    own = config(dataset="digits", partition=f"file:{path}", num_clients=2, data_dir=str(tmp_path / "root"))
    (line,) = [line for line in data.partition_remarks(own, brief=True) if line.startswith("not read in ")]
    assert mentions(line, f"not read in {path}", "the array train_idx_0", "the array valid_idx")


@pytest.mark.parametrize(
    "write, order", [(of_folder, "by class"), (of_saved, "splits train and test"), (of_arrays, "arrays")]
)
def test_an_own_partition_says_how_it_counts(
    write: Callable[[Path], tuple[str, list[str]]], order: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, train_idx=[[0], [1]], test_idx=[[0], [99]])
    dataset, _ = write(tmp_path)
    target = "y" if dataset.startswith("hf") else ""
    own = config(dataset=dataset, target=target, partition=f"file:{path}", num_clients=2)
    for text in (data.numbering(own), ""):
        if not text:
            with pytest.raises(UserError) as caught:
                opened(dataset, tmp_path, partition=f"file:{path}", num_clients=2)
            text = str(caught.value)
        assert "each count from 0" in text and order in text
    assert data.numbering(config(dataset="digits")) == ""
