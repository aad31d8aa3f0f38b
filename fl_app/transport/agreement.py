"""Facts on which all clients of a run must agree, by majority, and remarks on sites' data.

Answers are counted as they come. The remarks follow from the data's sums: a column in another unit, and the same data at two
sites.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fl_app.checksums import DataHashes
from fl_app.config import RunConfig
from fl_app.data.moments import MomentSums
from fl_app.errors import listed
from fl_app.server.properties import CONTENT, MOST_CLIENTS, ClientReport, Names, Shape, splits_column
from fl_app.sources import NODE
from fl_app.transport import wire

T = TypeVar("T", bound=Hashable)
# of a ClientReport
_FACTS = ("num_clients", "shape", "sums_kind", "key_list", "shared_hashes")


class Agreed(NamedTuple):
    """Facts that all clients of a run must share, as most clients report them.

    shape: of their data. names: clients' names of features and classes, where they may differ; the features are those that
    more than half of the sites name (`Features`). sums_kind: number of features in sites' sums, and their unit. key_list: the
    list of all sites' keys, in private runs. hashes: of data and partition, if all clients share them. like: in private runs,
    the answer of a client with the most common names; only sites can read the names.
    """

    num_clients: int = 0
    shape: Shape | None = None
    names: Names | None = None
    sums_kind: tuple[int, int] | None = None
    key_list: str | None = None
    hashes: DataHashes | None = None
    like: ClientReport | None = None


def most(counts: Counter[T]) -> T | None:
    """Return the most frequent value; in a tie, the one that came first. None if there is none."""
    return max(counts, key=counts.__getitem__, default=None)


class Features:
    """The features that more than half of the sites name, in the order that most sites have.

    In a tie it is the order of the site with the lowest client id, whoever came first. A run that goes on from another one has
    that run's features in their order, if more than half of the sites name each. If no site has all of these features,
    or only some words of a column are among them, or there are none, they are the most frequent list.
    """

    def __init__(self, before: tuple[str, ...] = ()) -> None:
        # features of the run that this one goes on from
        self._before = before
        # number of sites by list of features, and by feature; lowest client id by list
        self._lists, self._named = Counter[tuple[str, ...]](), Counter[str]()
        self._first: dict[tuple[str, ...], int] = {}

    def add(self, features: tuple[str, ...] | None, client_id: object) -> None:
        """Count a site's list. None does not count."""
        if features is None:
            return
        self._lists[features] += 1
        self._named.update(set(features))
        place = client_id if type(client_id) is int else MOST_CLIENTS
        self._first[features] = min(place, self._first.get(features, place))

    @property
    def value(self) -> tuple[str, ...] | None:
        """The features; None if no site has told any."""
        common = {name for name, count in self._named.items() if 2 * count > self._lists.total()}
        if self._before and common >= set(self._before):
            return self._before
        whole = {features: tuple(name for name in features if name in common) for features in self._lists}
        usable = {
            features: kept
            for features, kept in whole.items()
            if kept and set(kept) == common and not splits_column(features, kept)
        }
        found: dict[tuple[str, ...], tuple[int, int]] = {}
        for features, kept in (usable or {features: features for features in self._lists}).items():
            count, first = found.get(kept, (0, -MOST_CLIENTS))
            found[kept] = count + self._lists[features], max(first, -self._first[features])
        return max(found, key=lambda kept: found[kept], default=None)


class Agreement:
    """Counts clients' answers on the facts that they must share."""

    def __init__(self, config: RunConfig, before: tuple[str, ...] = ()) -> None:
        """before: the features of the run that this one goes on from, () if there is none, or if it has no names."""
        self._config = config
        # names and sums are compared if each site has its own data, and names with those of an earlier run
        self._by_site = config.dataset == NODE or bool(before)
        self._features, self._classes = Features(before), Counter[tuple[str, ...]]()
        self._facts: dict[str, Counter[Any]] = {
            name: Counter() for name in _FACTS if self._by_site or name != "sums_kind"
        }

    def add(self, told: ClientReport) -> None:
        """Count a client's answer. A fact that it does not have does not count."""
        if self._by_site:
            self._features.add(told.names.features, told.answer.get("client-id"))
            self._classes.update([told.names.classes] if told.names.classes is not None else [])
        for name, counts in self._facts.items():
            if (fact := getattr(told, name)) is not None:
                counts[fact] += 1

    @property
    def found(self) -> Agreed:
        """The facts that most clients report, without `like`."""
        facts = {name: most(counts) for name, counts in self._facts.items()}
        return Agreed(
            self._config.num_clients or facts["num_clients"] or 0,
            facts["shape"],
            Names(self._features.value, most(self._classes)) if self._by_site else None,
            facts.get("sums_kind"),
            facts["key_list"],
            facts["shared_hashes"],
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


APART = 100.0
"""Factor between the root mean squares of a column at two sites, beyond which they hardly have one unit."""
# most columns that are named
_MOST_COLUMNS = 5


def remarks(told: Mapping[int, ClientReport], own: bool, called: Callable[[int], str]) -> list[str]:
    """Return a line for each column that lies apart at some sites, and for sites with the same data.

    told: the sites' reports by client id. own: whether each has its own data (`dataset = node`): others have parts of the
    same files. called: returns a client's name by its id.
    """
    sums = {i: found for i, report in sorted(told.items()) if (found := report.sums) is not None}
    features = next((names.features for i in sums if (names := told[i].names).features), ())
    columns = list(_apart(sums, features or (), called))
    if more := len(columns) - _MOST_COLUMNS:
        columns[_MOST_COLUMNS:] = [f"and {more} more columns lie as far apart"] if more > 0 else []
    return [*columns, *(_identical(told, called) if own else ())]


def _apart(sums: Mapping[int, MomentSums], features: Sequence[str], called: Callable[[int], str]) -> Iterator[str]:
    for k in range(len(next(iter(sums.values())).totals) if len(sums) > 1 else 0):
        sizes = {i: math.sqrt(float(own.squares[k] / own.count)) for i, own in sums.items()}
        order = sorted((i for i, size in sizes.items() if size > 0), key=lambda i: sizes[i])
        ends = [at for at in range(1, len(order)) if sizes[order[at]] > APART * sizes[order[at - 1]]]
        groups = [order[a:b] for a, b in itertools.pairwise([0, *ends, len(order)])]
        usual = max(groups, key=len)
        for group in groups:
            if group is not usual:
                one, other = (sizes[ids[len(ids) // 2]] for ids in (group, usual))
                size, way = (one / other, "large") if one > other else (other / one, "small")
                name = f"column {features[k]}" if k < len(features) else f"feature {k + 1}"
                yield (
                    f"{name}: its values at {_clients(group, called)} are about {size:.0f} times as {way} as at "
                    f"{_clients(usual, called)}; do they have another unit?"
                )


def _identical(told: Mapping[int, ClientReport], called: Callable[[int], str]) -> Iterator[str]:
    """Yield a line for each group of sites with the same sums or content, and numbers of samples, or the same hash of files."""
    same: dict[object, list[int]] = {}
    for i, report in sorted(told.items()):
        samples = tuple(report.answer.get(name) for name in ("train-samples", "test-samples", "class-counts"))
        if report.sums is not None:
            same.setdefault((report.sums, samples), []).append(i)
        elif content := report.answer.get(CONTENT):
            same.setdefault((content, samples), []).append(i)
        elif report.hashes is not None:
            same.setdefault(report.hashes, []).append(i)
    for ids in same.values():
        if len(ids) > 1:
            yield f"{_clients(ids, called)} have the same data"


def _clients(ids: Sequence[int], called: Callable[[int], str]) -> str:
    return f"client{'s' * (len(ids) > 1)} {listed([called(i) for i in sorted(ids)])}"
