"""Pictures of all runs together: metrics and losses over rounds, client by client, and over what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas

from corolla.experiments.result_table import undefined_notes
from corolla.report import arrays, charts, groups
from corolla.report.arrays import Frame
from corolla.report.charts import ROUNDS, Axis, Chart, Panel, metric_axis, sentences
from corolla.report.groups import Group, OfClients, by_client, long_runs, short
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
BINS = 20
# y of losses is logarithmic if the means differ by this factor, and x of bytes if the runs' bytes do
DECADES, DIFFERENT = 100, 30


def by_metric(rows: Sequence[Group]) -> Iterator[tuple[Metric, list[Group]]]:
    """Yield the groups of each headline metric: groups of different tasks do not share a picture."""
    for metric in dict.fromkeys(group.first.headline for group in rows):
        yield metric, [group for group in rows if group.first.headline == metric]


def accuracy(rows: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of each headline metric, and of the clients' other metrics. Groups without rounds are left out."""
    for metric, same in by_metric([group for group in rows if group.last_round]):
        if curves := [*_curves(metric, same)]:
            yield from [*curves, *_spread(metric, same)]
        yield from _sorted(metric, same)
        yield from _finals(
            metric,
            same,
            f"unseen-{metric.name}",
            f"Final {metric.title} of each client that never trains",
            f"Clients that never train (holdout-clients), sorted by {metric.title} on their own test data, with the model that "
            f"the method gives a new client.{' A client counts once, with the mean over its seeds.' * groups.repeated(same)}",
            arrays.last_unseen,
        )
        for other in dict.fromkeys(found for group in same for found in group.first.others):
            judged = [groups.judged_by(group, other) for group in same if other in group.first.others]
            yield from _curves(other, judged)
            yield from _sorted(other, judged)


# Over rounds ----------------------------------------------------------------------------------------------------------


def _curves(metric: Metric, rows: Sequence[Group]) -> Iterator[Panel]:
    """Yield the picture of a metric over rounds, if it is recorded."""
    titles = dict(SOURCES)
    if tested(rows):
        titles["before"] = BEFORE
    if any_unseen(rows):
        titles["evaluation"] = TRAINED
    if not any(len(run.evaluations) > 1 for group in rows for run in group.runs):
        titles = {name: title for name, title in titles.items() if name not in arrays.EVALUATED}
    frame = groups.curves(rows, titles)
    if len(frame):
        limits = late(frame, "mean")
        text = _caption(rows, frame, titles.get("evaluation", "")) + long_runs(rows, cut=bool(limits))
        yield _over_rounds(metric.name, f"{_title(metric)} over rounds", text, frame, metric_axis(metric, limits))


def _title(metric: Metric) -> str:
    return metric.title[:1].upper() + metric.title[1:]


def late(frame: Frame, *columns: str) -> tuple[float, float] | None:
    """Return y limits that ignore the first tenth of a long run, or None. columns: of the frame, those that are drawn.

    None for short runs (below LONG rounds), and if these limits would hide less than half of the picture's height.
    """
    last = frame["round"].max()
    every, kept = (own[[*columns]].to_numpy() for own in (frame, frame[frame["round"] > last / 10]))
    low, high = float(np.nanmin(kept)), float(np.nanmax(kept))
    pad = 0.05 * (high - low)
    hidden = np.nanmax(every) - np.nanmin(every) > 2 * (high - low)
    return (low - pad, high + pad) if last >= arrays.LONG and hidden else None


def any_unseen(rows: Sequence[Group]) -> bool:
    """Return whether any group has clients that never train."""
    return any(run.has_unseen for group in rows for run in group.runs)


def _caption(shown: Sequence[Group], frame: Frame, evaluated: str) -> str:
    """Return the caption of curves. evaluated: the heading of the one over all clients."""
    everybody = " (right): mean over all clients."
    if any_unseen(shown):
        everybody = ": mean over all of these; clients that never train are on the right."
    other_data = {*groups.DATA_KEYS, "seed"} & set(groups.differing([group.first for group in shown]))
    notes = undefined_notes(run for group in shown for run in group.runs)
    gone = [
        f"{f'{one.number}: ' * (len(shown) > 1)}{what} from round {t} on"
        for one in shown
        for t, what in groups.departures(one).items()
    ]
    return sentences(
        "Lines: mean over the round's clients, each on its own test data.",
        f"{evaluated}{everybody}" * (evaluated in set(frame["part"])),
        bands_told(shown, frame) or "The next picture shows their spread.",
        "The gap between the pictures shows how much local training gains and aggregation loses again.",
        tested(shown),
        "The runs do not all have the same test data: see their settings." * bool(other_data),
        *(f"{note}." for note in notes if note.startswith(f"{shown[0].first.headline.title}: ")),
        f"Dotted: fewer clients than in the round before ({'; '.join(gone)})." * bool(gone),
    )


def bands_told(rows: Sequence[Group], frame: Frame) -> str:
    """Return a sentence about the curves' bands; empty if they have none."""
    if groups.repeated(rows):
        return "A curve of several seeds is their mean, in a band of ± one sample standard deviation."
    return "" if len(rows) > groups.TOGETHER else f"Bands: {quartiles(frame)}."


def quartiles(frame: Frame) -> str:
    """Return a phrase that explains bands over clients."""
    many = "lowest" in frame
    return f"the middle half of the clients (quartiles){'; paler: the middle 90 % (5 % to 95 % quantiles)' * many}"


def tested(rows: Sequence[Group]) -> str:
    """Return sentences about methods that test other models than the start and the end of training."""
    told = dict.fromkeys((group.method, group.first.tested) for group in rows if group.first.tested)
    return " ".join(f"{method} is an exception: {text}." for method, text in told)


def _over_rounds(name: str, title: str, text: str, frame: Frame, axis: Axis) -> Panel:
    """Return the picture of curves over rounds, side by side with one y axis."""
    return Panel(name, title, text, lambda: charts.lines(frame, ROUNDS, axis), switch=charts.BY_COST)


def _spread(metric: Metric, shown: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the spread over clients and of the single runs of a mean, if one picture cannot show them."""
    frame = groups.curves(shown, {"before": ""}, seeds=False, most_bands=len(shown))
    several = [group for group in shown if len(group.runs) > 1]
    text = f"{_title(metric)} of each client's model before local training"
    if len(frame) and (several or len(shown) > groups.TOGETHER):
        limits = late(frame, "low", "high")
        yield Panel(
            f"{metric.name}-spread",
            f"{_title(metric)} and its spread over clients, run by run",
            f"{text}. Line: mean over the round's clients; band: "
            f"{quartiles(frame)}, of all seeds together; grey: the other runs.{long_runs(shown, cut=bool(limits))}",
            lambda: charts.lines(groups.behind(frame), ROUNDS, metric_axis(metric, limits)),
        )
    lines = []
    for group in several:
        for k, run in enumerate(group.runs):
            if (one := arrays.curve([run], "before")) is not None:
                own = arrays.smooth(one[["mean"]]).reset_index()
                lines.append(groups.line(group, k, part=short(group.label), line=run.number, seed=run.seed, **own))
    if lines:
        single = pandas.concat(lines, ignore_index=True)
        ends = late(single, "mean")
        yield Panel(
            f"{metric.name}-seeds",
            f"{_title(metric)} over rounds, seed by seed",
            f"{text}, mean over the round's clients: one line per run.{long_runs(several, cut=bool(ends))}",
            lambda: charts.lines(single, ROUNDS, metric_axis(metric, ends)),
            folded=True,
        )


def losses(rows: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of the losses per headline metric: different tasks have different losses."""
    for metric, same in by_metric([group for group in rows if group.last_round]):
        frame = groups.curves(same, LOSSES, LOSS)
        if len(frame):
            axis, told, means = Axis("loss", limits=late(frame, "mean")), "", frame["mean"]
            cut = long_runs(same, cut=bool(axis.limits))
            if means.min() > 0 and means.max() >= DECADES * means.min():
                axis, cut = Axis("loss", limits=(means.min() / 1.5, 1.5 * means.max()), log=True), long_runs(same)
                told = " The vertical axis is logarithmic."
            yield _over_rounds(
                picture_name(LOSS.name, metric),
                "Loss over rounds",
                "Lines: mean over the round's clients, each on its own data. Training loss: over the last local epoch. "
                f"{bands_told(same, frame)} A test loss that rises while the training loss falls shows overfitting.{told}{cut}",
                frame,
                axis,
            )


# Client by client -----------------------------------------------------------------------------------------------------


def picture_name(picture: str, metric: Metric) -> str:
    """Return a picture's name, which includes the metric unless that is accuracy."""
    return picture if metric.name == "accuracy" else f"{picture}-{metric.name}"


def listed(numbers: Sequence[object]) -> str:
    """Return the names of runs, given their numbers: `runs 1, 2`."""
    return ("run " if len(numbers) == 1 else "runs ") + ", ".join(map(str, numbers))


def _finals(metric: Metric, every: Sequence[Group], name: str, title: str, text: str, of: OfClients) -> Iterator[Panel]:
    """Yield the picture of each client's final metric. of: returns it of a run's clients."""
    known = {group.number: by_client(group, of) for group in every}
    shown = [group for group in every if len(known[group.number][0])]
    sources: dict[str, list[int]] = {}
    for group in shown:
        sources.setdefault(known[group.number][1], []).append(group.number)
    where = "; ".join(f"{text} ({listed(numbers)})" if len(sources) > 1 else text for text, numbers in sources.items())
    if shown:
        yield Panel(
            name,
            title,
            f"{text} Measured: {where}.",
            lambda: charts.lines(
                groups.finals(shown, of), Axis("clients, worst to best (%)", "d", (0.0, 100.0)), metric_axis(metric)
            ),
        )


def _sorted(metric: Metric, every: Sequence[Group]) -> Iterator[Panel]:
    """Yield the pictures of each client's final metric, of clients that train."""
    shown = [group for group in every if len(by_client(group)[0])]
    seeds = " A client counts once, with the mean over its seeds." * groups.repeated(shown)
    apart = any_unseen(shown)
    yield from _finals(
        metric,
        shown,
        picture_name("clients", metric),
        f"Final {metric.title} of each client{' that trains' * apart}",
        f"Clients sorted by {metric.title} on their own test data: the line starts at the worst client and crosses 50 % at the "
        f"median one. A flat line means equal results for all clients.{seeds}"
        f"{' Clients that never train are in the next picture.' * apart}",
        arrays.last_known,
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
    if any(len(by_client(group)[0]) > arrays.MANY for group in shown):
        yield Panel(
            picture_name("histogram", metric),
            f"Distribution of the clients' final {metric.title}",
            f"Share of the clients{' that train' * apart} by {metric.title} on their own test data, as in the picture above."
            f"{seeds} Dashed: the mean; dotted: the 5 % and the 95 % quantile.",
            lambda: _histograms(metric, shown),
        )


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
    sent, paced, phases = spent(same, "bytes"), spent(same, "paced"), groups.seconds(shown)
    if sent["x"].max() > 0:
        better = "Higher" if metric.higher_is_better else "Lower"
        yield Panel(
            "communication",
            f"Communication and {metric.title}",
            f"Across: bytes sent until the clients had a round's models, uploads and downloads of all clients together. Up: mean "
            f"{metric.title} of these models before local training. {better} and further left is better."
            + long_runs(same),
            lambda: _over_bytes(metric, sent),
        )
    if len(paced):
        seconds = Axis("seconds until then, simulated ones in a simulation", zero=True)
        yield Panel(
            "virtual-seconds",
            f"Time and {metric.title}",
            f"Across: seconds until a round began. Up: mean {metric.title} of its clients' models before local training. "
            "Clients that still work are in no mean." + long_runs(same),
            lambda: charts.lines(paced, seconds, metric_axis(metric)),
        )
    if len(phases):
        yield Panel(
            "seconds",
            "Seconds per round by phase",
            "Mean over the rounds. Left: the server's wall time. wait: mostly the clients' training; take-in: decoding and "
            "checking uploads; personalize: the method's aggregation; record: writing the previous round. Right: one "
            "client's time, mean over clients. Clients that share a machine wait for each other, so the left bar is not "
            "the sum over clients.",
            lambda: charts.stacked(phases),
        )


def spent(every: Sequence[Group], cost: str) -> Frame:
    """Return the groups' lines over a cost (see `arrays.until`): run, method, x, mean headline metric. Some may have none."""
    found = []
    for turn, group in enumerate(every):
        known = groups.over_costs(group)[[cost, "mean"]].dropna()
        found.append(groups.line(group, turn, x=known[cost], mean=arrays.smooth(known["mean"])))
    return pandas.concat(found, ignore_index=True)


def _over_bytes(metric: Metric, sent: Frame) -> Chart:
    """Return lines over bytes. A run that sends no parameters is a horizontal line, over all bytes of the others."""
    totals = sent.groupby("run", sort=False)["x"].max()
    most, least = totals.max(), totals[totals > 0].min()
    logarithmic = bool(most / least > DIFFERENT)
    # a logarithmic axis has no place for 0 bytes
    first = sent["x"][sent["x"] > 0].min() if logarithmic else 0.0
    found = []
    for run, total in totals.items():
        own = sent[(sent["run"] == run) & (sent["x"] >= first)]
        if not total:
            last = sent[sent["run"] == run].iloc[[-1, -1]]
            own = last.assign(x=[first, most], mark=1, run=f"{run} (sends no parameters)")
        found.append(own)
    axis = Axis(
        f"uploads and downloads of all clients until then (bytes{', logarithmic' * logarithmic})",
        "~s",
        log=logarithmic,
        zero=not logarithmic,
    )
    return charts.lines(pandas.concat(found, ignore_index=True), axis, metric_axis(metric))
