"""Per-parameter scores by which methods select parameters. Pure functions over flat float32 vectors [d]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sensitivity(before: NDArray[np.float32], after: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sensitivity of every parameter to the local data, |(after - before) * after|, float32 [d] (FedCAC Eq. 5).

    before, after: float32 [d], the vectors before and after local training. Raises ValueError if the shapes differ.
    """
    if before.shape != after.shape:
        raise ValueError(f"before has shape {before.shape}, after {after.shape}: they must be equal")
    scores: NDArray[np.float32] = np.subtract(after, before, dtype=np.float32)
    scores *= after
    return np.abs(scores, out=scores)
