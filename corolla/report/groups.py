"""Groups of runs that differ only in the seed, shown as one row and one curve: their labels, and their numbers as frames.

A frame is tidy, one line per number, as the charts take it (corolla/report/charts.py).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.experiments.grouping import DATA_SHA256, by_settings, differing_settings, settings_of
from corolla.experiments.result_table import FIGURES, Row, row_of
from corolla.report.arrays import (
    Floats,
    Frame,
    ReportedRun,
    class_names,
    client_labels,
    client_seconds,
    curve,
    last_known,
    mean_of,
    server_seconds,
    smooth,
    until,
    window,
)
from fl_app.config import RunConfig
from fl_app.keys import Scalar, show, specs
from fl_app.metrics import Metric

LABEL_LENGTH = 40
# most curves with bands in one picture
TOGETHER = 4
# most points of a line, and of a line whose points are clients; most rounds in which clients left
MOST_POINTS, MOST_CLIENTS, MOST_DEPARTURES = 400, 300, 5
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
        if not all(names):
            return ""
        if len(names) == 1:
            return names[0]
        stem = os.path.commonprefix(names)
        digits = r"\d*" if any(name[len(stem) :][:1].isdecimal() for name in names) else ""
        return re.sub(rf"[-_.,= ]*(seed|s)?[-_.,= ]*{digits}$", "", stem, flags=re.IGNORECASE)

    @cached_property
    def row(self) -> Row:
        """Row of the table of results, as far as the runs are recorded."""
        return row_of(self.settings, self.runs, self.first.metrics, tuple(FIGURES), lambda run: run.outcome)


def judged_by(group: Group, metric: Metric) -> Group:
    """Return a group judged by another of its metrics than the headline."""
    return replace(group, runs=tuple(run.but(judged_by=metric.name) for run in group.runs))


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
        return (runs[0].but(number=str(number), label=label),)
    names = [given_name(run) or f"{run.method}, seed {show(run.settings.get('seed', '?'))}" for run in runs]
    tags = [f"{number}.{k}" for k in range(1, len(runs) + 1)]
    return tuple(run.but(number=tag, label=f"{tag} {name}") for run, tag, name in zip(runs, tags, names, strict=True))


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
    places = {name: place for place, name in enumerate(KEY_SETTINGS)}
    found = [name for name in differing_settings(shown_settings(runs)) if name != "method"]
    return sorted(found, key=lambda name: -1 if "." in name else places.get(name, len(places)))


# Frames ---------------------------------------------------------------------------------------------------------------


def over_seeds(group: Group, name: str, metric: Metric | None = None) -> Frame:
    """Return the mean over runs of their means, ± one sample standard deviation (low, high), by round.

    Only rounds that all runs have count; None if there are none. The band is cut to the range of `metric`, by default
    the headline.
    """
    curves = [found["mean"] for run in group.runs if (found := curve([run], name)) is not None]
    if len(curves) < len(group.runs):
        return None
    values = pandas.concat(curves, axis=1, join="inner").sort_index()
    mean, std = values.mean(axis=1), values.std(axis=1).fillna(0.0)
    low, high = (metric or group.first.headline).range
    found = pandas.DataFrame({"mean": mean, "low": (mean - std).clip(low, high), "high": (mean + std).clip(low, high)})
    return None if found.empty else found


def long_runs(groups: Sequence[Group], *, cut: bool = False) -> str:
    """Return sentences about the running means of long runs. cut: y leaves out the values of the first rounds."""
    rounds = window(max(group.last_round for group in groups))
    first = " The first rounds lie outside the picture." if cut else ""
    return f" Lines over rounds are running means of {rounds} rounds.{first}" if rounds > 1 else ""


# a metric of clients in one run, a series by client id, and its source as text
OfClients = Callable[[ReportedRun], tuple[Frame, str]]


def by_client(group: Group, of: OfClients = last_known) -> tuple[Frame, str]:
    """Return the headline metric of each client, a series by id, as the mean over its seeds, and its source as text."""
    found = [of(run) for run in group.runs]
    means = pandas.concat([known for known, _ in found]).groupby(level=0).mean()
    return means, "; ".join(dict.fromkeys(source for known, source in found if len(known)))


def over_costs(group: Group) -> Frame:
    """Return `arrays.until` as the mean over the runs, by round, for rounds that all of them have."""
    rounds = pandas.concat([until(run) for run in group.runs]).groupby(level=0)
    return rounds.mean()[rounds.size() == len(group.runs)]


def seconds(groups: Sequence[Group]) -> Frame:
    """Return seconds per round: part (whose they are), run, phase, seconds, place. They are means over rounds and runs.

    Parts without seconds are left out.
    """
    found = []
    for part, of in (("Server, wall time", server_seconds), ("One client, mean", client_seconds)):
        for group in groups:
            own = pandas.Series(mean_of([of(run) for run in group.runs]), dtype=np.float64).rename_axis("phase")
            frame = own.reset_index(name="seconds")
            found.append(frame.assign(part=part, run=short(group.label), place=range(len(own))))
    frame = pandas.concat(found, ignore_index=True)
    return frame[frame.groupby("part")["seconds"].transform("sum") > 0]


def repeated(groups: Sequence[Group]) -> bool:
    """Return whether any group has several runs, so that bands are over seeds."""
    return any(len(group.runs) > 1 for group in groups)


def curves(
    groups: Sequence[Group],
    parts: Mapping[str, str],
    metric: Metric | None = None,
    seeds: bool | None = None,
    most_bands: int = TOGETHER,
) -> Frame:
    """Return lines over rounds: part, run, method, round, mean, low, high, lowest, highest, left (where clients left).

    `bytes` and `seconds` are those until a round's models, as the mean over a line's runs (`arrays.until`). parts: their
    headings, by the curves' names; those without any curve are left out. metric: see `over_seeds`. seeds: whether means
    and bands are over seeds, and not over clients; None: if any group has several runs. most_bands: single runs have
    bands if the groups are no more.
    """
    found, seeds = [], repeated(groups) if seeds is None else seeds
    for name, part in parts.items():
        for turn, group in enumerate(groups):
            own = over_seeds(group, name, metric) if seeds else curve(group.runs, name)
            own = pandas.DataFrame({"mean": [np.nan]}, [np.nan]) if own is None else smooth(own)
            if len(group.runs) == 1 and (seeds or len(groups) > most_bands):
                own = own[["mean"]]
            own = own.join(over_costs(group)[["bytes", "seconds"]]).rename_axis("round").reset_index()
            points = line(group, turn, part=part, **own)
            for t, what in departures(group).items():
                points.loc[points.index[points["round"] >= t][:1], "left"] = what
            found.append(points)
    frame = pandas.concat(found, ignore_index=True)
    known = frame[frame.groupby("part")["mean"].transform("count") > 0]
    return known.assign(round=pandas.to_numeric(known["round"], downcast="integer"))


def departures(group: Group) -> dict[int, str]:
    """Return the rounds from which on fewer clients are in the means, each with `4 of 6 clients`.

    Return {} if clients are sampled, or if their number falls more than MOST_DEPARTURES times: then it varies anyway.
    """
    found: dict[int, str] = {}
    for run in group.runs:
        if run.settings.get("fraction-train", 1.0) == 1.0:
            counts = {t: len(record.get("clients", {})) for t, record in run.rounds.items()}
            for before, t in itertools.pairwise(counts):
                if counts[t] < counts[before]:
                    found.setdefault(t, f"{counts[t]} of {max(counts.values())} clients")
    return found if len(found) <= MOST_DEPARTURES else {}


def line(group: Group, turn: int = 0, **columns: Any) -> Frame:
    """Return the points of a group's line, thinned to MOST_POINTS. About a dozen of them carry a mark.

    turn: offset of the marks, so that lines on top of each other show all their marks.
    """
    return marked(pandas.DataFrame({"run": short(group.label), "method": group.method, **columns}), turn)


def marked(frame: Frame, turn: int = 0, every: bool = False) -> Frame:
    """Return a line's points, thinned to MOST_POINTS, with `mark`: 1 for those that carry a mark."""
    frame = frame.iloc[spaced(len(frame), MOST_POINTS)]
    step = 1 if every else max(1, math.ceil(len(frame) / 12), min(2, len(frame) // 4))
    return frame.assign(mark=(np.arange(len(frame)) % step == turn % step).astype(int))


def spaced(count: int, most: int) -> NDArray[np.intp]:
    """Return which of `count` items stand for all: `most` of them at equal distances, or all if they are no more."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.intp)


def behind(frame: Frame) -> Frame:
    """Return lines with a part for each run, where the other runs are grey."""
    return frame.assign(part=frame["run"], other=frame["run"])


def finals(groups: Sequence[Group], of: OfClients = last_known) -> Frame:
    """Return each client's final metric, worst first: run, method, x (per cent of the clients), client, samples, classes, mean.

    Of many clients MOST_CLIENTS stand for all, without names.
    """
    found = []
    for turn, group in enumerate(groups):
        known = _ranked(by_client(group, of)[0], group.first.headline.higher_is_better)
        found.append(
            line(
                group,
                turn,
                x=100 * (np.arange(len(known)) + 0.5) / max(1, len(known)),
                **facts(group.first, known.index),
                mean=known.to_numpy(),
            )
        )
    return pandas.concat(found, ignore_index=True)


def against_first(groups: Sequence[Group]) -> Frame:
    """Return clients' final metric beside the first row's: part and run (the other row), method, client, reference, mean.

    Of many clients MOST_CLIENTS stand for all, spread over the reference's values.
    """
    reference, found = by_client(groups[0])[0], []
    for group in groups[1:]:
        known = by_client(group)[0]
        order = _ranked(reference[reference.index.isin(known.index)])
        own = {"reference": order.to_numpy(), "mean": known[order.index].to_numpy()}
        frame = pandas.DataFrame({**facts(group.first, order.index), **own})
        found.append(frame.assign(run=short(group.label), method=group.method, part=short(group.label)))
    return pandas.concat(found, ignore_index=True)


def _ranked(known: Frame, ascending: bool = True) -> Frame:
    """Return clients' values sorted, equal ones by id; of many, MOST_CLIENTS at equal distances."""
    known = known.sort_index().sort_values(ascending=ascending, kind="stable")
    return known.iloc[spaced(len(known), MOST_CLIENTS)]


def facts(run: ReportedRun, ids: Sequence[int]) -> dict[str, Any]:
    """Return clients' columns: client, samples, and classes if they are known."""
    known = [run.clients.get(str(i), {}) for i in ids]
    found: dict[str, Any] = {"client": client_labels(run, ids)}
    found["samples"] = [own.get("train-samples", np.nan) for own in known]
    counts = [own.get("class-counts") or () for own in known]
    if any(counts):
        names = class_names(run, max(map(len, counts)))
        found["classes"] = [class_text(own, names) for own in counts]
    return found


def class_text(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the most frequent classes of a client, as `cat 30, dog 4`."""
    called = names or [f"{k}:" for k in range(len(counts))]
    most = [k for k in np.argsort(np.negative(counts), kind="stable") if counts[k] > 0]
    return ", ".join(f"{called[k]} {counts[k]}" for k in most[:4]) + " …" * (len(most) > 4)


def bins(values: Floats, edges: Floats) -> Frame:
    """Return a histogram: low, high (ends of a bin), count."""
    return pandas.DataFrame({"low": edges[:-1], "high": edges[1:], "count": np.histogram(values, edges)[0]})


def as_cells(
    rows: Sequence[Any], columns: Sequence[Any], values: NDArray[Any], row: str, column: str = "round"
) -> Frame:
    """Return a matrix as lines: `row`, `column`, value. Cells without a number are left out."""
    at = np.nonzero(~np.isnan(values))
    cells = {row: np.array(rows, object)[at[0]], column: np.array(columns)[at[1]], "value": values[at]}
    return pandas.DataFrame(cells).infer_objects()
