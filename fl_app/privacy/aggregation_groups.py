"""Aggregation groups: clients of a private run that are summed up together, and the signatures that a split of one needs.

Two sums that differ by one client reveal that client's model. So every sum holds whole groups, of at least three clients.
The first groups follow from the configuration. A group is split only by a statement that two thirds of its members have
signed, and a client signs one split of a group at most. While fewer than a third of a group lie, it has one split:
two would share more than a third as signers. So all members know the same parts, whatever a server tells each of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fl_app import rng
from fl_app.config import RunConfig
from fl_app.errors import MALFORMED
from fl_app.transport.wire import GROUP_MIN

Parts = tuple[tuple[int, ...], ...]
"""The groups that one becomes, each sorted, in the order of their first members."""


def threshold(members: int) -> int:
    """Return how many of a group, or of a sum, must agree: two thirds, and three at least."""
    return max(GROUP_MIN, -(-2 * members // 3))


def first(config: RunConfig) -> list[list[int]]:
    """Return the groups with which a run begins, sorted: all clients that train, or with `fraction-train` drawn ones."""
    ids = sorted(set(range(config.num_clients)) - config.unseen)
    # The seed is not the run's: all runs of the same clients have the same groups.
    return random_groups(ids, rng.generator(0, "companies")) if config.fraction_train < 1 else [ids]


def random_groups(ids: Sequence[int], generator: np.random.Generator) -> list[list[int]]:
    """Return groups of nearly equal size, drawn at random: as many of at least three clients as `ids` allow."""
    return [sorted(own.tolist()) for own in np.array_split(generator.permutation(ids), max(1, len(ids) // GROUP_MIN))]


def parts_of(groups: Iterable[Iterable[int]]) -> Parts:
    """Return groups in the form in which they are signed."""
    return tuple(sorted(tuple(sorted(own)) for own in groups))


@dataclass(frozen=True)
class GroupSplit:
    """A group's division into several, and by member the signature of it. signatures: the server adds to them."""

    parts: Parts
    signatures: dict[int, str] = field(default_factory=dict)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The members before the split, sorted."""
        return tuple(sorted(i for own in self.parts for i in own))

    def can_be_signed(self, here: Collection[int]) -> bool:
        """Return whether enough members have signed, together with those of `here`."""
        return len(self.signatures.keys() | set(self.group).intersection(here)) >= threshold(len(self.group))

    @property
    def is_signed(self) -> bool:
        """Whether enough members have signed."""
        return self.can_be_signed(())


def written(splits: Iterable[GroupSplit]) -> str:
    """Return splits as text."""
    return json.dumps([[split.parts, split.signatures] for split in splits], separators=(",", ":"))


def read(text: str) -> list[GroupSplit]:
    """Return the splits that `written` made a text of. Raises ValueError if it did not."""
    try:
        return [
            GroupSplit(tuple(tuple(map(int, own)) for own in parts), {int(i): str(by) for i, by in signatures.items()})
            for parts, signatures in json.loads(text)
        ]
    except MALFORMED:
        raise ValueError("the splits of aggregation groups cannot be read") from None


@dataclass(frozen=True)
class Membership:
    """What a client knows of its group. members: sorted. signed: the splits that it has signed."""

    client_id: int
    members: tuple[int, ...]
    signed: tuple[Parts, ...] = ()

    def after(self, splits: Iterable[GroupSplit], has_signed: Callable[[int, Parts, str], bool]) -> Membership:
        """Return the membership after splits. Those of other groups change nothing.

        has_signed: returns whether a client made a signature of a split. Raises ValueError if a split has parts below
        three, lacks signatures, or is another than this client has signed.
        """
        known = self
        for split in splits:
            if split.group == known.members:
                known._check(split.parts)
                valid = sum(has_signed(i, split.parts, by) for i, by in split.signatures.items() if i in split.group)
                if valid < (needed := threshold(len(known.members))):
                    raise ValueError(
                        f"a split of an aggregation group needs the signatures of {needed} members, got {valid}"
                    )
                (own,) = (part for part in split.parts if self.client_id in part)
                known = replace(known, members=own)
        return known

    def signing(self, parts: Parts) -> Membership:
        """Return the membership once a split is signed. Raises ValueError if it must not be."""
        if parts in self.signed:
            return self
        if GroupSplit(parts).group != self.members:
            raise ValueError(f"it signs splits of its aggregation group alone, which is {list(self.members)}")
        self._check(parts)
        return replace(self, signed=(*self.signed, parts))

    def _check(self, parts: Parts) -> None:
        """Raise ValueError unless parts of the group are three clients or more, and no other split of it is signed."""
        if len(parts) < 2 or min(map(len, parts)) < GROUP_MIN or parts != parts_of(parts):
            raise ValueError(f"a split must have sorted parts of at least {GROUP_MIN} clients, got {list(parts)}")
        if any(parts != other and GroupSplit(other).group == self.members for other in self.signed):
            raise ValueError(f"it has signed another split of its aggregation group, which is {list(self.members)}")
