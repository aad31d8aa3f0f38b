"""The report's pictures of the headline metric, all runs compared: over rounds, and client by client."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from corolla.report.arrays import EVALUATED, LONG, Curve, Floats, ReportedRun, curve, unseen_accuracies
from corolla.report.figures import (
    TOGETHER,
    Panel,
    label_outer,
    legend,
    listed,
    metric_axis,
    new_figure,
    rounds_axis,
    small_multiples,
    styled,
)
from corolla.report.groups import DATA_KEYS, Group, all_clients, differing, long_runs, over_seeds, short
from corolla.report.style import LINES, Look, tone
from fl_app.tasks import Metric

SOURCES = (
    ("before", "Received model, before local training"),
    ("after", "After local training"),
    ("evaluation", "All clients' own models"),
    ("unseen", "Clients that never train"),
)
# by a group's number, as they are drawn
Curves = Mapping[int, Curve]
Limits = tuple[float, float]
# where not all models are the received ones
BEFORE = "Before local training"
# where some clients never train
TRAINED = "Own models of clients that train"


def accuracy(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the headline metric of all groups with any rounds, those of another task apart."""
    by_metric: dict[Metric, list[Group]] = {}
    for group in groups:
        if group.last_round:
            by_metric.setdefault(group.first.headline, []).append(group)
    for metric, same in by_metric.items():
        yield from _of(metric, same)


def _of(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    known = {name: curves for name, _ in SOURCES if (curves := drawn(groups, name))}
    if not any(len(run.evaluations) > 1 for group in groups for run in group.runs):
        known = {name: curves for name, curves in known.items() if name not in EVALUATED}
    if known:
        limits = late([(found.rounds, found.mean) for curves in known.values() for found in curves.values()])
        caption = _caption(groups, known) + long_runs(groups, cut=bool(limits))
        yield Panel(metric.name, f"{_title(metric)} over rounds", caption, lambda: _over_rounds(groups, known, limits))
        yield from _spread(metric, groups)
    yield from _sorted(metric, groups)
    yield from _unseen(metric, groups)


def _title(metric: Metric) -> str:
    return metric.title[:1].upper() + metric.title[1:]


# Over rounds ----------------------------------------------------------------------------------------------------------


def repeated(groups: Sequence[Group]) -> bool:
    """Tell whether any of the groups has several runs, so that bands are over seeds."""
    return any(len(group.runs) > 1 for group in groups)


def drawn(groups: Sequence[Group], name: str) -> Curves:
    """Return what one picture has of all groups: their means over seeds if any of them has several."""
    found = {group.number: over_seeds(group, name) if repeated(groups) else curve(group.runs, name) for group in groups}
    return {number: one.smooth() for number, one in found.items() if one}


def late(lines: Sequence[tuple[NDArray[np.int64], Floats]]) -> Limits | None:
    """Return limits of y without what the first tenth of many rounds alone reaches; None if that leaves half of the picture."""
    last = max(int(rounds[-1]) for rounds, _ in lines)
    if last < LONG:
        return None
    every, kept = (np.concatenate([values[rounds > start] for rounds, values in lines]) for start in (0, last / 10))
    low, high = float(kept.min()), float(kept.max())
    pad = 0.05 * (high - low)
    return (low - pad, high + pad) if np.ptp(every) > 2 * (high - low) else None


def _who(groups: Sequence[Group], known: Mapping[str, Curves]) -> str:
    """Say over whom the curves of evaluations are means, a phrase to add."""
    if "evaluation" not in known:
        return ""
    title = _titles(groups)["evaluation"]
    if not any_unseen(groups):
        return f" (right, {title}: over all clients)"
    return f" ({title}: over all clients but those that never train, who stand apart, right)"


def any_unseen(groups: Sequence[Group]) -> bool:
    """Tell whether any of the groups has clients that never train."""
    return any(run.has_unseen for group in groups for run in group.runs)


def _titles(groups: Sequence[Group]) -> dict[str, str]:
    """Return the titles of the pictures side by side."""
    titles = dict(SOURCES)
    if tested(groups):
        titles["before"] = BEFORE
    if any_unseen(groups):
        titles["evaluation"] = TRAINED
    return titles


def _caption(groups: Sequence[Group], known: Mapping[str, Curves]) -> str:
    bands, other = "Bands: the middle half of the clients (quartiles).", ""
    if repeated(groups):
        bands = "Where a curve stands for several seeds it is their mean, and the band ± one sample standard deviation over them."
    elif len(groups) > TOGETHER:
        bands = "Their spread is in the next picture."
    firsts = [group.first for group in groups]
    if {*DATA_KEYS, "seed"} & set(differing(firsts)):
        other = "The runs do not all have the same test data: see their settings."
    return (
        f"Lines: mean over the round's clients{_who(groups, known)}, each on its own test data. {bands} A gap between the "
        f"pictures is what local training adds, and what aggregation takes away again. {tested(groups)}{other}"
    ).rstrip()


def tested(groups: Sequence[Group]) -> str:
    """Say of which methods' runs other models were tested than those that training starts from and ends with."""
    told = dict.fromkeys((group.method, group.first.tested) for group in groups if group.first.tested)
    return "".join(f"But of {method}, {text}. " for method, text in told)


def _tested_before(groups: Sequence[Group]) -> str:
    return "each client's model" if any(group.first.tested for group in groups) else "the received model"


def _over_rounds(groups: Sequence[Group], known: Mapping[str, Curves], limits: Limits | None) -> Figure:
    style, last = styled(groups), max(group.last_round for group in groups)
    figure, first, titles = new_figure(4.4), None, _titles(groups)
    for k, (name, curves) in enumerate(known.items()):
        axes = figure.add_subplot(1, len(known), k + 1, sharey=first)
        first = first or axes
        for group in groups:
            band = len(group.runs) > 1 if repeated(groups) else len(groups) <= TOGETHER
            _line(axes, curves.get(group.number), short(group.label), style[group.number], band)
        # four side by side leave a title little room
        axes.set_title(textwrap.fill(titles[name], 24) if len(known) == len(SOURCES) else titles[name])
        rounds_axis(axes, last)
        metric_axis(groups)(axes) if k == 0 else axes.tick_params(labelleft=False)
    assert first is not None
    if limits:
        first.set_ylim(limits)
    legend(figure, first)
    return figure


def _line(axes: Axes, found: Curve | None, label: str, look: Look, band: bool) -> None:
    """Draw a curve; a label without one is for the legend."""
    if found is None:
        axes.plot([], [], label=label, **look.line_style(1))
        return
    if band:
        axes.fill_between(found.rounds, found.low, found.high, color=look.drawn(), alpha=0.16, linewidth=0)
        for edge in (found.low, found.high):
            axes.plot(found.rounds, edge, color=look.drawn(), linestyle=look.line, linewidth=0.6, alpha=0.7)
    axes.plot(found.rounds, found.mean, label=label, **look.line_style(len(found.rounds)))


def _behind(axes: Axes, x: NDArray[Any], y: Floats) -> None:
    axes.plot(x, y, color=tone(0.82), linewidth=0.9, zorder=1)


def _spread(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield what one picture cannot hold: the spread over clients, and the single runs behind a mean."""
    curves = {group.number: one.smooth() for group in groups if (one := curve(group.runs, "before"))}
    several = [group for group in groups if group.number in curves and len(group.runs) > 1]
    if curves and (len(groups) > TOGETHER or several):
        limits = late([(one.rounds, edge) for one in curves.values() for edge in (one.low, one.high)])
        yield Panel(
            f"{metric.name}-spread",
            f"{_title(metric)} and its spread over clients, run by run",
            f"{_title(metric)} of {_tested_before(groups)} before local training. Line: mean over the round's clients; band: the "
            "middle half of the clients (quartiles), of all seeds together; grey: the other runs."
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
    """One small picture per group, over rounds; draw: as `small_multiples` takes it."""
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


def _sorted(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    drawn = [group for group in groups if all_clients(group)[0].size]
    if not drawn:
        return
    sources: dict[str, list[int]] = {}
    for group in drawn:
        sources.setdefault(all_clients(group)[1], []).append(group.number)
    where = "; ".join(f"{text} ({listed(numbers)})" if len(sources) > 1 else text for text, numbers in sources.items())
    seeds = " Clients of all seeds count together." if repeated(drawn) else ""
    apart = any_unseen(drawn)
    alone = " Clients that never train are in the next picture." if apart else ""
    yield Panel(
        "clients" if metric.name == "accuracy" else f"clients-{metric.name}",
        f"Final {metric.title} of each client{' that trains' if apart else ''}",
        f"Clients sorted by {metric.title} on their own test data: where the line starts is the worst-off client, and where it "
        f"crosses 50 % the median one. A flat line treats all alike.{seeds}{alone} Measured: {where}.",
        lambda: _clients(drawn, {group.number: all_clients(group)[0] for group in drawn}),
    )


def _unseen(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the picture of the clients that never train."""
    values = {group.number: all_clients(group, unseen_accuracies) for group in groups}
    drawn = [group for group in groups if values[group.number][0].size]
    if drawn:
        where = "; ".join(dict.fromkeys(values[group.number][1] for group in drawn))
        yield Panel(
            f"unseen-{metric.name}",
            f"Final {metric.title} of each client that never trains",
            f"Clients that are kept out of all training (holdout-clients), sorted by {metric.title} on their own test data, with "
            f"the model that the method gives a client it has nothing of. Measured: {where}.",
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
