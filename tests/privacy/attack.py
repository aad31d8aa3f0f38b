"""Least squares for single models from all sums of a private run: what an honest server can make of what it rightly has."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata

from fl_app.site_directory import site_directory
from strategies.engine.attempt import RoundAttempt
from strategies.engine.private import MaskedSum, PrivateRounds, opened_sums

# round; what each client counts in it
Sum = tuple[int, dict[int, float]]


class Attack:
    """sums: of which clients and when; models: what each client sent, [d], by (round, client).

    The server knows what it sent: it looks for a client's mean deviation from the global model of the round before, from the second
    round on. which: float64 [sums, N], what each counts.
    """

    def __init__(self, sums: Collection[Sum], models: Mapping[tuple[int, int], np.ndarray], clients: int) -> None:
        trained: dict[int, list[np.ndarray]] = {i: [] for i in range(clients)}
        rows, found = [], []
        for round, counts in (each for each in sums if each[0] > 1):
            last = {i: count for r, own in sums if r == round - 1 for i, count in own.items()}
            before = np.average([models[round - 1, i] for i in last], axis=0, weights=list(last.values()))
            deviations = {i: models[round, i] - before for i in counts}
            rows.append([counts.get(i, 0.0) for i in range(clients)])
            found.append(sum(counts[i] * deviation for i, deviation in deviations.items()))
            for i, deviation in deviations.items():
                trained[i].append(deviation)
        self.which = np.array(rows)
        self.estimates = np.linalg.pinv(self.which) @ np.array(found)
        self.truth = {i: np.mean(of, axis=0) for i, of in trained.items() if of}

    @property
    def rank(self) -> int:
        """How many independent equations the server has."""
        return int(np.linalg.matrix_rank(self.which))

    def alike(self, client: int) -> list[int]:
        """Who was in the same sums as a client, in proportion to what each counts: what is made of sums is the same for them."""
        columns = self.which / np.maximum(np.linalg.norm(self.which, axis=0), 1e-12)
        return [int(i) for i in np.flatnonzero(np.isclose(columns.T, columns[:, client]).all(axis=1))]

    def place(self, client: int, among: Collection[int]) -> float:
        """Place of a client's own model among others', by their distance from its estimate: 0 the nearest, 1 the farthest."""
        ids = list(among)
        distances = [float(np.linalg.norm(self.estimates[client] - self.truth[i])) for i in ids]
        return float((rankdata(distances)[ids.index(client)] - 1) / (len(ids) - 1))


@contextmanager
def sums_seen(patch: pytest.MonkeyPatch) -> Iterator[list[Sum]]:
    """Every sum that a server in this process can form, of attempts that do not count, too."""
    seen: list[Sum] = []
    screen = PrivateRounds.screen

    def noted(self: PrivateRounds, attempt: RoundAttempt) -> Any:
        buffer = attempt.buffer
        assert isinstance(buffer, MaskedSum)
        notes = site_directory() / "runs" / self.server.folder.experiment
        for own in opened_sums(buffer):
            counts = (json.loads((notes / f"client-{i:04d}" / "sums.json").read_text())["count"] for i in own)
            seen.append((attempt.round, dict(zip(own, counts, strict=True))))
        return screen(self, attempt)

    patch.setattr(PrivateRounds, "screen", noted)
    yield seen
