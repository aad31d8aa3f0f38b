"""Data sets by name, from small files in their own formats."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image

from fl_app import data
from fl_app.config import RunConfig
from fl_app.data import named
from fl_app.errors import DataError, UserError
from tests.facts import mentions, rejected


@pytest.mark.parametrize("key, value", [("classes", ("a", "b")), ("image_size", 32)])
def test_named_sets_have_their_own_classes_and_size(tmp_path: Path, key: str, value: Any) -> None:
    with rejected(DataError, key.replace("_", "-"), "digits"):
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


# labels in torchvision's files: the split's first and last
SPLITS = {
    "emnist": ("byclass", 0, 61, "0", "z"),
    "emnist-balanced": ("balanced", 0, 46, "0", "t"),
    "emnist-byclass": ("byclass", 0, 61, "0", "z"),
    "emnist-bymerge": ("bymerge", 0, 46, "0", "t"),
    "emnist-digits": ("digits", 0, 9, "0", "9"),
    "emnist-letters": ("letters", 1, 26, "a", "z"),
    "emnist-mnist": ("mnist", 0, 9, "0", "9"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_of_emnist(tmp_path: Path, name: str) -> None:
    split, first, last, first_class, last_class = SPLITS[name]
    raw = np.arange(3 * 28 * 28).reshape(3, 28, 28).astype(np.uint8)
    target = tmp_path / "downloads" / "EMNIST" / "raw"
    target.mkdir(parents=True)
    for side in ("train", "test"):
        (target / f"emnist-{split}-{side}-images-idx3-ubyte").write_bytes(idx(raw))
        (target / f"emnist-{split}-{side}-labels-idx1-ubyte").write_bytes(idx(np.array([last, first, last])))
    found = data.prepare(name, tmp_path)
    assert found.info.num_classes == last - first + 1 == len(found.info.classes)
    assert (found.info.classes[0], found.info.classes[-1]) == (first_class, last_class)
    assert found.y_test.tolist() == found.y_train.tolist() == [last - first, 0, last - first]
    # the files hold the images transposed
    assert np.array_equal(found.x_test[:, 0], raw.transpose(0, 2, 1))


def test_offline_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    def offline(self: Any, *args: Any, **kw: Any) -> None:
        raise URLError("Name or service not known")

    files = {
        "cifar10": "cifar-10-python.tar.gz, or what is in it: cifar-10-batches-py/ with data_batch_1, data_batch_2, data_batch_3, "
        "data_batch_4, data_batch_5, test_batch, batches.meta;",
        "cifar100": "cifar-100-python.tar.gz, or what is in it: cifar-100-python/ with train, test, meta;",
        "svhn": "train_32x32.mat and test_32x32.mat;",
        "emnist": "EMNIST/raw/gzip.zip;",
        "mnist": "MNIST/raw/ with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, "
        "t10k-labels-idx1-ubyte.gz;",
    }
    for name, told in files.items():
        factory = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN", "emnist": "EMNIST", "mnist": "MNIST"}[
            name
        ]
        monkeypatch.setattr(getattr(datasets, factory), "__init__", offline)
        with rejected(
            DataError, "dataset", f"{name} is not complete", "downloads", "Name or service", "not known"
        ) as caught:
            data.prepare(name, tmp_path)
        assert mentions(str(caught.value), f"put there {told}", "= folder:/path")


def test_debian_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.arange(3 * 28 * 28).reshape(3, 28, 28).astype(np.uint8)
    for side in ("train", "t10k"):
        (tmp_path / f"{side}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(raw)))
        (tmp_path / f"{side}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([0, 9, 5]))))
    monkeypatch.setattr(named, "DEBIAN_FASHION_MNIST", tmp_path)
    p = data.prepare("fashion-mnist", tmp_path / "root")
    assert np.array_equal(p.x_test[:, 0], raw) and p.y_train.tolist() == [0, 9, 5] and p.info.classes[9] == "Ankle boot"


# MedMNIST


def write_medmnist(path: Path, **changes: Any) -> Path:
    """Write a file in MedMNIST's format with `changes`; a change to None removes the array."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, n in (("train", 22), ("val", 11), ("test", 11)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (n, 28, 28), np.uint8)
        arrays[f"{split}_labels"] = (np.arange(n) % 11).astype(np.uint8)[:, None]
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return path


@pytest.mark.parametrize("dataset, file", [("medmnist-a", "organamnist.npz"), ("medmnist-c", "organcmnist.npz")])
def test_medmnist(tmp_path: Path, dataset: str, file: str) -> None:
    raw = np.load(write_medmnist(tmp_path / "data" / file))
    p = data.prepare(dataset, tmp_path / "data")
    assert np.array_equal(p.x_train[:, 0], np.concatenate([raw["train_images"], raw["val_images"]]))
    assert p.y_train.tolist() == [*raw["train_labels"][:, 0], *raw["val_labels"][:, 0]]
    assert np.array_equal(p.x_test[:, 0], raw["test_images"]) and p.y_test.tolist() == list(range(11))
    assert (p.info.in_channels, p.info.image_size, p.info.num_classes) == (1, 28, 11)
    assert p.info.classes[0] == "bladder" and p.info.classes[10] == "spleen"
    config = RunConfig(
        dataset=dataset,
        data_dir=str(tmp_path / "data"),
        num_clients=2,
        partition="dirichlet",
        min_samples=2,
        dirichlet_alpha=10.0,
    )
    clients = [data.open_client(config, i) for i in range(2)]
    assert sum(len(c.y_train) + len(c.y_test) for c in clients) == 44  # FedOBP divides all of it


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"val_labels": None}, "has no val_labels; it has train_images"),
        (
            {"test_images": np.zeros((11, 64, 64), np.uint8)},
            r"test_images must have shape \[n, 28, 28\], got \[11, 64, 64\]",
        ),
        ({"train_images": np.zeros((22, 28, 28))}, "train_images must be uint8 .* got float64"),
        ({"test_labels": np.zeros((11, 2), int)}, r"test_labels must have shape \[n\], got \[11, 2\]"),
        ({"test_labels": np.full((11, 1), 11)}, "test_labels must hold labels below 11, got 11"),
        ({"val_labels": np.zeros((3, 1), int)}, "val_labels must have one label for each of the 11 images, got 3"),
    ],
)
def test_medmnist_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_medmnist(tmp_path / "organamnist.npz", **changes)
    with pytest.raises(UserError, match=rf"organamnist\.npz.*{message}"):
        data.prepare("medmnist-a", tmp_path)


def test_a_missing_medmnist_file_is_named(tmp_path: Path) -> None:
    with rejected(
        DataError, "dataset", "medmnist-c needs", "file organcmnist.npz", "/organcmnist.npz", "package medmnist"
    ):
        data.prepare("medmnist-c", tmp_path)
    (tmp_path / "organcmnist.npz").write_bytes(b"PK")
    with rejected(DataError, "dataset", "organcmnist.npz", "npz file"):
        data.prepare("medmnist-c", tmp_path)


# Tiny-ImageNet


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
    with rejected(DataError, "dataset", "class 'n03' of 'val_0.JPEG'", "not in wnids.txt"):
        data.prepare(f"tiny-imagenet:{folder}", tmp_path / "root")
    (folder / "wnids.txt").unlink()
    with pytest.raises(UserError, match="no .*wnids.txt"):
        data.prepare(f"tiny-imagenet:{folder}", tmp_path / "root")
