"""Reductions over the stack W [N, d] of a round's uploads.

All work is done in blocks of columns that fit the cache, on a few threads. A column's result depends on the column's block
alone, never on how many threads there are: digests must not change with the machine's load or core count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strategies.blocks import blocks, for_blocks, in_order
from strategies.masks import Bits

Stack = NDArray[np.float32]

# a block of float64 rows that fits the cache
_MEAN_COLUMNS = 4_096
# float64 values: fit the cache
_GRAM_CHUNK = 80_000
# share of the norms below which a squared distance has lost half its float64 digits
_CANCELLED = 1e-8


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
        out[start:stop] = mean_block(W[:, start:stop], weights, total)

    for_blocks(block, d)
    return out


def check_weights(weights: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the weights as float64 [n], equal ones as 1.

    Raises ValueError unless all are >= 0 and their sum is positive and finite.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (n,) or not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise ValueError(f"weights must be {n} numbers >= 0 with a positive sum, got {weights}")
    return np.ones(n) if (weights == weights[0]).all() else weights


def mean_block(block: Stack, weights: NDArray[np.float64], total: float) -> NDArray[np.float64]:
    """Weighted mean over the rows of a block of columns, float64 [w]; total: sum of the weights, checked ones."""
    out = np.empty(block.shape[1])
    rows = np.empty((len(block), min(_MEAN_COLUMNS, block.shape[1])))
    for start, stop in blocks(0, block.shape[1], _MEAN_COLUMNS):
        part = rows[:, : stop - start]
        np.copyto(part, block[:, start:stop])
        if (weights != 1).any():
            part *= weights[:, None]
        # row after row; a mean of -0.0 stays -0.0
        part.sum(axis=0, out=out[start:stop], initial=-0.0)
    out /= total
    return out


# byte -> eight masks of 32 bits, little bit order
_EXPAND = (-np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int32)).view(
    np.uint32
)


def select(bits: NDArray[np.uint8], inside: Stack, outside: Stack, out: Stack) -> None:
    """Write `inside` where a bit is set and `outside` elsewhere: uint8 [ceil(w/8)], three float32 [w]; no branch per element."""
    width = out.size
    chosen = np.take(_EXPAND, bits, axis=0, mode="clip").reshape(-1)[:width]
    target, background = out.view(np.uint32), outside.view(np.uint32)
    np.bitwise_xor(inside.view(np.uint32), background, out=target)
    np.bitwise_and(target, chosen, out=target)
    np.bitwise_xor(target, background, out=target)


def merge(bits: Bits, inside: NDArray[np.float32], outside: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values of `inside` where the packed mask is set, of `outside` elsewhere: uint8 [ceil(d/8)], float32 [d] each."""
    out = np.empty(outside.size, np.float32)
    select(bits, inside, outside, out)
    return out


def group_means(W: Stack, members: NDArray[np.bool_], out: Stack | None = None) -> NDArray[np.float32]:
    """Return unweighted means over groups of rows, float32 [G, d]: row g is the mean over members[g].

    W: float32 [N, d]; members: bool [G, N], at least one True per row; out: float32 [G, d], may be W itself.
    """
    result = np.empty((members.shape[0], W.shape[1]), dtype=np.float32) if out is None else out
    counts = members.sum(axis=1, dtype=np.float32)[:, None]
    summands = members.astype(np.float32)

    def block(start: int, stop: int) -> None:
        means = summands @ W[:, start:stop]
        np.divide(means, counts, out=result[:, start:stop])

    for_blocks(block, W.shape[1])
    return result


def squared_distances(W: Stack, V: Stack | None = None) -> NDArray[np.float64]:
    """Squared Euclidean distances between clients' vectors, float64 [N, N]: entry (i, j) is ||v_i - w_j||^2.

    W, V: float32 [N, d]; V = None means W: symmetric, diagonal 0. One matrix product per block in float64, of differences
    from the first row, so what the vectors have in common does not cancel. Pairs that lie much closer to each other than to
    that row are done again directly, and equal vectors have distance 0. Raises ValueError if the shapes differ.
    """
    if V is not None and V.shape != W.shape:
        raise ValueError(f"W has shape {W.shape}, V {V.shape}: they must be equal")
    n, d = W.shape
    step = max(512, _GRAM_CHUNK // n)

    def products(span: tuple[int, int]) -> NDArray[np.float64]:
        """Inner products of all rows of [W; V], [N, N] or [2N, 2N]."""
        sums = np.zeros((n, n) if V is None else (2 * n, 2 * n))
        scratch = np.empty((len(sums), min(step, span[1] - span[0])))
        for start in range(*span, step):
            stop = min(start + step, span[1])
            x = scratch[:, : stop - start]
            x[:n] = W[:, start:stop]
            if V is not None:
                x[n:] = V[:, start:stop]
            x -= x[0].copy()
            sums += x @ x.T
        return sums

    gram = sum(in_order(products, blocks(0, d)), np.zeros((n, n) if V is None else (2 * n, 2 * n)))
    norms = np.diag(gram)
    rows = slice(0, n) if V is None else slice(n, None)
    scale = norms[rows, None] + norms[None, :n]
    distances: NDArray[np.float64] = np.maximum(scale - 2 * gram[rows, :n], 0)
    if V is None:
        np.fill_diagonal(distances, 0)
    close = distances < _CANCELLED * scale
    if close.any():
        _directly(W, W if V is None else V, close, distances)
    return distances


def squared_distance(v: NDArray[np.float32], w: NDArray[np.float32]) -> float:
    """Squared Euclidean distance of two vectors, float32 [d] each, from differences in float64."""

    def part(span: tuple[int, int]) -> float:
        difference = np.subtract(v[slice(*span)], w[slice(*span)], dtype=np.float64)
        return float(difference @ difference)

    return sum(in_order(part, blocks(0, v.size)))


def _directly(W: Stack, V: Stack, close: NDArray[np.bool_], distances: NDArray[np.float64]) -> None:
    """Replace the chosen squared distances by sums of squared differences."""
    pairs = np.argwhere(close).tolist()

    def sums(span: tuple[int, int]) -> NDArray[np.float64]:
        at = slice(*span)
        out = np.empty(len(pairs))
        for k, (i, j) in enumerate(pairs):
            difference = np.subtract(V[i, at], W[j, at], dtype=np.float64)
            out[k] = difference @ difference
        return out

    distances[close] = sum(in_order(sums, blocks(0, W.shape[1])), np.zeros(len(pairs)))


def mix(W: Stack, weights: NDArray[np.float64], out: Stack | None = None) -> NDArray[np.float32]:
    """Weighted sums of the rows, float32 [G, d]: row g is sum_j weights[g, j] w_j.

    W: float32 [N, d]; weights: [G, N]; out: float32 [G, d], may be W itself.
    """
    result = np.empty((weights.shape[0], W.shape[1]), dtype=np.float32) if out is None else out
    factors = weights.astype(np.float32)

    def block(start: int, stop: int) -> None:
        result[:, start:stop] = factors @ W[:, start:stop]

    for_blocks(block, W.shape[1])
    return result
