"""Pictures of the costs of all runs: bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from corolla.report.arrays import Floats, ReportedRun, client_seconds, server_seconds, smooth
from corolla.report.figures import Panel, legend, metric_axis, new_figure, styled
from corolla.report.groups import Group, exchanged, long_runs, over_time, phases, short
from corolla.report.style import COLOURS, HATCHES, paper, shown

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
            lambda: _over_time(drawn, points),
        )


def _over_time(groups: Sequence[Group], points: Points) -> Figure:
    style, figure = styled(groups), new_figure(4.2)
    axes = figure.add_subplot()
    for group in groups:
        x, y = points[group.number]
        axes.plot(x, smooth(y), label=short(group.label), **style[group.number].line_style(len(x)))
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds until then, simulated ones in a simulation")
    metric_axis(groups)(axes)
    legend(figure, axes)
    return figure


def _bytes_and_accuracy(groups: Sequence[Group], points: Points) -> Figure:
    style, totals = styled(groups), [x[-1] for x, _ in points.values() if x.size and x[-1] > 0]
    figure = new_figure(4.2)
    axes = figure.add_subplot()
    unit, scale = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if max(totals) >= s)
    for group in groups:
        x, y = points[group.number]
        if x[-1] > 0:
            axes.plot(x / scale, smooth(y), label=short(group.label), **style[group.number].line_style(len(x)))
        else:
            look = style[group.number]
            label = f"{short(group.label)} (sends no parameters)"
            axes.axhline(smooth(y)[-1], color=look.drawn(), linestyle=look.line, label=label)
    if max(totals) / min(totals) > 30:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        unit += ", logarithmic"
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(f"uploads and downloads of all clients until then ({unit})")
    metric_axis(groups)(axes)
    legend(figure, axes)
    return figure


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


def _phases(groups: Sequence[Group], sides: Sequence[Side]) -> Figure:
    height = 0.9 + 0.34 * len(groups)
    figure = new_figure(height + 0.6)
    grid = figure.add_gridspec(2, len(sides), height_ratios=[height, 0.6])
    for k, (title, of) in enumerate(sides):
        axes = figure.add_subplot(grid[0, k])
        _stacked(axes, [phases(group, of) for group in groups])
        axes.set_title(title)
        below = figure.add_subplot(grid[1, k])
        below.axis("off")
        below.legend(*axes.get_legend_handles_labels(), loc="center", ncols=3, fontsize=9, handlelength=2.6)
        names = [short(group.label) for group in groups] if k == 0 else [str(group.number) for group in groups]
        axes.set_yticks(range(len(groups)), names if len(groups) > 1 or k == 0 else [""])
    return figure


def _stacked(axes: Axes, rows: list[dict[str, float]]) -> None:
    """Draw horizontal bars, one per row, stacked by phase, with their sums at the end."""
    left = np.zeros(len(rows))
    for k, phase in enumerate(dict.fromkeys(name for row in rows for name in row)):
        width = np.array([row.get(phase, 0.0) for row in rows])
        axes.barh(
            range(len(rows)),
            width,
            left=left,
            height=0.66,
            label=phase,
            color=shown(COLOURS[(k + 1) % len(COLOURS)]),
            alpha=0.75,
            hatch=HATCHES[k % len(HATCHES)],
            edgecolor=paper(),
            linewidth=0.4,
        )
        left += width
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.3g} s", va="center", fontsize=9)
    axes.set_xlim(0, 1.16 * float(left.max() or 1))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per round")
