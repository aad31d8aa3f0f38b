"""Runs that differ in the seed alone as one row and one curve, and how the rows are told apart."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from corolla.experiments.grouping import DATA_SHA256, by_settings, differing_settings, settings_of
from corolla.experiments.table import FIGURES, Row, row_of
from corolla.report.arrays import Curve, Floats, ReportedRun, curve, final_accuracies, ranked, spent, window
from fl_app.config import RunConfig
from fl_app.keys import Scalar, show, specs

LABEL_LENGTH = 40
KEY_SETTINGS = tuple(key.name for key in specs(RunConfig) if key.headline)
DATA_KEYS = frozenset([DATA_SHA256, *(key.name for key in specs(RunConfig) if key.about == "data")])


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, often a single one. number, label, settings: in the report, what tells it apart."""

    runs: tuple[ReportedRun, ...]
    number: int = 1
    label: str = ""
    settings: dict[str, Scalar] = field(default_factory=dict)

    @property
    def first(self) -> ReportedRun:
        """The first of the runs."""
        return self.runs[0]

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.first.method

    @property
    def last_round(self) -> int:
        """The last round any of the runs has a record of, 0 without any."""
        return max(max(run.rounds, default=0) for run in self.runs)

    @property
    def name(self) -> str:
        """What the user called the runs; empty if names were made."""
        names = [given_name(run) for run in self.runs]
        if not all(names) or len(names) == 1:
            return names[0] if all(names) else ""
        stem = os.path.commonprefix(names)
        digits = r"\d*" if any(name[len(stem) :][:1].isdecimal() for name in names) else ""
        return re.sub(rf"[-_.,= ]*(seed|s)?[-_.,= ]*{digits}$", "", stem, flags=re.IGNORECASE)

    @property
    def row(self) -> Row:
        """What the runs come to, as far as they are recorded."""
        return row_of(self.settings, self.runs, self.first.headline, tuple(FIGURES), lambda run: run.outcome)


def given_name(run: ReportedRun) -> str:
    """The run's name if somebody gave it one; empty if it was made of time, method and data set, or by a sweep."""
    name = str(run.settings.get("run-name", ""))
    made = rf"\d{{8}}-\d{{6}}-{re.escape(run.method)}-.*|(.*=.*|{re.escape(run.method)})-[0-9a-f]{{6}}"
    return "" if re.fullmatch(made, name) else name


def grouped(runs: Sequence[ReportedRun]) -> list[Group]:
    """Put runs together that differ in the seed alone, finished ones only, and number and name them."""
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
    """Cut a label to a length, after a comma if it can be; its number stays."""
    if len(label) <= length:
        return label
    whole = label[: length - 1].rpartition(", ")[0]
    return f"{whole}, …" if whole else label[: length - 1] + "…"


def shown_settings(runs: Sequence[ReportedRun]) -> list[dict[str, Scalar]]:
    """Return runs' settings with the path of their data: two folders may hold other data under one name."""
    told = settings_of(runs, lambda run: run.settings)
    return [{**one, "dataset": run.settings.get("dataset", "")} for run, one in zip(runs, told, strict=True)]


def differing(runs: Sequence[ReportedRun]) -> list[str]:
    """Keys, beside the method, that have several values in the runs on which they bear: methods' own first, then by importance."""
    found = differing_settings(shown_settings(runs))
    found = [name for name in found if name != "method"]

    def place(name: str) -> int:
        if "." in name:
            return -1
        return KEY_SETTINGS.index(name) if name in KEY_SETTINGS else len(KEY_SETTINGS)

    return sorted(found, key=place)


# Arrays ---------------------------------------------------------------------------------------------------------------


def over_seeds(group: Group, name: str) -> Curve | None:
    """Mean of the runs' means over the rounds that all runs have, and that mean ± one sample standard deviation.

    The ends of that are cut to what the metric can be.
    """
    curves = [found for run in group.runs if (found := curve([run], name))]
    rounds = sorted(set.intersection(*(set(c.rounds.tolist()) for c in curves))) if curves else []
    if not rounds or len(curves) < len(group.runs):
        return None
    values = np.array([c.mean[np.isin(c.rounds, rounds)] for c in curves])
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    low, high = (np.clip(edge, *group.first.headline.range) for edge in (mean - std, mean + std))
    return Curve(np.array(rounds, np.int64), mean, low, high)


def long_runs(groups: Sequence[Group], *, cut: bool = False) -> str:
    """Say what drawn curves of many rounds are, a sentence to add; cut: y leaves out what the first rounds have."""
    rounds = window(max(group.last_round for group in groups))
    first = " The first rounds lie outside the picture." if cut else ""
    return f" Lines over rounds are running means of {rounds} rounds.{first}" if rounds > 1 else ""


def all_clients(group: Group, of: Callable[[ReportedRun], tuple[Floats, str]] = final_accuracies) -> tuple[Floats, str]:
    """Headline metrics of the clients of all runs, worst to best, and where they come from. of: a run's."""
    found = [of(run) for run in group.runs]
    sources = list(dict.fromkeys(source for values, source in found if values.size))
    return ranked(np.concatenate([values for values, _ in found]), group.first.headline), "; ".join(sources)


def exchanged(group: Group) -> tuple[Floats, Floats]:
    """Mean over the runs of the bytes exchanged and the accuracy then, over the rounds that all runs have; both [rounds]."""
    found = [spent(run) for run in group.runs]
    rounds = sorted(set.intersection(*(set(of) for of in found)))
    table = (
        np.array([[of[t] for t in rounds] for of in found], np.float64).reshape(len(found), len(rounds), 2).mean(axis=0)
    )
    return table[:, 0], table[:, 1]


def phases(group: Group, of: Callable[[ReportedRun], dict[str, float]]) -> dict[str, float]:
    """Mean over the runs of seconds by phase."""
    rows = [of(run) for run in group.runs]
    return {phase: float(np.mean([row.get(phase, 0.0) for row in rows])) for row in rows for phase in row}
