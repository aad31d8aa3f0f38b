"""Robust means over clients, which a few clients cannot shift far, and each client's distance from the median upload.

The rules are for n vectors, of which f may lie. Every client counts once, whatever sample count it reports.

- median, trimmed-mean: for each parameter the middle value, or the mean without the f lowest and f highest values (Yin
  et al., ICML 2018).
- krum: the vector with the smallest sum of squared distances to its n - f - 2 nearest vectors (Blanchard et al.,
  NeurIPS 2017).
- geometric-median: the point with the smallest sum of distances, by Weiszfeld's iteration (Pillutla et al., IEEE TSP
  2022). It is a weighted mean, and its weights follow from the vectors' distances alone.

With one or two vectors every rule gives the plain mean, because no vector can be outvoted.

Krum and the geometric median choose whole clients. An upload of several arrays is one vector to them: `Averaging.of`
chooses once, by the distances in all arrays. Each array's distances are in units of its usual distance, so that arrays
of large numbers do not decide alone.

Work is done in blocks of columns; no result depends on the number of threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strategies import aggregate
from strategies.aggregate import Stack
from strategies.blocks import blocks, for_blocks, in_order
from strategies.folded import Folded

Rule = Literal["none", "median", "trimmed-mean", "krum", "geometric-median"]
RULES: frozenset[str] = frozenset({"median", "trimmed-mean", "krum", "geometric-median"})
# rules that choose or weight clients by distances
CHOOSING: frozenset[str] = frozenset({"krum", "geometric-median"})

# with this many vectors or more, one of them can be outvoted
ABLE = 3

# float32 values in one piece of work: with fewer, threads wait for Python longer than they compute
_CHUNK = 1_000_000
_STEPS = 200  # of Weiszfeld's iteration
# largest change of a weight in its last step
_SETTLED = 1e-12
# a vector beyond this squared distance, in medians, has no weight: float64 could not distinguish the others beside it
_HOPELESS = 1e12


@dataclass(frozen=True)
class Averaging:
    """A mean over clients: the plain one (`none`), or one by a rule that withstands liars.

    liars: the part of clients, in [0, 0.5), that trimmed-mean and krum assume to lie. It is at least one client of
    three, and never half of them. apart: squared distances between clients, float64 [N, N] for each array of their
    uploads. Krum and geometric-median choose by them (`of`). None: every mean chooses by its own rows.
    """

    rule: Rule = "none"
    liars: float = 0.3
    apart: tuple[NDArray[np.float64], ...] | None = field(default=None, compare=False, repr=False)

    def of(self, arrays: Iterable[NDArray[np.floating]]) -> Averaging:
        """Return this rule with one choice of clients for all arrays of their uploads, floating [N, ...] each."""
        if self.rule not in CHOOSING:
            return self
        stacks = [array.reshape(len(array), -1) for array in arrays if array.size]
        return replace(self, apart=tuple(aggregate.squared_distances(stack) for stack in stacks) or None)

    def among(self, members: NDArray[np.bool_]) -> Averaging:
        """Return this rule for means over only some of the clients' rows. members: bool [N]."""
        if self.apart is None:
            return self
        return replace(self, apart=tuple(distances[np.ix_(members, members)] for distances in self.apart))

    def mean(self, W: Stack | Folded, weights: NDArray[np.float64] | None = None) -> NDArray[np.float32]:
        """Return the mean over clients, float32 [d]. Arguments as in `aggregate.weighted_mean`; only the rule `none` uses weights.

        Raises ValueError if there is no row.
        """
        if self.rule == "none" or isinstance(W, Folded):
            return aggregate.weighted_mean(W, weights)
        if not len(W):
            raise ValueError("a mean needs at least one row")
        mean: NDArray[np.float32] = self.group_means(W, np.ones((1, len(W)), dtype=bool))[0]
        return mean

    def group_means(self, W: Stack, members: NDArray[np.bool_], out: Stack | None = None) -> NDArray[np.float32]:
        """Return means over groups of rows, float32 [G, d]. Arguments as in `aggregate.group_means`."""
        if self.rule == "none":
            return aggregate.group_means(W, members, out=out)
        result = np.empty((len(members), W.shape[1]), np.float32) if out is None else out
        means = self.over_groups(W, members)

        def block(start: int, stop: int) -> None:
            result[:, start:stop] = means(W[:, start:stop])

        for_blocks(block, W.shape[1])
        return result

    def over_all(self, W: Stack, weights: NDArray[np.float64]) -> Callable[[Stack], NDArray[np.floating]]:
        """Return a function from a block of W's columns, float32 [N, w], to its mean over clients, [w]; see `mean`."""
        if self.rule == "none":
            weights = aggregate.check_weights(weights, len(W))
            return lambda block: aggregate.mean_block(block, weights, weights.sum())
        means = self.over_groups(W, np.ones((1, len(W)), dtype=bool))
        return lambda block: means(block)[0]

    def over_groups(self, W: Stack, members: NDArray[np.bool_]) -> Callable[[Stack], Stack]:
        """Return a function from a block of W's columns, float32 [N, w], to its group means, float32 [G, w]; see `group_means`."""
        if self.rule == "none":
            return aggregate.means_of(members)
        rows = [np.flatnonzero(group) for group in members]
        if self.rule in ("median", "trimmed-mean"):
            cuts = [(len(own) - 1) // 2 if self.rule == "median" else self.assumed(len(own)) for own in rows]
            return lambda block: np.array(
                [trimmed(block, own, cut) for own, cut in zip(rows, cuts, strict=True)], np.float32
            ).reshape(len(rows), block.shape[1])
        apart = self.apart or (aggregate.squared_distances(W),)
        if len(apart[0]) != len(W):
            raise ValueError(
                f"a mean over {len(W)} rows by distances between {len(apart[0])} clients: see Averaging.among"
            )
        weights = [self._weights(whole([distances[np.ix_(own, own)] for distances in apart])) for own in rows]
        return lambda block: np.array(
            [aggregate.mean_block(block[own], each, each.sum()) for own, each in zip(rows, weights, strict=True)],
            np.float32,
        ).reshape(len(rows), block.shape[1])

    def assumed(self, n: int) -> int:
        """Return how many of n clients are assumed to lie."""
        return min(max(1, math.floor(self.liars * n + 1e-9)), (n - 1) // 2)

    def _weights(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        if len(distances) < ABLE:
            return np.ones(len(distances))
        if self.rule == "geometric-median":
            return geometric_weights(distances)
        chosen = np.zeros(len(distances))
        chosen[krum(distances, self.assumed(len(distances)))] = 1
        return chosen


PLAIN = Averaging()


# Kernels --------------------------------------------------------------------------------------------------------------


def trimmed(block: Stack, rows: NDArray[np.intp], cut: int) -> NDArray[np.float32]:
    """Return each column's mean without the `cut` lowest and highest values of the chosen rows, float32 [w].

    block: float32 [N, w]. 0 <= 2 cut < number of rows. The largest cut gives the median.
    """
    out, width = np.empty(block.shape[1], np.float32), _width(len(rows))
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


def whole(apart: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return squared distances between whole uploads, float64 [n, n]: the sum over their arrays, each in its usual distances.

    apart: float64 [n, n] per array. An array's usual distance is the median over clients of the median distance to all
    clients; 1 if most vectors are equal. A single array's distances stay as they are.
    """
    if len(apart) == 1:
        return apart[0]
    total = np.zeros_like(apart[0])
    for distances in apart:
        total += distances / (float(np.median(np.median(distances, axis=1))) or 1.0)
    return total


def krum(distances: NDArray[np.float64], liars: int) -> int:
    """Return the index of the vector with the smallest sum of squared distances to its n - liars - 2 nearest others, at least one.

    distances: squared, float64 [n, n], n >= 2. Ties go to the lower index.
    """
    n = len(distances)
    nearest = np.sort(np.where(np.eye(n, dtype=bool), np.inf, distances), axis=1)[:, : max(1, n - liars - 2)]
    return int(nearest.sum(axis=1).argmin())


def geometric_weights(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights >= 0 of n vectors, with sum 1. The mean with these weights is the vectors' geometric median.

    distances: squared, float64 [n, n]. A mean with weights a has the squared distance sum_j a_j D_ij - a'Da / 2 from
    vector i, so that the iteration needs no vectors.
    """
    usual = np.median(distances, axis=1)
    near = usual <= _HOPELESS * np.median(usual)
    D = distances[np.ix_(near, near)]
    a = np.full(len(D), 1 / len(D))
    for _ in range(_STEPS):
        reach = (D * a).sum(axis=1)
        apart = np.sqrt(np.maximum(reach - (reach * a).sum() / 2, 0))
        least = 1e-9 * apart.max()
        if least == 0:
            break
        inverse = 1 / np.maximum(apart, least)
        before, a = a, inverse / inverse.sum()
        if np.abs(a - before).max() < _SETTLED:
            break
    weights = np.zeros(len(distances))
    weights[near] = a
    return weights


def distances_to_median(W: Stack, rows: Sequence[int]) -> NDArray[np.float64]:
    """Return the chosen rows' Euclidean distances from their median per parameter, float64 [len(rows)]. W: float32 [N, d]."""
    chosen = np.asarray(rows, np.intp)
    cut, width = (len(chosen) - 1) // 2, _width(len(chosen))

    def part(span: tuple[int, int]) -> NDArray[np.float64]:
        sums = np.zeros(len(chosen))
        for start, stop in blocks(*span, width):
            middle = ascending(W[chosen, start:stop])[cut : len(chosen) - cut]
            centre = middle[0] if len(middle) == 1 else (middle[0].astype(np.float64) + middle[1]) / 2
            for k, row in enumerate(chosen):
                difference = np.subtract(W[row, start:stop], centre, dtype=np.float64)
                sums[k] += difference @ difference
        return sums

    if not len(chosen):
        return np.zeros(0)
    return np.sqrt(sum(in_order(part, blocks(0, W.shape[1])), np.zeros(len(chosen))))


def capped(sizes: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Return the sizes, at most `factor` times their median, float64 [N]."""
    return np.minimum(sizes, factor * float(np.median(sizes)))


def _width(n: int) -> int:
    """Return the number of columns that are sorted in one go, of n float32 rows."""
    return max(512, _CHUNK // max(n, 1))
