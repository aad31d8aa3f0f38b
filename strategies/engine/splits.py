"""Signatures of the splits of aggregation groups: which of them clients have, and the questions that ask for more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from fl_app.keys import Scalar
from fl_app.privacy import aggregation_groups
from fl_app.privacy.aggregation_groups import GroupSplit, Parts
from fl_app.transport.wire import SIGNED, SPLIT, SPLITS, WireError
from strategies.engine.attempt import Questions, TooFewResults
from strategies.engine.group_store import GroupStore


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
