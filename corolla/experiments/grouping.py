"""Which runs are repetitions of each other, and their mean: the one rule for reports, comparisons, sweeps and tables of results."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from fl_app.checksums import SHOWN_DIGITS
from fl_app.config import RunConfig
from fl_app.keys import KeySpec, Scalar, bears_on, specs
from fl_app.sources import named_data

T = TypeVar("T")
DATA_SHA256 = "data-sha256"
"""Beside the keys of runs whose data sets are the same by name and not by content."""


class Recorded(Protocol):
    """What `settings_of` needs of a run (corolla/experiments/runs.py)."""

    @property
    def continued(self) -> dict[str, Scalar]:
        """What it was continued with that no run can be continued with."""

    @property
    def data_sha256(self) -> str:
        """Hash of the data set that its clients shared; empty if unknown."""


R = TypeVar("R", bound=Recorded)


_KEYS = {key.name: key for key in specs(RunConfig)}


def settings(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The keys of a run's flat config by which it is told from others: those that may change a result and bear on this run.

    Keys of all runs that the config lacks, being newer than the run, have their default; a data set counts by its name if it has
    one, wherever it lies.
    """
    given = {name: key.default for name, key in _KEYS.items()} | dict(config)
    found = {name: value for name, value in given.items() if tells_runs_apart(name, given)}
    return found | {"dataset": kind(str(given["dataset"]))}


def settings_of(runs: Sequence[R], config: Callable[[R], Mapping[str, Scalar]]) -> list[dict[str, Scalar]]:
    """Return what tells runs apart: their settings, and whether one was continued as none can be.

    Where runs of one data set were made of different samples, its hash is with them.
    config: a run's flat config.
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
    """Tell whether a run with such a flat config is another experiment if it differs in this key alone."""
    key: KeySpec | None = _KEYS.get(name)
    if key is None:
        return bears_on(name, str(config.get("method")))
    return key.tells_runs_apart and (
        name == "seed" or key.divides(str(config.get("partition")), str(config.get("dataset")))
    )


def differing_settings(every: Sequence[Mapping[str, Scalar]]) -> list[str]:
    """Return the keys that have several values in the settings of several runs (see `settings`), in their order there.

    A key that bears on some of the runs only is one if these differ in it.
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

    Unlike `differing_settings`, a key that one of the two lacks counts: its value there is None.
    """
    keys = dict.fromkeys((*theirs, *ours))
    return [(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)]


def kind(dataset: str) -> str:
    """Return a data set's name without the path to it, if it has a name; else the path is all there is."""
    return dataset.partition(":")[0] if named(dataset) else dataset


def named(dataset: str) -> bool:
    """Tell whether a data set has a name, and is not the user's own."""
    return named_data(dataset) is not None


def by_settings(runs: Iterable[T], settings: Callable[[T], Mapping[str, Scalar]]) -> list[list[T]]:
    """Put runs together that differ in the seed alone; groups, and runs in them, in the order given.

    settings: a run's keys by which runs are told apart. A seed counts once: a run that repeats one is of a group of its own, with
    others that repeat theirs as often.
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
    """Mean and sample standard deviation (n - 1), None for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
