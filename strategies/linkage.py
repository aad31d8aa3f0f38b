"""Groups of clients as a partition, for private runs: average linkage, cut at a threshold, nobody alone with one other.

FedCAC's neighbourhoods overlap: from the means that the server forms for them nearly every single model can be solved for. Here
groups are disjoint and have at least three members; who has no such group is alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fl_app.wire import GROUP_MIN

ALONE = -1


def partition(similarity: NDArray[np.float64], threshold: float) -> NDArray[np.int64]:
    """Cut the average-linkage tree where groups' mean similarity falls below the threshold; int64 [N], a group's number or ALONE.

    similarity: float64 [N, N], symmetric. Groups below three are dissolved; the others are numbered by their first member.
    """
    n = len(similarity)
    labels = np.full(n, ALONE)
    if n < GROUP_MIN:
        return labels
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    distances = squareform(1 - similarity, checks=False)
    found = hierarchy.fcluster(hierarchy.linkage(distances, "average"), 1 - threshold, "distance")
    number = 0
    for i in range(n):
        own = found == found[i]
        if labels[i] == ALONE and own.sum() >= GROUP_MIN:
            labels[own] = number
            number += 1
    return labels


def held(groups: Mapping[int, list[int]], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which clients use which sum as their group's: int64 by client id, its place among the sums, ALONE for those without.

    groups: who was summed up, by label; labels: int64 by client id. Who was only added to a sum, and the pool, use none.
    """
    places = np.full(len(labels), ALONE)
    for place, label in enumerate(groups):
        if label != ALONE:
            places[labels == label] = place
    return places


def regrouped(labels: NDArray[np.int64], ids: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return labels, int64 [N], in which the clients `ids` have new groups and those who were absent keep theirs.

    labels: int64 [N], the groups so far; parts: int64 [len(ids)], the new ones. No new group has the number of one that stays.
    """
    kept = np.delete(labels, ids)
    after = labels.copy()
    after[ids] = np.where(parts == ALONE, ALONE, parts + kept.max(initial=ALONE) + 1)
    return after
