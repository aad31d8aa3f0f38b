"""Groups of clients as a partition, for private runs: average linkage, cut at a threshold, at least three members.

FedCAC's neighbourhoods overlap. Nearly every single model follows from the means that the server forms over them. The
groups here are disjoint and have at least three members. A client without a group is alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fl_app.transport.wire import GROUP_MIN

ALONE = -1


def partition(similarity: NDArray[np.float64], threshold: float) -> NDArray[np.int64]:
    """Cut the average-linkage tree where the groups' mean similarity falls below the threshold.

    Returns int64 [N]: each client's group number, or ALONE. similarity: float64 [N, N], symmetric. Groups below three
    are dissolved; the others are numbered by their first member.
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
    """Return the sum that each client uses as its group's: int64 by client id, the sum's place among the sums, or ALONE for none.

    groups: the summed clients by label. labels: int64 by client id. Clients merged into another group's sum keep no group
    mean. Clients without a group (label ALONE) have none.
    """
    places = np.full(len(labels), ALONE)
    for place, label in enumerate(groups):
        if label != ALONE:
            places[labels == label] = place
    return places


def regrouped(labels: NDArray[np.int64], ids: NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return labels, int64 [N], with new groups for the clients `ids`. Absent clients keep their group.

    labels: the groups so far, int64 [N]. parts: the new groups of `ids`, int64 [len(ids)]. No new group has the number
    of a kept one.
    """
    kept = np.delete(labels, ids)
    after = labels.copy()
    after[ids] = np.where(parts == ALONE, ALONE, parts + kept.max(initial=ALONE) + 1)
    return after
