"""Companies: clients of a private run that are summed up together, and the signatures that a split of one needs.

Two sums that differ by one client reveal that client's model. So every sum holds whole companies, of at least three. The
first companies follow from the configuration. A company is split only by a statement that two thirds of its members have
signed, and a client signs one split of a company at most. While fewer than a third of a company lie, it has one split:
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
from fl_app.wire import GROUP_MIN

Parts = tuple[tuple[int, ...], ...]
"""The companies that one becomes, each sorted, in the order of their first members."""


def threshold(members: int) -> int:
    """Return how many of a company, or of a sum, must agree: two thirds, and three at least."""
    return max(GROUP_MIN, -(-2 * members // 3))


def first(config: RunConfig) -> list[list[int]]:
    """Return the companies with which a run begins, sorted: all clients that train, or with `fraction-train` drawn ones."""
    ids = sorted(set(range(config.num_clients)) - config.unseen)
    # The seed is not the run's: all runs of the same clients have the same companies.
    return drawn(ids, rng.generator(0, "companies")) if config.fraction_train < 1 else [ids]


def drawn(ids: Sequence[int], generator: np.random.Generator) -> list[list[int]]:
    """Return companies of nearly equal size, drawn at random: as many of at least three clients as `ids` allow."""
    return [sorted(own.tolist()) for own in np.array_split(generator.permutation(ids), max(1, len(ids) // GROUP_MIN))]


def parts_of(companies: Iterable[Iterable[int]]) -> Parts:
    """Return companies in the form in which they are signed."""
    return tuple(sorted(tuple(sorted(own)) for own in companies))


@dataclass(frozen=True)
class Split:
    """A company's division into several, and by member the signature of it. signatures: the server adds to them."""

    parts: Parts
    signatures: dict[int, str] = field(default_factory=dict)

    @cached_property
    def company(self) -> tuple[int, ...]:
        """The members before the split, sorted."""
        return tuple(sorted(i for own in self.parts for i in own))

    def can_be_signed(self, here: Collection[int]) -> bool:
        """Return whether enough members have signed, together with those of `here`."""
        return len(self.signatures.keys() | set(self.company).intersection(here)) >= threshold(len(self.company))

    @property
    def is_signed(self) -> bool:
        """Whether enough members have signed."""
        return self.can_be_signed(())


def written(splits: Iterable[Split]) -> str:
    """Return splits as text."""
    return json.dumps([[split.parts, split.signatures] for split in splits], separators=(",", ":"))


def read(text: str) -> list[Split]:
    """Return the splits that `written` made a text of. Raises ValueError if it did not."""
    try:
        return [
            Split(tuple(tuple(map(int, own)) for own in parts), {int(i): str(by) for i, by in signatures.items()})
            for parts, signatures in json.loads(text)
        ]
    except MALFORMED:
        raise ValueError("the splits of companies cannot be read") from None


@dataclass(frozen=True)
class Membership:
    """What a client knows of its company. members: sorted. signed: the splits that it has signed."""

    client_id: int
    members: tuple[int, ...]
    signed: tuple[Parts, ...] = ()

    def after(self, splits: Iterable[Split], has_signed: Callable[[int, Parts, str], bool]) -> Membership:
        """Return the membership after splits. Those of other companies change nothing.

        has_signed: returns whether a client made a signature of a split. Raises ValueError if a split has parts below
        three, lacks signatures, or is another than this client has signed.
        """
        known = self
        for split in splits:
            if split.company == known.members:
                known._check(split.parts)
                valid = sum(has_signed(i, split.parts, by) for i, by in split.signatures.items() if i in split.company)
                if valid < (needed := threshold(len(known.members))):
                    raise ValueError(f"a split of a company needs the signatures of {needed} members, got {valid}")
                (own,) = (part for part in split.parts if self.client_id in part)
                known = replace(known, members=own)
        return known

    def signing(self, parts: Parts) -> Membership:
        """Return the membership once a split is signed. Raises ValueError if it must not be."""
        if parts in self.signed:
            return self
        if Split(parts).company != self.members:
            raise ValueError(f"it signs splits of its company alone, which is {list(self.members)}")
        self._check(parts)
        return replace(self, signed=(*self.signed, parts))

    def _check(self, parts: Parts) -> None:
        """Raise ValueError unless parts of the company are three clients or more, and no other split of it is signed."""
        if len(parts) < 2 or min(map(len, parts)) < GROUP_MIN or parts != parts_of(parts):
            raise ValueError(f"a split must have sorted parts of at least {GROUP_MIN} clients, got {list(parts)}")
        if any(parts != other and Split(other).company == self.members for other in self.signed):
            raise ValueError(f"it has signed another split of its company, which is {list(self.members)}")
