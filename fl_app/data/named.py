"""Data sets with a name: scikit-learn's digits, those of torchvision, Tiny-ImageNet as distributed.

scikit-learn and torchvision are imported only during conversion.
"""

from __future__ import annotations

import contextlib
import gzip
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app import plain_pickle
from fl_app.data.folder import images_in, stamp
from fl_app.data.prepared import DOWNLOADS, Arrays, DataRequest, Images, Labels, Prepared, open_or_convert, save
from fl_app.errors import DataError
from fl_app.sources import NamedData, named_data

if TYPE_CHECKING:
    from fl_app.data.decode import Listing

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""The directory of Debian's package dataset-fashion-mnist."""

DOWNLOAD_TIMEOUT_SECONDS = 30


def prepare_digits(request: DataRequest) -> Prepared:
    """Open scikit-learn's digits."""
    return _open(request, _digits)


def prepare_torchvision(request: DataRequest) -> Prepared:
    """Open a data set of torchvision. Its files are kept in <root>/downloads."""
    known = named_data(request.dataset)
    assert known is not None
    return _open(request, lambda: _torchvision(request.dataset, known, request.root / DOWNLOADS))


def _open(request: DataRequest, load: Callable[[], tuple[Arrays, Sequence[str]]]) -> Prepared:
    def convert(directory: Path) -> Sequence[str]:
        arrays, names = load()
        save(directory, arrays)
        return names

    return open_or_convert(request, request.dataset, [request.dataset], convert)


def _digits() -> tuple[Arrays, Sequence[str]]:
    """Load scikit-learn's 1,797 digits, 8x8, values 0 .. 16 scaled to 0 .. 255; a fixed stratified 75/25 split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, random_state=0, stratify=y)
    return (x[train], y[train], x[test], y[test]), [str(k) for k in range(10)]


def _torchvision(dataset: str, known: NamedData, downloads: Path) -> tuple[Arrays, Sequence[str]]:
    """Load a torchvision data set, downloading it on first use."""
    if dataset == "fashion-mnist" and DEBIAN_FASHION_MNIST.is_dir():
        return _debian_fashion_mnist(DEBIAN_FASHION_MNIST)
    from torchvision import datasets
    from torchvision.datasets import cifar

    cifar.pickle = plain_pickle
    factory: Callable[..., Any] = getattr(datasets, known.torchvision)
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_SECONDS)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            train, test = (factory(root=str(downloads), download=True, **side) for side in (known.train, known.test))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()
        raise DataError(
            key="dataset",
            rule=f"{dataset} is not complete in {downloads} and could not be downloaded "
            f"({reason[-1] if reason else type(error).__name__}); "
            f"connect this machine to the network once, or put there {files_of(factory)}; or use your "
            f"own copy of the images with dataset = folder:/path (`corolla compare --dataset {dataset}` "
            "compares such runs with the papers)",
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)
    x_train, y_train = _channels_first(train, known)
    x_test, y_test = _channels_first(test, known)
    names = getattr(train, "classes", None) or [str(k) for k in range(10)]
    return (x_train, y_train, x_test, y_test), names[known.first_label :]


def files_of(factory: Any) -> str:
    """Return, in words, the files in the data directory's `downloads` that torchvision reads for a data set."""
    if hasattr(factory, "base_folder"):
        names = [entry[0] for entry in (*factory.train_list, *factory.test_list)]
        names.append(factory.meta["filename"])
        return f"{factory.filename}, or what is in it: {factory.base_folder}/ with {', '.join(names)}"
    if hasattr(factory, "split_list"):
        return " and ".join(factory.split_list[part][1] for part in ("train", "test"))
    raw = f"{factory.__name__}/raw/"
    if factory.__name__ == "EMNIST":
        return f"{raw}{factory.url.rpartition('/')[2]}"
    return f"{raw} with {', '.join(name for name, _ in factory.resources)}"


def _channels_first(side: Any, known: NamedData) -> tuple[Images, Labels]:
    """Return images uint8 [n, C, S, S] and labels int64 [n], from 0, of a torchvision data set."""
    x = np.asarray(side.data)
    y = np.asarray(side.labels if known.torchvision == "SVHN" else side.targets, np.int64) - known.first_label
    if known.torchvision == "EMNIST":
        # its files hold the images transposed
        x = x.transpose(0, 2, 1)
    if x.ndim == 3:
        return x[:, None], y
    if known.torchvision != "SVHN":
        x = x.transpose(0, 3, 1, 2)
    return x, y


def _debian_fashion_mnist(folder: Path) -> tuple[Arrays, Sequence[str]]:
    from torchvision.datasets import FashionMNIST

    def read_idx(name: str, header: int) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=header)
        except (OSError, EOFError, ValueError) as error:
            raise DataError(key="dataset", rule=f"{folder / name} cannot be read ({error})") from error

    def side(name: str) -> tuple[Images, Labels]:
        y = read_idx(f"{name}-labels-idx1-ubyte.gz", 8).astype(np.int64)
        return read_idx(f"{name}-images-idx3-ubyte.gz", 16).reshape(len(y), 1, 28, 28), y

    return (*side("train"), *side("t10k")), FashionMNIST.classes


def prepare_tiny_imagenet(request: DataRequest) -> Prepared:
    """Open Tiny-ImageNet as distributed: its validation images are the test set; classes are named by WordNet id."""
    path = request.path
    parts_of_it = [path / "wnids.txt", path / "train", path / "val" / "images", path / "val" / "val_annotations.txt"]
    for part in parts_of_it:
        if not part.exists():
            raise DataError(
                key="dataset", rule=f"no {part}; tiny-imagenet:/path names the folder tiny-imagenet-200 itself"
            )

    def convert(directory: Path) -> Sequence[str]:
        from fl_app.data.decode import decode

        names = sorted(parts_of_it[0].read_text().split())
        label = {name: k for k, name in enumerate(names)}
        train: Listing = []
        for name in names:
            folder = path / "train" / name / "images"
            files = images_in(folder) if folder.is_dir() else []
            if not files:
                raise DataError(key="dataset", rule=f"class {name!r} has no images in {folder}")
            train += [(file, label[name]) for file in files]
        test: Listing = []
        for line in parts_of_it[3].read_text().splitlines():
            file, name = (*line.split("\t"), "")[:2]
            if name not in label:
                raise DataError(key="dataset", rule=f"{parts_of_it[3]}: class {name!r} of {file!r} is not in wnids.txt")
            test.append((path / "val" / "images" / file, label[name]))
        decode(directory, train, sorted(test), request.image_size)
        return names

    parts = [str(path), [stamp(p) for p in parts_of_it], request.image_size]
    return open_or_convert(request, "tiny-imagenet", parts, convert)
