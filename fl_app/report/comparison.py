"""The report's pictures in which all runs are compared: accuracy, clients, communication, time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from fl_app.report.arrays import (
    DATA_KEYS,
    Floats,
    Run,
    client_seconds,
    curve,
    differences,
    final_accuracies,
    server_seconds,
    short,
    spent,
)
from fl_app.report.figures import (
    COLOURS,
    HATCHES,
    STYLE,
    TOGETHER,
    Look,
    Panel,
    label_outer,
    legend,
    listed,
    looks,
    new_figure,
    percent_axis,
    png,
    rounds_axis,
    small_multiples,
)


def comparison(runs: Sequence[Run]) -> Iterator[Panel]:
    """Yield the pictures in which all runs with any rounds are compared."""
    drawn = [run for run in runs if run.rounds]
    if not drawn:
        return
    with rc_context(STYLE):
        yield from _accuracy(drawn)
        yield from _sorted(drawn)
        yield from _communication(drawn)
        yield from _seconds(drawn)


# Accuracy -------------------------------------------------------------------------------------------------------------

SOURCES = (
    ("accuracy-before", "Received model, before local training"),
    ("accuracy-after", "After local training"),
    ("evaluation", "All clients' own models"),
)


def _accuracy(runs: Sequence[Run]) -> Iterator[Panel]:
    sources = [s for s in SOURCES if any(curve(run, s[0]) for run in runs)]
    if not any(len(run.evaluations) > 1 for run in runs):
        sources = [s for s in sources if s[0] != "evaluation"]
    if not sources:
        return
    style, last = looks(runs), max(max(run.rounds) for run in runs)
    figure, first = new_figure(4.4), None
    for k, (name, title) in enumerate(sources):
        axes = figure.add_subplot(1, len(sources), k + 1, sharey=first)
        first = first or axes
        for run in runs:
            _accuracy_line(axes, run, name, style[run.number], len(runs) <= TOGETHER)
        axes.set_title(title)
        rounds_axis(axes, last)
        percent_axis(axes) if k == 0 else axes.tick_params(labelleft=False)
    assert first is not None
    legend(figure, first, runs)
    bands, other = "Bands: the middle half of the clients (quartiles).", ""
    if len(runs) > TOGETHER:
        bands = "Their spread is in the next picture."
    if {*DATA_KEYS, "seed"} & set(differences(runs)):
        other = "The runs do not all have the same test data: see their settings."
    yield Panel(
        "accuracy", "Accuracy over rounds",
        f"Lines: mean over the round's clients, each on its own test data. {bands} FedCAC's published figures are "
        "the highest points of the left picture. A gap between the pictures is what local training "
        f"adds, and what aggregation takes away again. {other}", png(figure),
    )  # fmt: skip
    if len(runs) > TOGETHER and any(curve(run, "accuracy-before") for run in runs):

        def draw(axes: Axes, run: Run, in_focus: bool) -> None:
            _accuracy_line(axes, run, "accuracy-before", style[run.number] if in_focus else None, in_focus)

        figure, grid = small_multiples(runs, draw)
        label_outer(grid, min(4, len(runs)), lambda a: rounds_axis(a, last), percent_axis)
        yield Panel(
            "accuracy-spread", "Accuracy and its spread over clients, run by run",
            "Accuracy of the received model before local training. Line: mean over the round's clients; band: the middle half "
            "of the clients (quartiles); grey: the other runs.", png(figure),
        )  # fmt: skip


def _accuracy_line(axes: Axes, run: Run, name: str, look: Look | None, band: bool) -> None:
    """Draw one run; look None: in the background."""
    c = curve(run, name)
    if c is None:
        if look:
            axes.plot([], [], label=short(run.label), **look.line_style(1))
        return
    if look is None:
        axes.plot(c.rounds, c.mean, color="0.82", linewidth=0.9, zorder=1)
        return
    if band:
        axes.fill_between(c.rounds, c.low, c.high, color=look.colour, alpha=0.16, linewidth=0)
        for edge in (c.low, c.high):
            axes.plot(c.rounds, edge, color=look.colour, linestyle=look.line, linewidth=0.6, alpha=0.7)
    axes.plot(c.rounds, c.mean, label=short(run.label), **look.line_style(len(c.rounds)))


def _sorted(runs: Sequence[Run]) -> Iterator[Panel]:
    runs = [run for run in runs if final_accuracies(run)[0].size]
    if not runs:
        return
    style = looks(runs)

    def draw(axes: Axes, run: Run, in_focus: bool) -> None:
        values = final_accuracies(run)[0]
        x: Floats = 100 * (np.arange(len(values)) + 0.5) / len(values)
        if in_focus:
            axes.plot(x, values, label=short(run.label), **style[run.number].line_style(len(x)))
        else:
            axes.plot(x, values, color="0.82", linewidth=0.9, zorder=1)

    def ticks(axes: Axes) -> None:
        axes.set_xlim(0, 100)
        axes.set_xlabel("clients, worst to best (%)")

    if len(runs) > 2 * TOGETHER:
        figure, grid = small_multiples(runs, draw)
        label_outer(grid, min(4, len(runs)), ticks, percent_axis)
    else:
        figure = new_figure(4.2)
        axes = figure.add_subplot()
        for run in runs:
            draw(axes, run, True)
        ticks(axes)
        percent_axis(axes)
        legend(figure, axes, runs)
    sources: dict[str, list[Run]] = {}
    for run in runs:
        sources.setdefault(final_accuracies(run)[1], []).append(run)
    where = "; ".join(f"{text} ({listed(group)})" if len(sources) > 1 else text for text, group in sources.items())
    yield Panel(
        "clients", "Final accuracy of each client",
        "Clients sorted by accuracy on their own test data: where the line starts is the worst-off client, and where it "
        f"crosses 50 % the median one. A flat line treats all alike. Measured: {where}.", png(figure),
    )  # fmt: skip


# Cost -----------------------------------------------------------------------------------------------------------------


def _communication(runs: Sequence[Run]) -> Iterator[Panel]:
    points = {run.number: spent(run) for run in runs}
    runs = [run for run in runs if points[run.number][0].size]
    totals = [points[run.number][0][-1] for run in runs if points[run.number][0][-1] > 0]
    if not totals:
        return
    style = looks(runs)
    figure = new_figure(4.2)
    axes = figure.add_subplot()
    unit, scale = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if max(totals) >= s)
    for run in runs:
        x, y = points[run.number]
        if x[-1] > 0:
            axes.plot(x / scale, y, label=short(run.label), **style[run.number].line_style(len(x)))
        else:
            look = style[run.number]
            label = f"{short(run.label)} (sends no parameters)"
            axes.axhline(y[-1], color=look.colour, linestyle=look.line, label=label)
    if max(totals) / min(totals) > 30:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        unit += ", logarithmic"
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(f"uploads and downloads of all clients until then ({unit})")
    percent_axis(axes)
    legend(figure, axes, runs)
    yield Panel(
        "communication", "Communication and accuracy",
        "What was sent until the clients had the models whose accuracy is shown (mean, before local training): model "
        "parameters and masks, all clients together. Higher and further left is better.", png(figure),
    )  # fmt: skip


def _seconds(runs: Sequence[Run]) -> Iterator[Panel]:
    sides = [("Server, wall time", server_seconds), ("One client, mean", client_seconds)]
    sides = [(title, of) for title, of in sides if any(sum(of(run).values()) > 0 for run in runs)]
    if not sides:
        return
    height = 0.9 + 0.34 * len(runs)
    figure = new_figure(height + 0.6)
    grid = figure.add_gridspec(2, len(sides), height_ratios=[height, 0.6])
    for k, (title, of) in enumerate(sides):
        axes = figure.add_subplot(grid[0, k])
        _stacked(axes, [of(run) for run in runs])
        axes.set_title(title)
        below = figure.add_subplot(grid[1, k])
        below.axis("off")
        below.legend(*axes.get_legend_handles_labels(), loc="center", ncols=3, fontsize=9, handlelength=2.6)
        names = [short(run.label) for run in runs] if k == 0 else [str(run.number) for run in runs]
        axes.set_yticks(range(len(runs)), names if len(runs) > 1 or k == 0 else [""])
    yield Panel(
        "seconds", "Seconds per round by phase",
        "Mean over the rounds. Left: the server's wall time; wait is mostly the clients' training, take-in is decoding and "
        "checking uploads, personalize is the method's aggregation, record writes the round before. Right: what one client does "
        "meanwhile, mean over clients; clients that share a machine wait for each other, so the left bar is not their sum.",
        png(figure),
    )  # fmt: skip


def _stacked(axes: Axes, rows: list[dict[str, float]]) -> None:
    """Horizontal bars, one per row, stacked by phase, with their sums at the end."""
    left = np.zeros(len(rows))
    for k, phase in enumerate(dict.fromkeys(name for row in rows for name in row)):
        width = np.array([row.get(phase, 0.0) for row in rows])
        axes.barh(
            range(len(rows)), width, left=left, height=0.66, label=phase, color=COLOURS[(k + 1) % len(COLOURS)],
            alpha=0.75, hatch=HATCHES[k % len(HATCHES)], edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        left += width
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.3g} s", va="center", fontsize=9)
    axes.set_xlim(0, 1.16 * float(left.max() or 1))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per round")
