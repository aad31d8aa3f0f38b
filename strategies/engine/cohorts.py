"""Companies: clients of a private run that are summed up together.

Two sums that differ by one client tell that client's model, and sums over many different sets of clients tell nearly everybody's by
least squares, however many are in each (So, Ali, Guler, Jiao, Avestimehr: "Securing Secure Aggregation: Mitigating Multi-Round
Privacy Leakage in Federated Learning", AAAI 2023). So a sum is one over companies; they only ever split into parts of at least
three, and a client counts the same in all sums, beside the others of its company. As long as nobody is away from its company,
whatever is made of all sums of a run is the same for all of a company, times what each counts.

Companies are int64 [N], by client id the number of its company; OUTSIDE for clients that never train.
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
Companies = NDArray[np.int64]


def one(ids: Collection[int], n: int) -> Companies:
    """One company of all `ids`, of n clients."""
    companies = np.full(n, OUTSIDE)
    companies[list(ids)] = 0
    return companies


def drawn(ids: Sequence[int], n: int, generator: np.random.Generator) -> Companies:
    """As many companies of at least three as `ids` make, of nearly equal size, at random."""
    companies = np.full(n, OUTSIDE)
    for number, own in enumerate(np.array_split(generator.permutation(ids), max(1, len(ids) // GROUP_MIN))):
        companies[own] = number
    return companies


def members(companies: Companies) -> list[list[int]]:
    """Every company's members, sorted, in the order of their first ones."""
    found: dict[int, list[int]] = {}
    for i, number in enumerate(companies.tolist()):
        if number != OUTSIDE:
            found.setdefault(number, []).append(i)
    return list(found.values())


def left(companies: Companies, here: Collection[int]) -> list[list[int]]:
    """Who of each company may be summed up if these clients are there: all that are, none of a company of which one or two are."""
    present = ([i for i in own if i in here] for own in members(companies))
    return [own for own in present if len(own) >= GROUP_MIN]


def unlike(companies: Companies, own: Sequence[int], sums: Iterable[Collection[int]]) -> bool:
    """Tell whether a company is in one of these sums, but not as these members of it, sorted: the two would tell the difference."""
    number = companies[own[0]]
    parts = ([i for i in sorted(ids) if companies[i] == number] for ids in sums)
    return any(part and part != list(own) for part in parts)


def split(companies: Companies, here: Collection[int]) -> Companies:
    """Part companies of which some are away, so that the others may be summed up.

    Those away become a company of their own, with the lowest ids of the others up to three in all, if that leaves three others.
    """
    companies = companies.copy()
    for own in members(companies):
        gone = [i for i in own if i not in here]
        others = [i for i in own if i in here]
        along = others[: max(0, GROUP_MIN - len(gone))]
        if gone and len(others) - len(along) >= GROUP_MIN:
            companies[gone + along] = companies.max() + 1
    return companies


def grouped(
    companies: Companies, labels: NDArray[np.int64], similarity: NDArray[np.float64]
) -> tuple[Companies, NDArray[np.int64]]:
    """Change a grouping so that it splits no company into parts below three; the companies from now on and the labels, int64 [N].

    labels: int64 [N], a group by client id; similarity: float64 [N, N]. One or two of a company in a group go to the group of three
    or more of the company that they are most similar to on average; where there is none, all go where most are.
    """
    labels = labels.copy()
    for own in members(companies):
        groups = {int(label): [i for i in own if labels[i] == label] for label in np.unique(labels[own])}
        large = {label: of for label, of in groups.items() if len(of) >= GROUP_MIN}
        for label, few in groups.items():
            if label not in large:
                to = large or {max(groups, key=lambda label: len(groups[label])): own}
                labels[few] = max(to, key=lambda label: float(similarity[np.ix_(few, to[label])].mean()))
    both = np.unique(np.stack([companies, labels]), axis=1, return_inverse=True)[1].reshape(-1)
    return np.where(companies == OUTSIDE, OUTSIDE, both), labels


class Book:
    """A run's companies, and what each client counts, in a file of its folder, as soon as something changes.

    The server may have sums that no checkpoint knows of when a run goes on from an earlier one, which must not split companies in
    another way then.
    """

    def __init__(self, directory: Path, first: Companies) -> None:
        self.path = directory / FILE
        kept = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.companies = np.array(kept["companies"], np.int64) if kept else first
        self.counts: dict[int, float] = {int(i): count for i, count in kept.get("counts", {}).items()}
        self.most: float | None = kept.get("most")

    def part(self, companies: Companies) -> None:
        """Take these, made of the companies so far, from now on."""
        if (companies != self.companies).any():
            self.companies = companies
            self._save()

    def count(self, sizes: Mapping[int, float], factor: float) -> None:
        """Let clients that do not count yet count their sizes, at most `factor` times the median of the first ones; 0: no bound."""
        if not (new := {i: size for i, size in sizes.items() if i not in self.counts}):
            return
        if factor and self.most is None:
            self.most = factor * float(np.median(list(sizes.values())))
        self.counts |= {i: size if self.most is None else min(size, self.most) for i, size in new.items()}
        self._save()

    def _save(self) -> None:
        kept = {"companies": self.companies.tolist(), "counts": self.counts, "most": self.most}
        publish_text(self.path, json.dumps(kept) + "\n")
