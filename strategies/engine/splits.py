"""Signatures of the splits of companies: which of them clients have, and the questions that ask for more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from fl_app.keys import Scalar
from fl_app.privacy import companies
from fl_app.privacy.companies import Parts, Split
from fl_app.wire import SIGNED, SPLIT, SPLITS, WireError
from strategies.engine.attempt import Questions, TooFewResults
from strategies.engine.cohorts import CohortStore


class Signatures:
    """Collects the signatures of splits, and tells clients of each split once.

    store: the run's cohorts. asked: by client, the split that it is asked to sign. sent, known: by client, of how many splits
    of its company it has been told in the last message, and in messages that it has answered.
    """

    def __init__(self, store: CohortStore) -> None:
        self.store = store
        self.asked: dict[int, Split] = {}
        self.sent: dict[int, int] = {}
        self.known: dict[int, int] = {}

    def can_have(self, client_id: int, here: Collection[int]) -> bool:
        """Return whether all splits of a client's company are signed, or can be by the clients of `here`."""
        return all(split.can_be_signed(here) for split in self.store.splits_of(client_id))

    def told(self, client_id: int, more: Iterable[Split] = ()) -> dict[str, Scalar]:
        """Return the scalars that tell a client of signed splits of its company which it may not know. more: further ones."""
        signed = [split for split in self.store.splits_of(client_id) if split.is_signed]
        new = [*signed[self.known.get(client_id, 0) :], *more]
        self.sent[client_id] = len(signed)
        return {SPLITS: companies.written(new)} if new else {}

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
            raise WireError(f"{SIGNED}: its signature of the split of its company is false")
        asked.signatures[client_id] = signature

    def missing(self, ids: Iterable[int], here: Collection[int]) -> Iterator[Questions]:
        """Ask clients of `here` to sign the splits of these clients' companies.

        Raises TooFewResults if too few members sign one.
        """
        ids = list(ids)
        while unsigned := self._unsigned(ids):
            self.asked = {
                i: split for split in unsigned for i in split.company if i in here and i not in split.signatures
            }
            yield SPLIT, {i: self.told(i, [Split(split.parts)]) for i, split in self.asked.items()}
            self.store.save()
            for split in unsigned:
                if not split.is_signed:
                    silent = [i for i in split.company if i not in split.signatures]
                    raise TooFewResults(
                        f"clients {silent} have not signed the split of the company of clients {list(split.company)}: it is not "
                        "asked",
                        silent,
                    )

    def _unsigned(self, ids: Iterable[int]) -> list[Split]:
        """Return the first split of each of these clients' companies that too few have signed."""
        first = (next((s for s in self.store.splits_of(i) if not s.is_signed), None) for i in ids)
        return list({id(split): split for split in first if split is not None}.values())
