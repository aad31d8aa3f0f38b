"""Kinds of a column's values (numbers, booleans, dates or none of these), missing values, and places of rows."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.data.encoding import BOOLEAN, DATE, NUMBER
from fl_app.data.moments import held
from fl_app.data.user_arrays import word
from fl_app.errors import counted

DAY = np.timedelta64(1, "D") / np.timedelta64(1, "us")
"""A day in microseconds."""

_ISO = re.compile(r"\s*\d{4}-\d\d?-\d\d?([ T]\d\d?:\d\d.*)?\s*")
_OTHER_DATE = re.compile(r"\s*\d\d?[./-]\d\d?[./-](\d{4}|\d\d)\b.*")

Numbers = tuple[str, NDArray[Any]]
"""(kind of a column as in fl_app/data/encoding.py, values as numbers [n, ...], NaN where a value is missing)."""


@dataclass(frozen=True)
class Places:
    """Places of a table's rows in its file.

    number: from a row to its number in errors. written: from a column and a row to the file's text there; "" if it is
    unknown. of_model: whether the rows are for a trained model, which needs all of its columns.
    """

    number: Callable[[int], int] = lambda row: row
    written: Callable[[str, int], str] = lambda column, row: ""
    of_model: bool = False

    def shown(self, column: str, row: int) -> str:
        """Return the file's text of a missing value, for an error; "" if the cell is empty or unknown."""
        text = self.written(column, row)
        return f" ({text!r} in the file, which pandas takes for a missing value)" if text else ""


FROM_ZERO = Places()
"""Places for rows that are counted from 0."""


def missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows have no value, bool [n]: None, NaN, NaT, or an array that contains NaN or NaT."""
    if values.dtype.kind == "O" and values.ndim == 1:
        import pandas

        return np.array([not is_structure(value) and bool(pandas.isna(value)) for value in values], bool)
    if values.dtype.kind in "fcmM":
        gone = np.isnat(values) if values.dtype.kind in "mM" else np.isnan(values)
        return np.asarray(gone.any(axis=tuple(range(1, values.ndim))))
    return np.zeros(len(values), bool)


def numbers_of(values: NDArray[Any]) -> Numbers | None:
    """Return a column as numbers: booleans as 0 and 1, dates as days since 1970-01-01. None: it has other values."""
    kind = values.dtype.kind
    if kind in "biuf":
        return BOOLEAN if kind == "b" else NUMBER, values
    if values.ndim > 1:
        return None
    if kind == "M":
        return DATE, _days(values)
    if kind not in "OUS":
        return None
    gone = missing(values)
    there = values[~gone]
    if all(isinstance(value, bool | np.bool_) for value in there) and len(there):
        return BOOLEAN, values.astype(bool) if not gone.any() else _placed(gone, there.astype(np.float64))
    if all(isinstance(value, Number) and not isinstance(value, bool | complex) for value in there):
        return NUMBER, _placed(gone, there.astype(np.float64))
    if all(isinstance(value, datetime.date | np.datetime64) or _is_iso(value) for value in there):
        days = _days_of(there)
        return None if np.isnan(days).any() else (DATE, _placed(gone, days))
    return None


def usable_numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return a column's values as numbers, float64 [n, ...]: NaN for each that is no number that float32 can hold.

    Dates are days if more values are dates than numbers. Apart from that, a number depends on its own value alone.
    """
    out = _days(values) if values.dtype.kind == "M" else held(values)
    if values.ndim == 1 and values.dtype.kind in "OUS":
        fits, dates = np.array([is_number(value) for value in values], bool), _are_dates(values)
        if dates.sum() > fits.sum():
            out[dates] = _days_of(values[dates])
        else:
            out[fits] = [float(value) for value in values[fits]]
    return held(out)


def _placed(gone: NDArray[np.bool_], there: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the present values at their rows, and NaN at rows without a value."""
    out = np.full(len(gone), np.nan)
    out[~gone] = there
    return out


def _is_iso(value: Any) -> bool:
    return isinstance(value, str | bytes) and bool(_ISO.fullmatch(word(value)))


def _days_of(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return dates, or words of the form year-month-day, as days since 1970-01-01; NaN for no date (February 30)."""
    import pandas

    texts = [word(value).strip() if isinstance(value, str | bytes) else value for value in values]
    # a date without a time zone is read as UTC: it must be the same number at every site
    stamps = pandas.to_datetime(pandas.Series(texts, dtype=object), format="ISO8601", utc=True, errors="coerce")
    return _days(stamps.dt.tz_localize(None).to_numpy())


def _days(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return datetime64 [n] as days since 1970-01-01, NaN for NaT."""
    since = values.astype("datetime64[us]")
    return np.where(np.isnat(since), np.nan, since.astype(np.int64) / DAY)


# Why a column holds no numbers ----------------------------------------------------------------------------------------


def no_number(values: NDArray[Any], name: str, places: Places) -> str:
    """Return the end of an error: the values that a column holds instead of numbers, and the remedy."""
    ways = [] if places.of_model else [f"leave it out (add {name!r} to exclude)"]

    def ending(found: str, *mend: str) -> str:
        remedies = ", or ".join([*mend, *ways])
        return f"{found}; {remedies}" if remedies else found

    if values.dtype.kind == "m":
        durations = f"durations ({values[0]} in row {places.number(0)})"
        return ending(durations, "turn them into numbers such as hours")
    if values.dtype.kind not in "OUS" or not len(values):
        return ending(str(values.dtype))
    if values.ndim > 1 or first_structure(values) >= 0:
        return ending(shape_of(values, places))
    gone = missing(values)
    numeric = np.array([none or is_number(value) for value, none in zip(values, gone, strict=True)])
    dates = gone | _are_dates(values)
    fitting = dates if dates.mean() > max(numeric.mean(), 0.5) else numeric
    if fitting.all():
        return ending(f"{'dates' if fitting is dates else 'numbers'} as {type(values[0]).__name__}")
    row = int(np.argmin(fitting))
    text = word(values[row])
    found = f"{text!r}"[:40] + f" in row {places.number(row)}"
    if gone.any():
        empty = int(np.argmax(gone))
        first = f"row {places.number(empty)}{places.shown(name, empty)}"
        found += f", and no value in {counted(int(gone.sum()), 'row')} (the first: {first})"
    if re.fullmatch(r"\s*[-+]?\d+(,\d+)+(\.\d*)?\s*", text):
        return (
            f"{found}, a number with a comma; remove the comma if it separates thousands, or write a point if it is a decimal "
            "comma"
        )
    if fitting.mean() > 0.5:
        unfit = np.count_nonzero(~fitting)
        mend = "correct it" if unfit == 1 else f"correct these {unfit} rows"
        remedies = [mend, "name the word in na-values", *ways]
        return f"{found}; {', '.join(remedies[:-1])}, or {remedies[-1]}"
    if _OTHER_DATE.fullmatch(text):
        return ending(f"the date {found}", "write dates as year-month-day, 2024-12-31")
    words = {word(value) for value, none in zip(values, gone, strict=True) if not none}
    if len(words) > max(len(values) / 2, 10):
        texts = [] if places.of_model else ["set tokenizer if they are texts"]
        return ending(f"{found}, and {len(words)} words in {len(values)} rows", *texts)
    encode = [] if places.of_model else [f"encode it (add {name!r} to categorical: a feature for each word)"]
    return ending(found, *encode)


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or its text."""
    # Python also reads 1_000, and digits of other scripts
    if isinstance(value, str | bytes) and not re.fullmatch(r"[ -^`-~\s]*", word(value)):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _are_dates(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values [n] are dates, or words of the form year-month-day, bool [n]."""
    found = np.array([isinstance(value, datetime.date) or _is_iso(value) for value in values], bool)
    found[found] = ~np.isnan(_days_of(values[found]))
    return found


def no_date(values: NDArray[Any], places: Places) -> str:
    """Return the first value [n] that is there and no date, with its row, and the number of others; "" if there is none."""
    if values.dtype.kind not in "OUS" or values.ndim > 1 or first_structure(values) >= 0:
        return ""
    wrong = np.flatnonzero(~(missing(values) | _are_dates(values)))
    if not wrong.size:
        return ""
    more = f" and in {counted(wrong.size - 1, 'more row')}" if wrong.size > 1 else ""
    return f"{word(values[wrong[0]])!r:.40} in row {places.number(int(wrong[0]))}{more}"


def first_structure(values: NDArray[Any]) -> int:
    """Return the first row that holds a list, a tuple, an array, a map or a set; -1 if none does."""
    if values.dtype.kind != "O":
        return -1
    return next((k for k, value in enumerate(values) if is_structure(value)), -1)


def is_structure(value: Any) -> bool:
    """Return whether a value is a list, a tuple, an array, a map or a set."""
    return isinstance(value, list | tuple | dict | np.ndarray | set)


def shape_of(values: NDArray[Any], places: Places) -> str:
    """Return, in words, the shape of the first list or map, and the first row that has another shape."""
    row = max(first_structure(values), 0)
    first = _structure(values[row])
    other = next((k for k, value in enumerate(values) if _structure(value) != first), -1)
    more = f" and {_structure(values[other])} in row {places.number(other)}" if other >= 0 else ""
    return f"{first} in row {places.number(row)}{more}"


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
