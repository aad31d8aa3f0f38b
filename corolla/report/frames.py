"""Tidy data frames of a report's rows, one line per number, as the charts take them (corolla/report/charts.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.report.arrays import Curve, Floats, ReportedRun, last_known, until
from corolla.report.groups import Group, by_client, short
from corolla.report.recorded import class_names, client_labels

Frame = Any
# most points of a line, and of a line whose points are clients
MOST_POINTS, MOST_CLIENTS = 400, 300
# bytes and seconds of a round without a record
NOTHING = (np.nan, np.nan)


def curves(groups: Sequence[Group], parts: Mapping[str, Mapping[int, Curve]], bands: bool = True) -> Frame:
    """Return lines over rounds: part, run, method, round, mean, low, high, lowest, highest, left (where clients left).

    `bytes` and `seconds` are those until a round's models, as the mean over a line's runs (`arrays.until`).
    parts: curves by group number, by heading. bands: whether a line of one run has bands.
    """
    found = []
    costs = {group.number: [until(run) for run in group.runs] for group in groups}
    for part, of_group in parts.items():
        for turn, group in enumerate(groups):
            curve = of_group.get(group.number)
            if curve is None:
                found.append(line(group, part=part, round=[np.nan], mean=[np.nan], turn=turn))
                continue
            own: dict[str, Any] = {"round": curve.rounds, "mean": curve.mean}
            spent = [[of.get(t, NOTHING) for t in curve.rounds.tolist()] for of in costs[group.number]]
            own["bytes"], own["seconds"] = np.array(spent, np.float64).mean(axis=0).T
            if bands or len(group.runs) > 1:
                own |= {"low": curve.low, "high": curve.high}
                own |= dict(zip(("lowest", "highest"), curve.tails or (np.nan, np.nan), strict=True))
            points = line(group, part=part, turn=turn, **own)
            for t, what in departures(group).items():
                later = points.index[points["round"] >= t]
                points.loc[later[:1], "left"] = what
            found.append(points)
    return pandas.concat(found, ignore_index=True)


def departures(group: Group) -> dict[int, str]:
    """Return the rounds from which on fewer clients are in the means, each with `4 of 6 clients`; {} for sampled clients."""
    found: dict[int, str] = {}
    for run in group.runs:
        if run.settings.get("fraction-train", 1.0) != 1.0:
            continue
        counts = {t: len(record.get("clients", {})) for t, record in sorted(run.rounds.items())}
        for before, t in itertools.pairwise(counts):
            if counts[t] < counts[before]:
                found.setdefault(t, f"{counts[t]} of {max(counts.values())} clients")
    return found


def line(group: Group, turn: int = 0, **columns: Any) -> Frame:
    """Return the points of a group's line, thinned to MOST_POINTS. About a dozen of them carry a mark.

    turn: offset of the marks, so that lines on top of each other show all their marks.
    """
    return marked(pandas.DataFrame({"run": short(group.label), "method": group.method, **columns}), turn)


def marked(frame: Frame, turn: int = 0, every: bool = False) -> Frame:
    """Return a line's points, thinned to MOST_POINTS, with `mark`: 1 for those that carry a mark."""
    if len(frame) > MOST_POINTS:
        frame = frame.iloc[np.linspace(0, len(frame) - 1, MOST_POINTS).astype(int)]
    step = 1 if every else max(1, math.ceil(len(frame) / 12), min(2, len(frame) // 4))
    return frame.assign(mark=(np.arange(len(frame)) % step == turn % step).astype(int))


def behind(frame: Frame) -> Frame:
    """Return lines with a part for each run, where the other runs are grey."""
    return frame.assign(part=frame["run"], other=frame["run"])


def finals(groups: Sequence[Group], of: Callable[[ReportedRun], tuple[Mapping[str, float], str]] = last_known) -> Frame:
    """Return each client's final metric, worst first: run, method, x (per cent of the clients), client, samples, classes, mean.

    Of many clients MOST_CLIENTS stand for all, without names.
    """
    found = []
    for turn, group in enumerate(groups):
        known = by_client(group, of)[0]
        metric = group.first.headline
        order = sorted(known, key=lambda i: (known[i] if metric.higher_is_better else -known[i], int(i)))
        if len(order) > MOST_CLIENTS:
            order = [order[k] for k in np.linspace(0, len(order) - 1, MOST_CLIENTS).astype(int)]
        across = 100 * (np.arange(len(order)) + 0.5) / max(1, len(order))
        columns = {"x": across, **facts(group.first, order), "mean": [known[i] for i in order]}
        found.append(line(group, turn, **columns))
    return pandas.concat(found, ignore_index=True)


def against_first(groups: Sequence[Group]) -> Frame:
    """Return clients' final metric beside the first row's: part and run (the other row), method, client, reference, mean.

    Of many clients MOST_CLIENTS stand for all, spread over the reference's values.
    """
    reference, found = by_client(groups[0])[0], []
    for group in groups[1:]:
        known = by_client(group)[0]
        order = sorted(reference.keys() & known.keys(), key=lambda i: (reference[i], int(i)))
        if len(order) > MOST_CLIENTS:
            order = [order[k] for k in np.linspace(0, len(order) - 1, MOST_CLIENTS).astype(int)]
        own = {"reference": [reference[i] for i in order], "mean": [known[i] for i in order]}
        frame = pandas.DataFrame(
            {"run": short(group.label), "method": group.method, **facts(group.first, order), **own}
        )
        found.append(frame.assign(part=short(group.label)))
    return pandas.concat(found, ignore_index=True)


def facts(run: ReportedRun, ids: Sequence[str]) -> dict[str, Any]:
    """Return clients' columns: client, samples, and classes if they are known."""
    known = [run.clients.get(i, {}) for i in ids]
    found: dict[str, Any] = {"client": client_labels(run, map(int, ids))}
    found["samples"] = [own.get("train-samples", np.nan) for own in known]
    if any(own.get("class-counts") for own in known):
        names = class_names(run, max(len(own.get("class-counts") or ()) for own in known))
        found["classes"] = [class_text(own.get("class-counts") or (), names) for own in known]
    return found


def class_text(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the most frequent classes of a client, as `cat 30, dog 4`."""
    most = sorted((k for k, count in enumerate(counts) if count), key=lambda k: (-counts[k], k))
    words = [f"{names[k] if names else k} {counts[k]}" if names else f"{k}: {counts[k]}" for k in most[:4]]
    return ", ".join(words) + (" …" if len(most) > 4 else "")


def bins(values: Floats, edges: Floats) -> Frame:
    """Return a histogram: low, high (ends of a bin), count."""
    return pandas.DataFrame({"low": edges[:-1], "high": edges[1:], "count": np.histogram(values, edges)[0]})


def grid(rows: Sequence[Any], columns: Sequence[Any], values: NDArray[Any], row: str, column: str = "round") -> Frame:
    """Return a matrix as lines: `row`, `column`, value. Cells without a number are left out."""
    at = np.nonzero(~np.isnan(values))
    cells = {row: np.array(rows, object)[at[0]], column: np.array(columns)[at[1]], "value": values[at]}
    return pandas.DataFrame(cells).infer_objects()
