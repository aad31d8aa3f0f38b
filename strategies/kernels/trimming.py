"""Sorting of columns: means without the lowest and highest values, and medians. Work is done in blocks of columns."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from strategies.kernels import aggregate
from strategies.kernels.aggregate import Stack
from strategies.kernels.blocks import blocks

# float32 values in one piece of work: with fewer, threads wait for Python longer than they compute
_CHUNK = 1_000_000


def width_for(rows: int) -> int:
    """Return the number of columns that are sorted in one go, of this many float32 rows."""
    return max(512, _CHUNK // max(rows, 1))


def trimmed(block: Stack, rows: NDArray[np.intp], cut: int) -> NDArray[np.float32]:
    """Return each column's mean without the `cut` lowest and highest values of the chosen rows, float32 [w].

    block: float32 [N, w]. 0 <= 2 cut < number of rows. The largest cut gives the median.
    """
    out, width = np.empty(block.shape[1], np.float32), width_for(len(rows))
    for start, stop in blocks(0, block.shape[1], width):
        kept = ascending(block[rows, start:stop])[cut : len(rows) - cut]
        total = kept[0].astype(np.float64)
        for row in kept[1:]:
            total += row
        out[start:stop] = total / len(kept)
    return out


def ascending(block: Stack) -> list[NDArray[np.float32]]:
    """Sort every column. Return the rows of the result, in ascending order, float32 [w] each.

    block: float32 [N, w], finite. It is overwritten.
    """
    if len(block) >= aggregate.MANY:
        # the network takes N log² N steps; NumPy sorts contiguous columns faster
        columns = np.ascontiguousarray(block.T)
        columns.sort(axis=1)
        return list(np.ascontiguousarray(columns.T))
    rows, spare = list(block), np.empty_like(block[0])
    for low, high in comparators(len(rows)):
        np.minimum(rows[low], rows[high], out=spare)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return rows


@functools.lru_cache(maxsize=64)
def comparators(n: int) -> tuple[tuple[int, int], ...]:
    """Return pairs (low, high).

    Putting each pair in order, one after the other, sorts any n values (Batcher's odd-even merge sort).
    """
    out, run = [], 1
    while run < n:
        step = run
        while step:
            for first in range(step % run, n - step, 2 * step):
                for low in range(first, min(first + step, n - step)):
                    if low // (2 * run) == (low + step) // (2 * run):
                        out.append((low, low + step))
            step //= 2
        run *= 2
    return tuple(out)
