"""Pictures of all runs together: metrics and losses over rounds, client by client, and over what they cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas

from corolla.experiments.result_table import undefined_notes
from corolla.report import charts, groups
from corolla.report.arrays import (
    EVALUATED,
    LONG,
    MANY,
    Frame,
    ReportedRun,
    client_seconds,
    curve,
    server_seconds,
    smooth,
    unseen_accuracies,
)
from corolla.report.charts import ROUNDS, Axis, Chart, Panel, by_cost, metric_axis, sentences
from corolla.report.groups import DATA_KEYS, Group, by_client, judged_by, long_runs, over_costs, over_seeds, short
from fl_app.metrics import LOSS, Metric, moments

SOURCES = {
    "before": "Received model, before local training",
    "after": "After local training",
    "evaluation": "All clients' own models",
    "unseen": "Clients that never train",
}
# title if some methods test other models than the received ones
BEFORE = "Before local training"
# title if some clients never train
TRAINED = "Own models of clients that train"
LOSSES = dict(
    zip(
        (LOSS.name, *moments(LOSS.name)),
        ("Training loss", "Test loss before local training", "Test loss after local training"),
        strict=True,
    )
)
# most curves with bands in one picture
TOGETHER = 4
# curves as drawn, by group number
Curves = Mapping[int, Frame]
Limits = tuple[float, float] | None
QUARTILES = "the middle half of the clients (quartiles)"
OUTER = "; paler: the middle 90 % (5 % to 95 % quantiles)"
BINS = 20
# y of losses is logarithmic if the means differ by this factor, and x of bytes if the runs' bytes do
DECADES, DIFFERENT = 100, 30


def by_metric(groups: Sequence[Group]) -> Iterator[tuple[Metric, list[Group]]]:
    """Yield the groups of each headline metric: groups of different tasks do not share a picture."""
    for metric in dict.fromkeys(group.first.headline for group in groups):
        yield metric, [group for group in groups if group.first.headline == metric]


def accuracy(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of each headline metric, and of the clients' other metrics. Groups without rounds are left out."""
    for metric, same in by_metric([group for group in groups if group.last_round]):
        if curves := [*_curves(metric, same)]:
            yield from [*curves, *_spread(metric, same)]
        yield from _sorted(metric, same)
        yield from _unseen(metric, same)
        for other in dict.fromkeys(found for group in same for found in group.first.others):
            judged = [judged_by(group, other) for group in same if other in group.first.others]
            yield from _curves(other, judged)
            yield from _sorted(other, judged)


# Over rounds ----------------------------------------------------------------------------------------------------------


def _curves(metric: Metric, groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the picture of a metric over rounds, if it is recorded."""
    known = {name: curves for name in SOURCES if (curves := drawn(groups, name))}
    if not any(len(run.evaluations) > 1 for group in groups for run in group.runs):
        known = {name: curves for name, curves in known.items() if name not in EVALUATED}
    if known:
        limits = late(_means(known))
        titles = dict(SOURCES)
        if tested(groups):
            titles["before"] = BEFORE
        if any_unseen(groups):
            titles["evaluation"] = TRAINED
        axis = metric_axis(metric, limits)
        yield Panel(
            metric.name,
            f"{_title(metric)} over rounds",
            _caption(groups, known, titles) + long_runs(groups, cut=bool(limits)),
            lambda: side_by_side(groups, known, titles, axis),
            switch=by_cost(),
        )


def _title(metric: Metric) -> str:
    return metric.title[:1].upper() + metric.title[1:]


def _means(known: Mapping[str, Curves]) -> list[Frame]:
    return [found["mean"] for curves in known.values() for found in curves.values()]


def repeated(groups: Sequence[Group]) -> bool:
    """Return whether any group has several runs, so that bands are over seeds."""
    return any(len(group.runs) > 1 for group in groups)


def drawn(groups: Sequence[Group], name: str, metric: Metric | None = None) -> Curves:
    """Return one picture's curves by group number: means over seeds if any group has several runs.

    metric: see `over_seeds`.
    """
    seeds, found = repeated(groups), {}
    for group in groups:
        own = over_seeds(group, name, metric) if seeds else curve(group.runs, name)
        if own is not None:
            found[group.number] = own.apply(smooth, raw=True)
    return found


def late(lines: Iterable[Frame]) -> Limits:
    """Return y limits that ignore the first tenth of a long run, or None. lines: series by round.

    None for short runs (below LONG rounds), and if these limits would hide less than half of the picture's height.
    """
    every = pandas.concat(lines)
    last = every.index.max()
    kept = every[every.index > last / 10]
    low, high = float(kept.min()), float(kept.max())
    pad = 0.05 * (high - low)
    return (low - pad, high + pad) if last >= LONG and np.ptp(every) > 2 * (high - low) else None


def any_unseen(groups: Sequence[Group]) -> bool:
    """Return whether any group has clients that never train."""
    return any(run.has_unseen for group in groups for run in group.runs)


def _caption(shown: Sequence[Group], known: Mapping[str, Curves], titles: Mapping[str, str]) -> str:
    everybody = " (right): mean over all clients."
    if any_unseen(shown):
        everybody = ": mean over all of these; clients that never train are on the right."
    other_data = {*DATA_KEYS, "seed"} & set(groups.differing([group.first for group in shown]))
    notes = undefined_notes(run for group in shown for run in group.runs)
    gone = [
        f"{f'{one.number}: ' * (len(shown) > 1)}{what} from round {t} on"
        for one in shown
        for t, what in groups.departures(one).items()
    ]
    return sentences(
        "Lines: mean over the round's clients, each on its own test data.",
        f"{titles['evaluation']}{everybody}" * ("evaluation" in known),
        bands_told(shown, known) or "The next picture shows their spread.",
        "The gap between the pictures shows how much local training gains and aggregation loses again.",
        tested(shown),
        "The runs do not all have the same test data: see their settings." * bool(other_data),
        *(f"{note}." for note in notes if note.startswith(f"{shown[0].first.headline.title}: ")),
        f"Dotted: fewer clients than in the round before ({'; '.join(gone)})." * bool(gone),
    )


def bands_told(groups: Sequence[Group], known: Mapping[str, Curves]) -> str:
    """Return a sentence about the curves' bands; empty if they have none."""
    if repeated(groups):
        return "A curve of several seeds is their mean, in a band of ± one sample standard deviation."
    every = [one for found in known.values() for one in found.values()]
    return "" if len(groups) > TOGETHER else f"Bands: {QUARTILES}{_outer(every)}."


def _outer(curves: Iterable[Frame]) -> str:
    """Return a phrase that explains the paler band; empty if there is none."""
    return OUTER if any("lowest" in found for found in curves) else ""


def tested(groups: Sequence[Group]) -> str:
    """Return sentences about methods that test other models than the start and the end of training."""
    told = dict.fromkeys((group.method, group.first.tested) for group in groups if group.first.tested)
    return " ".join(f"{method} is an exception: {text}." for method, text in told)


def side_by_side(shown: Sequence[Group], known: Mapping[str, Curves], titles: Mapping[str, str], axis: Axis) -> Chart:
    """Return curves over rounds, side by side with one y axis. titles: by the curves' names."""
    return charts.lines(
        groups.curves(
            shown, {titles[name]: known[name] for name in known}, not repeated(shown) and len(shown) <= TOGETHER
        ),
        ROUNDS,
        axis,
    )


def _spread(metric: Metric, shown: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the spread over clients and of the single runs of a mean, if one picture cannot show them."""
    found = {group.number: curve(group.runs, "before") for group in shown}
    curves = {number: own.apply(smooth, raw=True) for number, own in found.items() if own is not None}
    several = [group for group in shown if group.number in curves and len(group.runs) > 1]
    text = f"{_title(metric)} of each client's model before local training"
    if curves and (len(shown) > TOGETHER or several):
        limits = late(one[edge] for one in curves.values() for edge in ("low", "high"))
        yield Panel(
            f"{metric.name}-spread",
            f"{_title(metric)} and its spread over clients, run by run",
            f"{text}. Line: mean over the round's clients; band: {QUARTILES}, of all seeds together"
            f"{_outer(curves.values())}; grey: the other runs.{long_runs(shown, cut=bool(limits))}",
            lambda: charts.lines(
                groups.behind(groups.curves(shown, {"": curves})), ROUNDS, metric_axis(metric, limits)
            ),
        )
    if several:
        lines = []
        for group in several:
            for k, run in enumerate(group.runs):
                if (one := curve([run], "before")) is not None:
                    own = one[["mean"]].apply(smooth, raw=True).reset_index()
                    lines.append(groups.line(group, k, part=short(group.label), line=run.number, seed=run.seed, **own))
        ends = late(own.set_index("round")["mean"] for own in lines)
        yield Panel(
            f"{metric.name}-seeds",
            f"{_title(metric)} over rounds, seed by seed",
            f"{text}, mean over the round's clients: one line per run.{long_runs(several, cut=bool(ends))}",
            lambda: charts.lines(pandas.concat(lines, ignore_index=True), ROUNDS, metric_axis(metric, ends)),
            folded=True,
        )


def losses(groups: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the losses per headline metric: different tasks have different losses."""
    for metric, same in by_metric([group for group in groups if group.last_round]):
        if known := {name: curves for name in LOSSES if (curves := drawn(same, name, LOSS))}:
            yield _losses(metric, same, known)


def _losses(metric: Metric, groups: Sequence[Group], known: Mapping[str, Curves]) -> Panel:
    means = pandas.concat(_means(known))
    axis = Axis("loss", limits=late(_means(known)))
    text = (
        "Lines: mean over the round's clients, each on its own data. Training loss: over the last local epoch. "
        f"{bands_told(groups, known)} A test loss that rises while the training loss falls shows overfitting."
    )
    if means.min() > 0 and means.max() >= DECADES * means.min():
        axis = Axis("loss", limits=(means.min() / 1.5, 1.5 * means.max()), log=True)
        text += " The vertical axis is logarithmic."
    return Panel(
        picture_name(LOSS.name, metric),
        "Loss over rounds",
        text + long_runs(groups, cut=bool(axis.limits) and not axis.log),
        lambda: side_by_side(groups, known, LOSSES, axis),
        switch=by_cost(),
    )


# Client by client -----------------------------------------------------------------------------------------------------


def picture_name(picture: str, metric: Metric) -> str:
    """Return a picture's name, which includes the metric unless that is accuracy."""
    return picture if metric.name == "accuracy" else f"{picture}-{metric.name}"


def listed(numbers: Sequence[object]) -> str:
    """Return the names of runs, given their numbers: `runs 1, 2`."""
    return ("run " if len(numbers) == 1 else "runs ") + ", ".join(map(str, numbers))


def _sorted(metric: Metric, every: Sequence[Group]) -> Iterator[Panel]:
    known = {group.number: by_client(group) for group in every}
    shown = [group for group in every if len(known[group.number][0])]
    if not shown:
        return
    sources: dict[str, list[int]] = {}
    for group in shown:
        sources.setdefault(known[group.number][1], []).append(group.number)
    where = "; ".join(sources)
    if len(sources) > 1:
        where = "; ".join(f"{text} ({listed(numbers)})" for text, numbers in sources.items())
    seeds = " A client counts once, with the mean over its seeds." * repeated(shown)
    apart = any_unseen(shown)
    train, alone = " that train" * apart, " Clients that never train are in the next picture." * apart
    yield Panel(
        picture_name("clients", metric),
        f"Final {metric.title} of each client{' that trains' * apart}",
        f"Clients sorted by {metric.title} on their own test data: the line starts at the worst client and crosses 50 % at the "
        f"median one. A flat line means equal results for all clients.{seeds}{alone} Measured: {where}.",
        lambda: _clients(metric, groups.finals(shown)),
    )
    same = [group for group in shown if group.first.data_sha256 == shown[0].first.data_sha256]
    if len(same) > 1:
        better = "above" if metric.higher_is_better else "below"
        yield Panel(
            picture_name("client-by-client", metric),
            f"{_title(metric)} client by client",
            f"A mark is a client: across, its {metric.title} with {short(same[0].label)}; up, with the other row. Clients "
            f"{better} the diagonal gain by the other row.{seeds}",
            lambda: _against(metric, same),
        )
    if any(len(values) > MANY for values, _ in known.values()):
        yield Panel(
            picture_name("histogram", metric),
            f"Distribution of the clients' final {metric.title}",
            f"Share of the clients{train} by {metric.title} on their own test data, as in the picture above.{seeds} Dashed: the "
            "mean; dotted: the 5 % and the 95 % quantile.",
            lambda: _histograms(metric, shown),
        )


def _unseen(metric: Metric, every: Sequence[Group]) -> Iterator[Panel]:
    """Yield the picture of the clients that never train."""
    known = {group.number: by_client(group, unseen_accuracies) for group in every}
    shown = [group for group in every if len(known[group.number][0])]
    if shown:
        where = "; ".join(dict.fromkeys(known[group.number][1] for group in shown))
        seeds = " A client counts once, with the mean over its seeds." * repeated(shown)
        yield Panel(
            f"unseen-{metric.name}",
            f"Final {metric.title} of each client that never trains",
            f"Clients that never train (holdout-clients), sorted by {metric.title} on their own test data, with the model that "
            f"the method gives a new client.{seeds} Measured: {where}.",
            lambda: _clients(metric, groups.finals(shown, unseen_accuracies)),
        )


def _clients(metric: Metric, frame: Frame) -> Chart:
    return charts.lines(frame, Axis("clients, worst to best (%)", "d", (0.0, 100.0)), metric_axis(metric))


def _against(metric: Metric, shown: Sequence[Group]) -> Chart:
    frame = groups.against_first(shown)
    values = frame[["reference", "mean"]].to_numpy()
    room = 0.03 * float(np.ptp(values)) or 0.03
    axis = metric_axis(metric, (float(values.min()) - room, float(values.max()) + room))
    return charts.against(
        frame,
        replace(axis, title=f"{axis.title}, {short(shown[0].label)}"),
        replace(axis, title=f"{axis.title}, the other row"),
    )


def _histograms(metric: Metric, shown: Sequence[Group]) -> Chart:
    """Return one small histogram per group."""
    values = [by_client(group)[0].to_numpy() for group in shown]
    every = np.unique(np.concatenate(values))
    low, high = (0.0, 1.0) if metric.ratio else (float(every[0]), float(every[-1]))
    # bins narrower than the steps between values would stay empty
    step = float(np.diff(every).min(initial=1)) if len(every) > 1 else 1.0
    width = max((high - low) / BINS, step)
    edges = np.arange(low - width / 2, high + width, width)
    found = []
    for group, own in zip(shown, values, strict=True):
        frame = groups.bins(own, edges)
        frame["share"] = frame.pop("count") / len(own)
        lowest, highest = np.percentile(own, (5, 95))
        label = short(group.label)
        told = {"mean": own.mean(), "lowest": lowest, "highest": highest}
        found.append(frame.assign(**told, run=label, part=label, method=group.method))
    return charts.histogram(
        pandas.concat(found, ignore_index=True),
        replace(metric_axis(metric), limits=(float(edges[0]), float(edges[-1]))),
        Axis("clients", "~%", zero=True),
    )


# Costs ----------------------------------------------------------------------------------------------------------------


def costs(every: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the bytes and seconds of the groups with any rounds."""
    shown = [group for group in every if group.last_round]
    if not shown:
        return
    metric = shown[0].first.headline
    same = [group for group in shown if group.first.headline == metric]
    points = {group.number: spent(group, "bytes") for group in same}
    sent = [group for group in same if len(points[group.number])]
    if any(points[group.number]["bytes"].iloc[-1] > 0 for group in sent):
        better = "Higher" if metric.higher_is_better else "Lower"
        yield Panel(
            "communication",
            f"Communication and {metric.title}",
            f"Across: bytes sent until the clients had a round's models, uploads and downloads of all clients together. Up: mean "
            f"{metric.title} of these models before local training. {better} and further left is better."
            + long_runs(same),
            lambda: _over_bytes(metric, sent, points),
        )
    timed = {group.number: spent(group, "paced") for group in same}
    paced = [group for group in same if len(timed[group.number])]
    if paced:
        yield Panel(
            "virtual-seconds",
            f"Time and {metric.title}",
            f"Across: seconds until a round began. Up: mean {metric.title} of its clients' models before local training. "
            "Clients that still work are in no mean." + long_runs(paced),
            lambda: _over_cost(
                metric, paced, timed, "paced", Axis("seconds until then, simulated ones in a simulation", zero=True)
            ),
        )
    both = [("Server, wall time", server_seconds), ("One client, mean", client_seconds)]
    sides = [(title, of) for title, of in both if any(sum(groups.phases(group, of).values()) > 0 for group in shown)]
    if sides:
        yield Panel(
            "seconds",
            "Seconds per round by phase",
            "Mean over the rounds. Left: the server's wall time. wait: mostly the clients' training; take-in: decoding and "
            "checking uploads; personalize: the method's aggregation; record: writing the previous round. Right: one "
            "client's time, mean over clients. Clients that share a machine wait for each other, so the left bar is not "
            "the sum over clients.",
            lambda: _phases(shown, sides),
        )


def spent(group: Group, cost: str) -> Frame:
    """Return a cost (see `arrays.until`) and the mean headline metric as drawn, by round."""
    known = over_costs(group)[[cost, "mean"]].dropna()
    return known.assign(mean=smooth(known["mean"].to_numpy()))


def _over_cost(
    metric: Metric, shown: Sequence[Group], points: Curves, cost: str, axis: Axis, silent: Collection[int] = ()
) -> Chart:
    """Return a line for each group. points: by group number. silent: numbers of those that send no parameters."""
    found = []
    for turn, group in enumerate(shown):
        own = points[group.number]
        frame = groups.line(group, turn, x=own[cost].to_numpy(), mean=own["mean"].to_numpy())
        found.append(frame.assign(run=frame["run"] + " (sends no parameters)" * (group.number in silent)))
    return charts.lines(pandas.concat(found, ignore_index=True), axis, metric_axis(metric))


def _over_bytes(metric: Metric, shown: Sequence[Group], points: Curves) -> Chart:
    """Return lines over bytes. A run that sends no parameters is a horizontal line, over all bytes of the others."""
    known = {group.number: points[group.number] for group in shown}
    totals = pandas.Series({number: own["bytes"].iloc[-1] for number, own in known.items()})
    sending = totals[totals > 0]
    every = pandas.concat(known.values())["bytes"]
    logarithmic = bool(sending.max() / sending.min() > DIFFERENT)
    # a logarithmic axis has no place for 0 bytes
    first = every[every > 0].min() if logarithmic else 0.0
    drawn = {}
    for number, own in known.items():
        drawn[number] = own[own["bytes"] >= first]
        if number not in sending:
            drawn[number] = pandas.DataFrame({"bytes": [first, sending.max()], "mean": own["mean"].iloc[-1]})
    axis = Axis(
        f"uploads and downloads of all clients until then (bytes{', logarithmic' * logarithmic})",
        "~s",
        log=logarithmic,
        zero=not logarithmic,
    )
    return _over_cost(metric, shown, drawn, "bytes", axis, totals[totals == 0].index)


def _phases(shown: Sequence[Group], sides: Sequence[tuple[str, Callable[[ReportedRun], dict[str, float]]]]) -> Chart:
    """Return bars of seconds by phase. sides: headings, with what returns a run's seconds."""
    found = []
    for title, of in sides:
        for group in shown:
            own = pandas.Series(groups.phases(group, of)).rename_axis("phase").reset_index(name="seconds")
            found.append(own.assign(part=title, run=short(group.label), place=range(len(own))))
    return charts.stacked(pandas.concat(found, ignore_index=True))
