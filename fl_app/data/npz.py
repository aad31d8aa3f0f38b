"""Data sets as .npz files of plain arrays: x_train, y_train, x_test, y_test."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.data.prepared import ARRAYS, Arrays, Images, Labels, Prepared, at_least_two, listed, open_or_convert, save
from fl_app.errors import UserError


def prepare(
    path: Path, root: Path, classes: tuple[str, ...], image_size: int, force: bool, *, site: bool
) -> Prepared:
    """Open an .npz file. site: a site's own, which may lack classes and test samples; else as `sources.prepare`."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"dataset: no file {path}")
    stat = path.stat()

    def convert(directory: Path) -> Sequence[str]:
        arrays, names = _read(path, classes, site)
        side = arrays[0].shape[2]
        if image_size not in (0, side):
            raise UserError(f"image-size: npz images are not resized; {path} has {side} pixels, got {image_size}")
        save(directory, arrays)
        return names

    parts = [str(path), stat.st_mtime_ns, stat.st_size, classes, image_size, site]
    return open_or_convert(root, f"npz-{path.stem}", parts, convert, force)


def members(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Read arrays of an .npz file by name. optional: may be missing. Raises UserError."""
    try:
        npz = np.load(path, allow_pickle=False)
        if not isinstance(npz, np.lib.npyio.NpzFile):
            raise UserError(f"dataset: {path} is a single array, not an npz file with {', '.join(keys)}")
        with npz:
            if missing := [key for key in keys if key not in npz.files and key not in optional]:
                raise UserError(f"dataset: {path} has no {missing[0]}; it has {', '.join(npz.files) or 'nothing'}")
            return {key: np.asarray(npz[key]) for key in keys if key in npz.files}
    except UserError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"dataset: {path} is not a readable npz file of plain arrays ({error})") from error


def _read(path: Path, classes: tuple[str, ...], site: bool) -> tuple[Arrays, Sequence[str]]:
    found = members(path, ARRAYS, ARRAYS[2:] if site else ())
    x_train, y_train = found["x_train"], found["y_train"]
    x_test, y_test = found.get("x_test", x_train[:0]), found.get("y_test", y_train[:0])
    train = images_and_labels(path, "x_train", x_train, "y_train", y_train)
    test = images_and_labels(path, "x_test", x_test, "y_test", y_test)
    if not len(train[1]):
        raise UserError(f"dataset: {path}: x_train has no images")
    if not len(test[1]):
        test = train[0][:0], train[1][:0]
    if test[0].shape[1:] != train[0].shape[1:]:
        raise UserError(
            f"dataset: {path}: x_test must have images like x_train's {x_train.shape[1:]}, got {x_test.shape[1:]}"
        )
    return (*train, *test), _classes(path, classes, train[1], test[1], site)


def images_and_labels(
    path: Path, x_name: str, x: NDArray[Any], y_name: str, y: NDArray[Any]
) -> tuple[Images, Labels]:
    """Check one split of an npz file and return images uint8 [n, C, S, S] and labels int64 [n]."""

    def refuse(name: str, rule: str, value: object) -> None:
        raise UserError(f"dataset: {path}: {name} must {rule}, got {value}")

    if not len(np.atleast_1d(x)) and not len(np.atleast_1d(y)):
        return np.zeros((0, 1, 1, 1), np.uint8), np.zeros(0, np.int64)
    if x.dtype != np.uint8:
        refuse(x_name, "be uint8 with values 0 .. 255", x.dtype)
    if x.ndim not in (3, 4):
        refuse(x_name, "have shape [n, H, W, C] or [n, H, W]", list(x.shape))
    if x.shape[1] != x.shape[2] or 0 in x.shape[1:]:
        refuse(x_name, "have square images, [n, H, W, C] or [n, H, W] with H = W", list(x.shape))
    if y.dtype.kind not in "iu":
        refuse(y_name, "hold integers", y.dtype)
    if y.ndim != 1:
        refuse(y_name, "have shape [n]", list(y.shape))
    if len(x) != len(y):
        refuse(y_name, f"have one label for each of the {len(x)} images", len(y))
    if y.min() < 0:
        refuse(y_name, "hold labels >= 0", y.min())
    return (x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)), y.astype(np.int64)


def _classes(path: Path, classes: tuple[str, ...], y_train: Labels, y_test: Labels, site: bool) -> Sequence[str]:
    top = int(max(y_train.max(), y_test.max(initial=0)))
    if classes:
        if top >= len(classes):
            raise UserError(
                f"dataset: {path}: class {top} must be below {len(classes)}, the number of classes ({listed(classes)})"
            )
        return classes
    if site:
        raise UserError("classes: dataset node needs the class names in label order")
    empty = np.setdiff1d(np.arange(min(top + 1, len(y_train) + 1)), y_train)
    if len(empty):
        raise UserError(f"dataset: {path}: class {empty[0]} has no images in x_train")
    return at_least_two([str(k) for k in range(top + 1)], path)
