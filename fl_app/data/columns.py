"""What becomes of each column of a table: a feature and how it is encoded, a target, the client, or left out and why.

The rules (docs/tasks.md, "Columns") look at a column's name and values alone, so that they are the same at every site. What no rule
can read right is refused, all such columns in one error. Columns go by their names: a test part may have another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.data.arrays import word
from fl_app.data.prepared import DataRequest, listed
from fl_app.errors import UserError

Columns = Mapping[str, NDArray[Any]]
"""Values by the name of their column."""

AsWritten = Callable[[str, int], str]
"""(column, row) -> what the file has there, "" if it cannot be told."""

FEW, MANY = 10, 20
"""Consecutive whole numbers number the rows if there are FEW rows and they are in order, or MANY rows in any order."""

MOST_WORDS = 1000
"""A column of more words is not encoded one by one."""

_WITHOUT_NAME = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
_SAVED_INDEX = re.compile(r"Unnamed: 0(\.\d+)*|__index_level_\d+__")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([ T]\d\d?:\d\d.*)?|\d\d?[./-]\d\d?[./-]\d{4}.*")


@dataclass(frozen=True)
class Use:
    """What becomes of a column. role: feature, target, client or left out. how: its encoding, or why it is left out."""

    name: str
    role: str
    how: str = ""


@dataclass(frozen=True)
class Encoded:
    """The features of a table.

    uses: every column's, in the file's order. names: of the encoded features, [F]. parts: per part of the data the features, each
    [n] or [n, ...], as numbers. remarks: what a user should know of columns that were not taken as they are.
    """

    uses: tuple[Use, ...]
    names: tuple[str, ...]
    parts: tuple[tuple[NDArray[Any], ...], ...]
    remarks: tuple[str, ...]


def by_name(request: DataRequest, parts: Sequence[Columns]) -> list[Columns]:
    """Return the parts with their columns in the first part's order. Raises UserError if they have other columns than that."""
    first = list(parts[0])
    for part in parts[1:]:
        if set(part) != set(first):
            raise UserError(
                f"dataset: {request.path}: train and test must have columns of the same names; train has "
                f"{listed(first)}; test has {listed(list(part))}"
            )
    return [{name: part[name] for name in first} for part in parts]


def encode(request: DataRequest, parts: Sequence[Columns], as_written: AsWritten) -> Encoded:
    """Return the features of a table's parts, whose columns are in one order. Raises UserError, naming all unfit columns."""
    train = parts[0]
    for key, asked in (("exclude", request.exclude), ("categorical", request.categorical)):
        for name in asked:
            if name not in train:
                raise UserError(f"{key}: {request.path} has no column {name!r}; it has {listed(list(train))}")
            if name in (*request.targets, request.client):
                raise UserError(f"{key}: {name!r} is the column of {'target' if name in request.targets else 'client'}")
    uses: list[Use] = []
    names: list[str] = []
    features: list[list[NDArray[Any]]] = [[] for _ in parts]
    problems: list[str] = []
    for place, (name, values) in enumerate(train.items()):
        if name in request.targets or name == request.client:
            uses.append(Use(name, "target" if name in request.targets else "client"))
            continue
        if why := _left_out(request, name, values, place):
            uses.append(Use(name, "left out", why))
            continue
        if _WITHOUT_NAME.fullmatch(name):
            problems.append(
                f"column {place + 1} must have a name ({name!r} stands for none); name it in the header, or exclude it"
            )
            continue
        sides = [part[name] for part in parts]
        found = _words(name, sides) if name in request.categorical else _numbers(name, sides, as_written)
        if isinstance(found, str):
            problems.append(found)
            continue
        how, encoded, numbers = found
        uses.append(Use(name, "feature", how))
        names += encoded
        for part, more in zip(features, numbers, strict=True):
            part += more
    _refuse(request, problems)
    if not names:
        left = [f"{use.name} ({use.how})" for use in uses if use.role == "left out"]
        others = ", ".join(use.name for use in uses if use.role != "left out")
        also = f"; left out: {listed(left)}" if left else ""
        raise UserError(f"dataset: {request.path} has no columns but {others}: nothing to learn from{also}")
    return Encoded(tuple(uses), tuple(names), tuple(tuple(side) for side in features), tuple(_remarks(uses, train)))


def _refuse(request: DataRequest, problems: Sequence[str]) -> None:
    """Raise UserError if there are problems; the first few, one a line if they are several."""
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(f"dataset: {request.path}: {problems[0]}")
    shown = [f"  {problem}" for problem in problems[:MANY]]
    if len(problems) > MANY:
        shown.append(f"  and {len(problems) - MANY} more columns")
    raise UserError(f"dataset: {request.path}: {len(problems)} columns cannot be features:\n" + "\n".join(shown))


# Columns that are no features -----------------------------------------------------------------------------------------


def _left_out(request: DataRequest, name: str, values: NDArray[Any], place: int) -> str:
    """Say why a column is no feature; "" if it is one."""
    if name in request.exclude:
        return "exclude"
    if name in request.categorical:
        return ""
    if _SAVED_INDEX.fullmatch(name) or (place == 0 and _WITHOUT_NAME.fullmatch(name)):
        return "an index that a program saved with the table"
    if _WITHOUT_NAME.fullmatch(name) and missing(values).all():
        return "empty and without a name, as a comma at the end of every line makes it"
    if numbers_the_rows(values):
        return "it numbers the rows"
    return ""


def numbers_the_rows(values: NDArray[Any]) -> bool:
    """Tell whether a column has consecutive whole numbers, each once: in the rows' order, or in any if there are many rows."""
    if values.ndim != 1 or values.dtype.kind not in "iuf" or not len(values) or not np.isfinite(values).all():
        return False
    if float(values.max()) - float(values.min()) != len(values) - 1:
        return False
    if len(values) < MANY:
        return len(values) >= FEW and bool(
            (values[1:] == values[:-1] + 1).all() or (values[:-1] == values[1:] + 1).all()
        )
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1] + 1).all())


def _remarks(uses: Iterable[Use], train: Columns) -> list[str]:
    lines = []
    for use in uses:
        if use.role == "left out":
            lines.append(f"column {use.name!r} is left out: {use.how}")
        elif use.role == "feature":
            values = train[use.name]
            if use.how != NUMBER:
                lines.append(f"column {use.name!r}: {use.how}")
            elif values.ndim == 1 and values.dtype.kind in "iu" and len(values) >= MANY:
                if len(np.unique(values)) == len(values):
                    lines.append(
                        f"column {use.name!r} has another whole number in every row: if they name the rows, set exclude"
                    )
    # what was asked for needs no remark
    return [line for line in lines if not line.endswith("is left out: exclude")]


# Features -------------------------------------------------------------------------------------------------------------

NUMBER = "number"

Features = tuple[str, list[str], list[list[NDArray[Any]]]]
"""How a column is encoded, the features' names, and per part the features."""


def _numbers(name: str, sides: Sequence[NDArray[Any]], as_written: AsWritten) -> Features | str:
    """Return a column as one feature, or say why it is none."""
    out: list[list[NDArray[Any]]] = []
    how = NUMBER
    for part, values in zip(("", "test part: "), sides, strict=False):
        if values.dtype.kind == "O":
            values = _as_numbers(values)
        if values.dtype.kind == "b":
            how = "boolean, as 0 and 1"
        elif values.dtype.kind not in "iuf":
            return f"{part}column {name} must hold numbers, got {_no_number(values, name, as_written)}"
        elif values.dtype.kind == "f" and not np.isfinite(values).all():
            wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))
            return (
                f"{part}column {name} must have a finite number in every row, row {wrong[0]} has not"
                f"{_written(as_written, name, int(wrong[0]))}; {len(wrong)} of {len(values)} rows; fill them in, or "
                f"leave the column out (exclude = {name!r})"
            )
        out.append([values])
    return how, [name], out


def _words(name: str, sides: Sequence[NDArray[Any]]) -> Features | str:
    """Return a column of words as one feature of zeros and ones for each word, sorted, or say why it cannot be that."""
    for values in sides:
        if values.ndim > 1 or _first_structure(values) >= 0:
            return f"column {name} must hold a word or a number per row to be categorical, got {_shape_of(values)}"
        if (empty := np.flatnonzero(missing(values))).size:
            return f"column {name} must have a value in every row, row {empty[0]} has none"
    texts = [np.array([word(value) for value in values], dtype=object) for values in sides]
    known = sorted(set().union(*texts))
    if len(known) > MOST_WORDS:
        return f"column {name} must have at most {MOST_WORDS} words to be categorical, got {len(known)}"
    parts = [[np.asarray(side == text, np.float32) for text in known] for side in texts]
    shown = listed(known)
    return f"one of {len(known)} words, each a feature of 0 and 1: {shown}", [f"{name}={text}" for text in known], parts


def _as_numbers(values: NDArray[Any]) -> NDArray[Any]:
    """Return objects that are all numbers (decimals, say) or all booleans as an array of such; others as they are."""
    from numbers import Number

    gone = missing(values)
    there = values[~gone] if values.ndim == 1 else values[:0]
    if not len(there) or values.ndim > 1:
        return values
    if all(isinstance(value, bool | np.bool_) for value in there):
        return values.astype(bool) if not gone.any() else np.where(gone, np.nan, 1.0)
    if all(isinstance(value, Number) and not isinstance(value, bool | complex) for value in there):
        return np.array([np.nan if none else float(value) for value, none in zip(values, gone, strict=True)])
    return values


def _no_number(values: NDArray[Any], name: str, as_written: AsWritten) -> str:
    """Say what a column holds instead of numbers, and what can be done."""
    leave = f"leave it out (exclude = {name!r})"
    if values.dtype.kind in "mM":
        row = 0
        return f"dates ({values[row]} in row {row}); turn them into numbers, days say, or {leave}"
    if values.dtype.kind not in "OUS" or not len(values):
        return f"{values.dtype}; {leave}"
    if values.ndim > 1 or _first_structure(values) >= 0:
        return f"{_shape_of(values)}; {leave}"
    gone = missing(values)
    numeric = np.array([none or _is_number(value) for value, none in zip(values, gone, strict=True)])
    row = int(np.argmin(numeric))
    found = f"{word(values[row])!r}"[:40] + f" in row {row}"
    if gone.any():
        empty = int(np.argmax(gone))
        found += f", and no value in {gone.sum()} rows (the first: row {empty}{_written(as_written, name, empty)})"
    if numeric.mean() > 0.5:
        return f"{found}; mend these {np.count_nonzero(~numeric)} rows, name the word in na-values, or {leave}"
    if _DATE.fullmatch(word(values[row]).strip()):
        return f"the date {found}; turn dates into numbers, days say, or {leave}"
    if re.fullmatch(r"\s*-?\d+,\d+\s*", word(values[row])):
        return f"{found}, a decimal comma; write numbers with a point"
    return f"{found}; encode it (categorical = {name!r}, a feature for each word), or {leave}"


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _first_structure(values: NDArray[Any]) -> int:
    """Return the first row that holds a list, an array or a map, -1 if none does."""
    if values.dtype.kind != "O":
        return -1
    rows = (k for k, value in enumerate(values) if isinstance(value, list | tuple | dict | np.ndarray | set))
    return next(rows, -1)


def _shape_of(values: NDArray[Any]) -> str:
    """Say what the first row with a list or a map has, and the first row that has another shape of it."""
    row = max(_first_structure(values), 0)
    first = _structure(values[row])
    other = next((k for k, value in enumerate(values) if _structure(value) != first), -1)
    return f"{first} in row {row}" + (f" and {_structure(values[other])} in row {other}" if other >= 0 else "")


def _structure(value: Any) -> str:
    if isinstance(value, dict):
        return f"a map of {', '.join(map(str, value))}"
    if isinstance(value, list | tuple | np.ndarray):
        try:
            shape = np.shape(value)
        except ValueError:
            return "a list of lists of unequal lengths"
        return f"a list of shape {list(shape)}"
    return f"{type(value).__name__}"


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows have no value, bool [n]: None, NaN, NaT, or such an element of an array."""
    if values.dtype.kind == "O" and values.ndim == 1:
        import pandas

        lists = (list, tuple, dict, np.ndarray, set)
        return np.array([not isinstance(value, lists) and bool(pandas.isna(value)) for value in values], bool)
    if values.dtype.kind in "fcmM":
        gone = np.isnat(values) if values.dtype.kind in "mM" else np.isnan(values)
        return np.asarray(gone.any(axis=tuple(range(1, values.ndim))))
    return np.zeros(len(values), bool)


def refuse_missing(request: DataRequest, name: str, values: NDArray[Any], as_written: AsWritten) -> None:
    """Raise UserError if a row has no value in the target's column, or in that of the clients."""
    empty = np.flatnonzero(missing(values))
    if not empty.size:
        return
    written = _written(as_written, name, int(empty[0]))
    advice = "; if that is a name, set na-values = empty: then only empty cells are missing" if written else ""
    raise UserError(
        f"dataset: {request.path}: column {name} must have a value in every row, row {empty[0]} has none{written}{advice}"
    )


def _written(as_written: AsWritten, name: str, row: int) -> str:
    text = as_written(name, row)
    return f" ({text!r} in the file, which pandas takes for a missing value)" if text else ""
