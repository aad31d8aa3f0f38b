"""Pictures of the headline metric for all runs: over rounds, and client by client."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from corolla.experiments.table import undefined_notes
from corolla.report.arrays import EVALUATED, LONG, MANY, Curve, Floats, ReportedRun, curve, unseen_accuracies
from corolla.report.figures import (
    TOGETHER,
    Panel,
    label_outer,
    legend,
    listed,
    metric_axis,
    new_figure,
    percent_axis,
    rounds_axis,
    small_multiples,
    styled,
)
from corolla.report.groups import DATA_KEYS, Group, all_clients, differing, judged_by, long_runs, over_seeds, short
from corolla.report.style import LINES, Look, tone
from fl_app.tasks import Metric

SOURCES = (
    ("before", "Received model, before local training"),
    ("after", "After local training"),
    ("evaluation", "All clients' own models"),
    ("unseen", "Clients that never train"),
)
# curves as drawn, by group number
Curves = Mapping[int, Curve]
Limits = tuple[float, float]
# title if some methods test other models than the received ones
BEFORE = "Before local training"
# title if some clients never train
TRAINED = "Own models of clients that train"
QUARTILES = "the middle half of the clients (quartiles)"
BINS = 20


def accuracy(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the groups' metrics, per headline metric: groups of different tasks do not share a picture.

    Groups without rounds are left out.
    """
    by_metric: dict[Metric, list[Group]] = {}
    for group in groups:
        if group.last_round:
            by_metric.setdefault(group.first.headline, []).append(group)
    for metric, same in by_metric.items():
        yield from _of(metric, same)
        for other in dict.fromkeys(found for group in same for found in group.first.others):
            judged = [judged_by(group, other) for group in same if other in group.first.others]
            yield from _curves(other, judged)
            yield from _sorted(other, judged)


def _of(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    if any(_curves(metric, groups)):
        yield from _curves(metric, groups)
        yield from _spread(metric, groups)
    yield from _sorted(metric, groups)
    yield from _unseen(metric, groups)


def _curves(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the picture of a metric over rounds, if it is recorded."""
    known = {name: curves for name, _ in SOURCES if (curves := drawn(groups, name))}
    if not any(len(run.evaluations) > 1 for group in groups for run in group.runs):
        known = {name: curves for name, curves in known.items() if name not in EVALUATED}
    if known:
        limits = late([(found.rounds, found.mean) for curves in known.values() for found in curves.values()])
        caption = _caption(groups, known) + long_runs(groups, cut=bool(limits))
        yield Panel(metric.name, f"{_title(metric)} over rounds", caption, lambda: _over_rounds(groups, known, limits))


def _title(metric: Metric) -> str:
    return metric.title[:1].upper() + metric.title[1:]


# Over rounds ----------------------------------------------------------------------------------------------------------


def repeated(groups: Sequence[Group]) -> bool:
    """Return whether any group has several runs, so that bands are over seeds."""
    return any(len(group.runs) > 1 for group in groups)


def drawn(groups: Sequence[Group], name: str, metric: Metric | None = None) -> Curves:
    """Return one picture's curves by group number: means over seeds if any group has several runs.

    metric: see `over_seeds`.
    """
    seeds = repeated(groups)
    found = {g.number: over_seeds(g, name, metric) if seeds else curve(g.runs, name) for g in groups}
    return {number: one.smooth() for number, one in found.items() if one}


def late(lines: Sequence[tuple[NDArray[np.int64], Floats]]) -> Limits | None:
    """Return y limits that ignore the first tenth of a long run, or None.

    None for short runs (below LONG rounds), and if these limits would hide less than half of the picture's height.
    """
    last = max(int(rounds[-1]) for rounds, _ in lines)
    if last < LONG:
        return None
    every, kept = (np.concatenate([values[rounds > start] for rounds, values in lines]) for start in (0, last / 10))
    low, high = float(kept.min()), float(kept.max())
    pad = 0.05 * (high - low)
    return (low - pad, high + pad) if np.ptp(every) > 2 * (high - low) else None


def _who(groups: Sequence[Group], known: Mapping[str, Curves]) -> str:
    """Return a sentence on the clients that the evaluations' means are over; empty without evaluations."""
    if "evaluation" not in known:
        return ""
    title = _titles(groups)["evaluation"]
    if not any_unseen(groups):
        return f"{title} (right): mean over all clients. "
    return f"{title}: mean over all of these; clients that never train are on the right. "


def _outer(curves: Iterable[Curve]) -> str:
    """Return a phrase that explains the paler band; empty if there is none."""
    return "; paler: the middle 90 % (5 % to 95 % quantiles)" if any(curve.tails for curve in curves) else ""


def any_unseen(groups: Sequence[Group]) -> bool:
    """Return whether any group has clients that never train."""
    return any(run.has_unseen for group in groups for run in group.runs)


def _titles(groups: Sequence[Group]) -> dict[str, str]:
    """Return the titles of the side-by-side pictures."""
    titles = dict(SOURCES)
    if tested(groups):
        titles["before"] = BEFORE
    if any_unseen(groups):
        titles["evaluation"] = TRAINED
    return titles


def _caption(groups: Sequence[Group], known: Mapping[str, Curves]) -> str:
    bands, other = bands_told(groups, known), ""
    if len(groups) > TOGETHER and not bands:
        bands = "The next picture shows their spread."
    firsts = [group.first for group in groups]
    if {*DATA_KEYS, "seed"} & set(differing(firsts)):
        other = "The runs do not all have the same test data: see their settings."
    return (
        f"Lines: mean over the round's clients, each on its own test data. {_who(groups, known)}{bands} The gap between the "
        f"pictures shows how much local training gains and aggregation loses again. {tested(groups)}{other} {_left_out(groups)}"
    ).rstrip()


def bands_told(groups: Sequence[Group], known: Mapping[str, Curves]) -> str:
    """Return a sentence about the curves' bands; empty if they have none."""
    if repeated(groups):
        return "A curve of several seeds is their mean, in a band of ± one sample standard deviation."
    every = [one for found in known.values() for one in found.values()]
    return "" if len(groups) > TOGETHER else f"Bands: {QUARTILES}{_outer(every)}."


def _left_out(groups: Sequence[Group]) -> str:
    """Return sentences that name the clients with data that define the metric; empty if all do."""
    title = groups[0].first.headline.title
    notes = undefined_notes(run for group in groups for run in group.runs)
    return "".join(f"{note}. " for note in notes if note.startswith(f"{title}: "))


def tested(groups: Sequence[Group]) -> str:
    """Return sentences about methods that test other models than the start and the end of training."""
    told = dict.fromkeys((group.method, group.first.tested) for group in groups if group.first.tested)
    return "".join(f"{method} is an exception: {text}. " for method, text in told)


def _tested_before(groups: Sequence[Group]) -> str:
    return "each client's model" if any(group.first.tested for group in groups) else "the received model"


def _over_rounds(groups: Sequence[Group], known: Mapping[str, Curves], limits: Limits | None) -> Figure:
    figure, first = curves_side_by_side(groups, known, _titles(groups))
    metric_axis(groups)(first)
    if limits:
        first.set_ylim(limits)
    return figure


def curves_side_by_side(
    groups: Sequence[Group], known: Mapping[str, Curves], titles: Mapping[str, str]
) -> tuple[Figure, Axes]:
    """Return a picture of curves over rounds, side by side with one y axis, and its leftmost axes. titles: by name."""
    style, last = styled(groups), max(group.last_round for group in groups)
    figure, first = new_figure(4.4), None
    for k, (name, curves) in enumerate(known.items()):
        axes = figure.add_subplot(1, len(known), k + 1, sharey=first)
        first = first or axes
        for group in groups:
            band = len(group.runs) > 1 if repeated(groups) else len(groups) <= TOGETHER
            _line(axes, curves.get(group.number), short(group.label), style[group.number], band)
        # four pictures leave a title little room
        axes.set_title(textwrap.fill(titles[name], 24) if len(known) == len(SOURCES) else titles[name])
        rounds_axis(axes, last)
        axes.tick_params(labelleft=k == 0)
    assert first is not None
    legend(figure, first)
    return figure, first


def _line(axes: Axes, found: Curve | None, label: str, look: Look, band: bool) -> None:
    """Draw a curve. Without one, only the label is added, for the legend."""
    if found is None:
        axes.plot([], [], label=label, **look.line_style(1))
        return
    if band:
        if found.tails:
            axes.fill_between(found.rounds, *found.tails, color=look.drawn(), alpha=0.1, linewidth=0)
        axes.fill_between(found.rounds, found.low, found.high, color=look.drawn(), alpha=0.16, linewidth=0)
        for edge in (found.low, found.high):
            axes.plot(found.rounds, edge, color=look.drawn(), linestyle=look.line, linewidth=0.6, alpha=0.7)
    axes.plot(found.rounds, found.mean, label=label, **look.line_style(len(found.rounds)))


def _behind(axes: Axes, x: NDArray[Any], y: Floats) -> None:
    axes.plot(x, y, color=tone(0.82), linewidth=0.9, zorder=1)


def _spread(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the spread over clients and of the single runs of a mean, if one picture cannot show them."""
    curves = {group.number: one.smooth() for group in groups if (one := curve(group.runs, "before"))}
    several = [group for group in groups if group.number in curves and len(group.runs) > 1]
    if curves and (len(groups) > TOGETHER or several):
        limits = late([(one.rounds, edge) for one in curves.values() for edge in (one.low, one.high)])
        yield Panel(
            f"{metric.name}-spread",
            f"{_title(metric)} and its spread over clients, run by run",
            f"{_title(metric)} of {_tested_before(groups)} before local training. Line: mean over the round's clients; band: "
            f"{QUARTILES}, of all seeds together{_outer(curves.values())}; grey: the other runs."
            + long_runs(groups, cut=bool(limits)),
            lambda: _clients_spread(groups, curves, limits),
        )
    if several:
        single = {
            group.number: [(run, one.smooth()) for run in group.runs if (one := curve([run], "before"))]
            for group in several
        }
        ends = late([(one.rounds, one.mean) for found in single.values() for _, one in found])
        yield Panel(
            f"{metric.name}-seeds",
            f"{_title(metric)} over rounds, seed by seed",
            f"{_title(metric)} of {_tested_before(several)} before local training, mean over the round's clients: one line per "
            "run." + long_runs(several, cut=bool(ends)),
            lambda: _single_runs(several, single, ends),
            folded=True,
        )


def _small_over_rounds(
    groups: Sequence[Group], draw: Callable[[Axes, Group, bool], None], limits: Limits | None
) -> Figure:
    """Return one small picture per group, over rounds. draw: see `small_multiples`."""
    last = max(group.last_round for group in groups)
    figure, grid = small_multiples(groups, draw)
    label_outer(grid, min(4, len(groups)), lambda axes: rounds_axis(axes, last), metric_axis(groups))
    if limits:
        grid[0].set_ylim(limits)
    return figure


def _clients_spread(groups: Sequence[Group], curves: Curves, limits: Limits | None) -> Figure:
    style = styled(groups)

    def draw(axes: Axes, group: Group, in_focus: bool) -> None:
        found = curves.get(group.number)
        if in_focus:
            _line(axes, found, short(group.label), style[group.number], True)
        elif found is not None:
            _behind(axes, found.rounds, found.mean)

    return _small_over_rounds(groups, draw, limits)


def _single_runs(
    groups: Sequence[Group], curves: Mapping[int, Sequence[tuple[ReportedRun, Curve]]], limits: Limits | None
) -> Figure:
    style = styled(groups)

    def draw(axes: Axes, group: Group, in_focus: bool) -> None:
        if not in_focus:
            return
        colour = style[group.number].drawn()
        for k, (run, found) in enumerate(curves[group.number]):
            label, line = f"seed {run.settings.get('seed', '?')}", LINES[k % len(LINES)]
            axes.plot(found.rounds, found.mean, color=colour, linestyle=line, linewidth=1.3, label=label)
        axes.legend(fontsize=8, handlelength=3.2, loc="lower right")

    return _small_over_rounds(groups, draw, limits)


# Client by client -----------------------------------------------------------------------------------------------------


def picture_name(picture: str, metric: Metric) -> str:
    """Return a picture's name, which includes the metric unless that is accuracy."""
    return picture if metric.name == "accuracy" else f"{picture}-{metric.name}"


def _sorted(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    drawn = [group for group in groups if all_clients(group)[0].size]
    if not drawn:
        return
    sources: dict[str, list[int]] = {}
    for group in drawn:
        sources.setdefault(all_clients(group)[1], []).append(group.number)
    where = "; ".join(f"{text} ({listed(numbers)})" if len(sources) > 1 else text for text, numbers in sources.items())
    seeds = " A client counts once, with the mean over its seeds." if repeated(drawn) else ""
    apart = any_unseen(drawn)
    alone = " Clients that never train are in the next picture." if apart else ""
    yield Panel(
        picture_name("clients", metric),
        f"Final {metric.title} of each client{' that trains' if apart else ''}",
        f"Clients sorted by {metric.title} on their own test data: the line starts at the worst client and crosses 50 % at the "
        f"median one. A flat line means equal results for all clients.{seeds}{alone} Measured: {where}.",
        lambda: _clients(drawn, {group.number: all_clients(group)[0] for group in drawn}),
    )
    if any(all_clients(group)[0].size > MANY for group in drawn):
        yield Panel(
            picture_name("histogram", metric),
            f"Distribution of the clients' final {metric.title}",
            f"Share of the clients{' that train' if apart else ''} by {metric.title} on their own test data, as in the picture "
            f"above.{seeds} Dashed: the mean; dotted: the 5 % and the 95 % quantile.",
            lambda: _histograms(drawn, {group.number: all_clients(group)[0] for group in drawn}),
        )


def _unseen(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the picture of the clients that never train."""
    values = {group.number: all_clients(group, unseen_accuracies) for group in groups}
    drawn = [group for group in groups if values[group.number][0].size]
    if drawn:
        where = "; ".join(dict.fromkeys(values[group.number][1] for group in drawn))
        seeds = " A client counts once, with the mean over its seeds." if repeated(drawn) else ""
        yield Panel(
            f"unseen-{metric.name}",
            f"Final {metric.title} of each client that never trains",
            f"Clients that never train (holdout-clients), sorted by {metric.title} on their own test data, with the model that "
            f"the method gives a new client.{seeds} Measured: {where}.",
            lambda: _clients(drawn, {number: found for number, (found, _) in values.items()}),
        )


def _clients(groups: Sequence[Group], sorted_values: Mapping[int, Floats]) -> Figure:
    style = styled(groups)

    def draw(axes: Axes, group: Group, in_focus: bool) -> None:
        values = sorted_values[group.number]
        x: Floats = 100 * (np.arange(len(values)) + 0.5) / len(values)
        if in_focus:
            axes.plot(x, values, label=short(group.label), **style[group.number].line_style(len(x)))
        else:
            _behind(axes, x, values)

    def ticks(axes: Axes) -> None:
        axes.set_xlim(0, 100)
        axes.set_xlabel("clients, worst to best (%)")

    if len(groups) > 2 * TOGETHER:
        figure, grid = small_multiples(groups, draw)
        label_outer(grid, min(4, len(groups)), ticks, metric_axis(groups))
        return figure
    figure = new_figure(4.2)
    axes = figure.add_subplot()
    for group in groups:
        draw(axes, group, True)
    ticks(axes)
    metric_axis(groups)(axes)
    legend(figure, axes)
    return figure


def _histograms(groups: Sequence[Group], values: Mapping[int, Floats]) -> Figure:
    """Return one small histogram per group, with the others in grey behind it."""
    style, every = styled(groups), np.concatenate([values[group.number] for group in groups])
    low, high = (0.0, 1.0) if groups[0].first.headline.ratio else (float(every.min()), float(every.max()))
    # bins narrower than the steps between values would stay empty
    steps = np.diff(np.unique(every))
    width = max((high - low) / BINS, float(steps.min(initial=1)) if steps.size else 1.0)
    edges = np.arange(low - width / 2, high + width, width)
    shares = {number: np.histogram(found, edges)[0] / len(found) for number, found in values.items()}

    def draw(axes: Axes, group: Group, in_focus: bool) -> None:
        share = shares[group.number]
        if not in_focus:
            axes.stairs(share, edges, color=tone(0.82), linewidth=0.9, zorder=1)
            return
        colour, found = style[group.number].drawn(), values[group.number]
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.35)
        axes.stairs(share, edges, color=colour, linewidth=1.2)
        axes.axvline(float(found.mean()), color=colour, linestyle=(0, (5, 2)))
        for quantile in np.percentile(found, (5, 95)):
            axes.axvline(float(quantile), color=colour, linestyle=(0, (1.3, 1.4)))

    def across(axes: Axes) -> None:
        axes.set_xlim(edges[0], edges[-1])
        label = groups[0].first.headline
        if label.ratio:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}"))
        axes.set_xlabel(f"test {label.title}{' (%)' if label.ratio else ''}")

    figure, grid = small_multiples(groups, draw)
    label_outer(grid, min(4, len(groups)), across, lambda axes: percent_axis(axes, "clients (%)"))
    grid[0].set_ylim(bottom=0)
    return figure
