"""Which runs are repetitions of each other, and their mean: the one rule for reports, comparisons, sweeps and tables of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from fl_app.keys import Scalar

T = TypeVar("T")


def by_settings(runs: Iterable[T], settings: Callable[[T], Mapping[str, Scalar]]) -> list[list[T]]:
    """Put runs together that differ in the seed alone; groups, and runs in them, in the order given.

    settings: a run's keys by which runs are told apart; the seed among them is ignored.
    """
    groups: dict[tuple[tuple[str, Scalar, bool], ...], list[T]] = {}
    for run in runs:
        named = sorted((name, value) for name, value in settings(run).items() if name != "seed")
        groups.setdefault(tuple((name, value, isinstance(value, bool)) for name, value in named), []).append(run)
    return list(groups.values())


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1), None for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
