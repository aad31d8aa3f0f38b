"""Remarks on sites' data, by their sums: a column in another unit, and the same data at two sites."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from fl_app.data.moments import MomentSums
from fl_app.errors import listed
from fl_app.server.properties import CONTENT, ClientReport

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
