from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image

from fl_app import data
from fl_app.config import RunConfig
from fl_app.errors import UserError

APP = Path(__file__).resolve().parents[1]
CIFAR_IMAGES = APP.parent / "shared" / "data" / "cifar10-images.tar.gz"
AN_ARRAY = np.zeros((4, 6, 6), np.uint8)


def write_folder(path: Path, sizes: dict[str, int], test_sizes: dict[str, int] | None = None, side: int = 8) -> Path:
    """Write random RGB images, one directory per class."""
    rng = np.random.default_rng(0)
    for split, counts in (("train", sizes), ("test", test_sizes or sizes)):
        (path / split).mkdir(parents=True)
        for name, count in counts.items():
            (path / split / name).mkdir()
            for i in range(count):
                pixels = rng.integers(0, 256, (side, side, 3), np.uint8)
                Image.fromarray(pixels).save(path / split / name / f"{i:03}.png")
    return path


def write_npz(path: Path, **changes: Any) -> Path:
    """Write a valid npz data set with `changes`; a change to None removes the key."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": rng.integers(0, 256, (12, 6, 6, 3), np.uint8), "y_train": np.arange(12) % 3,
        "x_test": rng.integers(0, 256, (6, 6, 6, 3), np.uint8), "y_test": np.arange(6) % 3,
    } | changes  # fmt: skip
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def run_python(code: str, **env: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=APP, env=os.environ | env
    ).stdout


def digest(prepared: data.Prepared) -> str:
    arrays = (prepared.x_train, prepared.y_train, prepared.x_test, prepared.y_test)
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


# digits and what every data set shares


def test_digits_are_the_real_ones_split_by_class(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    p = data.prepare("digits", tmp_path)
    assert p.x_train.shape == (1347, 1, 8, 8) and p.x_test.shape == (450, 1, 8, 8)
    assert p.x_train.dtype == np.uint8 and p.y_train.dtype == np.int64 and not p.x_train.flags.writeable
    assert p.x_train.max() == 255 and p.x_train.min() == 0
    ours = np.concatenate([p.x_train, p.x_test]).reshape(-1, 64)
    theirs = np.rint(load_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs))
    train, test = np.bincount(p.y_train), np.bincount(p.y_test)
    assert np.all(np.abs(test / (train + test) - 0.25) < 0.01)
    assert p.info.num_classes == 10 and (p.info.num_train, p.info.num_test) == (1347, 450)
    scaled = np.asarray(p.x_train, np.float64) / 255
    assert np.allclose([p.info.mean[0], p.info.std[0]], [scaled.mean(), scaled.std()])
    assert data.DatasetInfo.from_json(p.info.to_json()) == p.info


def test_import_is_light() -> None:
    heavy = "torch torchvision sklearn PIL datasets flwr flwr_datasets scipy"
    loaded = run_python(f"import sys, fl_app.data; print([m for m in {heavy.split()} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_DATA_DIR", "/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert data.data_root(RunConfig(data_dir="/a")) == Path("/a")
    assert data.data_root(RunConfig()) == Path("/b")
    monkeypatch.delenv("COROLLA_DATA_DIR")
    assert data.data_root(RunConfig()) == Path("/c/corolla")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.data_root(RunConfig()) == Path.home() / ".cache" / "corolla"


def test_processes_convert_once_and_agree(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 40, "b": 40})
    code = f"""
import hashlib, os, time
from pathlib import Path
from fl_app import data
decode = data._decode
def logged(*args):
    os.write(os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT), b"x")
    time.sleep(0.5)
    decode(*args)
data._decode = logged
p = data.prepare("folder:{folder}", Path({str(tmp_path / "root")!r}))
print(hashlib.sha256(b"".join(a.tobytes() for a in (p.x_train, p.y_train, p.x_test, p.y_test))).hexdigest(), p.key)
"""
    procs = [subprocess.Popen([sys.executable, "-c", code], cwd=APP, stdout=subprocess.PIPE) for _ in range(5)]
    outputs = {proc.communicate()[0] for proc in procs}
    assert all(proc.returncode == 0 for proc in procs)
    assert len(outputs) == 1
    assert (tmp_path / "log").read_bytes() == b"x"


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = f"folder:{write_folder(tmp_path / 'images', {'a': 2, 'b': 2})}"
    decode = data._decode

    def interrupted(directory: Path, *args: Any) -> None:
        decode(directory, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "_decode", interrupted)
        data.prepare(dataset, tmp_path / "root")
    assert [p.suffix for p in (tmp_path / "root" / "datasets").iterdir()] == [".lock"]
    lock = next((tmp_path / "root" / "datasets").glob(".*.lock"))
    stale = lock.with_suffix(".tmp-1")  # as a killed process leaves it
    stale.mkdir()
    (stale / "x_train.npy").write_bytes(b"half")
    prepared = data.prepare(dataset, tmp_path / "root")
    assert prepared.info.num_train == 4 and not stale.exists()


def test_force_converts_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    before = data.prepare(f"folder:{folder}", tmp_path / "root")
    (folder / "train" / "a" / "000.png").write_bytes((folder / "train" / "b" / "000.png").read_bytes())  # in place
    assert digest(data.prepare(f"folder:{folder}", tmp_path / "root")) == digest(before)
    after = data.prepare(f"folder:{folder}", tmp_path / "root", force=True)
    assert np.array_equal(after.x_train[0], after.x_train[2])
    assert not np.array_equal(before.x_train[0], before.x_train[2])  # the open map still has the old file
    assert len([p for p in (tmp_path / "root" / "datasets").iterdir() if not p.name.startswith(".")]) == 1


def test_an_unwritable_data_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="data-dir: cannot write under .*file/datasets"):
        data.prepare("digits", tmp_path / "file")


# image folders


def test_folder_keeps_pixels_and_order(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"cat": 3, "ant": 2}, {"cat": 1})
    (folder / "train" / "ant" / "notes.txt").write_text("no image")
    (folder / "train" / ".hidden").mkdir()
    p = data.prepare(f"folder:{folder}", tmp_path / "root")
    assert p.info.classes == ("ant", "cat") and p.y_train.tolist() == [0, 0, 1, 1, 1] and p.y_test.tolist() == [1]
    first = np.asarray(Image.open(folder / "train" / "ant" / "000.png")).transpose(2, 0, 1)
    assert np.array_equal(p.x_train[0], first) and p.x_train.shape == (5, 3, 8, 8)
    scaled = p.x_train / 255
    assert np.allclose(p.info.mean, scaled.mean((0, 2, 3))) and np.allclose(p.info.std, scaled.std((0, 2, 3)))
    other = data.prepare(f"folder:{folder}", tmp_path / "root", classes=("cat", "ant"))
    assert other.info.classes == ("cat", "ant") and other.key != p.key and other.y_test.tolist() == [0]


def test_folder_is_converted_again_when_its_directories_change(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    inside = folder / "prepared"  # a data directory inside the folder does not count as a change
    key = data.prepare(f"folder:{folder}", inside).key
    assert data.prepare(f"folder:{folder}", inside).key == key
    (folder / "train" / "a" / "001.png").unlink()
    changed = data.prepare(f"folder:{folder}", inside)
    assert changed.key != key and changed.info.num_train == 3


def test_folder_channels(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 3, "b": 3})
    for file in folder.rglob("*.png"):
        Image.open(file).convert("L").save(file)
    gray = data.prepare(f"folder:{folder}", tmp_path / "root")
    assert gray.info.in_channels == 1 and len(gray.info.mean) == 1
    Image.new("RGB", (8, 8), (255, 0, 0)).save(folder / "test" / "b" / "002.png")  # one colour image, the last of all
    colour = data.prepare(f"folder:{folder}", tmp_path / "root", force=True)
    assert colour.info.in_channels == 3
    assert np.array_equal(colour.x_train[:, 2], gray.x_train[:, 0])
    assert colour.x_test[-1].reshape(3, -1).mean(1).tolist() == [255, 0, 0]


def test_modes_are_converted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 1, "b": 1})
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(folder / "train" / "a" / "16bit.png")
    Image.new("RGBA", (8, 8), (1, 2, 3, 128)).save(folder / "train" / "a" / "alpha.png")
    Image.new("P", (8, 8)).save(folder / "train" / "a" / "palette.gif")
    p = data.prepare(f"folder:{folder}", tmp_path / "root")
    assert p.x_train[1].min() == p.x_train[1].max() == 40_000 >> 8
    assert p.x_train[2, :, 0, 0].tolist() == [1, 2, 3]


def test_image_size_resizes_and_crops(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"a": 1, "b": 1})
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200  # the centre square
    Image.fromarray(wide).save(folder / "train" / "a" / "wide.png")
    p = data.prepare(f"folder:{folder}", tmp_path / "root", image_size=5)
    assert p.info.image_size == 5 and p.x_train.shape == (3, 3, 5, 5)
    assert p.x_train[1, :, :, 1:4].min() == 200


def folder_errors() -> dict[str, tuple[Any, str]]:
    def images(folder: Path, where: str, size: tuple[int, int]) -> None:
        Image.new("RGB", size).save(folder / where)

    return {
        "no test/": (lambda f: (f / "test").rename(f / "tset"), r"has no test/"),
        "no train/": (lambda f: (f / "train").rename(f / "tarin"), r"has no train/"),
        "empty class": (lambda f: (f / "train" / "c").mkdir(), r"class 'c' has no images in .*train/c"),
        "test only": (lambda f: (f / "test" / "c").mkdir(), r"test/c: class 'c' is not one of train/'s a, b"),
        "unreadable": (lambda f: (f / "test" / "b" / "bad.jpg").write_bytes(b"x"), r"test/b/bad.jpg cannot be read"),
        "truncated": (
            lambda f: (f / "train" / "a" / "t.png").write_bytes((f / "train" / "a" / "000.png").read_bytes()[:90]),
            r"train/a/t.png cannot be read",
        ),
        "size": (lambda f: images(f, "test/b/big.png", (9, 9)), r"test/b/big.png has 9x9 .* 8x8 .*set image-size"),
        "shape": (lambda f: images(f, "train/a/0.png", (9, 8)), r"train/a/0.png has 9x8 pixels, not square; set image"),
    }


@pytest.mark.parametrize("case", folder_errors())
def test_folder_errors(tmp_path: Path, case: str) -> None:
    folder = write_folder(tmp_path / "images", {"a": 2, "b": 2})
    change, message = folder_errors()[case]
    change(folder)
    with pytest.raises(UserError, match=message):
        data.prepare(f"folder:{folder}", tmp_path / "root")
    assert not list(tmp_path.glob("root/datasets/[!.]*")) and not list(tmp_path.glob("root/datasets/.*tmp*"))


@pytest.mark.parametrize(
    "classes, message",
    [
        (("a",), r"train/b: class 'b' is not one of classes a$"),
        (("a", "b", "c"), r"classes: .*train has no directory for class 'c'"),
    ],
)
def test_folder_classes_errors(tmp_path: Path, classes: tuple[str, ...], message: str) -> None:
    folder = write_folder(tmp_path / "images", {"a": 1, "b": 1})
    with pytest.raises(UserError, match=message):
        data.prepare(f"folder:{folder}", tmp_path / "root", classes=classes)


def test_missing_folder_and_single_class(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder .*nowhere"):
        data.prepare(f"folder:{tmp_path / 'nowhere'}", tmp_path)
    with pytest.raises(UserError, match="at least two classes, got a"):
        data.prepare(f"folder:{write_folder(tmp_path / 'one', {'a': 1})}", tmp_path)


def test_tiny_imagenet_layout(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    annotations = []
    for k, name in enumerate(("n01", "n02")):
        (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
        for i in range(3):
            Image.new("RGB", (64, 64), (k * 100, 0, 0)).save(folder / "train" / name / "images" / f"{name}_{i}.JPEG")
        Image.new("RGB", (64, 64), (k * 100, 0, 0)).save(folder / "val" / "images" / f"val_{1 - k}.JPEG")
        annotations.append(f"val_{1 - k}.JPEG\t{name}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    p = data.prepare(f"tiny-imagenet:{folder}", tmp_path / "root")
    assert p.info.classes == ("n01", "n02") and p.y_train.tolist() == [0] * 3 + [1] * 3 and p.y_test.tolist() == [1, 0]
    assert p.x_train.shape == (6, 3, 64, 64)
    assert [int(x[0].mean()) // 50 for x in p.x_test] == [2, 0]
    assert data.prepare(f"tiny-imagenet:{folder}", tmp_path / "root", image_size=32).info.image_size == 32
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn03\n")
    with pytest.raises(UserError, match="class 'n03' of 'val_0.JPEG' is not in wnids.txt"):
        data.prepare(f"tiny-imagenet:{folder}", tmp_path / "root")
    (folder / "wnids.txt").unlink()
    with pytest.raises(UserError, match="no .*wnids.txt"):
        data.prepare(f"tiny-imagenet:{folder}", tmp_path / "root")


# npz


def test_npz(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "d.npz")
    p = data.prepare(f"npz:{path}", tmp_path / "root")
    assert p.x_train.shape == (12, 3, 6, 6) and p.info.classes == ("0", "1", "2")
    assert np.array_equal(p.x_train, np.load(path)["x_train"].transpose(0, 3, 1, 2))
    named = data.prepare(f"npz:{path}", tmp_path / "root", classes=("a", "b", "c", "d"))
    assert named.info.classes == ("a", "b", "c", "d")
    gray = write_npz(tmp_path / "gray.npz", x_train=AN_ARRAY, y_train=np.array([0, 1, 0, 1], np.uint8),
                     x_test=AN_ARRAY[:0], y_test=np.zeros(0, np.int64))  # fmt: skip
    p = data.prepare(f"npz:{gray}", tmp_path / "root", image_size=6)
    assert p.x_train.shape == (4, 1, 6, 6) and p.info.num_test == 0 and p.info.std == (1.0,)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"y_test": None}, r"has no y_test; it has x_train, y_train, x_test"),
        ({"x_train": np.zeros((12, 6, 6, 3), np.float32)}, r"x_train must be uint8 .*, got float32"),
        ({"x_train": np.zeros((12, 108), np.uint8)}, r"x_train must have shape \[n, H, W, C\].*got \[12, 108\]"),
        ({"x_train": np.zeros((12, 3, 6, 6), np.uint8)}, r"x_train must have square images.*got \[12, 3, 6, 6\]"),
        ({"y_train": np.zeros(12)}, r"y_train must hold integers, got float64"),
        ({"y_train": np.zeros((12, 1), int)}, r"y_train must have shape \[n\], got \[12, 1\]"),
        ({"y_test": np.zeros(5, int)}, r"y_test must have one label for each of the 6 images, got 5"),
        ({"x_test": np.zeros((6, 7, 7, 3), np.uint8)}, r"x_test must have images like x_train's \(6, 6, 3\), got"),
        ({"y_train": np.arange(12) - 1}, r"y_train must hold labels >= 0, got -1"),
        ({"y_train": np.array([0, 1, 2, 4] * 3)}, r"class 3 has no images"),
        ({"y_test": np.full(6, 9)}, r"class 3 has no images"),
        ({"y_train": np.array([{}] * 12)}, r"not a readable npz file"),
        ({"x_train": np.zeros((0, 6, 6), np.uint8), "y_train": np.zeros(0, int)}, r"x_train has no images"),
    ],
)
def test_npz_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_npz(tmp_path / "d.npz", **changes)
    with pytest.raises(UserError, match=rf"d\.npz.*{message}"):
        data.prepare(f"npz:{path}", tmp_path / "root")


def test_npz_file_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file .*gone.npz"):
        data.prepare(f"npz:{tmp_path / 'gone.npz'}", tmp_path)
    good = write_npz(tmp_path / "good.npz")
    for name, content in (("cut", good.read_bytes()[:-200]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.npz is not a readable npz file"):
            data.prepare(f"npz:{tmp_path / name}.npz", tmp_path)
    flipped = bytearray(good.read_bytes())
    flipped[300] ^= 255
    (tmp_path / "flipped.npz").write_bytes(flipped)
    with pytest.raises(UserError, match="flipped.npz is not a readable npz file"):
        data.prepare(f"npz:{tmp_path / 'flipped.npz'}", tmp_path)
    np.save(tmp_path / "one.npy", AN_ARRAY)
    with pytest.raises(UserError, match="is a single array"):
        data.prepare(f"npz:{tmp_path / 'one.npy'}", tmp_path)
    with pytest.raises(UserError, match=r"class 2 must be below 2, the number of classes \(a, b\)"):
        data.prepare(f"npz:{good}", tmp_path, classes=("a", "b"))
    with pytest.raises(UserError, match="image-size: npz images are not resized; .*6 pixels, got 32"):
        data.prepare(f"npz:{good}", tmp_path, image_size=32)


# a site's own data


def test_site_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "site", {"b": 3})
    (folder / "test" / "b").rename(folder / "kept")
    (folder / "test").rmdir()
    config = RunConfig(num_clients=3, dataset="node", classes="a, b, c", data_dir=str(tmp_path / "root"))
    mine = data.open_client(config, 2, data_path=str(folder))
    assert mine.y_train.tolist() == [1, 1, 1] and mine.x_test.shape == (0, 3, 8, 8) and mine.info.num_test == 0
    assert mine.info.classes == ("a", "b", "c")
    (folder / "train" / "d").mkdir()
    with pytest.raises(UserError, match="class 'd' is not one of classes a, b, c"):
        data.open_client(config, 2, data_path=str(folder))
    (folder / "train" / "d").rmdir()
    for file in (folder / "train" / "b").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="no images in the class directories of .*site/train"):
        data.open_client(config, 2, data_path=str(folder))


def test_site_npz(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "site.npz", x_test=None, y_test=None, y_train=np.full(12, 1))
    site = data.prepare_site(str(path), tmp_path, classes=("a", "b"), image_size=0)
    assert site.info.num_test == 0 and site.info.classes == ("a", "b") and set(site.y_train.tolist()) == {1}
    path = write_npz(tmp_path / "other.npz")
    with pytest.raises(UserError, match=r"class 2 must be below 2, .*\(a, b\)"):
        data.prepare_site(str(path), tmp_path, classes=("a", "b"))
    for gone in ("gone.npz", "gone"):
        with pytest.raises(UserError, match="no f.*gone"):
            data.prepare_site(str(tmp_path / gone), tmp_path, classes=("a", "b"))


def test_node_needs_a_data_path(tmp_path: Path) -> None:
    config = RunConfig(num_clients=3, dataset="node", classes="a,b", data_dir=str(tmp_path))
    with pytest.raises(UserError, match="--node-config 'data-path=\"/site\"'"):
        data.open_client(config, 0)


# data sets by name


@pytest.mark.parametrize("key, value", [("classes", ("a", "b")), ("image_size", 32)])
def test_named_sets_have_their_own_classes_and_size(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{key.replace('_', '-')}: digits has its own"):
        data.prepare("digits", tmp_path, **{key: value})


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def test_torchvision_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    raw = np.arange(4 * 28 * 28).reshape(4, 28, 28).astype(np.uint8)
    labels = np.array([0, 61, 3, 3])
    for directory, stem in (("MNIST", ""), ("EMNIST", "emnist-byclass-")):
        (tmp_path / "downloads" / directory / "raw").mkdir(parents=True)
        for side, other in (("train", "train"), ("t10k", "test")):
            side = side if directory == "MNIST" else other
            target = tmp_path / "downloads" / directory / "raw"
            (target / f"{stem}{side}-images-idx3-ubyte").write_bytes(idx(raw))
            (target / f"{stem}{side}-labels-idx1-ubyte").write_bytes(idx(labels))
    mnist, emnist = data.prepare("mnist", tmp_path), data.prepare("emnist", tmp_path)
    assert np.array_equal(mnist.x_train[:, 0], raw) and mnist.info.num_classes == 10
    assert np.array_equal(emnist.x_test[:, 0], raw.transpose(0, 2, 1)) and emnist.y_test.tolist() == [0, 61, 3, 3]
    assert emnist.info.num_classes == 62

    class Fake:
        classes = ("x", "y")

        def __init__(self, root: str, download: bool, **side: Any) -> None:
            self.data = np.arange(2 * 32 * 32 * 3).reshape(2, 32, 32, 3).astype(np.uint8)
            self.targets = self.labels = [0, 1]

    class FakeSVHN(Fake):
        classes = None  # type: ignore[assignment]

        def __init__(self, **kw: Any) -> None:
            super().__init__(**kw)
            self.data = self.data.transpose(0, 3, 1, 2)

    monkeypatch.setattr(datasets, "CIFAR10", Fake)
    monkeypatch.setattr(datasets, "SVHN", FakeSVHN)
    cifar, svhn = data.prepare("cifar10", tmp_path), data.prepare("svhn", tmp_path)
    assert cifar.info.classes == ("x", "y") and np.array_equal(cifar.x_train, svhn.x_train)
    assert svhn.info.classes == tuple("0123456789") and svhn.x_train[0, :, 0, 0].tolist() == [0, 1, 2]


def test_offline_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    def offline(**kw: Any) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(datasets, "CIFAR100", offline)
    with pytest.raises(UserError, match="cifar100 is not complete in .*downloads .*network.*Name or service not known"):
        data.prepare("cifar100", tmp_path)


def test_debian_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.arange(3 * 28 * 28).reshape(3, 28, 28).astype(np.uint8)
    for side in ("train", "t10k"):
        (tmp_path / f"{side}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(raw)))
        (tmp_path / f"{side}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([0, 9, 5]))))
    monkeypatch.setattr(data, "DEBIAN_FASHION_MNIST", tmp_path)
    p = data.prepare("fashion-mnist", tmp_path / "root")
    assert np.array_equal(p.x_test[:, 0], raw) and p.y_train.tolist() == [0, 9, 5] and p.info.classes[9] == "Ankle boot"


# clients


def test_clients_open_what_the_partition_gives_them(tmp_path: Path) -> None:
    config = RunConfig(dataset=f"npz:{write_npz(tmp_path / 'd.npz')}", data_dir=str(tmp_path / "root"), num_clients=2,
                       partition="dirichlet", min_samples=1, dirichlet_alpha=10.0, test_ratio=0.5)  # fmt: skip
    info = data.check(config)
    everyone = [data.open_client(config, i) for i in range(2)]
    p = data.prepare(config.dataset, tmp_path / "root")
    seen = [bytes(x) for c in everyone for x in (*c.x_train, *c.x_test)]
    assert sorted(seen) == sorted(map(bytes, (*p.x_train, *p.x_test)))  # all of both sets, mixed
    label = {bytes(x): y for x, y in zip((*p.x_train, *p.x_test), (*p.y_train, *p.y_test), strict=True)}
    for c in everyone:
        assert c.info == info and c.x_train.dtype == np.uint8 and c.y_test.dtype == np.int64
        assert [label[bytes(x)] for x in c.x_train] == c.y_train.tolist()
        assert [label[bytes(x)] for x in c.x_test] == c.y_test.tolist()
    for bad in (-1, 2):
        with pytest.raises(UserError, match=rf"client {bad}: must be >= 0 and below num-clients \(2\)"):
            data.open_client(config, bad)


def test_check_refuses_before_training(tmp_path: Path) -> None:
    config = RunConfig(data_dir=str(tmp_path), num_clients=3, train_samples=5000)
    with pytest.raises(UserError, match="train-samples: .* 5000 samples but the training set of digits has 1347"):
        data.check(config)
    assert not list(tmp_path.glob("partitions/[!.]*"))
    assert data.check(dataclasses.replace(config, train_samples=50)).num_train == 1347


def test_open_takes_milliseconds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {f"class{k:02}": 10 for k in range(20)}, side=16)
    data.check(RunConfig(dataset=f"folder:{folder}", data_dir=str(tmp_path / "root"), num_clients=4, train_samples=40))
    code = f"""
import sys, time
from fl_app import config, data
times = []
for client_id in range(4):
    start = time.perf_counter()
    run = config.RunConfig(dataset="folder:{folder}", data_dir={str(tmp_path / "root")!r}, num_clients=4,
                           train_samples=40)
    assert len(data.open_client(run, client_id).y_train) == 40
    times.append(time.perf_counter() - start)
assert not {{"torch", "datasets", "PIL", "sklearn"}} & set(sys.modules)
print(min(times))
"""
    assert float(run_python(code)) < 0.05


def test_real_images(tmp_path: Path) -> None:
    if not CIFAR_IMAGES.exists():
        pytest.skip(f"{CIFAR_IMAGES.name} is not in shared/data")
    count = 0
    with tarfile.open(CIFAR_IMAGES) as tar:
        for member in tar:  # the archive is sorted: test/ comes first, so stop early and use its images for both
            if member.isfile() and member.name.endswith(".jpg") and int(Path(member.name).stem) < 10:
                split, name, file = Path(member.name).parts[-3:]
                for target in ("train", "test"):
                    path = tmp_path / "images" / target / name / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
                count += 1
            if count == 100:
                break
    assert split == "test"
    config = RunConfig(dataset=f"folder:{tmp_path / 'images'}", data_dir=str(tmp_path / "root"), num_clients=5,
                       partition="iid", train_samples=20, test_samples=20)  # fmt: skip
    info = data.check(config)
    assert info.classes[0] == "airplane" and info.num_classes == 10 and info.image_size == 32 and info.in_channels == 3
    assert all(0.3 < m < 0.7 for m in info.mean) and all(0.15 < s < 0.4 for s in info.std)
    assert data.open_client(config, 4).x_train.shape == (20, 3, 32, 32)
