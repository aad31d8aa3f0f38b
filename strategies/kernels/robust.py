"""Robust means over clients, which a few clients cannot shift far, and each client's distance from the median upload.

The rules are for n vectors, of which f may lie. Every client counts once, whatever sample count it reports.
strategies/kernels/averages/ has them, a file each.

With one or two vectors every rule gives the plain mean, because no vector can be outvoted.

Krum and the geometric median choose whole clients. An upload of several arrays is one vector to them: `Averaging.of`
chooses once, by the distances in all arrays. Each array's distances are in units of its usual distance, so that arrays
of large numbers do not decide alone.

Work is done in blocks of columns; no result depends on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from strategies.kernels import aggregate
from strategies.kernels.aggregate import Stack, SummedRows
from strategies.kernels.averages import RULES, ByColumn, ByDistance, rule_of
from strategies.kernels.blocks import blocks, for_blocks, in_order
from strategies.kernels.trimming import ascending, width_for

# with this many vectors or more, one of them can be outvoted
ABLE = 3


def choosing() -> frozenset[str]:
    """Return the names of the rules that choose or weight clients by distances."""
    return frozenset(name for name in RULES if isinstance(rule_of(name), ByDistance))


@dataclass(frozen=True)
class Averaging:
    """A mean over clients: the plain one (`none`), or one by a rule that withstands Byzantine clients.

    byzantine_ratio: the part of clients, in [0, 0.5), that trimmed-mean and krum assume to lie. It is at least one client of
    three, and never half of them. apart: squared distances between clients, float64 [N, N] for each array of their
    uploads. Krum and geometric-median choose by them (`of`). None: every mean chooses by its own rows.
    """

    rule: str = "none"
    byzantine_ratio: float = 0.3
    apart: tuple[NDArray[np.float64], ...] | None = field(default=None, compare=False, repr=False)

    def of(self, arrays: Iterable[NDArray[np.floating]]) -> Averaging:
        """Return this rule with one choice of clients for all arrays of their uploads, floating [N, ...] each."""
        if self.rule == "none" or isinstance(rule_of(self.rule), ByColumn):
            return self
        stacks = [array.reshape(len(array), -1) for array in arrays if array.size]
        return replace(self, apart=tuple(aggregate.squared_distances(stack) for stack in stacks) or None)

    def among(self, members: NDArray[np.bool_]) -> Averaging:
        """Return this rule for means over only some of the clients' rows. members: bool [N]."""
        if self.apart is None:
            return self
        return replace(self, apart=tuple(distances[np.ix_(members, members)] for distances in self.apart))

    def mean(self, W: Stack | SummedRows, weights: NDArray[np.float64] | None = None) -> NDArray[np.float32]:
        """Return the mean over clients, float32 [d]. Arguments as in `aggregate.weighted_mean`; only the rule `none` uses weights.

        Raises ValueError if there is no row.
        """
        if self.rule == "none" or isinstance(W, SummedRows):
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
        rule, num_byzantine = rule_of(self.rule), [self.assumed(len(own)) for own in rows]
        if isinstance(rule, ByColumn):
            mean = rule.mean
            return lambda block: np.array(
                [mean(block, own, some) for own, some in zip(rows, num_byzantine, strict=True)], np.float32
            ).reshape(len(rows), block.shape[1])
        apart = self.apart or (aggregate.squared_distances(W),)
        if len(apart[0]) != len(W):
            raise ValueError(
                f"a mean over {len(W)} rows by distances between {len(apart[0])} clients: see Averaging.among"
            )
        weights = [
            rule.weights(total_distances([distances[np.ix_(own, own)] for distances in apart]), some)
            if len(own) >= ABLE
            else np.ones(len(own))
            for own, some in zip(rows, num_byzantine, strict=True)
        ]
        return lambda block: np.array(
            [aggregate.mean_block(block[own], each, each.sum()) for own, each in zip(rows, weights, strict=True)],
            np.float32,
        ).reshape(len(rows), block.shape[1])

    def assumed(self, n: int) -> int:
        """Return how many of n clients are assumed to lie."""
        return min(max(1, math.floor(self.byzantine_ratio * n + 1e-9)), (n - 1) // 2)


PLAIN = Averaging()


# Kernels --------------------------------------------------------------------------------------------------------------


def total_distances(apart: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
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


def distances_to_median(W: Stack, rows: Sequence[int]) -> NDArray[np.float64]:
    """Return the chosen rows' Euclidean distances from their median per parameter, float64 [len(rows)]. W: float32 [N, d]."""
    chosen = np.asarray(rows, np.intp)
    cut, width = (len(chosen) - 1) // 2, width_for(len(chosen))

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
