"""Groups of clients as a partition, for private runs: average linkage, cut at a threshold, nobody alone with one other.

FedCAC's neighbourhoods overlap: from the means that the server forms for them nearly every single model can be solved for. Here
groups are disjoint and have at least three members; who has no such group is alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_app.wire import GROUP_MIN
from strategies.base.companies import OUTSIDE, Companies, regrouped

ALONE = -1


def partition(similarity: NDArray[np.float64], threshold: float, smallest: int = GROUP_MIN) -> NDArray[np.int64]:
    """Cut the average-linkage tree where groups' mean similarity falls below the threshold; int64 [N], a group's number or ALONE.

    similarity: float64 [N, N], symmetric. Groups below `smallest` are dissolved; the others are numbered by their first member.
    """
    n = len(similarity)
    labels = np.full(n, ALONE)
    if n < max(2, smallest):
        return labels
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    distances = squareform(1 - similarity, checks=False)
    found = hierarchy.fcluster(hierarchy.linkage(distances, "average"), 1 - threshold, "distance")
    number = 0
    for i in range(n):
        own = found == found[i]
        if labels[i] == ALONE and own.sum() >= smallest:
            labels[own] = number
            number += 1
    return labels


def summed(
    ids: Sequence[int], labels: NDArray[np.int64], similarity: NDArray[np.float64], smallest: int = GROUP_MIN
) -> dict[int, list[int]]:
    """Who is summed up with whom: disjoint groups of at least `smallest` that cover `ids`, each sorted, by label.

    ids: the clients present, at least `smallest`; labels: int64, by client id, as of `partition`; similarity: [N, N] by client id.
    Groups of which too few are present, and who is alone, are one pool, ALONE. A pool that is itself too small goes, whole, to the
    group that it is most similar to on average.
    """
    if len(ids) < smallest:
        raise ValueError(f"at least {smallest} clients are needed, got {sorted(ids)}")
    groups: dict[int, list[int]] = {}
    for i in sorted(ids):
        groups.setdefault(int(labels[i]), []).append(i)
    pool = sorted(i for label, own in groups.items() if label == ALONE or len(own) < smallest for i in own)
    whole = {label: own for label, own in sorted(groups.items()) if label != ALONE and len(own) >= smallest}
    if not pool or len(pool) >= smallest:
        return whole | ({ALONE: pool} if pool else {})
    nearest = max(whole, key=lambda label: float(similarity[np.ix_(pool, whole[label])].mean()))
    return whole | {nearest: sorted(whole[nearest] + pool)}


def regroup(
    companies: Companies, ids: NDArray[np.int64], overlap: NDArray[np.float64], threshold: float | None
) -> tuple[Companies, NDArray[np.int64], NDArray[np.float64]] | None:
    """Group clients anew, so that no company splits into parts below three (strategies/base/companies.py).

    companies: int64 [N]; ids: int64 [n], the clients present, of which overlap is, float64 [n, n]; threshold: None for no groups.
    Returns the companies from now on, the groups' labels, int64 [N], and the overlap by client id, float64 [N, N]; None if the
    groups that are left would be summed up with others in a way that splits a company.
    """
    n = len(companies)
    similarity, labels = np.eye(n), np.full(n, ALONE)
    similarity[np.ix_(ids, ids)] = overlap
    if threshold is not None:
        labels[ids] = partition(overlap, threshold)
    everyone = np.flatnonzero(companies != OUTSIDE).tolist()
    found = regrouped(companies, labels, lambda labels: summed(everyone, labels, similarity).values())
    return (*found, similarity) if found else None


def held(groups: Mapping[int, list[int]], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which clients use which sum as their group's: int64 by client id, its place among the sums, ALONE for those without.

    groups: as of `summed`; labels: int64 by client id. Who was only added to a sum, and the pool, use none.
    """
    places = np.full(len(labels), ALONE)
    for place, label in enumerate(groups):
        if label != ALONE:
            places[labels == label] = place
    return places
