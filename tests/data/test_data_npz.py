"""Arrays in .npz files, and every error by name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app import data
from fl_app.errors import DataError, UserError
from tests.facts import each_mentions, rejected

AN_ARRAY = np.zeros((4, 6, 6), np.uint8)


def write_npz(path: Path, **changes: Any) -> Path:
    """Write a valid npz data set with `changes`; a change to None removes the key."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": rng.integers(0, 256, (12, 6, 6, 3), np.uint8),
        "y_train": np.arange(12) % 3,
        "x_test": rng.integers(0, 256, (6, 6, 6, 3), np.uint8),
        "y_test": np.arange(6) % 3,
    } | changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_npz(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "d.npz")
    p = data.prepare(f"npz:{path}", tmp_path / "root")
    assert p.x_train.shape == (12, 3, 6, 6) and p.info.classes == ("0", "1", "2")
    assert np.array_equal(p.x_train, np.load(path)["x_train"].transpose(0, 3, 1, 2))
    named = data.prepare(f"npz:{path}", tmp_path / "root", classes=("a", "b", "c", "d"))
    assert named.info.classes == ("a", "b", "c", "d")
    gray = write_npz(
        tmp_path / "gray.npz",
        x_train=AN_ARRAY,
        y_train=np.array([0, 1, 0, 1], np.uint8),
        x_test=AN_ARRAY[:0],
        y_test=np.zeros(0, np.int64),
    )
    p = data.prepare(f"npz:{gray}", tmp_path / "root", image_size=6)
    assert p.x_train.shape == (4, 1, 6, 6) and p.info.num_test == 0 and p.info.std == (1.0,)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"y_test": None}, r"has no y_test; it has x_train, y_train, x_test"),
        ({"x_train": np.zeros((12, 6, 6, 3), "S4")}, r"x_train must hold numbers, got \|S4"),
        ({"x_train": np.zeros((12, 0))}, r"x_train must have shape \[n, \.\.\.\].*got \[12, 0\]"),
        (
            {"x_train": np.full((12, 6, 6, 3), np.nan)},
            r"must hold finite float32 numbers, got nan in sample 0, and 1295 more",
        ),
        ({"y_train": np.zeros(12)}, r"y_train must hold integers or names of classes, got float64"),
        ({"y_train": np.zeros((12, 1), int)}, r"y_train must have shape \[n\], got \[12, 1\]"),
        ({"y_test": np.zeros(5, int)}, r"y_test must have one label for each of the 6 images, got 5"),
        ({"x_test": np.zeros((6, 7, 7, 3), np.uint8)}, r"x_test must have images like x_train's \(6, 6, 3\), got"),
        ({"y_train": np.array([1, 2, 3, 4] * 3)}, r"y_test must hold labels among 1, 2, 3, 4, got '0'"),
        ({"y_test": np.full(6, 9)}, r"y_test: class 9 must be below 3, the number of classes"),
        ({"y_train": np.full(12, 7), "y_test": np.full(6, 7)}, r"must hold at least two classes, got 7"),
        ({"y_train": np.array([{}] * 12)}, r"not a readable npz file"),
        ({"x_train": np.zeros((0, 6, 6), np.uint8), "y_train": np.zeros(0, int)}, r"x_train has no images"),
    ],
)
def test_npz_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_npz(tmp_path / "d.npz", **changes)
    with pytest.raises(UserError, match=rf"d\.npz.*{message}"):
        data.prepare(f"npz:{path}", tmp_path / "root")


def test_npz_file_errors(tmp_path: Path) -> None:
    with rejected(DataError, "dataset", "gone.npz", "no such file", "directory"):
        data.prepare(f"npz:{tmp_path / 'gone.npz'}", tmp_path)
    good = write_npz(tmp_path / "good.npz")
    for name, content in (("cut", good.read_bytes()[:-200]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / f"{name}.npz").write_bytes(content)
        with rejected(DataError, "dataset", name, "npz file"):
            data.prepare(f"npz:{tmp_path / name}.npz", tmp_path)
    flipped = bytearray(good.read_bytes())
    flipped[300] ^= 255
    (tmp_path / "flipped.npz").write_bytes(flipped)
    with rejected(DataError, "dataset", "flipped.npz", "npz file"):
        data.prepare(f"npz:{tmp_path / 'flipped.npz'}", tmp_path)
    np.save(tmp_path / "one.npy", AN_ARRAY)
    with pytest.raises(UserError, match="single array"):
        data.prepare(f"npz:{tmp_path / 'one.npy'}", tmp_path)
    with rejected(DataError, "dataset", "class 2", "below 2", "number of classes (a, b)"):
        data.prepare(f"npz:{good}", tmp_path, classes=("a", "b"))
    with rejected(DataError, "image-size", "npz images", "not resized", "6 pixels", value=32):
        data.prepare(f"npz:{good}", tmp_path, image_size=32)


@pytest.mark.parametrize("count", [10**12, 10**15])
def test_a_header_of_more_than_any_memory(tmp_path: Path, count: int) -> None:
    path, header = tmp_path / "bomb.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", header.getvalue())
    with pytest.raises(
        UserError, match=r"bomb\.npz (does not fit in this machine's memory|is not a readable npz file)"
    ):
        data.prepare(f"npz:{path}", tmp_path / "root")


def test_what_unpacks_to_more_than_the_free_memory_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x_train=np.zeros((10, 2**20), np.uint8), y_train=np.arange(10))
    monkeypatch.setattr("fl_app.npz_file.available_memory", lambda: 10e6)
    with rejected(DataError, "dataset", "bomb.npz unpacks to 10.5", "10 MB of memory", "free"):
        data.prepare(f"npz:{tmp_path / 'bomb.npz'}", tmp_path / "root")
    # numpy opens a member without the suffix .npy, too
    with zipfile.ZipFile(tmp_path / "bare.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train", bytes(11 * 10**6))
        archive.writestr("x_train.npy", b"")
    with rejected(DataError, "dataset", "bare.npz unpacks to 11", "10 MB of memory", "free"):
        data.prepare(f"npz:{tmp_path / 'bare.npz'}", tmp_path / "root")


@pytest.mark.parametrize(
    ("shape", "becomes", "first"),
    [
        ((3, 16, 16), (3, 16, 16), True),
        ((16, 16, 3), (3, 16, 16), False),
        ((1, 28, 28), (1, 28, 28), True),
        ((13, 8, 8), (13, 8, 8), True),
        ((8, 8, 13), (13, 8, 8), False),
        ((3, 6, 5), (3, 6, 5), True),
        ((3, 6, 4), (4, 3, 6), False),
        ((6, 5, 3), (3, 6, 5), False),
        ((3, 3, 3), (3, 3, 3), False),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_where_the_channels_are(
    tmp_path: Path, shape: tuple[int, ...], becomes: tuple[int, ...], first: bool, dtype: type
) -> None:
    x = np.arange(12 * np.prod(shape)).reshape(12, *shape).astype(dtype)
    path = write_npz(tmp_path / "d.npz", x_train=x, x_test=x[:6])
    p = data.prepare(f"npz:{path}", tmp_path / "root")
    assert p.info.input_shape == becomes and p.info.in_channels == becomes[0]
    assert np.array_equal(p.x_train, x if first else x.transpose(0, 3, 1, 2))
    sizes = " x ".join(map(str, shape))
    named = f"{path}: x_train is read as [n, C, H, W], {sizes}: {shape[0]} channels of {shape[1]} x {shape[2]} pixels"
    assert p.info.remarks == ([named] if first else [])


HIGH = 2**64 - 1
UNSIGNED = np.array([HIGH - 4096 * k for k in range(24)], np.uint64)


def test_unsigned_integers_from_2_63_on_are_numbers(tmp_path: Path) -> None:
    """Read as int64 they would be negative."""
    wide = np.random.default_rng(0).integers(2**63, HIGH, (12, 2), np.uint64)
    more = {"x_test": wide[:6], "y_train": np.arange(12) % 2, "y_test": np.arange(6) % 2}
    p = data.prepare(f"npz:{write_npz(tmp_path / 'wide.npz', x_train=wide, **more)}", tmp_path / "root")
    assert p.x_train.dtype == np.float32 and np.array_equal(p.x_train, wide.astype(np.float32))
    assert each_mentions(
        [line for line in p.info.remarks if "from 2^63 on" in line],
        (
            "feature 0 of x_train",
            "feature 1 of x_train",
            "read as float64",
            "keeps about 16 digits",
            "because of integers",
            "2^63",
        ),
    )
    far = UNSIGNED.reshape(12, 2)
    p = data.prepare(
        f"npz:{write_npz(tmp_path / 'far.npz', x_train=far, **{**more, 'x_test': far[:6]})}", tmp_path / "root"
    )
    assert sorted(p.x_train[:, 0]) == [8192 * k for k in range(12)] and any("minus" in line for line in p.info.remarks)
    # in an array whose values all fit, they stay integers
    small = np.arange(24, dtype=np.uint64).reshape(12, 2)
    p = data.prepare(
        f"npz:{write_npz(tmp_path / 'small.npz', x_train=small, **{**more, 'x_test': small[:6]})}", tmp_path / "root"
    )
    assert p.x_train.dtype == np.int64 and np.array_equal(p.x_train, small)


def test_labels_and_clients_of_unsigned_integers_keep_their_names(tmp_path: Path) -> None:
    labels, whose = UNSIGNED[np.arange(12) % 2], np.array([HIGH, HIGH - 1] * 6, np.uint64)
    changes = {"y_train": labels, "y_test": labels[:6], "c_train": whose, "c_test": np.array([3] * 6)}
    path = write_npz(tmp_path / "d.npz", **changes)
    p = data.prepare(f"npz:{path}", tmp_path / "root", client="c")
    assert p.info.classes == (str(HIGH - 4096), str(HIGH)) and set(p.y_train.tolist()) == {0, 1}
    assert p.groups is not None and p.groups.names == ("3", str(HIGH - 1), str(HIGH))
    with rejected(DataError, "dataset", "y_train must hold", "below 2^63", f"got {HIGH}"):
        data.prepare(f"npz:{path}", tmp_path / "root", classes=("a", "b"))


@pytest.mark.parametrize("name", ["x_train", "y_train", "x_test", "y_test"])
def test_a_single_value_is_no_array(tmp_path: Path, name: str) -> None:
    path = write_npz(tmp_path / "d.npz", **{name: np.float32(3)})
    with rejected(DataError, "dataset", "d.npz", name, "array", "got the single", "value 3.0"):
        data.prepare(f"npz:{path}", tmp_path / "root")


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    names = np.array([b"\xff", b"caf\xe9", b"a"])
    path = write_npz(tmp_path / "d.npz", y_train=names[np.arange(12) % 3], y_test=names[np.arange(6) % 3])
    assert data.prepare(f"npz:{path}", tmp_path / "root").info.classes == (r"\xff", "a", r"caf\xe9")
