"""Least squares for single models from all sums of a private run: what an honest server can make of what it rightly has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from scipy.stats import rankdata

Sum = tuple[int, tuple[int, ...]]  # round, who was summed up


class Attack:
    """sums: of which clients and when; models: what each client sent, [d], by (round, client).

    The server knows what it sent: it looks for a client's mean deviation from the global model of the round before, from the second
    round on. which: bool [sums, N].
    """

    def __init__(self, sums: Collection[Sum], models: Mapping[tuple[int, int], np.ndarray], clients: int) -> None:
        own: dict[int, list[np.ndarray]] = {i: [] for i in range(clients)}
        rows, found = [], []
        first = min(round for round, _ in sums)
        for round, ids in (each for each in sorted(sums) if each[0] > first):
            everyone = [i for r, own in sums if r == round - 1 for i in own]
            before = np.mean([models[round - 1, i] for i in everyone], axis=0, dtype=np.float64)
            deviations = {i: models[round, i] - before for i in ids}
            rows.append(np.isin(np.arange(clients), ids))
            found.append(sum(deviations.values()))
            for i, deviation in deviations.items():
                own[i].append(deviation)
        self.which = np.array(rows)
        self.estimates = np.linalg.pinv(self.which.astype(np.float64)) @ np.array(found)
        self.truth = {i: np.mean(rows, axis=0) for i, rows in own.items() if rows}

    @property
    def rank(self) -> int:
        """How many independent equations the server has."""
        return int(np.linalg.matrix_rank(self.which))

    def alike(self, client: int) -> list[int]:
        """Who was in the same sums as a client always: whatever is made of them, it is the same for all of these."""
        return [int(i) for i in np.flatnonzero((self.which.T == self.which[:, client]).all(axis=1))]

    def place(self, client: int, among: Collection[int]) -> float:
        """Place of a client's own model among others', by their distance from its estimate: 0 the nearest, 1 the farthest."""
        ids = list(among)
        distances = [float(np.linalg.norm(self.estimates[client] - self.truth[i])) for i in ids]
        return float((rankdata(distances)[ids.index(client)] - 1) / (len(ids) - 1))
