"""Cohorts: clients of a private run that are summed up together. The keys, the docs and the file call them companies.

Two sums that differ by one client reveal that client's model. Sums over many different sets of clients reveal nearly
all clients' models by least squares, however large the sets are (So, Ali, Guler, Jiao, Avestimehr: "Securing Secure
Aggregation: Mitigating Multi-Round Privacy Leakage in Federated Learning", AAAI 2023).

Therefore every sum is over cohorts. Cohorts only split, and only into parts of at least three. Their members must sign
that (fl_app/privacy/companies.py). Within its cohort a client has the same relative weight in all sums. While no client is
away from its cohort, every combination of a run's sums contains the cohort's clients in proportion to these weights.

Cohorts are int64 [N]: for each client id the number of its cohort, or OUTSIDE for clients that never train.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_app.files import publish_text
from fl_app.privacy import companies
from fl_app.privacy.companies import Split, parts_of, threshold
from fl_app.wire import GROUP_MIN

OUTSIDE = -1
FILE = "companies.json"
Cohorts = NDArray[np.int64]


def numbered(found: Iterable[Sequence[int]], n: int) -> Cohorts:
    """Return cohorts with these members. n: the number of clients."""
    cohorts = np.full(n, OUTSIDE)
    for number, own in enumerate(found):
        cohorts[own] = number
    return cohorts


def members(cohorts: Cohorts) -> list[list[int]]:
    """Return every cohort's members, sorted. The cohorts are in the order of their first members."""
    found: dict[int, list[int]] = {}
    for i, number in enumerate(cohorts.tolist()):
        if number != OUTSIDE:
            found.setdefault(number, []).append(i)
    return list(found.values())


def present(cohorts: Cohorts, here: Collection[int]) -> list[list[int]]:
    """Return the members of each cohort that are in `here`. Cohorts with only one or two of them are left out."""
    there = ([i for i in own if i in here] for own in members(cohorts))
    return [own for own in there if len(own) >= GROUP_MIN]


def differs(cohorts: Cohorts, own: Sequence[int], sums: Iterable[Collection[int]]) -> bool:
    """Return whether one of these sums holds another part of the cohort than `own`. The two sums would reveal the difference.

    own: the cohort's members in the new sum, sorted.
    """
    number = cohorts[own[0]]
    parts = ([i for i in sorted(ids) if cohorts[i] == number] for ids in sums)
    return any(part and part != list(own) for part in parts)


def split(cohorts: Cohorts, here: Collection[int]) -> Cohorts:
    """Split cohorts with absent members, so that the others can be summed up. Return the new cohorts.

    The absent members become a cohort. One or two of them are joined by the present members with the lowest ids, up to
    three in all. The cohort is split only if at least three other members remain, and if two thirds of it are
    present to sign that.
    """
    cohorts = cohorts.copy()
    for own in members(cohorts):
        gone = [i for i in own if i not in here]
        others = [i for i in own if i in here]
        along = others[: max(0, GROUP_MIN - len(gone))]
        if gone and len(others) - len(along) >= GROUP_MIN and len(others) >= threshold(len(own)):
            cohorts[gone + along] = cohorts.max() + 1
    return cohorts


def grouped(
    cohorts: Cohorts, labels: NDArray[np.int64], similarity: NDArray[np.float64]
) -> tuple[Cohorts, NDArray[np.int64]]:
    """Change a grouping so that it splits no cohort into parts below three. Return the new cohorts and the labels, int64 [N] each.

    labels: each client's group, int64 [N]. similarity: float64 [N, N]. If one or two clients of a cohort are in a
    group, they go to another group with three or more clients of that cohort: the one to which they are most similar on
    average. If there is none, the whole cohort goes to the group with most of its clients.
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
    """A run's cohorts, and the bound on its clients' sample counts (`most`, 0 for none), in a file of the run folder.

    splits: those of cohorts so far, in their order. Clients sign one split of a cohort at most, so none is ever changed.
    Every change is written at once. A resumed run may start from an earlier checkpoint. The server may then have sums
    that the checkpoint does not know. The file keeps the run from splitting cohorts in another way.
    """

    def __init__(self, directory: Path, first: Cohorts) -> None:
        self.path = directory / FILE
        kept = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.cohorts = np.array(kept["companies"], np.int64) if kept else first
        self.most: float = kept.get("most") or 0.0
        self.splits = companies.read(json.dumps(kept.get("splits", [])))
        if not kept:
            self.save()

    def replace(self, cohorts: Cohorts) -> None:
        """Replace the cohorts by new ones that were made from them."""
        if (cohorts != self.cohorts).any():
            for own in members(self.cohorts):
                parts = parts_of([i for i in own if cohorts[i] == number] for number in np.unique(cohorts[own]))
                self.splits += [Split(parts)] if len(parts) > 1 else []
            self.cohorts = cohorts
            self.save()

    def splits_of(self, client_id: int) -> list[Split]:
        """Return the splits of a client's cohort so far, in their order."""
        return [split for split in self.splits if client_id in split.company]

    def bound_sizes(self, sizes: Sequence[float], factor: float) -> None:
        """Bound sample counts by `factor` times the median of the first sizes, once for the whole run; at least 1."""
        if not self.most:
            self.most = max(1.0, factor * float(np.median(sizes)))
            self.save()

    def save(self) -> None:
        """Write the file."""
        told = {
            "companies": self.cohorts.tolist(),
            "most": self.most,
            "splits": json.loads(companies.written(self.splits)),
        }
        publish_text(self.path, json.dumps(told) + "\n")
