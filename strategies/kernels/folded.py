"""Sums over the rows of a round's stack [N, d], in place of the stack: rows are added in order, as they come.

A mean has the bits of `aggregate.mean_block` over a stack of the same rows. Both sum row after row in float64. The
exception is a block of one column, which NumPy sums pairwise: `RowSum` keeps that column's values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.kernels.blocks import blocks


class RowSum:
    """A sum of float64 rows [d]. Its bits are those of `stack.sum(axis=0, initial=initial)` in blocks of `width` columns."""

    def __init__(self, d: int, width: int, initial: float = 0.0) -> None:
        self._initial = initial
        self._sum = np.full(d, initial)
        self._column: list[float] | None = [] if d % width == 1 else None

    def add(self, row: NDArray[np.floating], factor: float = 1.0, plain: RowSum | None = None) -> None:
        """Add a row times a factor, multiplied in float64. plain: a sum that the row itself is added to."""
        for start, stop in blocks(0, self._sum.size):
            part = row[start:stop].astype(np.float64)
            if plain is not None:
                plain._sum[start:stop] += part
            if factor != 1:
                part *= factor
            self._sum[start:stop] += part
        for total, times in ((self, factor), (plain, 1.0)):
            if total is not None and total._column is not None:
                total._column.append(float(row[-1]) * times)

    def total(self) -> NDArray[np.float64]:
        """Return the sum, float64 [d]."""
        total = self._sum.copy()
        if self._column:
            total[-1] = np.array(self._column).sum(initial=self._initial)
        return total


class SummedRows:
    """A stack of float32 rows [N, d] that have been added up. It returns nothing but the mean with the rows' weights.

    Rows of equal weights are averaged as rows of weight 1 (`aggregate.check_weights`). Until two weights differ, both
    sums are kept.
    """

    def __init__(self, d: int, width: int) -> None:
        self.d, self.width = d, width
        self.weights: list[float] = []
        self._plain: RowSum | None = self._empty()
        self._weighted: RowSum | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.weights)

    def add(self, row: NDArray[np.float32], weight: float) -> None:
        """Add a row, float32 [d], with its weight."""
        if not self.weights and weight != 1:
            self._weighted = self._empty()
        if self._plain is not None and self.weights and weight != self.weights[0]:
            if self._weighted is None:
                self._weighted = self._plain
            self._plain = None
        self.weights.append(weight)
        if self._weighted is not None:
            self._weighted.add(row, weight, self._plain)
        elif self._plain is not None:
            self._plain.add(row)

    def close(self) -> None:
        """Free the sum that no mean needs. No row is added after this."""
        if self._plain is not None:
            self._weighted = None

    def mean(self, weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Return the mean of the rows, float64 [d]. weights: the rows' weights, as they were added; None: equal ones.

        Raises ValueError for other weights, because the rows are gone.
        """
        asked = np.ones(len(self)) if weights is None else np.asarray(weights, np.float64)
        added = np.array(self.weights)
        equal = self._plain is not None and len(asked) == len(added) and bool((asked == asked[:1]).all())
        if not equal and not np.array_equal(asked, added):
            raise ValueError("uploads were added up as they came, with other weights than are asked for now")
        if self._plain is not None:
            mean = self._plain.total()
            mean /= len(self)
            return mean
        assert self._weighted is not None, "rows whose weights differ have a weighted sum"
        mean = self._weighted.total()
        mean /= added.sum()
        return mean

    def _empty(self) -> RowSum:
        # a mean of -0.0 stays -0.0
        return RowSum(self.d, self.width, -0.0)

    def __getattr__(self, name: str) -> Any:
        """Raise TypeError: there is no stack."""
        raise TypeError(
            f"uploads were added up as they came: there is no stack that has {name!r} (`means` of the server half)"
        )
