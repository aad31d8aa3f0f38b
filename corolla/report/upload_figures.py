"""Pictures of kept uploads (key `keep-uploads`), as in FedCAC's Fig. 1 and FedPake's Fig. 1, 2 and 6."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas

from corolla.report import charts, frames, upload_numbers
from corolla.report.arrays import Floats, ReportedRun
from corolla.report.by_kind import MOST_LINES, layer_lines
from corolla.report.charts import ROUNDS, WIDTH, Axis, Chart
from corolla.report.groups import Group
from corolla.report.pictures import Panel, averaged
from corolla.report.recorded import class_counts, class_labels, client_labels
from corolla.report.upload_numbers import LocalValues, Spread
from fl_app.server import kept_uploads
from fl_app.server.kept_uploads import KeptUploads

# clients in the picture of sensitivities, and parameters of each kind in that of local values
MOST_CLIENTS, PARAMETERS = 12, 3
# rounds and inputs of a classifier that are drawn
MOST_MAPS, MOST_INPUTS = 3, 200
# name of the entry for all tensors together
MODEL = "whole model"
NEIGHBOURS = "t-SNE"
ANGLE, DEVIATION = "mean angle (degrees)", "squared deviation"


def of_uploads(run: ReportedRun, spreads: Sequence[Spread]) -> Iterator[Panel]:
    """Yield the pictures of a run's kept uploads. spreads: of its kept rounds."""
    # few files are open at a time: each holds file descriptors
    at = dict.fromkeys(np.linspace(0, len(spreads) - 1, MOST_MAPS).astype(int).tolist()) if spreads else {}
    found = list(upload_numbers.kept(run, [spreads[k].round for k in at]))
    if not found:
        return
    number = run.number.replace(".", "-")
    if any(not np.isnan(spread.angles).all() for spread in spreads):
        yield Panel(
            f"upload-angles-{number}",
            "Angle between clients' updates, by layer",
            "Mean over pairs of clients of the angle between their updates (the upload minus the model that was sent), as in "
            "FedCAC's Fig. 1(a). 90 degrees: the updates have nothing in common; above: they work against each other.",
            lambda: _by_layer(spreads, [spread.angles for spread in spreads], ANGLE),
        )
    yield Panel(
        f"upload-deviations-{number}",
        "Squared deviation of local models from their mean, by layer",
        "Squared deviation of a parameter's local values from their mean over clients, as mean over a layer's parameters and the "
        "clients (FedPake's Fig. 6). The scale is logarithmic.",
        lambda: _by_layer(spreads, [spread.deviations for spread in spreads], DEVIATION, log=True),
    )
    last = found[-1]
    if (scores := upload_numbers.sensitivity(last, MOST_CLIENTS)) is not None:
        yield Panel(
            f"upload-sensitivity-{number}",
            f"Sensitivity of the classifier's weights in round {last.round}",
            "Sensitivity |(w after - w before) w after| of every weight of the last layer, one picture per client, relative to the "
            "client's largest; a row is a class (FedCAC's Fig. 1(b)). The grey column beside it has the class's samples, relative "
            f"to the client's most frequent class. {_of_clients(len(scores[0]), len(last.clients))}",
            lambda: _sensitivities(run, *scores),
        )
    most, least = upload_numbers.extreme_values(run, last, PARAMETERS)
    if not most:
        return
    yield Panel(
        f"upload-values-{number}",
        f"Local values of single parameters in round {last.round}",
        "Number of clients by their trained value of a parameter (FedPake's Fig. 2). Above: the parameters with the largest "
        "standard deviation over clients. Below: those with the smallest one, at least a thousandth of the largest. The new "
        "global value is known in the last round, and if the next round is kept and has one model for all clients.",
        lambda: _local_values([most, least]),
    )
    yield _map(run, found, f"upload-map-{number}")


def of_all_uploads(groups: Sequence[Group], spreads: dict[str, list[Spread]]) -> Iterator[Panel]:
    """Yield the picture that compares rows of runs. spreads: of the kept rounds, by a run's number."""
    kept = [group for group in groups if any(spreads.get(run.number) for run in group.runs)]
    rounds = {group.number: _common_rounds(group, spreads) for group in kept}
    if len(kept) < 2 or not any(rounds.values()):
        return
    yield Panel(
        "uploads",
        "Angles and deviations of clients' models",
        "Left: mean angle between two clients' updates, for the whole model (FedCAC's Fig. 1(a)). Middle and right: "
        "squared deviation of a parameter's local values from their mean over clients (FedPake's Fig. 6), the mean over parameters "
        "and clients, and the largest. Seeds are averaged. All use the rounds that the runs keep.",
        lambda: _compared([group for group in kept if rounds[group.number]], rounds, spreads),
    )


def spreads_of(run: ReportedRun) -> list[Spread]:
    """Return the spread of every kept round of a run, by round. Rounds with other tensors than the last one are left out."""
    found = [upload_numbers.spread(found) for found in upload_numbers.kept(run, kept_uploads.rounds(run.path))]
    return [spread for spread in found if spread.names == found[-1].names]


def _of_clients(drawn: int, all: int) -> str:
    return "" if drawn == all else f"The {drawn} clients of lowest ids, of {all} in the round."


# Over rounds ----------------------------------------------------------------------------------------------------------


def _common_rounds(group: Group, spreads: Mapping[str, Sequence[Spread]]) -> list[int]:
    """Return the rounds that all of a group's runs keep, of those that keep any."""
    each = [{spread.round for spread in spreads[run.number]} for run in group.runs if spreads.get(run.number)]
    return sorted(set.intersection(*each))


def _compared(
    drawn: Sequence[Group], rounds: Mapping[int, list[int]], spreads: Mapping[str, Sequence[Spread]]
) -> Chart:
    kinds: dict[str, Callable[[Spread], float]] = {
        "mean angle": lambda spread: float(spread.angles[-1]),
        "mean deviation": lambda spread: float(spread.deviations[-1]),
        "largest deviation": lambda spread: spread.largest,
    }
    lines: dict[str, list[charts.Frame]] = {kind: [] for kind in kinds}
    for turn, group in enumerate(drawn):
        of_group = [spreads[run.number] for run in group.runs if spreads.get(run.number)]
        shared = rounds[group.number]
        for kind, value in kinds.items():
            means = [np.mean([value(s) for own in of_group for s in own if s.round == t]) for t in shared]
            lines[kind].append(frames.line(group, turn, round=shared, mean=means))
    each = []
    for kind, found in lines.items():
        axis = (
            Axis(ANGLE, "~g")
            if kind == "mean angle"
            else _axis(f"{kind.split()[0]} {DEVIATION}", [f["mean"] for f in found])
        )
        frame = pandas.concat(found, ignore_index=True)
        if axis.log:
            frame["mean"] = frame["mean"].where(frame["mean"] > 0)
        each.append(charts.lines(frame, ROUNDS, axis, 260, width=charts.small_width(3)))
    return charts.beside(*each, independent=[])


def _axis(title: str, values: Sequence[Floats]) -> Axis:
    """Return a logarithmic axis, unless no value is above 0."""
    return Axis(title, "~g", log=bool(max(np.nanmax(each, initial=0) for each in values) > 0))


def _by_layer(spreads: Sequence[Spread], values: Sequence[Floats], label: str, log: bool = False) -> Chart:
    """Return values by layer over the kept rounds: a line each, or a row each if there are many."""
    rounds, grid = [spread.round for spread in spreads], np.array(values).T
    names = [MODEL, *spreads[0].names]
    grid = np.concatenate([grid[-1:], grid[:-1]])
    if len(names) <= MOST_LINES + 1:
        positive = np.where(grid > 0, grid, np.nan) if log else grid
        return layer_lines(names, rounds, positive, _axis(label, [grid]) if log else Axis(label))
    if log:
        grid, label = np.log10(np.where(grid > 0, grid, np.nan)), f"{label} (log10)"
    axis = Axis(label)
    x, y = (
        charts.names("x", "at", "round", [str(t) for t in rounds]),
        charts.names("y", "row", "", names),
    )
    frame = frames.grid(names, [str(t) for t in rounds], grid, "row", "at")
    return charts.cells(frame, x, y, charts.coloured(axis), axis, WIDTH - 250, 16 * len(names))


# One round ------------------------------------------------------------------------------------------------------------


def _sensitivities(run: ReportedRun, ids: list[int], scores: Floats) -> Chart:
    classes = scores.shape[1]
    known = class_counts(run)
    mix = dict(zip(known[0], known[1], strict=True)) if known and known[1].shape[1] == classes else {}
    names = class_labels(run, classes)
    height, columns = max(110, min(14 * classes, 230)), min(3, len(ids))
    width = charts.small_width(columns) - 90
    axis, each = Axis("share of the client's largest", "~%"), []
    for k, (i, label) in enumerate(zip(ids, client_labels(run, ids), strict=True)):
        cells = averaged(scores[k], MOST_INPUTS, axis=1)
        inputs = [str(j) for j in np.linspace(0, scores.shape[2], cells.shape[1] + 1).astype(int)[:-1]]
        share = np.array(mix.get(i, np.full(classes, np.nan)), np.float64)[:, None]
        strip = frames.grid(names, [""], share / max(np.nanmax(share, initial=1), 1), "class", "samples")
        rows = charts.names("y", "class", None, names)
        column = charts.names("x", "samples", None, [""], shown=False)
        grey = charts.coloured(axis, (0.0, 1.0), share=True).legend(None)
        first = charts.cells(strip, column, rows, grey, axis, 12, height)
        across = charts.names("x", "input", "input of the last layer", inputs, shown=False)
        frame = frames.grid(names, inputs, cells / (cells.max() or 1), "class", "input")
        colour = charts.coloured(axis, (0.0, 1.0), across=200)
        if k < len(ids) - 1:
            colour = colour.legend(None)
        second = charts.cells(
            frame, across, charts.names("y", "class", None, names, shown=False), colour, axis, width, height
        )
        each.append(charts.beside(first, second.properties(title=f"client {label}")))
    return charts.beside(*each, columns=columns)


def _local_values(rows: Sequence[Sequence[LocalValues]]) -> Chart:
    found, marks = [], []
    for row, one in ((row, one) for row, several in enumerate(rows) for one in several):
        bins = int(np.clip(len(one.values) / 2, 5, 30))
        found.append(frames.bins(one.values, np.histogram_bin_edges(one.values, bins)).assign(part=one.name, place=row))
        places = {
            "new global model": one.after,
            "mean of the uploads": float(one.values.mean()),
            "sent to the clients": one.sent,
        }
        marks += [
            {"part": one.name, "place": row, "kind": kind, "value": at}
            for kind, at in places.items()
            if not np.isnan(at)
        ]
    return charts.local_values(pandas.concat(found, ignore_index=True), pandas.DataFrame(marks))


# Maps -----------------------------------------------------------------------------------------------------------------


def _map(run: ReportedRun, found: Sequence[KeptUploads], name: str) -> Panel:
    files = [each for each in found if each.params == found[-1].params]
    parts = upload_numbers.relative(files)
    principal, neighbours = upload_numbers.maps(np.concatenate([points for _, points in parts]))
    classes = _majority(run, [int(i) for ids, _ in parts for i in ids])
    clients = [(each.round, ids.tolist()) for each, (ids, _) in zip(files, parts, strict=True)]
    drawn = [("principal components", principal)] + ([(NEIGHBOURS, neighbours)] if neighbours is not None else [])
    coloured = "Colour and mark: the class with most of the client's samples. " if classes else ""
    text = (
        "Each point is a client's upload, as its deviation from the round's mean (FedPake's Fig. 1). All rounds share one map, so "
        f"points that move together have become alike. {coloured}Principal components keep distances, as far as two axes can; "
        "t-SNE keeps neighbours, and its distances between groups mean nothing."
    )
    return Panel(name, "Map of local models", text, lambda: _maps(run, clients, drawn, classes))


def _majority(run: ReportedRun, ids: Sequence[int]) -> list[int]:
    """Return each client's class with most samples; [] if a client does not report its classes."""
    known = class_counts(run)
    if known is None or not set(ids) <= set(known[0]):
        return []
    largest = dict(zip(known[0], known[1].argmax(axis=1).tolist(), strict=True))
    return [largest[i] for i in ids]


def _maps(
    run: ReportedRun, parts: Sequence[tuple[int, list[int]]], drawn: Sequence[tuple[str, Floats]], classes: list[int]
) -> Chart:
    """Return maps. parts: round and its clients; their points follow each other."""
    counts = class_counts(run)
    names = class_labels(run, counts[1].shape[1]) if counts else []
    found, start = [], 0
    for round, ids in parts:
        own = slice(start, start + len(ids))
        for kind, points in drawn:
            columns = {
                "kind": kind,
                "part": f"round {round}",
                "client": client_labels(run, ids),
                "x": points[own, 0],
                "y": points[own, 1],
            }
            if classes:
                columns["class"] = [names[c] for c in classes[own]]
            found.append(pandas.DataFrame(columns))
        start += len(ids)
    every = [names[c] for c in sorted(set(classes))]
    return charts.maps(pandas.concat(found, ignore_index=True), every)
