"""Reductions over the stack W [N, d] of a round's uploads.

All work is done in blocks of columns that fit the cache, on a few threads. A column's result depends on the column's block
alone, never on how many threads there are: digests must not change with the machine's load or core count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from strategies.masks import Bits, unpack

Stack = NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")

_BLOCK = 16_384  # columns; a multiple of 8, so blocks of packed masks start on a byte


def weighted_mean(W: Stack, weights: NDArray[np.float64] | None = None) -> NDArray[np.float32]:
    """Mean over clients, sum_i weights_i w_i / sum_i weights_i, accumulated in float64 in row order.

    W: float32 [N, d]; weights: float64 [N], not negative, or None for uniform. Returns float32 [d].
    Raises ValueError if N is 0 or the weights do not sum to a positive finite number.
    """
    n, d = W.shape
    if n == 0:
        raise ValueError("weighted_mean needs at least one row")
    if weights is None:
        weights = np.ones(n)
    weights = check_weights(weights, n)
    total = weights.sum()
    out = np.empty(d, dtype=np.float32)

    def block(start: int, stop: int) -> None:
        out[start:stop] = _mean_block(W[:, start:stop], weights, total)

    for_blocks(block, d)
    return out


def check_weights(weights: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the weights as float64 [n]; raise ValueError unless all are >= 0 and their sum is positive and finite."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (n,) or not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise ValueError(f"weights must be {n} numbers >= 0 with a positive sum, got {weights}")
    return weights


def _mean_block(block: Stack, weights: NDArray[np.float64], total: float) -> NDArray[np.float64]:
    acc: NDArray[np.float64] = block[0] * weights[0]
    scratch = np.empty_like(acc)
    for row, weight in zip(block[1:], weights[1:], strict=True):
        acc += np.multiply(row, weight, out=scratch)
    acc /= total
    return acc


def for_blocks(block: Callable[[int, int], None], d: int) -> None:
    """Call block(start, stop) for consecutive blocks of d columns, on a few threads."""
    starts = range(0, d, _BLOCK)
    with threadpool_limits(1, "blas"):
        if len(starts) <= 4:
            for start in starts:
                block(start, min(start + _BLOCK, d))
            return
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            list(pool.map(lambda start: block(start, min(start + _BLOCK, d)), starts))


def blocks(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut the columns start..stop into consecutive blocks, (start, stop) each."""
    return [(first, min(first + _BLOCK, stop)) for first in range(start, stop, _BLOCK)]


def in_order(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield work(item) in the order of the items, computed on a few threads with BLAS on one.

    What is summed over these results does not depend on the number of threads.
    """
    with threadpool_limits(1, "blas"):
        if len(items) <= 4:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            yield from pool.map(work, items)


def group_means(W: Stack, members: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return unweighted means over groups of rows, float32 [G, d]: row g is the mean over members[g].

    W: float32 [N, d]; members: bool [G, N], at least one True per row.
    """
    out = np.empty((members.shape[0], W.shape[1]), dtype=np.float32)
    counts = members.sum(axis=1, dtype=np.float32)[:, None]
    summands = members.astype(np.float32)

    def block(start: int, stop: int) -> None:
        np.matmul(summands, W[:, start:stop], out=out[:, start:stop])
        out[:, start:stop] /= counts

    for_blocks(block, W.shape[1])
    return out


def collaborate(
    W: Stack, bits: Bits, members: NDArray[np.bool_], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Global mean, and per client the mean of its group on its critical parameters (FedCAC Eq. 9-11).

    W: float32 [N, d]; bits: uint8 [N, ceil(d/8)] packed masks; members: bool [N, N], row i the group of client i, itself
    included; weights: float64 [N] for the global mean. Returns (float32 [d], float32 [N, d]).
    Clients with equal groups share one mean, a client alone takes its own row: no [N, N] x [N, d] product when the groups
    are small.
    """
    n, d = W.shape
    weights = check_weights(weights, n)
    total = weights.sum()
    alone = members.sum(axis=1) == 1
    groups, group_of = np.unique(members[~alone], axis=0, return_inverse=True)
    group_index = np.full(n, -1)
    group_index[~alone] = group_of.reshape(-1)
    summands = groups.astype(np.float32)
    counts = groups.sum(axis=1, dtype=np.float32)[:, None]
    mean = np.empty(d, dtype=np.float32)
    personalized = np.empty((n, d), dtype=np.float32)

    def block(start: int, stop: int) -> None:
        rows = W[:, start:stop]
        mean[start:stop] = _mean_block(rows, weights, total)
        if len(groups):
            group = summands @ rows
            group /= counts
        masks = unpack(bits[:, start // 8 : -(-stop // 8)], stop - start)
        for i in range(n):
            own = rows[i] if alone[i] else group[group_index[i]]
            personalized[i, start:stop] = np.where(masks[i], own, mean[start:stop])

    for_blocks(block, d)
    return mean, personalized
