"""Krum: the vector with the smallest sum of squared distances to its n - f - 2 nearest vectors (Blanchard et al., NeurIPS 2017)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strategies.kernels.averages import ByDistance


def krum(distances: NDArray[np.float64], num_byzantine: int) -> int:
    """Return the index of the vector with the smallest sum of squared distances to its nearest others.

    These are n - num_byzantine - 2 others, at least one. distances: squared, float64 [n, n], n >= 2. Ties go to the
    lower index.
    """
    n = len(distances)
    nearest = np.sort(np.where(np.eye(n, dtype=bool), np.inf, distances), axis=1)[:, : max(1, n - num_byzantine - 2)]
    return int(nearest.sum(axis=1).argmin())


def chosen(distances: NDArray[np.float64], num_byzantine: int) -> NDArray[np.float64]:
    """Return the weights of a mean over n vectors, float64 [n]: 1 for Krum's choice, 0 for the others. Arguments: see `krum`."""
    weights = np.zeros(len(distances))
    weights[krum(distances, num_byzantine)] = 1
    return weights


RULE = ByDistance(chosen, counts_byzantine=True)
