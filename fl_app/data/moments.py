"""Means and standard deviations of training samples, from exact sums, and numbers that float32 would not keep apart.

Exact sums do not depend on the order of addition. The added sums of several sites equal the sums of one table with all
their rows. So a deployment and its simulation scale inputs by the same bits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import listed

PIXEL = 255
"""8-bit images are divided by this to become inputs."""

_BATCH = 2**22
_HALF = 12
"""Bits of a half. A float32's 24 bits are split in two halves: the products' sums in float64 are not rounded."""

_LOWEST = 150
"""A float32 is a whole number of at most 24 bits times 2 ** (e - 150), with e its exponent's field, at least 1."""

_MOST_DIGITS = 400
"""No sum of float32 numbers, or of their squares, has more decimal digits, for any number of summands."""

_LARGEST_SQUARE = 2**512
"""Samples are float32 or smaller, so the mean of their squares is smaller, also after a shift. It has room in a float64."""


@dataclass(frozen=True)
class Moments:
    """Mean and population standard deviation per channel or feature. still: it is constant, and its std is set to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    still: tuple[bool, ...]


@dataclass(frozen=True)
class MomentSums:
    """Exact sums over training samples, per channel of images, per feature (the last axis) of anything else.

    count: numbers in each sum. totals, squares: sums of the numbers, and of their squares. unit: the divisor that turns
    the numbers into inputs, 1 or PIXEL.
    """

    count: int
    totals: tuple[Fraction, ...]
    squares: tuple[Fraction, ...]
    unit: int = 1

    @classmethod
    def of(cls, x: NDArray[Any], shift: Sequence[float] = (), scale: Sequence[float] = ()) -> Self:
        """Return the sums of samples x [n, ...].

        uint8 x is images [n, C, H, W]. Integers are converted to float32, as for a model. shift, scale: those x is
        stored with; the sums are then those of the original numbers.
        """
        images = x.dtype == np.uint8
        channel = 1 if x.ndim == 4 else x.ndim - 1
        columns = np.moveaxis(x, channel, -1).reshape(-1, x.shape[channel])
        totals, squares = _sums_of_bytes(columns) if images else _sums_of_floats(columns)
        found = cls(len(columns), totals, squares, PIXEL if images else 1)
        return found._raw(shift, scale) if shift else found

    def _raw(self, shift: Sequence[float], scale: Sequence[float]) -> Self:
        """Return the sums of value * scale + shift."""
        totals, squares = [], []
        for total, square, less, by in zip(self.totals, self.squares, shift, scale, strict=True):
            a, b = Fraction(less), Fraction(by)
            totals.append(b * total + self.count * a)
            squares.append(b * b * square + 2 * a * b * total + self.count * a * a)
        return type(self)(self.count, tuple(totals), tuple(squares), self.unit)

    def __add__(self, other: MomentSums) -> MomentSums:
        """Return the sums over both. Both must have the same number of features and the same unit."""
        totals = tuple(a + b for a, b in zip(self.totals, other.totals, strict=True))
        squares = tuple(a + b for a, b in zip(self.squares, other.squares, strict=True))
        return MomentSums(self.count + other.count, totals, squares, self.unit)

    @property
    def kind(self) -> tuple[int, int]:
        """(number of features, unit): only sums of equal kind can be added."""
        return len(self.totals), self.unit

    @property
    def means(self) -> list[Fraction]:
        """Mean per channel or feature."""
        return [total / (self.count * self.unit) for total in self.totals]

    @property
    def variances(self) -> list[Fraction]:
        """Population variance per channel or feature."""
        n = self.count
        pairs = zip(self.totals, self.squares, strict=True)
        return [(n * square - total * total) / (n * self.unit) ** 2 for total, square in pairs]

    @property
    def moments(self) -> Moments:
        """Mean and standard deviation, each rounded once."""
        deviations = [math.sqrt(variance) for variance in self.variances]
        still = tuple(deviation == 0 for deviation in deviations)
        std = tuple(deviation or 1.0 for deviation in deviations)
        return Moments(tuple(map(float, self.means)), std, still)

    @property
    def scaling(self) -> Scaling:
        """The scaling from raw numbers to inputs. It shifts and scales numbers that float32 would not keep apart."""
        found, shift, scale = self.moments, [], []
        means, stds = list(found.mean), list(found.std)
        for k, (mean, std, still) in enumerate(zip(found.mean, found.std, found.still, strict=True)):
            spread = 0.0 if still else std
            largest = max(abs(mean), spread)
            far = spread > 0 and abs(mean) > FAR * spread
            tiny = 0 < largest < TINY
            shift.append(mean if far or tiny else 0.0)
            scale.append(float(2.0 ** math.floor(math.log2(spread))) if tiny and spread else 1.0)
            if far or tiny:
                means[k] = float((self.means[k] - Fraction(mean)) / Fraction(scale[k]))
                stds[k] = std / scale[k] if spread else std
        if not any(shift) and set(scale) <= {1.0}:
            return Scaling(tuple(means), tuple(stds))
        return Scaling(tuple(means), tuple(stds), tuple(shift), tuple(scale))

    def to_json(self) -> str:
        """Return the sums as JSON. A sum is [m, e], for m * 2 ** e."""
        sums = {"totals": [_dyadic(value) for value in self.totals], "squares": [_dyadic(v) for v in self.squares]}
        return json.dumps({"count": self.count, "unit": self.unit, **sums})

    @classmethod
    def from_json(cls, text: object) -> Self:
        """Return the sums that `to_json` wrote. Raises ValueError for sums that no samples have."""
        words = str(text)
        if re.search(rf"\d{{{_MOST_DIGITS + 1}}}", words):
            raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
        try:
            told = json.loads(words)
            count, unit = told["count"], told["unit"]
            totals, squares = ([_fraction(pair) for pair in told[name]] for name in ("totals", "squares"))
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a table of sums ({error!r:.80})") from None
        if type(count) is not int or count < 1 or unit not in (1, PIXEL) or not totals or len(totals) != len(squares):
            raise ValueError("count, unit and lists of one length are needed")
        found = cls(count, tuple(totals), tuple(squares), unit)
        if min(found.variances) < 0:
            raise ValueError("the squares are smaller than the totals allow")
        if max(found.squares) > _LARGEST_SQUARE * count:
            raise ValueError("the squares are larger than those of numbers can be")
        return found


def added(several: Iterable[MomentSums]) -> MomentSums:
    """Return the sum of at least one Sums."""
    return reduce(MomentSums.__add__, several)


@dataclass(frozen=True)
class Scaling:
    """The scaling from raw numbers to inputs: ((value - shift) / scale - mean) / std, per channel or feature.

    Samples are stored as (value - shift) / scale. shift, scale: (): samples are stored unchanged.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, told: Mapping[str, Sequence[float]]) -> Self:
        """Return the scaling that a table of run.json holds."""
        return cls(*(tuple(told[name]) for name in ("mean", "std", "shift", "scale")))

    def stored_with(self, shift: Sequence[float], scale: Sequence[float]) -> Scaling:
        """Return the same scaling for numbers that are stored with another shift and scale."""
        if (self.shift, self.scale) == (tuple(shift), tuple(scale)):
            return self
        zeros, ones = (0.0,) * len(self.mean), (1.0,) * len(self.mean)
        mean, std = [], []
        mine = zip(self.mean, self.std, self.shift or zeros, self.scale or ones, strict=True)
        for (m, s, a, b), less, by in zip(mine, shift or zeros, scale or ones, strict=True):
            mean.append(float((Fraction(m) * Fraction(b) + Fraction(a) - Fraction(less)) / Fraction(by)))
            std.append(float(Fraction(s) * Fraction(b) / Fraction(by)))
        return Scaling(tuple(mean), tuple(std), tuple(shift), tuple(scale))


def _sums_of_bytes(columns: NDArray[Any]) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    """Return the sums of uint8 [m, C] and of the squares, per column."""
    counts = np.zeros((columns.shape[1], 256), np.int64)
    for start in range(0, len(columns), _BATCH):
        batch = columns[start : start + _BATCH]
        for channel, row in enumerate(counts):
            row += np.bincount(batch[:, channel], minlength=256)
    values = np.arange(256)
    return tuple(map(Fraction, map(int, counts @ values))), tuple(map(Fraction, map(int, counts @ values**2)))


def _sums_of_floats(columns: NDArray[Any]) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    """Return the sums of numbers [m, F] and of their squares, per column, exact for the numbers rounded to float32.

    Float32 numbers with one exponent are whole numbers of 24 bits times a power of two. They are summed by exponent.
    """
    features = columns.shape[1]
    totals, squares = [Fraction(0)] * features, [Fraction(0)] * features
    rows = max(1, _BATCH // features)
    for start in range(0, len(columns), rows):
        bits = np.ascontiguousarray(columns[start : start + rows], np.float32).view(np.uint32)
        exponent = ((bits >> 23) & 255).astype(np.int64)
        digits = (bits & 0x7FFFFF) | ((exponent > 0).astype(np.uint32) << 23)
        place = np.maximum(exponent, 1) + 256 * np.arange(features)
        low, high = digits & (2**_HALF - 1), digits >> _HALF
        signed = np.where(bits >> 31, -digits.astype(np.int64), digits.astype(np.int64))
        total, least, middle, most = (
            np.bincount(place.ravel(), values.ravel(), 256 * features).reshape(features, 256)
            for values in (signed, low * low, low * high, high * high)
        )
        for feature, power in zip(*np.nonzero(least + middle + most), strict=True):
            unit = Fraction(2) ** (int(power) - _LOWEST)
            totals[feature] += int(total[feature, power]) * unit
            parts = (int(part[feature, power]) for part in (least, middle, most))
            a, b, c = parts
            squares[feature] += (a + (b << (_HALF + 1)) + (c << (2 * _HALF))) * unit * unit
    return tuple(totals), tuple(squares)


def _dyadic(value: Fraction) -> list[int]:
    """Return [m, e] of a number m * 2 ** e, with m odd or 0."""
    below = value.denominator.bit_length() - 1
    zeros = (value.numerator & -value.numerator).bit_length() - 1 if value.numerator and not below else 0
    return [value.numerator >> zeros, zeros - below]


def _fraction(pair: Sequence[int]) -> Fraction:
    """Return the number of a pair from `_dyadic`. Raises ValueError for any other value."""
    m, e = pair
    if type(m) is not int or type(e) is not int or abs(e) > 4 * _MOST_DIGITS:
        raise ValueError(f"must be [m, e], of whole numbers, got {pair!r:.80}")
    return Fraction(m) * Fraction(2) ** e


# Numbers that float32 would not keep apart ----------------------------------------------------------------------------

# Samples are stored as float32 (integers as int64, but a task converts them to float32). The next float32 after 1,709,251,200
# is 128 larger. A column of large, close values is shifted by its smallest training value before it is stored. A column of
# tiny values is scaled by a power of two. Both are computed in float64 or in integers. Other columns are stored unchanged.


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


def storing(x: NDArray[Any], *, tokens: bool = False) -> Stored:
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


def storage_remarks(x: NDArray[Any], how: Stored, names: Sequence[str]) -> list[str]:
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
