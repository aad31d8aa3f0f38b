"""Facts on which all clients of a run must agree, by majority. Answers are counted as they come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from fl_app.checksums import DataHashes
from fl_app.config import RunConfig
from fl_app.server.properties import ClientReport, Names, Shape
from fl_app.sources import NODE
from fl_app.transport import wire

T = TypeVar("T", bound=Hashable)


class Agreed(NamedTuple):
    """Facts that all clients of a run must share, as most clients report them.

    shape: of their data. names: sites' names of features and classes. sums_kind: number of features in sites' sums, and
    their unit. key_list: the list of all sites' keys, in private runs. hashes: of data and partition, if all clients
    share them. like: in private runs, the answer of a client with the most common names; only sites can read the names.
    """

    num_clients: int = 0
    shape: Shape | None = None
    names: Names | None = None
    sums_kind: tuple[int, int] | None = None
    key_list: str | None = None
    hashes: DataHashes | None = None
    like: ClientReport | None = None


class Majority(Generic[T]):
    """The most frequent value; in a tie, the one that came first. None if there is none."""

    def __init__(self) -> None:
        self.value: T | None = None
        # value -> number of times it occurs; value -> its place in the order of first occurrence
        self._counts: dict[T, int] = {}
        self._places: dict[T, int] = {}

    def add(self, value: T | None) -> None:
        """Count a value, in constant time. None does not count."""
        if value is None:
            return
        self._counts[value] = self._counts.get(value, 0) + 1
        self._places.setdefault(value, len(self._places))
        if self.value is None or self._rank(value) > self._rank(self.value):
            self.value = value

    def _rank(self, value: T) -> tuple[int, int]:
        return self._counts[value], -self._places[value]


class Agreement:
    """Counts clients' answers on the facts that they must share."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        # names and sums are compared if each site has its own data
        self._by_site = config.dataset == NODE
        self._num_clients = Majority[int]()
        self._shape = Majority[Shape]()
        self._names = Majority[Names]()
        self._sums_kind = Majority[tuple[int, int]]()
        self._key_list = Majority[str]()
        self._hashes = Majority[DataHashes]()

    def add(self, told: ClientReport) -> None:
        """Count a client's answer."""
        self._num_clients.add(told.num_clients)
        self._shape.add(told.shape)
        if self._by_site:
            self._names.add(told.names)
            self._sums_kind.add(told.sums_kind)
        self._key_list.add(told.key_list)
        self._hashes.add(told.shared_hashes)

    @property
    def found(self) -> Agreed:
        """The facts that most clients report, without `like`."""
        return Agreed(
            self._config.num_clients or self._num_clients.value or 0,
            self._shape.value,
            self._names.value,
            self._sums_kind.value,
            self._key_list.value,
            self._hashes.value,
        )


def majority(several: Iterable[ClientReport]) -> ClientReport | None:
    """Return the answer of the client with the most common names, by their tags; None if no answer has tags.

    The first client with the same names as more than half is taken. So few comparisons suffice if sites agree.
    """
    tagged = [told for told in several if wire.FEATURE_TAGS in told.answer]
    best, most = None, 0
    for told in tagged:
        alike = sum(told.tags.alike(other.tags) for other in tagged)
        if alike > most:
            best, most = told, alike
        if 2 * most > len(tagged):
            break
    return best
