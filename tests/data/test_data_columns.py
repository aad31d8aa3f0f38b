"""Tables, saved Hugging Face data sets, arrays of any shape, and the partition by a column."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from fl_app import data
from fl_app.data.columns import encode, unknown
from fl_app.data.parsing import Places
from fl_app.data.prepared import DataRequest
from fl_app.errors import ConfigurationError, DataError, UserError
from tests.conftest import config
from tests.facts import mentions, rejected


def frame(rows: int = 40) -> pandas.DataFrame:
    draw = np.random.default_rng(0)
    return pandas.DataFrame(
        {
            "age": draw.normal(50, 10, rows),
            "dose": draw.integers(0, 5, rows),
            "hospital": np.array(["B", "A", "C", "A"] * (rows // 4)),
            "days": draw.normal(10, 2, rows),
            "outcome": np.array(["ill", "well"] * (rows // 2)),
        }
    )


def table(directory: Path, suffix: str = ".csv", **more: str) -> dict[str, object]:
    path = directory / f"table{suffix}"
    content = frame().drop(columns="outcome")
    content.to_csv(path, index=False) if suffix == ".csv" else content.to_parquet(path)
    return {
        "dataset": f"table:{path}",
        "target": "days",
        "client": "hospital",
        "task": "regression",
        "partition": "by-column",
        "data_dir": str(directory / "root"),
        "num_clients": 3,
        **more,
    }


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_by_a_column(tmp_path: Path, suffix: str) -> None:
    parsed = config(**table(tmp_path, suffix))
    info = data.check(parsed)
    assert (info.input_shape, info.classes, info.groups) == ((2,), ("days",), ("A", "B", "C"))
    clients = [data.open_client(parsed, i) for i in range(3)]
    assert [len(c.y_train) + len(c.y_test) for c in clients] == [20, 10, 10]
    # a quarter of each one's, rounded to even
    assert [len(c.y_test) for c in clients] == [5, 2, 2]
    whole, of_a = frame(), clients[0]
    own = whole[whole.hospital == "A"]
    np.testing.assert_allclose(np.sort(np.r_[of_a.y_train, of_a.y_test][:, 0]), np.sort(own.days).astype(np.float32))
    rows = np.r_[of_a.x_train, of_a.x_test]
    assert rows.dtype == np.float32 and {tuple(r) for r in rows} == {
        (np.float32(a), np.float32(d)) for a, d in zip(own.age, own.dose, strict=True)
    }


def test_a_long_table_has_one_type_per_column(tmp_path: Path) -> None:
    """pandas guesses types in parts of a million cells unless it is told not to: 01 was a class beside 1."""
    columns, rows = 260, 6_000
    labels = [f"{k % 3 + 1:02d}" for k in range(rows - 3)] + ["unknown"] * 3
    path = tmp_path / "long.csv"
    header = ",".join(f"a{k}" for k in range(columns))
    path.write_text(
        f"{header},label\n" + "".join(f"{k % 7},{'0,' * (columns - 1)}{label}\n" for k, label in enumerate(labels))
    )
    raw = {"dataset": f"table:{path}", "target": "label", "data_dir": str(tmp_path / "root"), "partition": "iid"}
    assert data.check(config(**raw)).classes == ("01", "02", "03", "unknown")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target": "weeks"}, "target: .* has no column 'weeks'; it has age, dose, hospital, days"),
        ({"client": "clinic"}, "client: .* has no column 'clinic'"),
        (
            {"client": "", "partition": "iid", "train_samples": 0, "test_samples": 0},
            "column hospital must hold numbers, got 'B'",
        ),
        ({"num_clients": 4}, "num-clients: must be 3, the values of the column client of .*, got 4"),
        (
            {"partition": "dirichlet-client", "client": "", "exclude": "hospital"},
            "partition: dirichlet-client divides by classes, and task regression has none",
        ),
        (
            {"partition": "iid"},
            "partition: must be by-column if client = 'hospital' is set, got 'iid'",
        ),
    ],
)
def test_table_errors(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.check(config(**{**table(tmp_path), **changes}))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("column, target", [("outcome", "outcome"), ("hospital", "outcome"), ("days", "days")])
def test_a_row_without_its_target_or_client_is_named(tmp_path: Path, suffix: str, column: str, target: str) -> None:
    content, path = frame().drop(columns="days" if target == "outcome" else "outcome"), tmp_path / f"t{suffix}"
    content.loc[3, column] = None
    content.to_csv(path, index=False) if suffix == ".csv" else content.to_parquet(path)
    task = "classification" if target == "outcome" else "regression"
    with rejected(DataError, "dataset", f"column {column}", "every row", "row 5 has none"):
        data.check(config(**table(tmp_path) | {"dataset": f"table:{path}", "target": target, "task": task}))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_of_no_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    content = frame().drop(columns="outcome")[:0]
    content.to_csv(path, index=False) if suffix == ".csv" else content.to_parquet(path)
    with pytest.raises(UserError, match=f"{path} has no rows"):
        data.check(config(**table(tmp_path) | {"dataset": f"table:{path}"}))


def test_config_errors() -> None:
    with rejected(ConfigurationError, "target", "table:/x.csv needs", "column to learn"):
        config(dataset="table:/x.csv")
    with rejected(ConfigurationError, "client", "partition by-column", "name", "column"):
        config(partition="by-column")


def test_a_saved_hugging_face_data_set(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    draw = np.random.default_rng(0)
    series = draw.normal(size=(24, 6, 2)).astype(np.float32)
    whole = Dataset.from_dict(
        {"x": series.tolist(), "y": ["up", "down"] * 12, "device": [f"d{i % 3}" for i in range(24)]}
    )
    DatasetDict(train=whole.select(range(16)), test=whole.select(range(16, 24))).save_to_disk(tmp_path / "saved")
    raw = {
        "dataset": f"hf:{tmp_path / 'saved'}",
        "target": "y",
        "client": "device",
        "partition": "by-column",
        "data_dir": str(tmp_path / "root"),
        "num_clients": 3,
    }
    info = data.check(config(**raw))
    assert (info.num_train, info.num_test, info.input_shape, info.classes) == (16, 8, (6, 2), ("down", "up"))
    part = data.open_client(config(**raw), 1)
    np.testing.assert_allclose(part.x_train, series[1:16:3], rtol=1e-6)


@pytest.mark.parametrize(
    "x, stored, shape",
    [
        (np.ones((8, 5)), np.float32, (5,)),
        (np.ones((8, 7, 3), np.float32), np.float32, (7, 3)),
        (np.ones((8, 6, 4), np.uint8), np.uint8, (1, 6, 4)),
        (np.ones((8, 6, 4, 3), np.uint8), np.uint8, (3, 6, 4)),
        (np.ones((8, 9), np.int32), np.int64, (9,)),
        (np.ones(8, bool), np.float32, (1,)),
        (np.ones((8, 5), np.uint8), np.float32, (5,)),
    ],
)
def test_arrays_of_any_shape(tmp_path: Path, x: np.ndarray, stored: type, shape: tuple[int, ...]) -> None:
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(8) / 8, x_test=x[:2], y_test=np.zeros(2))
    p = data.prepare(f"npz:{tmp_path / 'd.npz'}", tmp_path / "root", task="regression")
    assert p.x_train.dtype == stored and p.info.input_shape == shape and p.y_train.shape == (8, 1)
    with rejected(DataError, "dataset", "y_train must hold", "zeros and ones", "got 0.125"):
        data.prepare(f"npz:{tmp_path / 'd.npz'}", tmp_path / "root", task="multi-label")


def test_an_npz_by_a_column(tmp_path: Path) -> None:
    site = np.array(["x", "y"] * 4)
    np.savez(
        tmp_path / "d.npz",
        x_train=np.ones((8, 2)),
        y_train=np.array(["a", "b"] * 4),
        x_test=np.ones((2, 2)),
        y_test=np.array(["b", "b"]),
        site_train=site,
        site_test=site[:2],
    )
    raw = {
        "dataset": f"npz:{tmp_path / 'd.npz'}",
        "client": "site",
        "partition": "by-column",
        "data_dir": str(tmp_path / "root"),
        "num_clients": 2,
    }
    assert data.check(config(**raw)).classes == ("a", "b")
    part = data.open_client(config(**raw), 1)
    assert part.y_train.tolist() == [1] * 4 and part.y_test.tolist() == [1]


# Images of saved data sets --------------------------------------------------------------------------------------------


def saved_images(directory: Path, train: list[Image.Image], test: list[Image.Image]) -> str:
    """Save images with labels 0, 1, 0, ... as `datasets` does; return the name of the data set."""
    import datasets

    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    parts = {
        side: datasets.Dataset.from_dict(
            {"image": images, "label": [k % 2 for k in range(len(images))]}, features=kinds
        )
        for side, images in (("train", train), ("test", test))
    }
    datasets.DatasetDict(parts).save_to_disk(str(directory / "saved"))
    return f"hf:{directory / 'saved'}"


def pictures(count: int, mode: str) -> list[Image.Image]:
    draw = np.random.default_rng(count)
    images = [Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)) for _ in range(count)]
    return [image.quantize(16) if mode == "P" else image.convert(mode) for image in images]


@pytest.mark.parametrize("modes", [("P", "P"), ("L", "L"), ("L", "RGB"), ("RGBA", "P"), ("1", "1")])
def test_saved_images_are_read_as_a_folders(tmp_path: Path, modes: tuple[str, str]) -> None:
    train, test = pictures(4, modes[0]), pictures(2, modes[1])
    for side, images in (("train", train), ("test", test)):
        for k, image in enumerate(images):
            file = tmp_path / "folder" / side / "ab"[k % 2] / f"{k}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)
    saved = data.prepare(saved_images(tmp_path, train, test), tmp_path / "root", target="label")
    folder = data.prepare(f"folder:{tmp_path / 'folder'}", tmp_path / "root")
    # the folder's are sorted by class
    order = np.argsort(saved.y_train, kind="stable")
    assert np.array_equal(saved.x_train[order], folder.x_train) and np.array_equal(saved.x_test, folder.x_test)
    assert saved.info.in_channels == (1 if set(modes) <= {"L", "1"} else 3) and saved.info.remarks == []


def test_saved_images_of_twelve_bits(tmp_path: Path) -> None:
    deep = [Image.fromarray(np.full((8, 8), value, np.uint16)) for value in (100, 2000, 4095)]
    prepared = data.prepare(saved_images(tmp_path, deep[:2], deep[2:]), tmp_path / "root", target="label")
    assert prepared.x_train[:, 0, 0, 0].tolist() == [100 >> 4, 2000 >> 4] and prepared.x_test.max() == 255
    assert mentions(prepared.info.remarks[0], "16-bit images", "values up to 4095", "12 bits")


def test_saved_images_of_two_sizes_are_named_by_row(tmp_path: Path) -> None:
    train, test = pictures(2, "RGB"), [Image.new("RGB", (8, 9))]
    with rejected(
        DataError, "dataset", "column image", "row 0", "8x9 pixels", "expected 8x8 as column", "image", "row 0 of train"
    ):
        data.prepare(saved_images(tmp_path, train, test), tmp_path / "root", target="label")


@pytest.mark.parametrize("key", ["", "impute", "exclude", "categorical", "target"])
def test_time_grows_with_the_number_of_columns_not_with_its_square(key: str, tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        columns = {f"column {k:05}": np.array([0.5, 2.5, 2.5]) for k in range(count)}
        names = tuple(columns)[1:]
        keys = {key: ",".join(names) if key == "target" else names} if key else {}
        request = DataRequest("table", tmp_path, tmp_path, **keys)  # type: ignore[arg-type]
        start = time.process_time()
        encoded, problems = encode(request, [columns], np.arange(3), Places())
        problems += unknown(request, columns)
        assert len(encoded.uses) == count and len(problems) in (0, count - 1)
        return time.process_time() - start

    assert min(seconds(4000) for _ in range(2)) < 8 * min(seconds(1000) for _ in range(2))
