"""Groups of runs that differ only in the seed, shown as one row and one curve, and the labels of these rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from corolla.experiments.grouping import DATA_SHA256, by_settings, differing_settings, settings_of
from corolla.experiments.result_table import FIGURES, Row, row_of
from corolla.report.arrays import Curve, Floats, ReportedRun, curve, last_known, ranked, spent, timed, window
from fl_app.config import RunConfig
from fl_app.keys import Scalar, show, specs
from fl_app.metrics import Metric

LABEL_LENGTH = 40
KEY_SETTINGS = tuple(key.name for key in specs(RunConfig) if key.headline)
DATA_KEYS = frozenset([DATA_SHA256, *(key.name for key in specs(RunConfig) if key.about == "data")])


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed, often a single one. number, label: its names in the report.

    settings: those that distinguish it.
    """

    runs: tuple[ReportedRun, ...]
    number: int = 1
    label: str = ""
    settings: dict[str, Scalar] = field(default_factory=dict)

    @property
    def first(self) -> ReportedRun:
        """The first run."""
        return self.runs[0]

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.first.method

    @property
    def last_round(self) -> int:
        """Last recorded round of any of the runs; 0 if there is none."""
        return max(max(run.rounds, default=0) for run in self.runs)

    @property
    def name(self) -> str:
        """Name that the user gave the runs; empty if it was generated."""
        names = [given_name(run) for run in self.runs]
        if not all(names) or len(names) == 1:
            return names[0] if all(names) else ""
        stem = os.path.commonprefix(names)
        digits = r"\d*" if any(name[len(stem) :][:1].isdecimal() for name in names) else ""
        return re.sub(rf"[-_.,= ]*(seed|s)?[-_.,= ]*{digits}$", "", stem, flags=re.IGNORECASE)

    @cached_property
    def row(self) -> Row:
        """Row of the table of results, as far as the runs are recorded."""
        return row_of(self.settings, self.runs, self.first.metrics, tuple(FIGURES), lambda run: run.outcome)


def judged_by(group: Group, metric: Metric) -> Group:
    """Return a group judged by another of its metrics than the headline."""
    return replace(group, runs=tuple(run.judged(metric.name) for run in group.runs))


def given_name(run: ReportedRun) -> str:
    """Return the run's name if the user gave it; empty if it was made from time, method and data set, or by a sweep."""
    name = str(run.settings.get("run-name", ""))
    made = rf"\d{{8}}-\d{{6}}-{re.escape(run.method)}-.*|(.*=.*|{re.escape(run.method)})-[0-9a-f]{{6}}"
    return "" if re.fullmatch(made, name) else name


def grouped(runs: Sequence[ReportedRun]) -> list[Group]:
    """Group finished runs that differ only in the seed, and number and name the groups.

    An unfinished run is a group by itself.
    """
    told = settings_of(runs, lambda run: run.settings)
    own = {
        run.path: {**one, "method": run.method, "unfinished": "" if run.finished else str(run.path)}
        for run, one in zip(runs, told, strict=True)
    }
    found = [Group(tuple(same)) for same in by_settings(runs, lambda run: own[run.path])]
    firsts = [group.first for group in found]
    keys = [key for key in differing(firsts) if key != "seed" or len(found) == len(runs)]
    out = []
    for (number, group), known in zip(enumerate(found, 1), shown_settings(firsts), strict=True):
        varying = {key: known[key] for key in keys if key in known}
        words = [f"{key.rpartition('.')[2]} {show(value)}" for key, value in varying.items()]
        label = group.name or ", ".join([group.method, *words])
        label = f"{number} {label}" if len(found) > 1 else label
        out.append(Group(_numbered(group.runs, number, label), number, label, varying))
    return out


def _numbered(runs: Sequence[ReportedRun], number: int, label: str) -> tuple[ReportedRun, ...]:
    if len(runs) == 1:
        return (runs[0].named(str(number), label),)
    names = [given_name(run) or f"{run.method}, seed {show(run.settings.get('seed', '?'))}" for run in runs]
    tags = [f"{number}.{k}" for k in range(1, len(runs) + 1)]
    return tuple(run.named(tag, f"{tag} {name}") for run, tag, name in zip(runs, tags, names, strict=True))


def short(label: str, length: int = LABEL_LENGTH) -> str:
    """Cut a label to a length, after a comma if possible. Its number stays."""
    if len(label) <= length:
        return label
    whole = label[: length - 1].rpartition(", ")[0]
    return f"{whole}, …" if whole else label[: length - 1] + "…"


def shown_settings(runs: Sequence[ReportedRun]) -> list[dict[str, Scalar]]:
    """Return runs' settings with the path of their data, since two folders may hold different data of one name."""
    told = settings_of(runs, lambda run: run.settings)
    return [{**one, "dataset": run.settings.get("dataset", "")} for run, one in zip(runs, told, strict=True)]


def differing(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the keys with several values in runs they apply to: methods' own first, then by importance.

    The method itself is left out.
    """
    found = differing_settings(shown_settings(runs))
    found = [name for name in found if name != "method"]

    def place(name: str) -> int:
        if "." in name:
            return -1
        return KEY_SETTINGS.index(name) if name in KEY_SETTINGS else len(KEY_SETTINGS)

    return sorted(found, key=place)


# Arrays ---------------------------------------------------------------------------------------------------------------


def over_seeds(group: Group, name: str, metric: Metric | None = None) -> Curve | None:
    """Return the mean over runs of their means, ± one sample standard deviation.

    Only rounds that all runs have count; None if there are none. The band is cut to the range of `metric`, by default
    the headline.
    """
    curves = [found for run in group.runs if (found := curve([run], name))]
    rounds = sorted(set.intersection(*(set(c.rounds.tolist()) for c in curves))) if curves else []
    if not rounds or len(curves) < len(group.runs):
        return None
    values = np.array([c.mean[np.isin(c.rounds, rounds)] for c in curves])
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    low, high = (np.clip(edge, *(metric or group.first.headline).range) for edge in (mean - std, mean + std))
    return Curve(np.array(rounds, np.int64), mean, low, high)


def long_runs(groups: Sequence[Group], *, cut: bool = False) -> str:
    """Return sentences about the running means of long runs. cut: y leaves out the values of the first rounds."""
    rounds = window(max(group.last_round for group in groups))
    first = " The first rounds lie outside the picture." if cut else ""
    return f" Lines over rounds are running means of {rounds} rounds.{first}" if rounds > 1 else ""


def all_clients(
    group: Group, of: Callable[[ReportedRun], tuple[Mapping[str, float], str]] = last_known
) -> tuple[Floats, str]:
    """Return `by_client`'s values from worst to best, and their source as text."""
    known, source = by_client(group, of)
    return ranked(np.array(list(known.values()), np.float64), group.first.headline), source


def by_client(
    group: Group, of: Callable[[ReportedRun], tuple[Mapping[str, float], str]] = last_known
) -> tuple[dict[str, float], str]:
    """Return the headline metric of each client by id, as the mean over its seeds, and its source as text.

    of: the metric in one run by client id, and its source.
    """
    found = [of(run) for run in group.runs]
    sources = list(dict.fromkeys(source for known, source in found if known))
    every: dict[str, list[float]] = {}
    for known, _ in found:
        for i, value in known.items():
            every.setdefault(i, []).append(value)
    return {i: float(np.mean(values)) for i, values in every.items()}, "; ".join(sources)


def exchanged(group: Group) -> tuple[Floats, Floats]:
    """Return (bytes exchanged, headline metric), each the mean over runs for rounds that all runs have; both [rounds]."""
    return _meaned([spent(run) for run in group.runs])


def over_time(group: Group) -> tuple[Floats, Floats]:
    """Return (seconds until a round began, headline metric), each the mean over runs for rounds that all runs have; both [rounds].

    `arrays.timed` describes the seconds.
    """
    return _meaned([timed(run) for run in group.runs])


def _meaned(found: list[dict[int, tuple[float, float]]]) -> tuple[Floats, Floats]:
    """Return pairs by round as two columns, [rounds] each: means over runs, for the rounds that all of them have."""
    rounds = sorted(set.intersection(*(set(of) for of in found)))
    table = (
        np.array([[of[t] for t in rounds] for of in found], np.float64).reshape(len(found), len(rounds), 2).mean(axis=0)
    )
    return table[:, 0], table[:, 1]


def phases(group: Group, of: Callable[[ReportedRun], dict[str, float]]) -> dict[str, float]:
    """Return seconds by phase, as the mean over the runs."""
    rows = [of(run) for run in group.runs]
    return {phase: float(np.mean([row.get(phase, 0.0) for row in rows])) for row in rows for phase in row}
