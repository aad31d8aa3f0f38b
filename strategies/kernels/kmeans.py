"""k-means of a few rows in float64: equal on every machine, without empty clusters, with bounded sizes if asked for."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]
Labels = NDArray[np.int64]

_RESTARTS, _STEPS = 10, 300


def kmeans(rows: Rows, k: int, stream: np.random.Generator, cap: int = 0) -> Labels:
    """Return the cluster of every row, int64 [N]. Clusters are numbered in the order of their first rows.

    The result is the one of least inertia among ten k-means++ starts. rows: [N, C]. k is limited to the number of
    distinct rows; no cluster is empty. cap: the most rows in a cluster; 0: any number. If k clusters of this size
    cannot hold all rows, the bound is the smallest size that can.
    """
    k = min(k, len(np.unique(rows, axis=0)))
    cap = max(cap, math.ceil(len(rows) / k)) if cap else len(rows)
    best, least = np.zeros(len(rows), np.int64), math.inf
    for _ in range(_RESTARTS):
        labels = _settled(rows, _far_apart(rows, k, stream), cap)
        inertia = float(np.square(rows - centres_of(rows, labels)[labels]).sum())
        if inertia < least:
            best, least = labels, inertia
    _, first, inverse = np.unique(best, return_index=True, return_inverse=True)
    ranks: Labels = np.argsort(np.argsort(first))[inverse.reshape(-1)].astype(np.int64)
    return ranks


def centres_of(rows: Rows, labels: Labels) -> Rows:
    """Return the means of clusters 0, 1, ..., float64 [k, C]."""
    return np.stack([rows[labels == k].mean(axis=0) for k in range(int(labels.max()) + 1)])


def squared_distances(rows: Rows, centres: Rows) -> Rows:
    """Return the squared distances of rows [N, C] from centres [k, C], float64 [N, k]."""
    apart: Rows = np.square(rows[:, None] - centres).sum(axis=2)
    return apart


def _far_apart(rows: Rows, k: int, stream: np.random.Generator) -> Rows:
    """Return k distinct rows by k-means++. Each is drawn in proportion to its squared distance from the nearest row
    drawn before.
    """
    chosen = [int(stream.integers(len(rows)))]
    while len(chosen) < k:
        nearest = squared_distances(rows, rows[chosen]).min(axis=1)
        chosen.append(int(stream.choice(len(rows), p=nearest / nearest.sum())))
    return rows[chosen]


def _settled(rows: Rows, centres: Rows, cap: int) -> Labels:
    """Return the labels after Lloyd's steps from centres [k, C], taken until no row moves."""
    labels = np.full(len(rows), -1)
    for _ in range(_STEPS):
        apart = squared_distances(rows, centres)
        moved = _filled(_assigned(apart, cap), apart)
        if (moved == labels).all():
            break
        labels, centres = moved, centres_of(rows, moved)
    return labels


def _assigned(apart: Rows, cap: int) -> Labels:
    """Return each row's nearest of k centres, given squared distances [N, k].

    If a cluster would have more than `cap` rows, return the assignment with the least sum of squared distances within
    that bound.
    """
    labels: Labels = apart.argmin(axis=1)
    if np.bincount(labels).max() <= cap:
        return labels
    from scipy.optimize import linear_sum_assignment

    places: Labels = linear_sum_assignment(np.repeat(apart, cap, axis=1))[1]
    return places // cap


def _filled(labels: Labels, apart: Rows) -> Labels:
    """Return labels without an empty cluster. Each gets the row farthest from its centre, among rows not alone in their cluster."""
    labels, k = labels.copy(), apart.shape[1]
    for empty in np.flatnonzero(np.bincount(labels, minlength=k) == 0).tolist():
        own = apart[np.arange(len(labels)), labels]
        alone = np.bincount(labels, minlength=k)[labels] == 1
        labels[np.where(alone, -1, own).argmax()] = empty
    return labels
