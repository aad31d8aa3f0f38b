"""Arrays as users have them, checked and turned into what a prepared data set holds: samples, targets, groups of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.data.prepared import Arrays, Groups, Labels, Samples, Targets, at_least_two, listed
from fl_app.errors import UserError
from fl_app.tasks import Task

Side = tuple[str, NDArray[Any]]  # an array with its name in errors


def refuse(path: Path, name: str, rule: str, value: object) -> None:
    """Raise UserError about an array."""
    raise UserError(f"dataset: {path}: {name} must {rule}, got {value}")


def samples(path: Path, name: str, x: NDArray[Any]) -> Samples:
    """Return samples as they are stored: [n, ...].

    uint8 [n, H, W] and [n, H, W, C] are images: uint8 [n, C, H, W]; [n, H, W, C] of any other dtype becomes [n, C, H, W] too. Other
    integers are int64, other numbers float32, and [n] is [n, 1].
    """
    if x.dtype.kind not in "biuf":
        refuse(path, name, "hold numbers", x.dtype)
    if x.ndim < 1 or 0 in x.shape[1:]:
        refuse(path, name, "have shape [n, ...], nothing of length 0 but n", list(x.shape))
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    x = x[:, None] if x.ndim == 1 else x.transpose(0, 3, 1, 2) if x.ndim == 4 else x
    if x.dtype == np.uint8 and x.ndim == 4:
        return x
    if x.dtype.kind in "iu" and x.dtype != np.uint8:
        return x.astype(np.int64)
    with np.errstate(over="ignore"):
        out = x.astype(np.float32)
    if not np.isfinite(out).all():
        wrong = np.argwhere(~np.isfinite(out))
        more = f", and {len(wrong) - 1} more such" * (len(wrong) > 1)
        refuse(path, name, "hold finite float32 numbers", f"{x[tuple(wrong[0])]} in sample {wrong[0][0]}{more}")
    return out


def targets(
    path: Path, task: Task, train: Side, test: Side, classes: Sequence[str], *, site: bool = False, what: str = "images"
) -> tuple[Targets, Targets, Sequence[str]]:
    """Return training and test targets as the task wants them, and the names of the model's outputs.

    Labels int64 [n] for a task with classes, whose names are `classes`, the strings that stand for them, or "0" .. "max"; else
    float32 [n, k]. what: the samples, in errors. Raises UserError.
    """
    if task.has_classes:
        return _labels(path, train, test, classes, site, what)
    y_train, y_test = (_numbers(path, name, y, task) for name, y in (train, test))
    if not len(y_test):
        y_test = y_train[:0]
    if y_train.shape[1] != y_test.shape[1]:
        refuse(path, test[0], f"have {y_train.shape[1]} columns as {train[0]}", y_test.shape[1])
    names = list(classes) or [str(k) for k in range(y_train.shape[1])]
    if len(names) != y_train.shape[1]:
        raise UserError(f"classes: {path} has {y_train.shape[1]} targets, got {len(names)} names ({listed(names)})")
    return y_train, y_test, names


def _numbers(path: Path, name: str, y: NDArray[Any], task: Task) -> Targets:
    if y.dtype.kind not in "biuf":
        refuse(path, name, "hold numbers", y.dtype)
    if y.ndim not in (1, 2):
        refuse(path, name, "have shape [n] or [n, k]", list(y.shape))
    out = y.astype(np.float32).reshape(len(y), -1 if y.size else max(1, *y.shape[1:], 1))
    if rule := task.check(out):
        wrong = next((value for value in np.unique(out) if task.check(np.array([[value]], np.float32))), "others")
        refuse(path, name, rule, wrong)
    return out


def _labels(
    path: Path, train: Side, test: Side, classes: Sequence[str], site: bool, what: str
) -> tuple[Labels, Labels, Sequence[str]]:
    for name, y in (train, test):
        if y.dtype.kind not in "iubUSO" and len(y):
            refuse(
                path,
                name,
                "hold integers or names of classes",
                f"{y.dtype}; numbers are learned with task = regression",
            )
        if y.ndim != 1:
            refuse(path, name, "have shape [n]", list(y.shape))
    if train[1].dtype.kind in "USO":
        return _named(path, train, test, classes, site)
    y_train, y_test = (y.astype(np.int64) for _, y in (train, test))
    for name, y in ((train[0], y_train), (test[0], y_test)):
        if y.min(initial=0) < 0:
            refuse(path, name, "hold labels >= 0", y.min())
    top = int(max(y_train.max(initial=0), y_test.max(initial=0)))
    hint = (
        f"; labels start at 0: subtract 1 from {train[0]} and {test[0]}" if len(y_train) and y_train.min() == 1 else ""
    )
    if classes:
        if top >= len(classes):
            raise UserError(
                f"dataset: {path}: class {top} must be below {len(classes)}, the number of classes ({listed(classes)}){hint}"
            )
        return y_train, y_test, classes
    if site:
        raise UserError("classes: dataset node needs the class names in label order")
    empty = np.setdiff1d(np.arange(min(top + 1, len(y_train) + 1)), y_train)
    if len(empty):
        raise UserError(f"dataset: {path}: class {empty[0]} has no {what} in {train[0].replace('y_', 'x_')}{hint}")
    return y_train, y_test, at_least_two([str(k) for k in range(top + 1)], path)


def _named(
    path: Path, train: Side, test: Side, classes: Sequence[str], site: bool
) -> tuple[Labels, Labels, Sequence[str]]:
    """Labels that are strings: their place among the sorted names, or in `classes`."""
    words = [[str(word.decode() if isinstance(word, bytes) else word) for word in y] for _, y in (train, test)]
    if site and not classes:
        raise UserError("classes: dataset node needs the class names in label order")
    names = list(classes) or sorted(set(words[0]))
    place = {name: k for k, name in enumerate(names)}
    for (name, _), side in zip((train, test), words, strict=True):
        if unknown := [word for word in side if word not in place]:
            refuse(path, name, f"hold labels among {listed(names)}", repr(unknown[0]))
    y_train, y_test = (np.array([place[word] for word in side], np.int64) for side in words)
    return y_train, y_test, at_least_two(names, path)


def groups(train: NDArray[Any], test: NDArray[Any]) -> Groups:
    """Number the groups that a column's values make of the samples, in the order of the values, sorted."""
    values = np.unique(np.concatenate([train, test]) if len(test) else train)
    return Groups(np.searchsorted(values, train), np.searchsorted(values, test), tuple(str(value) for value in values))


def stored(x_train: Samples, y_train: Targets, x_test: Samples, y_test: Targets) -> Arrays:
    """Return the four arrays, both sides' samples in one dtype."""
    dtype = np.result_type(x_train, x_test) if len(x_test) and x_test.dtype != x_train.dtype else x_train.dtype
    dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
    return x_train.astype(dtype, copy=False), y_train, x_test.astype(dtype, copy=False), y_test
