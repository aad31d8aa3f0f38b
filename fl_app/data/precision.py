"""Shift and scale of numbers that float32 would not keep apart: features and targets far from zero beside their spread.

Samples are stored as float32 (integers as int64, but a task converts them to float32). The next float32 after
1,709,251,200 is 128 larger. A column of large, close values is shifted by its smallest training value before it is
stored. A column of tiny values is scaled by a power of two. Both are computed in float64 or in integers. All other
columns are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import listed

FAR = 1000.0
"""Float32 is too coarse if a column's largest absolute value exceeds this many ranges: a step is 1e-4 of the range."""

TINY = 1e-30
"""A column is scaled if all its absolute values are smaller: float32 ends at 1e-38."""

EXACT = 2**24
"""Float32 represents every integer up to this one."""

FEW_STEPS = 4
"""A range of at most this many steps of the column's own type is a remainder of rounding."""


BEYOND = 2**63
"""int64 ends below this integer. Arrays of unsigned integers that reach it are read as float64."""


def plain(x: NDArray[Any]) -> NDArray[Any]:
    """Return an array without uint64: int64, which keeps all its values, or float64 if one is BEYOND."""
    if x.dtype != np.uint64:
        return x
    return x.astype(np.float64 if x.max(initial=0) >= BEYOND else np.int64)


@dataclass(frozen=True)
class Stored:
    """The conversion of numbers for storage, (value - shift) / scale for every feature. Empty: numbers are unchanged.

    shift: [F], integers for integer features. scale: [F], powers of two.
    """

    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def of(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return numbers x [n, ..., F], or [n] with F = 1, as stored: int64, float64, or x itself if unchanged."""
        if not self.shift:
            return x
        x = plain(x)
        of_integers = all(isinstance(value, int) for value in self.shift) and set(self.scale) == {1.0}
        if of_integers and x.dtype.kind in "iu":
            return x.astype(np.int64) - np.array(self.shift, np.int64)
        return np.asarray((x.astype(np.float64) - np.array(self.shift, np.float64)) / np.array(self.scale))


def held(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return values as float64 [n, ...]: NaN for each that is no number that float32 can hold."""
    out = x.astype(np.float64) if x.dtype.kind in "biuf" else np.full(x.shape, np.nan)
    with np.errstate(over="ignore"):
        out[~np.isfinite(out.astype(np.float32))] = np.nan
    return out


def stored(x: NDArray[Any], *, tokens: bool = False) -> Stored:
    """Return how to store training numbers x [n, ..., F] or [n] so that float32 keeps them apart.

    tokens: whether the model receives integers as such; these are never changed.
    """
    x = plain(x)
    if not _may_be_far(x) or (tokens and x.dtype.kind in "iu"):
        return Stored()
    shift: list[float] = []
    scale: list[float] = []
    for low, high in _ranges(x):
        largest, spread = max(abs(low), abs(high)), high - low
        far = spread > 0 and largest > FAR * spread
        if x.dtype.kind == "f":
            far = far and spread > FEW_STEPS * _step(x.dtype, largest)
        else:
            far = far and largest > EXACT
        shift.append(low if far else 0)
        rest = float(spread if far else largest)
        scale.append(float(2.0 ** np.floor(np.log2(rest))) if 0 < rest < TINY else 1.0)
    if not any(shift) and set(scale) == {1.0}:
        return Stored()
    return Stored(tuple(shift), tuple(scale))


def remarks(x: NDArray[Any], how: Stored, names: Sequence[str]) -> list[str]:
    """Return lines about features of x that are shifted or scaled, of integers too large for int64, or of rounding errors.

    names: the features' names, [F].
    """
    lines = []
    if x.dtype == np.uint64 and (x := plain(x)).dtype.kind == "f":
        beyond = [name for name, (_, high) in zip(names, _ranges(x), strict=True) if high >= BEYOND]
        lines.append(
            f"{listed(beyond)}: read as float64, which keeps about 16 digits, because of integers from 2^63 on"
        )
    for name, shift, scale in zip(names, how.shift, how.scale, strict=False):
        changes = [f"minus {shift:.16g}"] * bool(shift) + [f"divided by {scale:.3g}"] * (scale != 1)
        if changes:
            lines.append(f"{name} is stored {' and '.join(changes)}: float32 does not keep its values apart")
    if x.dtype.kind == "f" and _may_be_far(x):
        spreads = zip(names, _ranges(x), strict=True)
        coarse = [
            name for name, (low, high) in spreads if 0 < high - low <= FEW_STEPS * _step(x.dtype, max(-low, high))
        ]
        if coarse:
            lines.append(
                f"{listed(coarse)}: the spread is below {FEW_STEPS} steps of {x.dtype}, so the differences are only rounding "
                "errors; save the values as float64 or as integers"
            )
    return lines


def _may_be_far(x: NDArray[Any]) -> bool:
    return bool(x.size) and x.dtype.kind in "iuf" and x.dtype.itemsize > 1


def _ranges(x: NDArray[Any]) -> list[tuple[float, float]]:
    """Return each feature's smallest and largest value, exact: integers as int, other numbers as float."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
    number: type[int] | type[float] = int if x.dtype.kind in "iu" else float
    return [(number(low), number(high)) for low, high in zip(rows.min(0), rows.max(0), strict=True)]


def _step(dtype: np.dtype[Any], value: float) -> float:
    """Return the distance between neighbouring floating-point numbers of a type at a value."""
    return float(np.spacing(dtype.type(value)))
