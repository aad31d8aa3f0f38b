"""Pictures of the headline metric for all runs: over rounds, and client by client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.experiments.result_table import undefined_notes
from corolla.report import charts, frames
from corolla.report.arrays import EVALUATED, LONG, MANY, Curve, Floats, ReportedRun, curve, unseen_accuracies
from corolla.report.charts import ROUNDS, Axis, Chart
from corolla.report.groups import (
    DATA_KEYS,
    Group,
    all_clients,
    differing,
    judged_by,
    long_runs,
    over_seeds,
    short,
)
from corolla.report.pictures import TOGETHER, Panel, listed, metric_axis
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
# most departures of clients that a caption names
MANY_TOLD = 5


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
    if curves := [*_curves(metric, groups)]:
        yield from curves
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
        title = f"{_title(metric)} over rounds"
        yield Panel(metric.name, title, caption, lambda: _over_rounds(groups, known, limits), switch=charts.by_cost())


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
        f"pictures shows how much local training gains and aggregation loses again. {tested(groups)}{other} "
        f"{_left_out(groups)}{_departed(groups)}"
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


def _departed(groups: Sequence[Group]) -> str:
    """Return a sentence on the rounds from which on fewer clients are in the means; empty if there are none."""
    told = [
        f"{group.number}: {what} from round {t} on" for group in groups for t, what in frames.departures(group).items()
    ]
    return f"Dotted: fewer clients than in the round before ({'; '.join(told[:MANY_TOLD])}). " if told else ""


def tested(groups: Sequence[Group]) -> str:
    """Return sentences about methods that test other models than the start and the end of training."""
    told = dict.fromkeys((group.method, group.first.tested) for group in groups if group.first.tested)
    return "".join(f"{method} is an exception: {text}. " for method, text in told)


def _over_rounds(groups: Sequence[Group], known: Mapping[str, Curves], limits: Limits | None) -> Chart:
    axis = metric_axis(groups[0].first.headline, limits)
    return side_by_side(groups, known, _titles(groups), axis)


def side_by_side(groups: Sequence[Group], known: Mapping[str, Curves], titles: Mapping[str, str], axis: Axis) -> Chart:
    """Return curves over rounds, side by side with one y axis. titles: by the curves' names."""
    bands = not repeated(groups) and len(groups) <= TOGETHER
    return charts.lines(
        frames.curves(groups, {titles[name]: found for name, found in known.items()}, bands), ROUNDS, axis
    )


def _spread(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the spread over clients and of the single runs of a mean, if one picture cannot show them."""
    curves = {group.number: one.smooth() for group in groups if (one := curve(group.runs, "before"))}
    several = [group for group in groups if group.number in curves and len(group.runs) > 1]
    if curves and (len(groups) > TOGETHER or several):
        limits = late([(one.rounds, edge) for one in curves.values() for edge in (one.low, one.high)])
        yield Panel(
            f"{metric.name}-spread",
            f"{_title(metric)} and its spread over clients, run by run",
            f"{_title(metric)} of each client's model before local training. Line: mean over the round's clients; band: "
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
            f"{_title(metric)} of each client's model before local training, mean over the round's clients: one line per "
            "run." + long_runs(several, cut=bool(ends)),
            lambda: _single_runs(several, single, ends),
            folded=True,
        )


def _clients_spread(groups: Sequence[Group], curves: Curves, limits: Limits | None) -> Chart:
    frame = frames.behind(frames.curves(groups, {"": curves}))
    return charts.lines(frame, ROUNDS, metric_axis(groups[0].first.headline, limits))


def _single_runs(
    groups: Sequence[Group], curves: Mapping[int, Sequence[tuple[ReportedRun, Curve]]], limits: Limits | None
) -> Chart:
    found = [
        frames.line(group, k, part=short(group.label), line=run.number, seed=run.seed, round=one.rounds, mean=one.mean)
        for group in groups
        for k, (run, one) in enumerate(curves[group.number])
    ]
    return charts.lines(pandas.concat(found, ignore_index=True), ROUNDS, metric_axis(groups[0].first.headline, limits))


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
        lambda: _clients(drawn, frames.finals(drawn)),
    )
    same = [group for group in drawn if group.first.data_sha256 == drawn[0].first.data_sha256]
    if len(same) > 1:
        better = "above" if metric.higher_is_better else "below"
        yield Panel(
            picture_name("client-by-client", metric),
            f"{metric.title[0].upper()}{metric.title[1:]} client by client",
            f"A mark is a client: across, its {metric.title} with {short(same[0].label)}; up, with the other row. Clients "
            f"{better} the diagonal gain by the other row.{seeds}",
            lambda: _against(same),
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
            lambda: _clients(drawn, frames.finals(drawn, unseen_accuracies)),
        )


def _clients(groups: Sequence[Group], frame: charts.Frame) -> Chart:
    across = Axis("clients, worst to best (%)", "d", (0.0, 100.0))
    return charts.lines(frame, across, metric_axis(groups[0].first.headline))


def _against(groups: Sequence[Group]) -> Chart:
    frame = frames.against_first(groups)
    values = frame[["reference", "mean"]].to_numpy()
    room = 0.03 * float(np.ptp(values)) or 0.03
    axis = metric_axis(groups[0].first.headline, (float(values.min()) - room, float(values.max()) + room))
    across, up = (replace(axis, title=f"{axis.title}, {name}") for name in (short(groups[0].label), "the other row"))
    return charts.against(frame, across, up)


def _histograms(groups: Sequence[Group], values: Mapping[int, Floats]) -> Chart:
    """Return one small histogram per group."""
    metric, every = groups[0].first.headline, np.concatenate([values[group.number] for group in groups])
    low, high = (0.0, 1.0) if metric.ratio else (float(every.min()), float(every.max()))
    # bins narrower than the steps between values would stay empty
    steps = np.diff(np.unique(every))
    width = max((high - low) / BINS, float(steps.min(initial=1)) if steps.size else 1.0)
    edges = np.arange(low - width / 2, high + width, width)
    found = []
    for group in groups:
        own = values[group.number]
        lowest, highest = np.percentile(own, (5, 95))
        told = {"share": frames.bins(own, edges)["count"] / len(own), "mean": own.mean()}
        frame = frames.bins(own, edges).drop(columns="count").assign(**told, lowest=lowest, highest=highest)
        found.append(frame.assign(run=short(group.label), part=short(group.label), method=group.method))
    axis = Axis(f"test {metric.title}", "~%" if metric.ratio else "~g", (float(edges[0]), float(edges[-1])))
    return charts.histogram(pandas.concat(found, ignore_index=True), axis, Axis("clients", "~%", zero=True))
