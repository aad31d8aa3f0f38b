"""Data sets as .npz files of plain arrays: x_train, y_train, x_test, y_test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import npz_file
from fl_app.data import moments, user_arrays
from fl_app.data.prepared import (
    ARRAYS,
    Arrays,
    DataRequest,
    Facts,
    Prepared,
    SampleGroups,
    Samples,
    Targets,
    not_read,
    note,
    open_or_convert,
    save,
)
from fl_app.data.user_arrays import refuse, samples, targets
from fl_app.errors import DataError
from fl_app.keys import nearest
from fl_app.sources import named_data
from fl_app.tasks import Classification

RULES = 5
"""Version of the rules that read arrays. Conversions of other versions are not used."""


def prepare(request: DataRequest) -> Prepared:
    """Open an .npz file. A site's own file may lack classes and test samples."""
    path = request.path
    if not path.is_file():
        raise DataError(key="dataset", rule=f"no file {path}")
    stat = path.stat()

    def convert(directory: Path) -> Sequence[str]:
        found, names, groups, facts, layout = _read_arrays(request)
        side = found[0].shape[2] if found[0].dtype == np.uint8 else 0
        if request.image_size not in (0, side):
            what = f"{side} pixels" if side else "no images"
            raise DataError(
                key="image-size", rule=f"npz images are not resized; {path} has {what}", value=request.image_size
            )
        save(directory, found, groups, facts)
        read = (*ARRAYS, *_columns(request))
        others = [name for name in npz_file.names("dataset", path) if name not in read]
        note(directory, [*layout, *not_read(path, [f"the array {name}" for name in others])])
        return names

    parts = [str(path), stat.st_mtime_ns, stat.st_size, request.classes, request.image_size, request.site]
    # the directory's key names the task only without classes, and the column of clients only if there is one
    if not request.of_task.has_classes:
        parts.append(request.task)
    if request.client:
        parts.append({"client": request.client})
    parts.append({"rules": RULES})
    if request.hides:
        parts.append("hides values")
    return open_or_convert(request, f"npz-{path.stem}", parts, convert)


def members(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Return arrays of an .npz file by name. optional: arrays that may be missing. Raises UserError."""
    found, names = npz_file.read("dataset", path, lambda name: name in keys)
    if missing := [key for key in keys if key not in found and key not in optional]:
        has = f"it has {', '.join(names) or 'nothing'}{nearest(missing[0], names)}"
        raise DataError(key="dataset", rule=f"{path} has no {missing[0]}; {has}")
    for key, array in found.items():
        if not array.ndim:
            user_arrays.refuse(path, key, "be an array", f"the single value {array!s:.80}")
    return {key: found[key] for key in keys if key in found}


def _read_arrays(request: DataRequest) -> tuple[Arrays, Sequence[str], SampleGroups | None, Facts, list[str]]:
    """Return the four arrays, the outputs' names, the samples' groups, other facts, and lines about the axes' order.

    The groups are None unless an array of the file names each sample's client. Raises UserError.
    """
    path, site = request.path, request.site
    column = _columns(request)
    found = members(path, (*ARRAYS, *column), (*ARRAYS[2:], *column[1:]) if site else ())
    x_train, y_train = found["x_train"], found["y_train"]
    x_test, y_test = found.get("x_test", x_train[:0]), found.get("y_test", y_train[:0])
    are_images = x_train.ndim == 4 or (x_train.ndim == 3 and x_train.dtype == np.uint8)
    what = "images" if are_images else "samples"
    if not len(x_train):
        raise DataError(key="dataset", rule=f"{path}: x_train has no {what}")
    if not len(x_test) and not len(y_test):
        x_test, y_test = x_train[:0], y_train[:0]
    task = request.of_task
    if request.hides:
        x_train, x_test = user_arrays.filled(x_train), user_arrays.filled(x_test)
    how = moments.storing(x_train, tokens=task.input_dtype == "int64")
    stored_train = user_arrays.samples(path, "x_train", how.of(x_train))
    stored_test = user_arrays.samples(
        path, "x_test", how.of(x_test) if x_test.shape[1:] == x_train.shape[1:] else x_test
    )
    if stored_test.shape[1:] != stored_train.shape[1:]:
        raise DataError(
            key="dataset",
            rule=f"{path}: x_test must have {what} like x_train's {x_train.shape[1:]}",
            value=x_test.shape[1:],
        )
    for name, x, y in (("y_train", x_train, y_train), ("y_test", x_test, y_test)):
        if len(x) != len(y):
            user_arrays.refuse(path, name, f"have one label for each of the {len(x)} {what}", len(y))
    remarks = moments.storage_remarks(x_train, how, [f"feature {k} of x_train" for k in _last(x_train)])
    targets = moments.Stored()
    if not task.has_classes:
        targets = user_arrays.stored_targets(request, "y_train", y_train)
        remarks += moments.storage_remarks(y_train, targets, [f"target {k} of y_train" for k in _last(y_train)])
    classes, chosen = request.classes, bool(request.classes) or site or not task.has_classes
    if not chosen and y_train.dtype.kind in "iu":
        # as in a table: integers are places in label order if they are 0, 1, ..., and names otherwise
        classes = user_arrays.class_names(y_train)
    y_train, y_test, names = user_arrays.targets(
        path,
        task,
        ("y_train", targets.of(y_train)),
        ("y_test", targets.of(y_test)),
        classes,
        site=site,
        hides=request.hides,
        what=what,
    )
    if not chosen:
        user_arrays.refuse_one_class(path, "y_train", y_train, names)
    facts = Facts(remarks=tuple(remarks), shift=how.shift, scale=how.scale, target_shift=targets.shift)
    groups = None
    if column:
        sides = [found.get(name, np.zeros(0)) for name in column]
        for name, side, x in zip(column, sides, (x_train, x_test), strict=True):
            if side.shape != (len(x),):
                user_arrays.refuse(path, name, f"have shape [{len(x)}], one value for each sample", list(side.shape))
        groups = user_arrays.groups(*sides)
    layout = user_arrays.layout_note(path, "x_train", x_train.shape)
    return user_arrays.stored(stored_train, y_train, stored_test, y_test), names, groups, facts, layout


def _columns(request: DataRequest) -> list[str]:
    """Return the names of the two arrays that name each sample's client; [] without the key `client`."""
    return [f"{request.client}_train", f"{request.client}_test"] if request.client else []


def _last(x: NDArray[Any]) -> range:
    """Return the places in an array's last axis; one place for [n]."""
    return range(x.shape[-1] if x.ndim > 1 else 1)


# OrganAMNIST and OrganCMNIST of MedMNIST v2 (Yang et al., Scientific Data 2023) ---------------------------------------

# The user puts the official file into the data directory. Training and validation images together are the training set. A
# partition that divides all data, as FedOBP's does, then uses all three parts.


ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
SPLITS = ("train", "val", "test")


def prepare_medmnist(request: DataRequest) -> Prepared:
    """Open `medmnist-a` or `medmnist-c` from its file in the data directory. Raises UserError."""
    known = named_data(request.dataset)
    assert known is not None
    path = (request.root / known.file).resolve()
    if not path.is_file():
        raise DataError(
            key="dataset",
            rule=f"{request.dataset} needs the file {path.name} in the data directory: no {path}. Get it "
            "(28 x 28 pixels) from medmnist.com or with the Python package medmnist",
        )

    def convert(directory: Path) -> Sequence[str]:
        save(directory, _read_splits(path, known.image_size))
        return ORGANS

    parts = [str(path), path.stat().st_mtime_ns, path.stat().st_size]
    return open_or_convert(request, request.dataset, parts, convert)


def _read_splits(path: Path, side: int) -> Arrays:
    arrays = members(path, [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels")])
    parts: list[tuple[Samples, Targets]] = []
    for split in SPLITS:
        x_name, y_name = f"{split}_images", f"{split}_labels"
        x, y = arrays[x_name], arrays[y_name]
        # MedMNIST has a column per task, here one
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if x.dtype != np.uint8:
            refuse(path, x_name, "be uint8 with values 0 .. 255", x.dtype)
        if x.shape[1:] != (side, side):
            raise DataError(
                key="dataset", rule=f"{path}: {x_name} must have shape [n, {side}, {side}]", value=list(x.shape)
            )
        if len(x) != len(y):
            refuse(path, y_name, f"have one label for each of the {len(x)} images", len(y))
        some = [str(k) for k in range(int(y.max(initial=0)) + 1)]
        labels, _, _ = targets(path, Classification(), (y_name, y), (y_name, y[:0]), some)
        if labels.max(initial=0) >= len(ORGANS):
            raise DataError(
                key="dataset", rule=f"{path}: {y_name} must hold labels below {len(ORGANS)}, got {labels.max()}"
            )
        parts.append((samples(path, x_name, x), labels))
    (x_train, y_train), (x_val, y_val), (x_test, y_test) = parts
    return np.concatenate([x_train, x_val]), np.concatenate([y_train, y_val]), x_test, y_test
