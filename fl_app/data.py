"""Data sets, converted once into memory-mapped arrays that every client process opens in milliseconds.

`prepare` turns a data set into <root>/datasets/<key>/ with x_train.npy, x_test.npy (uint8 [n, C, S, S]), y_train.npy,
y_test.npy (int64 [n]) and info.json. The key names what defines the data; a client process computes it again, so for a
folder it rests on the modification times of its directories, not of its files: after overwriting an image in place,
prepare again with force. The conversion is under a lock and ends in a rename: many processes at once do it exactly
once, and an interrupted one leaves nothing that would be used. torch, torchvision, scikit-learn and PIL are imported
only while converting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import socket
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import TORCHVISION_DATASETS, RunConfig, class_names
from fl_app.errors import UserError
from fl_app.files import build_once
from fl_app.partition import cache_key, partition

if TYPE_CHECKING:
    from PIL.Image import Image

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Arrays = tuple[Images, Labels, Images, Labels]
Listing = list[tuple[Path, int]]

FORMAT = 1
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".pnm", ".gif", ".tif", ".tiff"}
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist
DOWNLOAD_TIMEOUT_SECONDS = 30
DECODE_BATCH = 64
STATISTICS_BATCH = 1024


@dataclass(frozen=True)
class DatasetInfo:
    """What a model and a report need to know of a data set.

    Images are [in_channels, image_size, image_size]. classes: names in label order. mean, std: per channel, of the
    training images scaled to [0, 1]; std is 1 for a channel that never varies, so that dividing by it is safe.
    """

    in_channels: int
    image_size: int
    classes: tuple[str, ...]
    num_train: int
    num_test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.classes)

    @classmethod
    def from_json(cls, text: str) -> DatasetInfo:
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("classes", "mean", "std")}
        return cls(**fields)

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)


@dataclass(frozen=True)
class Prepared:
    """A converted data set: read-only memory maps, x uint8 [n, C, S, S], y int64 [n]; key names it among all others."""

    root: Path
    info: DatasetInfo
    key: str
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels


@dataclass(frozen=True)
class ClientData:
    """One client's samples: x uint8 [n, C, S, S], y int64 [n]; `info` describes the whole data set."""

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    info: DatasetInfo


def data_root(config: RunConfig) -> Path:
    """Return `data-dir`, else $COROLLA_DATA_DIR, else corolla under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := config.data_dir or os.environ.get("COROLLA_DATA_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corolla"


def prepare(
    dataset: str, root: Path, *, classes: tuple[str, ...] = (), image_size: int = 0, force: bool = False
) -> Prepared:
    """Open a data set, converting it first if no process has yet, or if `force`.

    dataset: as in the run config, but `node`. classes: label order of `folder:` and `npz:`; empty: sorted directory
    names, "0" .. "max". image_size: pixels, 0: as the images are. Raises UserError naming what is wrong with the data.
    """
    kind, _, path = dataset.partition(":")
    if kind == "folder":
        return _prepare_folder(Path(path), root, classes, image_size, force, site=False)
    if kind == "npz":
        return _prepare_npz(Path(path), root, classes, image_size, force, site=False)
    for key, value in (("classes", ",".join(classes)), ("image-size", image_size)):
        if value and not (kind == "tiny-imagenet" and key == "image-size"):
            raise UserError(f"{key}: {dataset} has its own; leave it unset, got {value!r}")
    if kind == "tiny-imagenet" and path:
        return _prepare_tiny_imagenet(Path(path), root, image_size, force)
    converters: dict[str, Callable[[], tuple[Arrays, Sequence[str]]]] = {"digits": _digits}
    converters |= {n: lambda: _torchvision(dataset, root / "downloads") for n in TORCHVISION_DATASETS}
    if dataset not in converters:
        raise UserError(f"dataset: {dataset!r} cannot be prepared")

    def convert(directory: Path) -> Sequence[str]:
        arrays, names = converters[dataset]()
        _save(directory, arrays)
        return names

    return _open(root, cache_key(dataset, [FORMAT, dataset]), convert, force)


def prepare_site(
    data_path: str, root: Path, *, classes: tuple[str, ...], image_size: int = 0, force: bool = False
) -> Prepared:
    """Open one site's own data (dataset `node`): an image folder or an .npz file, converted first if needed.

    classes: label order shared by all sites; the site may lack some of them, and its test set may be missing or empty.
    Raises UserError for a class not in `classes`, for a site without training samples, and as `prepare` does.
    """
    path = Path(data_path).expanduser()
    if path.is_file() or path.suffix == ".npz":
        return _prepare_npz(path, root, classes, image_size, force, site=True)
    return _prepare_folder(path, root, classes, image_size, force, site=True)


def open_client(config: RunConfig, client_id: int, *, data_path: str = "") -> ClientData:
    """Open one client's samples; milliseconds once data set and partition are prepared (`check` does both).

    data_path: the SuperNode's own data, used by dataset `node` alone, whose client holds all of it. Raises UserError
    for a client_id outside [0, num-clients) and as `prepare`, `prepare_site` and `partition.split` do.
    """
    if not 0 <= client_id < config.num_clients:
        raise UserError(f"client {client_id}: must be >= 0 and below num-clients ({config.num_clients})")
    root, names = data_root(config), class_names(config.classes)
    if config.dataset == "node":
        if not data_path:
            raise UserError(
                f"client {client_id}: dataset node needs each SuperNode's own data; start it with "
                "--node-config 'data-path=\"/site\"'"
            )
        site = prepare_site(data_path, root, classes=names, image_size=config.image_size)
        return ClientData(site.x_train, site.y_train, site.x_test, site.y_test, site.info)
    data = prepare(config.dataset, root, classes=names, image_size=config.image_size)
    shares = partition(config, data.y_train, data.y_test, data.info.num_classes, data.key, root)
    train, test = shares.client(client_id)
    return ClientData(*_take(data, train), *_take(data, test), data.info)


def check(config: RunConfig) -> DatasetInfo:
    """Prepare data set and partition in full, so that everything wrong with them shows before a run starts.

    Not for dataset `node`, whose data only the SuperNodes can see. Raises UserError.
    """
    assert config.dataset != "node"
    root = data_root(config)
    data = prepare(config.dataset, root, classes=class_names(config.classes), image_size=config.image_size)
    partition(config, data.y_train, data.y_test, data.info.num_classes, data.key, root)
    return data.info


def _take(data: Prepared, indices: NDArray[np.int64]) -> tuple[Images, Labels]:
    """Copy samples by their index into [train; test]."""
    n = data.info.num_train
    in_train = indices < n
    if in_train.all():
        return data.x_train[indices], data.y_train[indices]
    x = np.empty((len(indices), *data.x_train.shape[1:]), np.uint8)
    y = np.empty(len(indices), np.int64)
    x[in_train], y[in_train] = data.x_train[indices[in_train]], data.y_train[indices[in_train]]
    x[~in_train], y[~in_train] = data.x_test[indices[~in_train] - n], data.y_test[indices[~in_train] - n]
    return x, y


# the prepared directory


def _open(root: Path, key: str, convert: Callable[[Path], Sequence[str]], force: bool) -> Prepared:
    """Open <root>/datasets/<key>; `convert` writes its four arrays if needed and returns the class names."""
    directory = root / "datasets" / key

    def build(fresh: Path) -> None:
        names = tuple(convert(fresh))
        x_train, _, x_test, _ = _load(fresh)
        mean, std = _statistics(x_train)
        channels, size = x_train.shape[1:3]
        info = DatasetInfo(channels, size, names, len(x_train), len(x_test), mean, std)
        (fresh / "info.json").write_text(info.to_json())

    build_once(directory, build, key="data-dir", force=force)
    info = DatasetInfo.from_json((directory / "info.json").read_text())
    return Prepared(root, info, key, *_load(directory))


def _load(directory: Path) -> Arrays:
    x_train, y_train, x_test, y_test = (
        np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("x_train", "y_train", "x_test", "y_test")
    )
    return x_train, y_train, x_test, y_test


def _save(directory: Path, arrays: Arrays) -> None:
    for name, array in zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True):
        dtype = np.uint8 if name.startswith("x") else np.int64
        np.save(directory / f"{name}.npy", np.ascontiguousarray(array, dtype))


def _statistics(x: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and population std per channel of x / 255, from exact counts of the 256 values."""
    counts = np.zeros((x.shape[1], 256), np.int64)
    for start in range(0, len(x), STATISTICS_BATCH):
        batch = x[start : start + STATISTICS_BATCH]
        for channel, row in enumerate(counts):
            row += np.bincount(batch[:, channel].reshape(-1), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt(np.maximum(weights @ values**2 - mean**2, 0))
    std[np.count_nonzero(counts, axis=1) == 1] = 1.0
    return tuple(map(float, mean)), tuple(map(float, std))


# data sets by name


def _digits() -> tuple[Arrays, Sequence[str]]:
    """Load scikit-learn's 1,797 digits, 8x8, values 0 .. 16 scaled to 0 .. 255; a fixed stratified 75/25 split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, random_state=0, stratify=y)
    return (x[train], y[train], x[test], y[test]), [str(k) for k in range(10)]


def _torchvision(dataset: str, downloads: Path) -> tuple[Arrays, Sequence[str]]:
    """Load a torchvision data set, downloading it on first use."""
    if dataset == "fashion-mnist" and DEBIAN_FASHION_MNIST.is_dir():
        return _debian_fashion_mnist(DEBIAN_FASHION_MNIST)
    from torchvision import datasets

    factories: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
        "mnist": (datasets.MNIST, {"train": True}, {"train": False}),
        "fashion-mnist": (datasets.FashionMNIST, {"train": True}, {"train": False}),
        "emnist": (datasets.EMNIST, {"split": "byclass", "train": True}, {"split": "byclass", "train": False}),
        "svhn": (datasets.SVHN, {"split": "train"}, {"split": "test"}),
        "cifar10": (datasets.CIFAR10, {"train": True}, {"train": False}),
        "cifar100": (datasets.CIFAR100, {"train": True}, {"train": False}),
    }
    factory, *sides = factories[dataset]
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_SECONDS)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            train, test = (factory(root=str(downloads), download=True, **side) for side in sides)
    except (OSError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()
        raise UserError(
            f"dataset: {dataset} is not complete in {downloads} and could not be downloaded; connect this machine to "
            f"the network once, or put torchvision's files there ({reason[-1] if reason else type(error).__name__})"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)
    x_train, y_train = _channels_first(train, dataset)
    x_test, y_test = _channels_first(test, dataset)
    names = getattr(train, "classes", None) or [str(k) for k in range(10)]
    return (x_train, y_train, x_test, y_test), names


def _channels_first(side: Any, dataset: str) -> tuple[Images, Labels]:
    """Return images uint8 [n, C, S, S] and labels int64 [n] of a torchvision data set."""
    x = np.asarray(side.data)
    y = np.asarray(side.labels if dataset == "svhn" else side.targets, np.int64)
    if dataset == "emnist":  # its files hold the images transposed
        x = x.transpose(0, 2, 1)
    if x.ndim == 3:
        return x[:, None], y
    return (x if dataset == "svhn" else x.transpose(0, 3, 1, 2)), y


def _debian_fashion_mnist(folder: Path) -> tuple[Arrays, Sequence[str]]:
    from torchvision.datasets import FashionMNIST

    def read(name: str, header: int) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=header)
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"dataset: {folder / name} cannot be read ({error})") from error

    def side(name: str) -> tuple[Images, Labels]:
        y = read(f"{name}-labels-idx1-ubyte.gz", 8).astype(np.int64)
        return read(f"{name}-images-idx3-ubyte.gz", 16).reshape(len(y), 1, 28, 28), y

    return (*side("train"), *side("t10k")), FashionMNIST.classes


# npz files


def _prepare_npz(
    path: Path, root: Path, classes: tuple[str, ...], image_size: int, force: bool, *, site: bool
) -> Prepared:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"dataset: no file {path}")
    stat = path.stat()

    def convert(directory: Path) -> Sequence[str]:
        arrays, names = _read_npz(path, classes, site)
        side = arrays[0].shape[2]
        if image_size not in (0, side):
            raise UserError(f"image-size: npz images are not resized; {path} has {side} pixels, got {image_size}")
        _save(directory, arrays)
        return names

    parts = [FORMAT, str(path), stat.st_mtime_ns, stat.st_size, classes, image_size, site]
    return _open(root, cache_key(f"npz-{path.stem}", parts), convert, force)


def _read_npz(path: Path, classes: tuple[str, ...], site: bool) -> tuple[Arrays, Sequence[str]]:
    def member(npz: Any, key: str) -> NDArray[Any] | None:
        if key not in npz.files and site and key.endswith("_test"):
            return None
        if key not in npz.files:
            raise UserError(f"dataset: {path} has no {key}; it has {', '.join(npz.files) or 'nothing'}")
        return np.asarray(npz[key])

    try:
        npz = np.load(path, allow_pickle=False)
        if not isinstance(npz, np.lib.npyio.NpzFile):
            raise UserError(f"dataset: {path} is a single array, not an npz file with x_train, y_train, x_test, y_test")
        with npz:
            x_train, y_train, x_test, y_test = (member(npz, k) for k in ("x_train", "y_train", "x_test", "y_test"))
    except UserError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"dataset: {path} is not a readable npz file of plain arrays ({error})") from error
    assert x_train is not None and y_train is not None
    x_test = x_train[:0] if x_test is None else x_test
    y_test = y_train[:0] if y_test is None else y_test
    train, test = _npz_side(path, "train", x_train, y_train), _npz_side(path, "test", x_test, y_test)
    if not len(train[1]):
        raise UserError(f"dataset: {path}: x_train has no images")
    if not len(test[1]):
        test = train[0][:0], train[1][:0]
    if test[0].shape[1:] != train[0].shape[1:]:
        raise UserError(
            f"dataset: {path}: x_test must have images like x_train's {x_train.shape[1:]}, got {x_test.shape[1:]}"
        )
    return (*train, *test), _npz_classes(path, classes, train[1], test[1], site)


def _npz_side(path: Path, side: str, x: NDArray[Any], y: NDArray[Any]) -> tuple[Images, Labels]:
    """Check one split of an npz file and return images uint8 [n, C, S, S] and labels int64 [n]."""

    def refuse(key: str, rule: str, value: object) -> None:
        raise UserError(f"dataset: {path}: {key}_{side} must {rule}, got {value}")

    if not len(np.atleast_1d(x)) and not len(np.atleast_1d(y)):
        return np.zeros((0, 1, 1, 1), np.uint8), np.zeros(0, np.int64)
    if x.dtype != np.uint8:
        refuse("x", "be uint8 with values 0 .. 255", x.dtype)
    if x.ndim not in (3, 4):
        refuse("x", "have shape [n, H, W, C] or [n, H, W]", list(x.shape))
    if x.shape[1] != x.shape[2] or 0 in x.shape[1:]:
        refuse("x", "have square images, [n, H, W, C] or [n, H, W] with H = W", list(x.shape))
    if y.dtype.kind not in "iu":
        refuse("y", "hold integers", y.dtype)
    if y.ndim != 1:
        refuse("y", "have shape [n]", list(y.shape))
    if len(x) != len(y):
        refuse("y", f"have one label for each of the {len(x)} images", len(y))
    if y.min() < 0:
        refuse("y", "hold labels >= 0", y.min())
    return (x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)), y.astype(np.int64)


def _npz_classes(path: Path, classes: tuple[str, ...], y_train: Labels, y_test: Labels, site: bool) -> Sequence[str]:
    top = int(max(y_train.max(), y_test.max(initial=0)))
    if classes:
        if top >= len(classes):
            raise UserError(
                f"dataset: {path}: class {top} must be below {len(classes)}, the number of classes ({_listed(classes)})"
            )
        return classes
    if site:
        raise UserError("classes: dataset node needs the class names in label order")
    empty = np.setdiff1d(np.arange(min(top + 1, len(y_train) + 1)), y_train)
    if len(empty):
        raise UserError(f"dataset: {path}: class {empty[0]} has no images in x_train")
    return _at_least_two([str(k) for k in range(top + 1)], path)


# image folders


def _prepare_folder(
    path: Path, root: Path, classes: tuple[str, ...], image_size: int, force: bool, *, site: bool
) -> Prepared:
    path = path.expanduser().resolve()
    train = _class_directories(path, "train")
    test = _class_directories(path, "test", required=not site)
    names = classes or tuple(train)
    _check_class_directories(path, names, train, test, explicit=bool(classes), site=site)
    # not the folder's own time: a data directory inside it would change it
    stamps = [_stamp(d) for d in (path / "train", path / "test", *train.values(), *test.values())]

    def convert(directory: Path) -> Sequence[str]:
        listings: list[Listing] = []
        for side in (train, test):
            images = {name: _images_in(side[name]) for name in names if name in side}
            empty = [name for name, files in images.items() if not files]
            if empty and side is train and not site:
                raise UserError(f"dataset: class {empty[0]!r} has no images in {train[empty[0]]}")
            listings.append([(file, names.index(name)) for name, files in images.items() for file in files])
        if not listings[0]:
            raise UserError(f"dataset: no images in the class directories of {path / 'train'}")
        _decode(directory, listings[0], listings[1], image_size)
        return names

    parts = [FORMAT, str(path), stamps, names, image_size, site]
    return _open(root, cache_key(f"folder-{path.name}", parts), convert, force)


def _class_directories(path: Path, side: str, required: bool = True) -> dict[str, Path]:
    """Return the class directories of one split by name, sorted."""
    if not path.is_dir():
        raise UserError(f"dataset: no folder {path}")
    folder = path / side
    if not folder.is_dir():
        if not required:
            return {}
        raise UserError(f"dataset: {path} has no {side}/; a folder holds train/<class>/ and test/<class>/")
    with os.scandir(folder) as entries:
        return {name: folder / name for name in sorted(e.name for e in entries if e.name[0] != "." and e.is_dir())}


def _check_class_directories(
    path: Path, names: tuple[str, ...], train: dict[str, Path], test: dict[str, Path], *, explicit: bool, site: bool
) -> None:
    for side, found in (("train", train), ("test", test)):
        for name in found:
            if name not in names:
                known = "classes" if explicit else "train/'s"
                raise UserError(f"dataset: {path / side / name}: class {name!r} is not one of {known} {_listed(names)}")
    missing = [name for name in names if name not in train]
    if missing and not site:
        raise UserError(f"classes: {path / 'train'} has no directory for class {missing[0]!r}")
    _at_least_two(names, path / "train")


def _at_least_two(names: Sequence[str], path: Path) -> Sequence[str]:
    if len(names) < 2:
        raise UserError(f"dataset: {path} must hold at least two classes, got {_listed(names) or 'none'}")
    return names


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" ... ({len(names)})" if len(names) > 20 else "")


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _images_in(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name[0] != "." and e.is_file())
    return [folder / name for name in names if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES]


def _prepare_tiny_imagenet(path: Path, root: Path, image_size: int, force: bool) -> Prepared:
    """Open Tiny-ImageNet as distributed: its validation images are the test set; classes are named by WordNet id."""
    path = path.expanduser().resolve()
    parts_of_it = [path / "wnids.txt", path / "train", path / "val" / "images", path / "val" / "val_annotations.txt"]
    for part in parts_of_it:
        if not part.exists():
            raise UserError(f"dataset: no {part}; tiny-imagenet:/path names the folder tiny-imagenet-200 itself")

    def convert(directory: Path) -> Sequence[str]:
        names = sorted(parts_of_it[0].read_text().split())
        label = {name: k for k, name in enumerate(names)}
        train: Listing = []
        for name in names:
            folder = path / "train" / name / "images"
            files = _images_in(folder) if folder.is_dir() else []
            if not files:
                raise UserError(f"dataset: class {name!r} has no images in {folder}")
            train += [(file, label[name]) for file in files]
        test: Listing = []
        for line in parts_of_it[3].read_text().splitlines():
            file, name = (*line.split("\t"), "")[:2]
            if name not in label:
                raise UserError(f"dataset: {parts_of_it[3]}: class {name!r} of {file!r} is not in wnids.txt")
            test.append((path / "val" / "images" / file, label[name]))
        _decode(directory, train, sorted(test), image_size)
        return names

    parts = [FORMAT, str(path), [_stamp(p) for p in parts_of_it], image_size]
    return _open(root, cache_key("tiny-imagenet", parts), convert, force)


# decoding


class _ColourFound(Exception):
    """An image is not grayscale where the first one was."""


def _decode(directory: Path, train: Listing, test: Listing, image_size: int) -> None:
    """Decode image files straight into x_train.npy and x_test.npy; write the labels beside them.

    One channel if all images are grayscale, else three (RGB).
    """
    first = train[0][0]
    with _reading(first) as image:
        gray, (width, height) = _is_gray(image), image.size
    if not image_size and width != height:
        raise UserError(f"dataset: {first} has {width}x{height} pixels, not square; set image-size to resize and crop")
    side = image_size or width
    for channels in (1, 3) if gray else (3,):
        try:
            for name, listing in (("train", train), ("test", test)):
                np.save(directory / f"y_{name}.npy", np.array([label for _, label in listing], np.int64))
                shape = (len(listing), channels, side, side)
                out = np.lib.format.open_memmap(directory / f"x_{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
                _decode_into(out, [file for file, _ in listing], first if not image_size else None)
            return
        except _ColourFound:
            continue


def _decode_into(out: Images, files: list[Path], like: Path | None) -> None:
    """Fill out [n, C, S, S] with the images, by a few threads (PIL decodes without the interpreter lock)."""

    def batch(start: int) -> None:
        for i in range(start, min(start + DECODE_BATCH, len(files))):
            out[i] = _pixels(files[i], out.shape[1], out.shape[2], like)

    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for _ in pool.map(batch, range(0, len(files), DECODE_BATCH)):
            pass  # in order, so that the first bad file is the one reported
    finally:
        pool.shutdown(cancel_futures=True)


def _pixels(file: Path, channels: int, side: int, like: Path | None) -> Images:
    """Return one image, uint8 [channels, side, side]; `like`: the image whose size all must have, None: resize."""
    with _reading(file) as image:
        if channels == 1 and not _is_gray(image):
            raise _ColourFound
        if image.mode.startswith("I"):  # 16 bits a pixel
            from PIL import Image

            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("L" if channels == 1 else "RGB")
        if like is None:
            image = _resize(image, side)
        if image.size != (side, side):
            width, height = image.size
            raise UserError(
                f"dataset: {file} has {width}x{height} pixels, expected {side}x{side} as {like}; set image-size to "
                "resize and crop"
            )
        pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _resize(image: Image, side: int) -> Image:
    """Scale the short side to `side` (bilinear, antialiased) and crop the centre."""
    from PIL.Image import Resampling

    width, height = image.size
    short = min(width, height)
    size = max(side, side * width // short), max(side, side * height // short)
    if size != image.size:
        image = image.resize(size, Resampling.BILINEAR)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    return image.crop((left, top, left + side, top + side))


def _is_gray(image: Image) -> bool:
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[Image]:
    from PIL import Image

    try:
        with Image.open(file) as image:
            image.load()
            yield image
    except (UserError, _ColourFound):
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(f"dataset: {file} cannot be read as an image ({error})") from error
