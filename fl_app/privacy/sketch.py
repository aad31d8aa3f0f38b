"""A mask as the server sees it: permuted, and XORed with a pad, by a key that only clients know.

Overlaps do not change.

Client i sends z_i = (M_i o pi)[0:m] xor r. The permutation pi and the pad r follow from a key that all clients share,
for one attempt at one round. With m = d, z_i xor z_j has as many ones, H_ij, as M_i xor M_j. So for masks with K ones
each, the server gets |M_i and M_j| = K - H_ij / 2 exactly. With m < d it gets an estimate. For an overlap O and a share
tau of ones its standard deviation is sqrt(h (1 - h) / m) sqrt(1 - m / d) / (2 tau), h = 2 tau (1 - O): 0.003 for m = 16,384,
tau = 0.5 and O = 0.8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fl_app.privacy.masking import derived, stream

Bits = NDArray[np.uint8]


def sketch(bits: Bits, d: int, m: int, key: bytes) -> Bits:
    """Return the sketch of a mask, uint8 [ceil(m/8)], little bit order, zero padding.

    bits: uint8 [ceil(d/8)], the packed mask. 1 <= m <= d. key: 32 bytes, equal for all clients of the attempt. Raises
    ValueError if m or the mask's shape does not fit d.
    """
    if not 1 <= m <= d or bits.shape != (-(-d // 8),):
        raise ValueError(
            f"a sketch of m = {m} bits needs a packed mask of at least as many, got {bits.shape} for d = {d}"
        )
    order = _order(d, key)[:m]
    mask = np.unpackbits(bits, count=d, bitorder="little")
    pad = np.unpackbits(np.frombuffer(stream(derived(key, "pad"), -(-m // 8)), np.uint8), count=m, bitorder="little")
    return np.packbits(mask[order] ^ pad, bitorder="little")


def _order(d: int, key: bytes) -> NDArray[np.uint64]:
    """Return a permutation of d positions that follows from the key, uint64 [d].

    The positions are sorted by random bits; the low bits of each sorted word are the position itself.
    """
    below = np.uint64(d.bit_length())
    words = np.frombuffer(stream(derived(key, "order"), 8 * d), "<u8") << below | np.arange(d, dtype=np.uint64)
    words.sort()
    return words & ((np.uint64(1) << below) - np.uint64(1))


def length(d: int, asked: int) -> int:
    """Return m, the number of bits in a sketch of d parameters. asked: the key `private-sketch`; 0 means all."""
    return min(asked or d, d)


def overlaps(common: NDArray[np.int64], m: int, d: int, num_selected: int) -> NDArray[np.float64]:
    """Return the overlaps of masks from their sketches, float64 [N, N], symmetric, diagonal 1.

    common: int64 [N, N], the ones that two sketches have in common; the diagonal has each sketch's ones. num_selected:
    K >= 1, ones in every mask. With m = d the overlaps are quotients of the same integers as from the masks themselves.
    With m < d they are clipped to [0, 1].
    """
    ones = common.diagonal()
    apart = ones[:, None] + ones[None, :] - 2 * common
    if m == d:
        return (num_selected - apart // 2) / num_selected
    return np.clip(1 - apart * (d / m) / (2 * num_selected), 0, 1)
