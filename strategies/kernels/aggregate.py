"""Means, sums and distances over the stack W [N, d] of a round's uploads.

All work is done in blocks of columns that fit the cache, on a few threads. A column's result depends only on the
column's block, never on the number of threads: digests must not change with the machine's load or core count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.kernels.blocks import UNIT, blocks, columns_for, for_blocks, in_order
from strategies.kernels.masks import Bits


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


Stack = NDArray[np.float32]

# float64 values that fit the cache
_GRAM_CHUNK = 80_000
# a squared distance below this part of the squared lengths has lost half its float64 digits
_CANCELLED = 1e-8
# up to this many close pairs per client are computed one by one; beyond it, each cluster of close clients gets its own product
_PAIRS = 8
# the most levels of clusters within clusters
_DEPTH = 4

# From this many rows on, the order of sums is chosen for speed. With fewer, the bits are those of one product of whole matrices.
MANY = 256
# a weighted sum is added up term by term if at most one factor in this many is not 0
_SPARSE = 32
# the smallest factor, relative to its row's largest and absolutely: smaller ones lead to numbers below float32's normal ones
_LEAST, _NORMAL = 2.0**-102, float(np.finfo(np.float32).tiny)


def weighted_mean(W: Stack | SummedRows, weights: NDArray[np.float64] | None = None) -> NDArray[np.float32]:
    """Return the mean over clients, sum_i weights_i w_i / sum_i weights_i, accumulated in float64 in row order, float32 [d].

    W: float32 [N, d], or its rows added up with these weights. weights: float64 [N], not negative; None: uniform.
    Raises ValueError if N is 0 or the weights do not sum to a positive finite number.
    """
    n = len(W)
    if n == 0:
        raise ValueError("weighted_mean needs at least one row")
    if weights is None:
        weights = np.ones(n)
    checked = check_weights(weights, n)
    if isinstance(W, SummedRows):
        return W.mean(weights).astype(np.float32)
    weights, d = checked, W.shape[1]
    total = weights.sum()
    out = np.empty(d, dtype=np.float32)

    def block(start: int, stop: int) -> None:
        out[start:stop] = mean_block(W[:, start:stop], weights, total)

    for_blocks(block, d, n)
    return out


def block_means(W: Stack | SummedRows) -> Callable[[slice], NDArray[np.float64]]:
    """Return a function from a slice of columns to their unweighted mean over the rows, float64 [w].

    W: float32 [N, d], or its rows added up with equal weights.
    """
    if isinstance(W, SummedRows):
        return W.mean().__getitem__
    ones = np.ones(len(W))
    return lambda at: mean_block(W[:, at], ones, float(len(ones)))


def check_weights(weights: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the weights as float64 [n]. Equal weights become 1.

    Raises ValueError unless all are >= 0 and their sum is positive and finite.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (n,) or not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise ValueError(f"weights must be {n} numbers >= 0 with a positive sum, got {weights}")
    return np.ones(n) if (weights == weights[0]).all() else weights


def mean_block(block: Stack, weights: NDArray[np.float64], total: float) -> NDArray[np.float64]:
    """Return the weighted mean over the rows of a block of columns, float64 [w].

    weights: as `check_weights` returns them. total: their sum.
    """
    out = np.empty(block.shape[1])
    rows = np.empty((len(block), min(UNIT, block.shape[1])))
    for start, stop in blocks(0, block.shape[1], UNIT):
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
    """Write into `out` the values of `inside` where a bit is set, and those of `outside` elsewhere, without a branch per element.

    bits: uint8 [ceil(w/8)]. inside, outside, out: float32 [w].
    """
    chosen = np.take(_EXPAND, bits, axis=0, mode="clip").reshape(-1)[: out.size]
    target, background = out.view(np.uint32), outside.view(np.uint32)
    np.bitwise_xor(inside.view(np.uint32), background, out=target)
    np.bitwise_and(target, chosen, out=target)
    np.bitwise_xor(target, background, out=target)


def merge(bits: Bits, inside: NDArray[np.float32], outside: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values of `inside` where the packed mask is set, and those of `outside` elsewhere, float32 [d].

    bits: uint8 [ceil(d/8)]. inside, outside: float32 [d].
    """
    out = np.empty(outside.size, np.float32)
    select(bits, inside, outside, out)
    return out


def group_means(W: Stack, members: NDArray[np.bool_], out: Stack | None = None) -> NDArray[np.float32]:
    """Return unweighted means over groups of rows, float32 [G, d]: row g is the mean over members[g].

    W: float32 [N, d]; members: bool [G, N], at least one True per row; out: float32 [G, d], may be W itself.
    """
    result = np.empty((members.shape[0], W.shape[1]), dtype=np.float32) if out is None else out
    means = means_of(members)

    def block(start: int, stop: int) -> None:
        result[:, start:stop] = means(W[:, start:stop])

    for_blocks(block, W.shape[1], len(W))
    return result


def means_of(members: NDArray[np.bool_]) -> Callable[[Stack], Stack]:
    """Return a function from a block of W's columns, float32 [N, w], to its means over groups, float32 [G, w]; see
    `group_means`.
    """
    counts, sums = members.sum(axis=1, dtype=np.float32)[:, None], sums_of(members)

    def means(block: Stack) -> Stack:
        total = sums(block)
        total /= counts
        return total

    return means


def sums_of(weights: NDArray[np.float64] | NDArray[np.bool_]) -> Callable[[Stack], Stack]:
    """Return a function from a block of W's columns, float32 [N, w], to weighted sums of its rows, float32 [G, w].

    weights: [G, N]; they count as `factors` returns them. From `MANY` clients on, the time for a sum of few terms
    follows from its terms alone.
    """
    own = factors(weights)
    terms = np.count_nonzero(own, axis=1)
    few = np.flatnonzero(terms * _SPARSE <= own.shape[1]) if own.shape[1] >= MANY else np.zeros(0, np.intp)
    if not len(few):
        return lambda block: own @ block
    rest = np.setdiff1d(np.arange(len(own)), few)
    pairs = [(int(g), [(float(own[g, j]), int(j)) for j in np.flatnonzero(own[g])]) for g in few]
    products = np.ascontiguousarray(own[rest])

    def sums(block: Stack) -> Stack:
        out = np.empty((len(own), block.shape[1]), np.float32)
        if len(rest):
            out[rest] = products @ block
        for start, stop in blocks(0, block.shape[1], UNIT):
            rows = np.ascontiguousarray(block[:, start:stop])
            term = np.empty(stop - start, np.float32)
            for g, chosen in pairs:
                total = out[g, start:stop]
                total[:] = 0
                for factor, j in chosen:
                    total += np.multiply(rows[j], np.float32(factor), out=term)
        return out

    return sums


def factors(weights: NDArray[np.float64] | NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return weights [G, N] as float32. Weights that float32 cannot multiply as normal numbers become 0.

    These are weights below the smallest normal number, 1.2e-38, and weights below 2e-31 of the row's largest, because
    their terms would be below it. Many processors take a hundred times as long for each number below it.
    """
    own = weights.astype(np.float32)
    size = np.abs(own)
    least = np.maximum(size.max(axis=1, initial=0, keepdims=True) * np.float32(_LEAST), np.float32(_NORMAL))
    own[size < least] = 0
    return own


def squared_distances(W: Stack, V: Stack | None = None) -> NDArray[np.float64]:
    """Return squared Euclidean distances between clients' vectors, float64 [N, N]: entry (i, j) is ||v_i - w_j||^2.

    W, V: float32 [N, d]. V = None means W: the result is symmetric, with diagonal 0. Raises ValueError if the shapes
    differ.

    Each block takes one matrix product in float64, of differences from the first row: a part that all vectors share
    costs no precision. Pairs that lie much closer to each other than to that row are computed again directly. Equal
    vectors have distance 0.
    """
    if V is not None and V.shape != W.shape:
        raise ValueError(f"W has shape {W.shape}, V {V.shape}: they must be equal")
    return _distances(W, V, np.arange(len(W)), 0)


def _distances(W: Stack, V: Stack | None, rows: NDArray[np.intp], depth: int) -> NDArray[np.float64]:
    """Return `squared_distances` of some rows, float64 [n, n]. depth: the current level of clusters within clusters."""
    n = len(rows)
    norms, products = _gram(W, V, rows)
    scale = norms[-n:, None] + norms[None, :n]
    distances: NDArray[np.float64] = np.maximum(scale - 2 * products, 0)
    if V is None:
        np.fill_diagonal(distances, 0)
    close = distances < _CANCELLED * scale
    if not close.any():
        return distances
    if len(W) >= MANY and depth < _DEPTH and np.count_nonzero(close) > _PAIRS * n:
        for cluster in _clusters(close):
            at = np.ix_(cluster, cluster)
            distances[at] = np.where(close[at], _distances(W, V, rows[cluster], depth + 1), distances[at])
        return distances
    _directly(W, W if V is None else V, rows, close, distances)
    return distances


def _gram(W: Stack, V: Stack | None, rows: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return squared lengths of the chosen rows of [W; V], float64 [n] or [2n], and the products of V's rows with W's, [n, n].

    All are of differences from W's first chosen row.
    """
    n, d = len(rows), W.shape[1]
    all_rows = n == len(W)
    step = max(512, _GRAM_CHUNK // n)
    apart = V is not None and n >= MANY
    size = n if V is None else 2 * n

    def products(span: tuple[int, int]) -> NDArray[np.float64]:
        """Return all products, [size, size]. If V and W are apart: V's products with W's, and both squared lengths below."""
        sums = np.zeros((n + 2, n) if apart else (size, size))
        scratch = np.empty((size, min(step, span[1] - span[0])))
        for start in range(*span, step):
            stop = min(start + step, span[1])
            x = scratch[:, : stop - start]
            x[:n] = W[:, start:stop] if all_rows else W[rows, start:stop]
            if V is not None:
                x[n:] = V[:, start:stop] if all_rows else V[rows, start:stop]
            x -= x[0].copy()
            if apart:
                sums[:n] += x[n:] @ x[:n].T
                sums[n:] += np.einsum("kij,kij->ki", x.reshape(2, n, -1), x.reshape(2, n, -1))
            else:
                sums += x @ x.T
        return sums

    gram = sum(in_order(products, blocks(0, d, columns_for(n))), np.zeros((n + 2, n) if apart else (size, size)))
    if apart:
        return gram[n:].reshape(-1), gram[:n]
    return np.diag(gram), gram[-n:, :n]


def _clusters(close: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Return the rows of every set that pairs, bool [n, n], link. Rows without a pair are in no set."""
    linked, left = close | close.T, np.flatnonzero(close.any(axis=0) | close.any(axis=1))
    found = []
    while len(left):
        inside = np.zeros(len(close), bool)
        inside[left[0]] = True
        edge = inside
        while edge.any():
            edge = linked[edge].any(axis=0) & ~inside
            inside |= edge
        found.append(np.flatnonzero(inside))
        left = left[~inside[left]]
    return found


def distances_between(V: Stack, W: Stack) -> NDArray[np.float64]:
    """Return squared Euclidean distances of each of V's vectors from each of W's, float64 [M, N].

    V: float32 [M, d]. W: float32 [N, d]. The precision is that of `squared_distances`.
    """
    m, (n, d) = len(V), W.shape
    step = max(512, _GRAM_CHUNK // (m + n))

    def products(span: tuple[int, int]) -> NDArray[np.float64]:
        """Return V's products with W's, [m, n], with V's squared lengths beside and W's below, of differences from W's
        first row.
        """
        sums = np.zeros((m + 1, n + 1))
        for start, stop in blocks(*span, step):
            first = W[0, start:stop].astype(np.float64)
            v, w = V[:, start:stop] - first, W[:, start:stop] - first
            sums[:m, :n] += v @ w.T
            sums[:m, n] += np.einsum("ij,ij->i", v, v)
            sums[m, :n] += np.einsum("ij,ij->i", w, w)
        return sums

    gram = sum(in_order(products, blocks(0, d, columns_for(n))), np.zeros((m + 1, n + 1)))
    scale = gram[:m, n:] + gram[m, :n]
    distances: NDArray[np.float64] = np.maximum(scale - 2 * gram[:m, :n], 0)
    for i, j in np.argwhere(distances < _CANCELLED * scale).tolist():
        (distances[i, j],) = distances_of_pairs([(V[i], W[j])])
    return distances


def distances_of_pairs(pairs: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]) -> list[float]:
    """Return the squared Euclidean distance of the two vectors of each pair, float32 [d] each, from differences in float64."""

    def part(v: NDArray[np.float32], w: NDArray[np.float32]) -> float:
        difference = np.subtract(v, w, dtype=np.float64)
        return float(difference @ difference)

    def distance(pair: tuple[NDArray[np.float32], NDArray[np.float32]]) -> float:
        v, w = pair
        return sum(part(v[start:stop], w[start:stop]) for start, stop in blocks(0, v.size))

    return list(in_order(distance, pairs))


def _directly(
    W: Stack, V: Stack, rows: NDArray[np.intp], close: NDArray[np.bool_], distances: NDArray[np.float64]
) -> None:
    """Replace the chosen squared distances between rows by sums of squared differences."""
    pairs = rows[np.argwhere(close)].tolist()

    def sums(span: tuple[int, int]) -> NDArray[np.float64]:
        at = slice(*span)
        out = np.empty(len(pairs))
        for k, (i, j) in enumerate(pairs):
            difference = np.subtract(V[i, at], W[j, at], dtype=np.float64)
            out[k] = difference @ difference
        return out

    distances[close] = sum(in_order(sums, blocks(0, W.shape[1])), np.zeros(len(pairs)))


def mix(W: Stack, weights: NDArray[np.float64], out: Stack | None = None) -> NDArray[np.float32]:
    """Return weighted sums of the rows, float32 [G, d]: row g is sum_j weights[g, j] w_j.

    W: float32 [N, d]. weights: [G, N]; they count as `factors` returns them. out: float32 [G, d], may be W itself.
    """
    result = np.empty((weights.shape[0], W.shape[1]), dtype=np.float32) if out is None else out
    sums = sums_of(weights)

    def block(start: int, stop: int) -> None:
        result[:, start:stop] = sums(W[:, start:stop])

    for_blocks(block, W.shape[1], len(W))
    return result
