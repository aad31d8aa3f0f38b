"""The aggregation groups of a private run: clients that are summed up together.

Two sums that differ by one client reveal that client's model. Sums over many different sets of clients reveal nearly
all clients' models by least squares, however large the sets are (So, Ali, Guler, Jiao, Avestimehr: "Securing Secure
Aggregation: Mitigating Multi-Round Privacy Leakage in Federated Learning", AAAI 2023).

Therefore every sum is over whole groups. Groups only split, and only into parts of at least three. Their members must
sign that (fl_app/privacy/aggregation_groups.py). Within its group a client has the same relative weight in all sums.
While no client is away from its group, every combination of a run's sums contains the group's clients in proportion to
these weights.

Groups are int64 [N]: for each client id the number of its group, or OUTSIDE for clients that never train.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_app.files import publish_text
from fl_app.keys import Scalar
from fl_app.privacy import aggregation_groups
from fl_app.privacy.aggregation_groups import GroupSplit, Parts, parts_of, threshold
from fl_app.transport.wire import GROUP_MIN, SIGNED, SPLIT, SPLITS, WireError
from strategies.engine.attempt import Questions, TooFewResults

OUTSIDE = -1
FILE = "aggregation-groups.json"
GroupNumbers = NDArray[np.int64]


def numbered(found: Iterable[Sequence[int]], n: int) -> GroupNumbers:
    """Return groups with these members. n: the number of clients."""
    groups = np.full(n, OUTSIDE)
    for number, own in enumerate(found):
        groups[own] = number
    return groups


def members(groups: GroupNumbers) -> list[list[int]]:
    """Return every group's members, sorted. The groups are in the order of their first members."""
    found: dict[int, list[int]] = {}
    for i, number in enumerate(groups.tolist()):
        if number != OUTSIDE:
            found.setdefault(number, []).append(i)
    return list(found.values())


def present(groups: GroupNumbers, here: Collection[int]) -> list[list[int]]:
    """Return the members of each group that are in `here`. Groups with only one or two of them are left out."""
    there = ([i for i in own if i in here] for own in members(groups))
    return [own for own in there if len(own) >= GROUP_MIN]


def differs(groups: GroupNumbers, own: Sequence[int], sums: Iterable[Collection[int]]) -> bool:
    """Return whether one of these sums holds another part of the group than `own`. The two sums would reveal the difference.

    own: the group's members in the new sum, sorted.
    """
    number = groups[own[0]]
    parts = ([i for i in sorted(ids) if groups[i] == number] for ids in sums)
    return any(part and part != list(own) for part in parts)


def split(groups: GroupNumbers, here: Collection[int]) -> GroupNumbers:
    """Split groups with absent members, so that the others can be summed up. Return the new groups.

    The absent members become a group. One or two of them are joined by the present members with the lowest ids, up to
    three in all. The group is split only if at least three other members remain, and if two thirds of it are
    present to sign that.
    """
    groups = groups.copy()
    for own in members(groups):
        gone = [i for i in own if i not in here]
        others = [i for i in own if i in here]
        along = others[: max(0, GROUP_MIN - len(gone))]
        if gone and len(others) - len(along) >= GROUP_MIN and len(others) >= threshold(len(own)):
            groups[gone + along] = groups.max() + 1
    return groups


def grouped(
    groups: GroupNumbers, labels: NDArray[np.int64], similarity: NDArray[np.float64]
) -> tuple[GroupNumbers, NDArray[np.int64]]:
    """Change labels so that they split no group into parts below three. Return the new groups and labels, int64 [N] each.

    labels: each client's cluster of the method, int64 [N]. similarity: float64 [N, N]. If one or two clients of a group
    have a label, they get a label that three or more clients of their group have: that of the clients to which they are
    most similar on average. If there is none, the whole group gets the label that most of its clients have.
    """
    labels = labels.copy()
    for own in members(groups):
        by_label = {int(label): [i for i in own if labels[i] == label] for label in np.unique(labels[own])}
        large = {label: of for label, of in by_label.items() if len(of) >= GROUP_MIN}
        for label, few in by_label.items():
            if label not in large:
                to = large or {max(by_label, key=lambda label: len(by_label[label])): own}
                labels[few] = max(to, key=lambda label: float(similarity[np.ix_(few, to[label])].mean()))
    both = np.unique(np.stack([groups, labels]), axis=1, return_inverse=True)[1].reshape(-1)
    return np.where(groups == OUTSIDE, OUTSIDE, both), labels


class GroupStore:
    """A run's groups, and the bound on its clients' sample counts (`most`, 0 for none), in a file of the run folder.

    splits: those of groups so far, in their order. Clients sign one split of a group at most, so none is ever changed.
    Every change is written at once. A resumed run may start from an earlier checkpoint. The server may then have sums
    that the checkpoint does not know. The file keeps the run from splitting groups in another way.
    """

    def __init__(self, directory: Path, first: GroupNumbers) -> None:
        self.path = directory / FILE
        kept = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.groups = np.array(kept["groups"], np.int64) if kept else first
        self.most: float = kept.get("most", 0.0)
        self.splits = aggregation_groups.read(json.dumps(kept.get("splits", [])))
        if not kept:
            self.save()

    def replace(self, groups: GroupNumbers) -> None:
        """Replace the groups by new ones that were made from them."""
        if (groups != self.groups).any():
            for own in members(self.groups):
                parts = parts_of([i for i in own if groups[i] == number] for number in np.unique(groups[own]))
                self.splits += [GroupSplit(parts)] if len(parts) > 1 else []
            self.groups = groups
            self.save()

    def splits_of(self, client_id: int) -> list[GroupSplit]:
        """Return the splits of a client's group so far, in their order."""
        return [split for split in self.splits if client_id in split.group]

    def bound_sizes(self, sizes: Sequence[float], factor: float) -> None:
        """Bound sample counts by `factor` times the median of the first sizes, once for the whole run; at least 1."""
        if not self.most:
            self.most = max(1.0, factor * float(np.median(sizes)))
            self.save()

    def save(self) -> None:
        """Write the file."""
        told = {
            "groups": self.groups.tolist(),
            "most": self.most,
            "splits": json.loads(aggregation_groups.written(self.splits)),
        }
        publish_text(self.path, json.dumps(told) + "\n")


class Signatures:
    """Collects the signatures of splits, and tells clients of each split once.

    store: the run's aggregation groups. asked: by client, the split that it is asked to sign. sent, known: by client, the
    number of its group's splits in the last message to it, and in messages that it has answered.
    """

    def __init__(self, store: GroupStore) -> None:
        self.store = store
        self.asked: dict[int, GroupSplit] = {}
        self.sent: dict[int, int] = {}
        self.known: dict[int, int] = {}

    def can_have(self, client_id: int, here: Collection[int]) -> bool:
        """Return whether all splits of a client's aggregation group are signed, or can be by the clients of `here`."""
        return all(split.can_be_signed(here) for split in self.store.splits_of(client_id))

    def told(self, client_id: int, more: Iterable[GroupSplit] = ()) -> dict[str, Scalar]:
        """Return the signed splits of a client's aggregation group that it may not know, as scalars. more: further ones."""
        signed = [split for split in self.store.splits_of(client_id) if split.is_signed]
        new = [*signed[self.known.get(client_id, 0) :], *more]
        self.sent[client_id] = len(signed)
        return {SPLITS: aggregation_groups.written(new)} if new else {}

    def heard(self, client_id: int) -> None:
        """Note that a client has answered the last message: it knows of the splits in it."""
        self.known[client_id] = self.sent.get(client_id, 0)

    def take(self, client_id: int, signature: str, has_signed: Callable[[int, Parts, str], bool]) -> None:
        """Keep a client's signature of the split that it was asked to sign. Raises WireError if it did not make it.

        has_signed: returns whether a client made a signature of a split.
        """
        self.heard(client_id)
        asked = self.asked[client_id]
        if not has_signed(client_id, asked.parts, signature):
            raise WireError(f"{SIGNED}: its signature of the split of its aggregation group is false")
        asked.signatures[client_id] = signature

    def missing(self, ids: Iterable[int], here: Collection[int]) -> Iterator[Questions]:
        """Ask clients of `here` to sign the splits of these clients' aggregation groups.

        Raises TooFewResults if too few members sign one.
        """
        ids = list(ids)
        while unsigned := self._unsigned(ids):
            self.asked = {
                i: split for split in unsigned for i in split.group if i in here and i not in split.signatures
            }
            yield SPLIT, {i: self.told(i, [GroupSplit(split.parts)]) for i, split in self.asked.items()}
            self.store.save()
            for split in unsigned:
                if not split.is_signed:
                    silent = [i for i in split.group if i not in split.signatures]
                    raise TooFewResults(
                        f"clients {silent} have not signed the split of the aggregation group of clients {list(split.group)}: "
                        "it is not asked",
                        silent,
                    )

    def _unsigned(self, ids: Iterable[int]) -> list[GroupSplit]:
        """Return the first split of each of these clients' aggregation groups that too few have signed."""
        first = (next((s for s in self.store.splits_of(i) if not s.is_signed), None) for i in ids)
        return list({id(split): split for split in first if split is not None}.values())
