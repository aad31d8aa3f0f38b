"""Companies: clients of a private run that are only ever summed up together.

Two sums that differ by one client tell that client's model, and sums over many different sets of clients tell nearly everybody's by
least squares, however many are in each (So, Ali, Guler, Jiao, Avestimehr: "Securing Secure Aggregation: Mitigating Multi-Round
Privacy Leakage in Federated Learning", AAAI 2023). So every sum of a run is one over whole companies, and a company splits into
parts of at least three alone: whatever is made of all sums together, it treats all members of a company alike.

Companies are int64 [N], by client id the number of its company; OUTSIDE for clients that never train.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_app.wire import GROUP_MIN

OUTSIDE = -1
Companies = NDArray[np.int64]


def one(ids: Collection[int], n: int) -> Companies:
    """One company of all `ids`, of n clients."""
    companies = np.full(n, OUTSIDE)
    companies[list(ids)] = 0
    return companies


def drawn(ids: Sequence[int], n: int, generator: np.random.Generator) -> Companies:
    """As many companies of at least three as `ids` make, of nearly equal size, at random."""
    companies = np.full(n, OUTSIDE)
    for number, members in enumerate(np.array_split(generator.permutation(ids), max(1, len(ids) // GROUP_MIN))):
        companies[members] = number
    return companies


def members(companies: Companies) -> list[list[int]]:
    """Every company's members, sorted, in the order of their first ones."""
    found: dict[int, list[int]] = {}
    for i, number in enumerate(companies.tolist()):
        if number != OUTSIDE:
            found.setdefault(number, []).append(i)
    return list(found.values())


def without(companies: Companies, absent: Collection[int]) -> tuple[Companies, list[int]]:
    """Leave out clients that are absent, and with each the fewest others: the companies from now on, and who is left, sorted.

    Of a company with absent members these and the next ones in a row become a company of their own, if three others are left.
    """
    companies, left = companies.copy(), []
    for own in members(companies):
        gone = [i for i in own if i in absent]
        here = [i for i in own if i not in absent]
        if gone and here:
            more = max(0, GROUP_MIN - len(gone))
            gone, here = gone + here[:more], here[more:]
            if len(here) < GROUP_MIN:
                here = []
            else:
                companies[gone] = companies.max() + 1
        left += here
    return companies, sorted(left)


def pieces(companies: Companies, sums: Iterable[Collection[int]]) -> Companies:
    """The companies that are left after these disjoint sums over all clients that train."""
    of = np.full(len(companies), OUTSIDE)
    for number, own in enumerate(sums):
        of[list(own)] = number
    both = np.unique(np.stack([companies, of]), axis=1, return_inverse=True)[1].reshape(-1)
    return np.where(companies == OUTSIDE, OUTSIDE, both)


def regrouped(
    companies: Companies, labels: NDArray[np.int64], sums: Callable[[NDArray[np.int64]], Iterable[Collection[int]]]
) -> tuple[Companies, NDArray[np.int64]] | None:
    """Change a new grouping so that no piece of a company is below three; the companies from now on and the labels.

    labels: int64 [N], a group by client id; sums: whom a grouping sums up together. Who would be one or two of its company in a
    group goes with the most of it. None if that gives groups so small that others are summed up in their place.
    """
    labels = labels.copy()
    for own in members(companies):
        numbers, counts = np.unique(labels[own], return_counts=True)
        few = numbers[counts < GROUP_MIN]
        labels[[i for i in own if labels[i] in few]] = numbers[np.argmax(counts)]
    left = pieces(companies, sums(labels))
    return None if any(len(own) < GROUP_MIN for own in members(left)) else (left, labels)
