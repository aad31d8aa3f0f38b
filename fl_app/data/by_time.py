"""The test part of a table by time (key `test-after`): rows after a date or a number, or the last rows of each client."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
from numpy.typing import NDArray

from fl_app.data.columns import Columns
from fl_app.data.encoding import DATE
from fl_app.data.parsing import FROM_ZERO, Places, missing, no_number, numbers_of
from fl_app.data.prepared import DataRequest
from fl_app.data.user_arrays import word
from fl_app.errors import DataError, listed
from fl_app.keys import nearest


def divide(
    request: DataRequest, table: Columns, whose: NDArray[np.generic], places: Places = FROM_ZERO
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (training, test) rows, sorted. whose: each row's client, [n].

    places: of the rows, for errors. Raises UserError for a column that does not exist or holds neither numbers nor dates, and
    for a client that would have no row for training.
    """
    column, text = _parsed(request, table)
    kind, values = _numbers(column, table[column], dataclasses.replace(places, of_model=True))
    if not text:
        test = _last(values, whose, request.test_ratio)
    else:
        test = np.flatnonzero(values > _value(column, kind, text))
        if not len(test):
            raise DataError(key="test-after", rule=f"no row of {request.path} is after {text} in column {column}")
    train = np.setdiff1d(np.arange(len(values)), test)
    without = np.setdiff1d(whose, whose[train])
    if len(without):
        names = [word(name) for name in without] if request.client else ["the data"]
        raise DataError(
            key="test-after", rule=f"{listed(names)} would have no row for training, with {request.test_after}"
        )
    return train, test.astype(np.int64)


def _parsed(request: DataRequest, table: Columns) -> tuple[str, str]:
    """Return the key's column and its value, "" without one. Raises UserError if there is no column of the name."""
    text = request.test_after
    if text in table:
        return text, ""
    column = max((name for name in table if text.startswith(f"{name}:")), key=len, default="")
    if not column or not (value := text[len(column) + 1 :].strip()):
        name = text.partition(":")[0]
        raise DataError(
            key="test-after",
            rule=f"must be COLUMN or COLUMN:VALUE, and {request.path} has no column {name!r}; it has "
            f"{listed(list(table))}{nearest(name, table)}",
        )
    return column, value


def _value(column: str, kind: str, text: str) -> float:
    """Return the key's value as a number, or a date's days since 1970-01-01. Raises UserError for any other text."""
    found = numbers_of(np.array([text], dtype=object))
    with contextlib.suppress(ValueError):
        value = float(found[1][0]) if found and kind == DATE == found[0] else float(text) if kind != DATE else np.nan
        if np.isfinite(value):
            return float(value)
    raise DataError(key="test-after", rule=f"must be {column}:VALUE, with a {kind} as in the column", value=text)


def _numbers(column: str, values: NDArray[np.generic], places: Places) -> tuple[str, NDArray[np.float64]]:
    found = numbers_of(values)
    if found is None or found[1].ndim > 1:
        raise DataError(
            key="test-after",
            rule=f"column {column} must hold numbers or dates, got {no_number(values, column, places)}",
        )
    empty = np.flatnonzero(missing(found[1]))
    if empty.size:
        first = int(empty[0])
        told = f"row {places.number(first)} has none{places.shown(column, first)}"
        raise DataError(
            key="test-after", rule=f"column {column} must have a value in every row, {told}; {empty.size} have none"
        )
    return found[0], found[1].astype(np.float64)


def _last(values: NDArray[np.float64], whose: NDArray[np.generic], ratio: float) -> NDArray[np.int64]:
    """Return the last rows of each client by their values, sorted; each keeps a row for training."""
    groups = np.unique(whose, return_inverse=True)[1]
    chosen: list[NDArray[np.int64]] = []
    for group in range(groups.max() + 1):
        own = np.flatnonzero(groups == group)
        ordered = own[np.argsort(values[own], kind="stable")]
        count = min(round(len(own) * ratio), len(own) - 1)
        chosen.append(ordered[len(own) - count :])
    return np.sort(np.concatenate(chosen)).astype(np.int64)
