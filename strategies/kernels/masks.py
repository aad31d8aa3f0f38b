"""Masks of selected parameters: top-k per layer, packing to 1 bit per parameter, pairwise overlap (FedCAC §3.3, §3.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.kernels.blocks import blocks, in_order

Bits = NDArray[np.uint8]

# uint64 words in a block, per client and of all clients: all rows that a client is compared with stay in the cache
_WORDS, _BLOCK_WORDS = 1024, 262_144


def top_k(scores: NDArray[np.floating], sizes: Sequence[int], ratio: float) -> NDArray[np.bool_]:
    """Select, layer by layer, the k = floor(ratio * n) highest of a layer's n scores (FedCAC Eq. 6).

    scores: float [d]; sizes: elements per layer, summing to d; ratio in [0, 1]. Returns bool [d] with exactly k ones per
    layer: ties are broken towards the lower index.
    Raises ValueError if ratio is outside [0, 1], the sizes do not sum to d or a score is not finite.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be in [0, 1], got {ratio}")
    if sum(sizes) != scores.size:
        raise ValueError(f"sizes sum to {sum(sizes)}, scores have {scores.size} elements")
    if not np.isfinite(scores).all():
        raise ValueError(f"scores must be finite, got {np.count_nonzero(~np.isfinite(scores))} that are not")
    mask = np.zeros(scores.size, dtype=bool)
    start = 0
    for size in sizes:
        k = math.floor(ratio * size)
        if k > 0:
            mark_largest(scores[start : start + size], k, mask[start : start + size])
        start += size
    return mask


def mark_largest(scores: NDArray[np.floating], k: int, mask: NDArray[np.bool_]) -> None:
    """Set the mask at the k >= 1 largest scores. Ties go to the lower index. scores: [n]. mask: bool [n], all False."""
    if k == scores.size:
        mask[:] = True
        return
    kth_largest = np.partition(scores, scores.size - k)[scores.size - k]
    np.greater(scores, kth_largest, out=mask)
    ties = np.flatnonzero(scores == kth_largest)
    mask[ties[: k - np.count_nonzero(mask)]] = True


def num_selected(sizes: Sequence[int], ratio: float) -> int:
    """Return K, the number of ones that `top_k` selects for these layer sizes and this ratio."""
    return sum(math.floor(ratio * size) for size in sizes)


def pack(mask: NDArray[np.bool_]) -> Bits:
    """Pack bool [d] to 1 bit per parameter: uint8 [ceil(d/8)], little bit order, zero padding."""
    return np.packbits(mask, bitorder="little")


def unpack(bits: Bits, d: int) -> NDArray[np.bool_]:
    """Undo `pack`: uint8 [..., ceil(d/8)] to bool [..., d]."""
    return np.unpackbits(bits, axis=-1, count=d, bitorder="little").view(np.bool_)


def popcount(bits: Bits) -> int:
    """Return the number of ones in packed bits."""
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def common_ones(bits: Bits) -> NDArray[np.int64]:
    """Return the number of ones that each pair of masks has in common, int64 [N, N]. The diagonal holds each mask's number of ones.

    bits: uint8 [N, ceil(d/8)].
    """
    n, num_bytes = bits.shape
    most = min(_WORDS, max(128, _BLOCK_WORDS // max(n, 1)))

    def counts(span: tuple[int, int]) -> NDArray[np.int64]:
        total = np.zeros((n, n), dtype=np.int64)
        words = np.zeros((n, most), dtype=np.uint64)
        both, ones = np.empty_like(words), np.empty(words.shape, dtype=np.uint8)
        for start, stop in blocks(*span, 8 * most):
            width = -(-(stop - start) // 8)
            # the last word may be filled in part
            words[:, width - 1] = 0
            words.view(np.uint8)[:, : stop - start] = bits[:, start:stop]
            for i in range(n):
                shared, number = both[i:, :width], ones[i:, :width]
                np.bitwise_and(words[i:, :width], words[i, :width], out=shared)
                np.bitwise_count(shared, out=number)
                total[i, i:] += number.sum(axis=1, dtype=np.uint32)
        return total

    upper = sum(in_order(counts, blocks(0, num_bytes, 64 * _WORDS)), np.zeros((n, n), dtype=np.int64))
    return upper + np.triu(upper, 1).T


def overlap(bits: Bits, num_critical: int) -> NDArray[np.float64]:
    """Return the pairwise overlap of critical-parameter masks, in [0, 1], float64 [N, N] (FedCAC §3.4).

    bits: uint8 [N, ceil(d/8)], little bit order, each row with num_critical ones. An entry is the share of a client's
    critical parameters that another client has too. The result is symmetric, with diagonal 1. docs/methods/fedcac.md
    has the paper's erratum. Raises ValueError if num_critical < 1.
    """
    if num_critical < 1:
        raise ValueError(f"num_critical must be at least 1, got {num_critical}")
    return common_ones(bits) / num_critical
