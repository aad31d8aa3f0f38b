"""Checks and conversion of a user's arrays into those of a prepared data set: samples, targets, groups of samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.data import moments
from fl_app.data.prepared import Arrays, DataRequest, Labels, SampleGroups, Samples, Targets, at_least_two, listed
from fl_app.errors import DataError
from fl_app.tasks import Regression, Task

CHANNELS = (1, 3, 4)

UNKNOWN = -1
"""Label of a sample whose word is no class, in data that hide which words they have."""

Side = tuple[str, NDArray[Any]]
"""(name in errors, array) of the training or the test part."""


def refuse(path: Path, name: str, rule: str, value: object) -> None:
    """Raise UserError: the array `name` must `rule`, got `value`."""
    raise DataError(key="dataset", rule=f"{path}: {name} must {rule}, got {value}")


def is_channels_first(shape: Sequence[int]) -> bool:
    """Return whether an array of this shape is read as images [n, C, H, W], not as [n, H, W, C].

    The layout that makes H and W equal wins. If neither does and only axis 1 has length 1, 3 or 4, not axis 3, axis 1
    is C. In all other cases the array is [n, H, W, C].
    """
    if len(shape) != 4 or shape[1] == shape[2]:
        return False
    return shape[2] == shape[3] or (shape[1] in CHANNELS and shape[3] not in CHANNELS)


def layout_note(path: Path, name: str, shape: Sequence[int]) -> list[str]:
    """Return a line stating that the array is read as [n, C, H, W]; none if it is not."""
    if not is_channels_first(shape):
        return []
    sizes = " x ".join(map(str, shape[1:]))
    return [f"{path}: {name} is read as [n, C, H, W], {sizes}: {shape[1]} channels of {shape[2]} x {shape[3]} pixels"]


def samples(path: Path, name: str, x: NDArray[Any]) -> Samples:
    """Return samples as they are stored: [n, ...].

    uint8 [n, H, W], [n, H, W, C] and [n, C, H, W] are images and become uint8 [n, C, H, W]. Arrays [n, H, W, C] of any
    other dtype become [n, C, H, W] too. [n] becomes [n, 1].

    Other integers become int64, or float32 if they include uint64 from 2^63 on; other numbers become float32. Raises
    UserError for values that are not finite numbers.
    """
    if x.dtype.kind not in "biuf":
        refuse(path, name, "hold numbers", x.dtype)
    x = moments.plain(x)
    if x.ndim < 1 or 0 in x.shape[1:]:
        refuse(path, name, "have shape [n, ...] without another axis of length 0", list(x.shape))
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.ndim == 1:
        x = x[:, None]
    elif x.ndim == 4 and not is_channels_first(x.shape):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.ndim == 4:
        return x
    if x.dtype.kind in "iu" and x.dtype != np.uint8:
        return x.astype(np.int64)
    with np.errstate(over="ignore"):
        out = x.astype(np.float32)
    if not np.isfinite(out).all():
        wrong = np.argwhere(~np.isfinite(out))
        first = f"{x[tuple(wrong[0])]} in sample {wrong[0][0]}"
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        refuse(path, name, "hold finite float32 numbers", first + more)
    return out


def filled(x: NDArray[Any]) -> NDArray[Any]:
    """Return samples with 0 in place of numbers that float32 cannot hold."""
    return x if x.dtype.kind != "f" else np.nan_to_num(moments.held(x), copy=False)


def targets(
    path: Path,
    task: Task,
    train: Side,
    test: Side,
    classes: Sequence[str],
    *,
    site: bool = False,
    hides: bool = False,
    what: str = "images",
) -> tuple[Targets, Targets, Sequence[str]]:
    """Return training and test targets in the task's form, and the names of the model's outputs.

    A task with classes gets labels, int64 [n]. The classes' names are `classes`, or the labels if these are strings, or
    "0" .. "max". Any other task gets float32 [n, k]. site: whether the data are one site's; a site may lack classes.
    hides: labels that are no class become UNKNOWN, and targets that are no numbers of the task NaN.
    what: the word for samples in errors. Raises UserError.
    """
    if hides and task.has_classes:
        sides = [_marked(path, side, classes) for side in (train, test)]
        return sides[0], sides[1], at_least_two(list(classes), path)
    if task.has_classes:
        return _labels(path, train, test, classes, site, what)
    y_train, y_test = (_numbers(path, name, y, task, hides=hides) for name, y in (train, test))
    if not len(y_test):
        y_test = y_train[:0]
    if y_train.shape[1] != y_test.shape[1]:
        refuse(path, test[0], f"have {y_train.shape[1]} columns as {train[0]}", y_test.shape[1])
    names = list(classes) or [str(k) for k in range(y_train.shape[1])]
    if len(names) != y_train.shape[1]:
        raise DataError(
            key="classes",
            rule=f"{path} has {y_train.shape[1]} targets",
            value=len(names),
            hint=f" names ({listed(names)})",
        )
    return y_train, y_test, names


def stored_targets(request: DataRequest, name: str, y: NDArray[Any]) -> moments.Stored:
    """Return how to store training targets that are numbers, [n] or [n, k], so that float32 keeps them apart.

    A shift does not change the metrics of the built-in regression. Raises UserError if targets need a shift that would
    change their meaning: for a user's own task, and at a site, because a site does not know the others' shift.
    """
    # at a site that hides its values none may be refused
    how = moments.Stored() if request.hides else moments.storing(y)
    if not any(how.shift):
        return moments.Stored()
    if type(request.of_task) is not Regression or request.site:
        far = ", ".join(f"{value:.16g}" for value in how.shift)
        who = "a site" if request.site else f"task {request.task}"
        refuse(
            request.path,
            name,
            f"lie near zero for {who}, because float32 does not keep them apart; subtract the same number everywhere",
            f"values from {far} on",
        )
    return moments.Stored(how.shift, tuple(1.0 for _ in how.shift))


def known(y: Targets) -> NDArray[np.bool_]:
    """Return which targets were read, bool [n]: neither UNKNOWN nor NaN."""
    return np.asarray(~np.isnan(y).any(axis=1) if y.dtype.kind == "f" else y != UNKNOWN)


def _numbers(path: Path, name: str, y: NDArray[Any], task: Task, *, hides: bool = False) -> Targets:
    if hides:
        y = moments.held(y)
    if y.dtype.kind not in "biuf":
        refuse(path, name, "hold numbers", y.dtype)
    if y.ndim not in (1, 2):
        refuse(path, name, "have shape [n] or [n, k]", list(y.shape))
    # reshape cannot infer the number of columns of an empty array
    columns = -1 if y.size else max(1, *y.shape[1:], 1)
    out = y.astype(np.float32).reshape(len(y), columns)
    if hides:
        out[~known(out)] = np.nan
        wrong = [bool(task.check(row[None])) for row in out] if task.check(out[known(out)]) else []
        out[np.flatnonzero(wrong)] = np.nan
        return out
    if rule := task.check(out):
        single = (value for value in np.unique(out) if task.check(np.array([[value]], np.float32)))
        refuse(path, name, rule, next(single, "others"))
    return out


def _labels(
    path: Path, train: Side, test: Side, classes: Sequence[str], site: bool, what: str
) -> tuple[Labels, Labels, Sequence[str]]:
    for name, y in (train, test):
        if y.dtype.kind not in "iubUSO" and len(y):
            advice = "numbers are learned with task = regression"
            if y.dtype.kind == "f" and (y == np.floor(y)).all():
                shown = listed([f"{value:g}" for value in np.unique(y)[:5]])
                advice = f"if {shown} are classes, write them as whole numbers, without a point; if they are quantities, {advice}"
            refuse(path, name, "hold integers or names of classes", f"{y.dtype}; {advice}")
        if y.ndim != 1:
            refuse(path, name, "have shape [n]", list(y.shape))
    if site and not classes:
        raise DataError(key="classes", rule="dataset node needs the class names in label order")
    if by_name(train[1], test[1], classes):
        y_train, y_test, names = _named(path, train, test, classes)
    else:
        y_train, y_test, names = _numbered(path, train, test, classes, what)
    if not site and not classes:
        refuse_one_class(path, train[0], y_train, names)
    return y_train, y_test, names


def refuse_one_class(path: Path, name: str, y_train: Labels, names: Sequence[str]) -> None:
    """Raise UserError if training labels have fewer than two classes. name: the labels' array or column."""
    present = [names[label] for label in np.unique(y_train)]
    if len(present) < 2:
        raise DataError(
            key="dataset", rule=f"{path}: {name} must hold at least two classes, got {listed(present) or 'none'}"
        )


def by_name(y_train: NDArray[Any], y_test: NDArray[Any], classes: Sequence[str]) -> bool:
    """Return whether labels are names.

    Words are names. Integers are names if all `classes` are integers, but not 0, 1, 2, ... in order. Booleans are names
    unless `classes` has other names than False and True. All other labels are places in label order. The result depends
    on dtypes and `classes` only, not on values: all sites of a run must get the same result.
    """
    if y_train.dtype.kind in "USO" or (y_test.dtype.kind in "USO" and len(y_test)):
        return True
    if y_train.dtype.kind == "b":
        return not classes or set(classes) == {"False", "True"}
    in_order = list(classes) == [str(k) for k in range(len(classes))]
    return not in_order and all(re.fullmatch(r"-?\d+", name) for name in classes)


def _numbered(
    path: Path, train: Side, test: Side, classes: Sequence[str], what: str
) -> tuple[Labels, Labels, Sequence[str]]:
    """Return labels that are integers >= 0, as places in label order."""
    for name, y in (train, test):
        if y.min(initial=0) < 0:
            refuse(path, name, "hold labels >= 0", y.min())
        if y.max(initial=0) >= moments.BEYOND:
            refuse(path, name, "hold labels below 2^63", y.max())
    y_train, y_test = (y.astype(np.int64) for _, y in (train, test))
    top = int(max(y_train.max(initial=0), y_test.max(initial=0)))
    hint = ""
    if len(y_train) and y_train.min() == 1:
        hint = f"; labels start at 0: subtract 1 from {train[0]} and {test[0]}"
    if classes:
        if top >= len(classes):
            where = train[0] if y_train.max(initial=0) == top else test[0]
            raise DataError(
                key="dataset",
                rule=f"{path}: {where}: class {top} must be below {len(classes)}, the number of classes ({listed(classes)}){hint}",
            )
        return y_train, y_test, classes
    empty = np.setdiff1d(np.arange(min(top + 1, len(y_train) + 1)), y_train)
    if len(empty):
        raise DataError(
            key="dataset", rule=f"{path}: class {empty[0]} has no {what} in {train[0].replace('y_', 'x_')}{hint}"
        )
    return y_train, y_test, at_least_two([str(k) for k in range(top + 1)], path)


def _named(path: Path, train: Side, test: Side, classes: Sequence[str]) -> tuple[Labels, Labels, Sequence[str]]:
    """Return labels that are names, as their places in `classes`, or among the sorted names."""
    words = [[word(value) for value in y] for _, y in (train, test)]
    names = list(classes) or sorted(set(words[0]))
    place = {name: k for k, name in enumerate(names)}
    for (name, _), side in zip((train, test), words, strict=True):
        if unknown := [word for word in side if word not in place]:
            refuse(path, name, f"hold labels among {listed(names)}", repr(unknown[0]))
    y_train, y_test = (np.array([place[word] for word in side], np.int64) for side in words)
    return y_train, y_test, at_least_two(names, path)


def _marked(path: Path, side: Side, classes: Sequence[str]) -> Labels:
    """Return labels as places in `classes`, UNKNOWN for all others. The result for a row depends on this row alone."""
    name, y = side
    if y.ndim != 1:
        refuse(path, name, "have shape [n]", list(y.shape))
    place = {name: k for k, name in enumerate(classes)}
    if not all(re.fullmatch(r"-?\d+", name) for name in classes):
        # whole numbers are places in label order, as in data that refuse other labels
        place = {str(k): k for k in range(len(classes))} | place
    return np.array([place.get(_whole(value), UNKNOWN) for value in y], np.int64)


def _whole(value: Any) -> str:
    """Return a label as text; a float that is a whole number, and a truth value, as integers."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return word(value)


def word(value: Any) -> str:
    """Return a value as text: the name of a class, a client or a category. Bytes that are not UTF-8 are escaped."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def class_names(y: NDArray[Any]) -> tuple[str, ...]:
    """Return the classes' names of labels [n]: integers in numeric order, words sorted; () for any other array."""
    if y.ndim != 1 or y.dtype.kind not in "iubUSO":
        return ()
    if y.dtype.kind in "iu":
        return tuple(str(value) for value in np.unique(y))
    return tuple(sorted({word(value) for value in y}))


def groups(train: NDArray[Any], test: NDArray[Any]) -> SampleGroups:
    """Return each sample's group: the place of its value among a column's sorted values."""
    if {train.dtype.kind, test.dtype.kind} == {"i", "u"}:
        # numpy would join them as float64, in which large integers are alike
        train, test = train.astype(object), test.astype(object)
    values = np.unique(np.concatenate([train, test]) if len(test) else train)
    return SampleGroups(np.searchsorted(values, train), np.searchsorted(values, test), tuple(map(word, values)))


def stored(x_train: Samples, y_train: Targets, x_test: Samples, y_test: Targets) -> Arrays:
    """Return the four arrays, with training and test samples in one dtype, never float64."""
    dtype = x_train.dtype
    if len(x_test) and x_test.dtype != dtype:
        dtype = np.result_type(x_train, x_test)
    if dtype == np.float64:
        dtype = np.dtype(np.float32)
    return x_train.astype(dtype, copy=False), y_train, x_test.astype(dtype, copy=False), y_test
