"""Cohorts: clients of a private run that are summed up together. The keys, the docs and the file call them companies.

Two sums that differ by one client tell that client's model, and sums over many different sets of clients tell nearly everybody's by
least squares, however many are in each (So, Ali, Guler, Jiao, Avestimehr: "Securing Secure Aggregation: Mitigating Multi-Round
Privacy Leakage in Federated Learning", AAAI 2023). So a sum is one over cohorts; they only ever split into parts of at least
three, and a client counts the same in all sums, beside the others of its cohort. As long as nobody is away from its cohort,
whatever is made of all sums of a run is the same for all of a cohort, times what each counts.

Cohorts are int64 [N], by client id the number of its cohort; OUTSIDE for clients that never train.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_app.files import publish_text
from fl_app.wire import GROUP_MIN

OUTSIDE = -1
FILE = "companies.json"
Cohorts = NDArray[np.int64]


def one(ids: Collection[int], n: int) -> Cohorts:
    """Return one cohort of all `ids`, of n clients."""
    cohorts = np.full(n, OUTSIDE)
    cohorts[list(ids)] = 0
    return cohorts


def drawn(ids: Sequence[int], n: int, generator: np.random.Generator) -> Cohorts:
    """Return as many cohorts of at least three as `ids` make, of nearly equal size, at random."""
    cohorts = np.full(n, OUTSIDE)
    for number, own in enumerate(np.array_split(generator.permutation(ids), max(1, len(ids) // GROUP_MIN))):
        cohorts[own] = number
    return cohorts


def members(cohorts: Cohorts) -> list[list[int]]:
    """Return every cohort's members, sorted, in the order of their first ones."""
    found: dict[int, list[int]] = {}
    for i, number in enumerate(cohorts.tolist()):
        if number != OUTSIDE:
            found.setdefault(number, []).append(i)
    return list(found.values())


def present(cohorts: Cohorts, here: Collection[int]) -> list[list[int]]:
    """Return who of each cohort may be summed up if these clients are there: all that are, nobody where they are one or two."""
    there = ([i for i in own if i in here] for own in members(cohorts))
    return [own for own in there if len(own) >= GROUP_MIN]


def differs(cohorts: Cohorts, own: Sequence[int], sums: Iterable[Collection[int]]) -> bool:
    """Tell whether one of these sums holds others of a cohort than `own`, sorted: the two sums would tell the difference."""
    number = cohorts[own[0]]
    parts = ([i for i in sorted(ids) if cohorts[i] == number] for ids in sums)
    return any(part and part != list(own) for part in parts)


def split(cohorts: Cohorts, here: Collection[int]) -> Cohorts:
    """Part cohorts of which some are away, so that the others may be summed up.

    Those away become a cohort of their own, with the lowest ids of the others up to three in all, if that leaves three others.
    """
    cohorts = cohorts.copy()
    for own in members(cohorts):
        gone = [i for i in own if i not in here]
        others = [i for i in own if i in here]
        along = others[: max(0, GROUP_MIN - len(gone))]
        if gone and len(others) - len(along) >= GROUP_MIN:
            cohorts[gone + along] = cohorts.max() + 1
    return cohorts


def grouped(
    cohorts: Cohorts, labels: NDArray[np.int64], similarity: NDArray[np.float64]
) -> tuple[Cohorts, NDArray[np.int64]]:
    """Change a grouping so that it splits no cohort into parts below three; the cohorts from now on and the labels, int64 [N].

    labels: int64 [N], a group by client id; similarity: float64 [N, N]. One or two of a cohort in a group go to the group of three
    or more of the cohort that they are most similar to on average; where there is none, all go where most are.
    """
    labels = labels.copy()
    for own in members(cohorts):
        groups = {int(label): [i for i in own if labels[i] == label] for label in np.unique(labels[own])}
        large = {label: of for label, of in groups.items() if len(of) >= GROUP_MIN}
        for label, few in groups.items():
            if label not in large:
                to = large or {max(groups, key=lambda label: len(groups[label])): own}
                labels[few] = max(to, key=lambda label: float(similarity[np.ix_(few, to[label])].mean()))
    both = np.unique(np.stack([cohorts, labels]), axis=1, return_inverse=True)[1].reshape(-1)
    return np.where(cohorts == OUTSIDE, OUTSIDE, both), labels


class CohortStore:
    """A run's cohorts, and how many samples each client counts with, in a file of its folder, as soon as something changes.

    The server may have sums that no checkpoint knows of when a run goes on from an earlier one, which must not split cohorts in
    another way then.
    """

    def __init__(self, directory: Path, first: Cohorts) -> None:
        self.path = directory / FILE
        kept = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.cohorts = np.array(kept["companies"], np.int64) if kept else first
        self.counts: dict[int, float] = {int(i): count for i, count in kept.get("counts", {}).items()}
        self.most: float | None = kept.get("most")

    def replace(self, cohorts: Cohorts) -> None:
        """Replace the cohorts by ones that were made of them."""
        if (cohorts != self.cohorts).any():
            self.cohorts = cohorts
            self._save()

    def note_sizes(self, sizes: Mapping[int, float], factor: float) -> None:
        """Note the sizes of clients that are new, at most `factor` times the median of the first ones; 0: no bound."""
        if not (new := {i: size for i, size in sizes.items() if i not in self.counts}):
            return
        if factor and self.most is None:
            self.most = factor * float(np.median(list(sizes.values())))
        self.counts |= {i: size if self.most is None else min(size, self.most) for i, size in new.items()}
        self._save()

    def _save(self) -> None:
        kept = {"companies": self.cohorts.tolist(), "counts": self.counts, "most": self.most}
        publish_text(self.path, json.dumps(kept) + "\n")
