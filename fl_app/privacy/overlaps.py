"""What the server makes of the sketches of masks (sketch.py): their overlaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def length(d: int, asked: int) -> int:
    """Return m, the bits of a sketch of d parameters (key `private-sketch`; 0: all of them)."""
    return min(asked or d, d)


def overlaps(common: NDArray[np.int64], m: int, d: int, num_selected: int) -> NDArray[np.float64]:
    """Return the overlaps of masks from their sketches, float64 [N, N], symmetric, diagonal 1.

    common: int64 [N, N], ones that two sketches have in common, on the diagonal those that one has; num_selected: K >= 1, ones in
    every mask. With m = d the quotient of the same integers as from the masks themselves; else clipped to [0, 1].
    """
    ones = common.diagonal()
    apart = ones[:, None] + ones[None, :] - 2 * common
    if m == d:
        return (num_selected - apart // 2) / num_selected
    return np.clip(1 - apart * (d / m) / (2 * num_selected), 0, 1)
