"""Groups of runs that repeat each other, and their mean: the one rule for reports, comparisons, sweeps and tables."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from fl_app.checksums import SHOWN_DIGITS
from fl_app.config import RunConfig
from fl_app.keys import KeySpec, Scalar, affects, specs
from fl_app.known_names import divisions
from fl_app.sources import named_data

if TYPE_CHECKING:
    from corolla.experiments.runs import RecordedRun

T = TypeVar("T")
R = TypeVar("R", bound="RecordedRun")
DATA_SHA256 = "data-sha256"
"""Key added to runs with data sets of the same name and different content."""


_KEYS = {key.name: key for key in specs(RunConfig)}


def settings(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the keys of a flat config that distinguish runs: those that may change a result and apply to this run.

    Keys that are missing, because they are newer than the run, have their default. A data set with a name counts by its
    name, wherever it lies.
    """
    given = {name: key.default for name, key in _KEYS.items()} | dict(config)
    found = {name: value for name, value in given.items() if tells_runs_apart(name, given)}
    return found | {"dataset": kind(str(given["dataset"]))}


def settings_of(runs: Sequence[R], config: Callable[[R], Mapping[str, Scalar]]) -> list[dict[str, Scalar]]:
    """Return the settings that distinguish runs, and `continued` of each run.

    If runs of one data set used different samples, the data's hash is added. config: returns a run's flat config.
    """
    found = [settings(config(run)) | run.continued for run in runs]
    hashes: dict[Scalar, set[str]] = {}
    for run, own in zip(runs, found, strict=True):
        if run.data_sha256:
            hashes.setdefault(own["dataset"], set()).add(run.data_sha256)
    for run, own in zip(runs, found, strict=True):
        if len(hashes.get(own["dataset"], ())) > 1:
            own[DATA_SHA256] = run.data_sha256[:SHOWN_DIGITS] or "unknown"
    return found


def tells_runs_apart(name: str, config: Mapping[str, Scalar]) -> bool:
    """Return whether changing this key alone makes a run with this flat config a different experiment."""
    key: KeySpec | None = _KEYS.get(name)
    if key is None:
        return affects(name, str(config.get("method")))
    kinds = divisions(str(config.get("partition")), str(config.get("dataset")), int(config.get("test-samples", 0)))
    return key.tells_runs_apart and (name == "seed" or key.divides(kinds))


def differing_settings(every: Sequence[Mapping[str, Scalar]]) -> list[str]:
    """Return the keys with several values in the settings of several runs (see `settings`), in their order there.

    A key that applies to only some runs is included if these differ in it.
    """
    values: dict[str, list[Scalar]] = {}
    for one in every:
        for name, value in one.items():
            found = values.setdefault(name, [])
            if value not in found:
                found.append(value)
    return [name for name, found in values.items() if len(found) > 1]


def differing_values(
    ours: Mapping[str, Scalar], theirs: Mapping[str, Scalar]
) -> list[tuple[str, Scalar | None, Scalar | None]]:
    """Return the keys in which two settings differ, with both values, in the order of `theirs`.

    Unlike in `differing_settings`, a key that one of the two lacks counts: its value there is None.
    """
    keys = dict.fromkeys((*theirs, *ours))
    return [(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)]


def kind(dataset: str) -> str:
    """Return a data set's name without its path; a data set without a name is returned as it is."""
    return dataset.partition(":")[0] if named(dataset) else dataset


def named(dataset: str) -> bool:
    """Return whether a data set has a name of Corolla's, rather than being the user's own."""
    return named_data(dataset) is not None


def by_settings(runs: Iterable[T], settings: Callable[[T], Mapping[str, Scalar]]) -> list[list[T]]:
    """Group runs that differ only in the seed. Groups, and the runs in them, keep the given order.

    settings: returns the keys that distinguish a run. A group has each seed once: a second run with the same settings
    and seed starts a new group.
    """
    groups: dict[tuple[object, ...], list[T]] = {}
    times: collections.Counter[tuple[object, ...]] = collections.Counter()
    for run in runs:
        given = dict(settings(run))
        seed = given.pop("seed", None)
        same = tuple(
            (name, value, isinstance(value, bool)) for name, value in sorted(given.items(), key=lambda pair: pair[0])
        )
        groups.setdefault((*same, times[(*same, seed)]), []).append(run)
        times[(*same, seed)] += 1
    return list(groups.values())


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (n - 1); the latter is None for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
