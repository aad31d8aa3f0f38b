"""The point with the smallest sum of distances, by Weiszfeld's iteration (Pillutla et al., IEEE TSP 2022).

It is a weighted mean, and its weights follow from the vectors' distances alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strategies.kernels.averages import ByDistance

_STEPS = 200  # of Weiszfeld's iteration
# largest change of a weight in its last step
_SETTLED = 1e-12
# a vector beyond this squared distance, in medians, has no weight: float64 could not distinguish the others beside it
_HOPELESS = 1e12


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


RULE = ByDistance(lambda distances, num_byzantine: geometric_weights(distances))
