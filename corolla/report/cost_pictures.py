"""Pictures of the costs of all runs: bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import pandas

from corolla.report import charts, frames
from corolla.report.arrays import Floats, ReportedRun, client_seconds, server_seconds, smooth
from corolla.report.charts import Axis, Chart
from corolla.report.groups import Group, exchanged, long_runs, over_time, phases, short
from corolla.report.pictures import Panel, metric_axis

# (bytes, headline metric) by group number
Points = dict[int, tuple[Floats, Floats]]
Side = tuple[str, Callable[[ReportedRun], dict[str, float]]]


def costs(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the cost pictures of the groups with any rounds."""
    groups = [group for group in groups if group.last_round]
    yield from _communication(groups)
    yield from _simulated_time(groups)
    yield from _seconds(groups)


def _communication(groups: Sequence[Group]) -> Iterator[Panel]:
    groups = [group for group in groups if group.first.headline == groups[0].first.headline]
    points = {group.number: exchanged(group) for group in groups}
    drawn = [group for group in groups if points[group.number][0].size]
    if any(points[group.number][0][-1] > 0 for group in drawn):
        metric = groups[0].first.headline
        better = "Higher" if metric.higher_is_better else "Lower"
        yield Panel(
            "communication",
            f"Communication and {metric.title}",
            f"Across: bytes sent until the clients had a round's models, uploads and downloads of all clients together. Up: mean "
            f"{metric.title} of these models before local training. {better} and further left is better."
            + long_runs(groups),
            lambda: _bytes_and_accuracy(drawn, points),
        )


def _simulated_time(groups: Sequence[Group]) -> Iterator[Panel]:
    groups = [group for group in groups if group.first.headline == groups[0].first.headline]
    points = {group.number: over_time(group) for group in groups}
    drawn = [group for group in groups if points[group.number][0].size]
    if drawn:
        metric = drawn[0].first.headline
        yield Panel(
            "virtual-seconds",
            f"Time and {metric.title}",
            f"Across: seconds until a round began. Up: mean {metric.title} of its clients' models before local training. "
            "Clients that still work are in no mean." + long_runs(drawn),
            lambda: _lines(drawn, points, Axis("seconds until then, simulated ones in a simulation", "~g", zero=True)),
        )


def _lines(groups: Sequence[Group], points: Points, axis: Axis, silent: Collection[int] = ()) -> Chart:
    """Return a line for each group. silent: numbers of those that send no parameters."""
    found = []
    for turn, group in enumerate(groups):
        x, y = points[group.number]
        found.append(frames.line(group, turn, x=x, mean=smooth(y)))
        if group.number in silent:
            found[-1]["run"] += " (sends no parameters)"
    return charts.lines(pandas.concat(found, ignore_index=True), axis, metric_axis(groups[0].first.headline))


def _bytes_and_accuracy(groups: Sequence[Group], points: Points) -> Chart:
    """Return lines over bytes. A run that sends no parameters is a horizontal line, over all bytes of the others."""
    totals = [x[-1] for x, _ in points.values() if x.size and x[-1] > 0]
    logarithmic = bool(max(totals) / min(totals) > 30)
    title = f"uploads and downloads of all clients until then (bytes{', logarithmic' * logarithmic})"
    first = min(x[x > 0][0] for x, _ in points.values() if (x > 0).any()) if logarithmic else 0.0
    silent = {number for number, (x, _) in points.items() if x.size and x[-1] == 0}
    drawn = {}
    for number, (x, y) in points.items():
        if number in silent:
            drawn[number] = (np.array([first, max(totals)]), np.full(2, smooth(y)[-1]))
        else:
            # a logarithmic axis has no place for 0 bytes
            drawn[number] = (x[x >= first], smooth(y)[x >= first])
    return _lines(groups, drawn, Axis(title, "~s", log=logarithmic, zero=not logarithmic), silent)


def _seconds(groups: Sequence[Group]) -> Iterator[Panel]:
    both: list[Side] = [("Server, wall time", server_seconds), ("One client, mean", client_seconds)]
    sides = [(title, of) for title, of in both if any(sum(phases(group, of).values()) > 0 for group in groups)]
    if sides:
        yield Panel(
            "seconds",
            "Seconds per round by phase",
            "Mean over the rounds. Left: the server's wall time. wait: mostly the clients' training; take-in: decoding and "
            "checking uploads; personalize: the method's aggregation; record: writing the previous round. Right: one "
            "client's time, mean over clients. Clients that share a machine wait for each other, so the left bar is not "
            "the sum over clients.",
            lambda: _phases(groups, sides),
        )


def _phases(groups: Sequence[Group], sides: Sequence[Side]) -> Chart:
    rows = [
        {"part": title, "run": short(group.label), "phase": phase, "seconds": seconds, "place": place}
        for title, of in sides
        for group in groups
        for place, (phase, seconds) in enumerate(phases(group, of).items())
    ]
    return charts.stacked(pandas.DataFrame(rows))
