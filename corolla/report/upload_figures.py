"""Pictures of kept uploads (key `keep-uploads`), as in FedCAC's Fig. 1 and FedPake's Fig. 1, 2 and 6."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from corolla.report import uploads
from corolla.report.arrays import Floats, ReportedRun
from corolla.report.by_kind import MOST_LINES
from corolla.report.figures import Panel, averaged, clipped, legend, new_figure, rounds_axis, styled, thinned
from corolla.report.groups import Group, short
from corolla.report.recorded import class_counts, class_names, client_labels
from corolla.report.style import (
    BLACK,
    BLUE,
    COLOURS,
    COLOURS_OF_VALUES,
    LINES,
    MARKERS,
    VERMILLION,
    Look,
    colours_of,
    empty_cells,
    paper,
    shares,
    shown,
    tone,
)
from corolla.report.uploads import LocalValues, Spread
from fl_app.server import kept_uploads
from fl_app.server.kept_uploads import KeptUploads

# clients in the picture of sensitivities, and parameters of each kind in that of local values
MOST_CLIENTS, PARAMETERS = 12, 3
# rounds and inputs of a classifier that are drawn
MOST_MAPS, MOST_INPUTS = 3, 200
# name of the entry for all tensors together
MODEL = "whole model"
NEIGHBOURS = "t-SNE"
# width of the lines of largest deviations
THIN = 0.8
ANGLE, DEVIATION = "mean angle (degrees)", "squared deviation"


def of_uploads(run: ReportedRun, spreads: Sequence[Spread]) -> Iterator[Panel]:
    """Yield the pictures of a run's kept uploads. spreads: of its kept rounds."""
    # few files are open at a time: each holds file descriptors
    at = dict.fromkeys(np.linspace(0, len(spreads) - 1, MOST_MAPS).astype(int).tolist()) if spreads else {}
    found = list(uploads.kept(run, [spreads[k].round for k in at]))
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
    if (scores := uploads.sensitivity(last, MOST_CLIENTS)) is not None:
        yield Panel(
            f"upload-sensitivity-{number}",
            f"Sensitivity of the classifier's weights in round {last.round}",
            "Sensitivity |(w after - w before) w after| of every weight of the last layer, one picture per client, relative to the "
            "client's largest; a row is a class (FedCAC's Fig. 1(b)). The grey column beside it has the class's samples, relative "
            f"to the client's most frequent class. {_of_clients(len(scores[0]), len(last.clients))}",
            lambda: _sensitivities(run, *scores),
        )
    most, least = uploads.extreme_values(run, last, PARAMETERS)
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
    drawn = [group for group in groups if any(spreads.get(run.number) for run in group.runs)]
    if len(drawn) < 2:
        return
    yield Panel(
        "uploads",
        "Angles and deviations of clients' models",
        "Left: mean angle between two clients' updates, for the whole model (FedCAC's Fig. 1(a)). Right: squared deviation of a "
        "parameter's local values from their mean over clients (FedPake's Fig. 6): the mean over parameters and clients (line with "
        "marks) and the largest (thin line). Seeds are averaged. Both use the rounds that the runs keep.",
        lambda: _compared(groups, drawn, spreads),
    )


def spreads_of(run: ReportedRun) -> list[Spread]:
    """Return the spread of every kept round of a run, by round. Rounds with other tensors than the last one are left out."""
    found = [uploads.spread(found) for found in uploads.kept(run, kept_uploads.rounds(run.path))]
    return [spread for spread in found if spread.names == found[-1].names]


def _of_clients(drawn: int, all: int) -> str:
    return "" if drawn == all else f"The {drawn} clients of lowest ids, of {all} in the round."


# Over rounds ----------------------------------------------------------------------------------------------------------


def _compared(groups: Sequence[Group], drawn: Sequence[Group], spreads: dict[str, list[Spread]]) -> Figure:
    picture = new_figure(4.2)
    left, right = picture.add_subplot(1, 2, 1), picture.add_subplot(1, 2, 2)
    style, last = styled(groups), 0
    for group in drawn:
        of_group = [spreads[run.number] for run in group.runs if spreads.get(run.number)]
        rounds = sorted(set.intersection(*({spread.round for spread in own} for own in of_group)))
        if not rounds:
            continue

        def mean(
            value: Callable[[Spread], float], own: Sequence[list[Spread]] = of_group, at: list[int] = rounds
        ) -> Floats:
            means: Floats = np.mean([[value(s) for s in each if s.round in at] for each in own], axis=0)
            return means

        look, last = style[group.number], max(last, rounds[-1])
        name = short(group.label, 60)
        left.plot(rounds, mean(lambda s: s.angles[-1]), label=name, **look.line_style(len(rounds)))
        middle, top = mean(lambda s: s.deviations[-1]), mean(lambda s: s.largest)
        right.plot(rounds, middle, **look.line_style(len(rounds)))
        right.plot(rounds, top, color=look.drawn(), linestyle=look.line, linewidth=THIN)
    left.set_ylabel(ANGLE)
    left.set_title("Angle between updates")
    right.set_ylabel(DEVIATION)
    right.set_title("Deviation from the mean")
    _log_axis(right)
    for axes in (left, right):
        rounds_axis(axes, last)
    ink: dict[str, Any] = {"color": tone(0.35), "markeredgecolor": paper()}
    kinds = [Line2D([], [], marker="o", label="mean", **ink), Line2D([], [], linewidth=THIN, label="largest", **ink)]
    right.legend(handles=kinds, fontsize=9)
    legend(picture, left)
    return picture


def _by_layer(spreads: Sequence[Spread], values: Sequence[Floats], label: str, log: bool = False) -> Figure:
    """Draw values by layer over the kept rounds: a line each, or a row each if there are many."""
    rounds, grid = [spread.round for spread in spreads], np.array(values).T
    names = spreads[0].names
    return (_lines if len(names) <= MOST_LINES else _rows)(rounds, names, grid, label, log)


def _lines(rounds: list[int], names: list[str], grid: Floats, label: str, log: bool) -> Figure:
    picture = new_figure(4.2)
    axes = picture.add_subplot()
    coloured = [colour for colour in COLOURS if colour != BLACK]
    for k, name in enumerate([*names, MODEL]):
        whole = k == len(names)
        look = (
            Look(BLACK, "-", MARKERS[-1])
            if whole
            else Look(coloured[k % len(coloured)], LINES[k % len(LINES)], MARKERS[k])
        )
        axes.plot(rounds, grid[k], label=name, linewidth=2.6 if whole else 1.5, **look.line_style(len(rounds)))
    axes.set_ylabel(label)
    if log:
        _log_axis(axes)
    rounds_axis(axes, rounds[-1])
    picture.legend(loc="outside right upper", handlelength=3.6, title="layer")
    return picture


def _log_axis(axes: Axes) -> None:
    """Make y logarithmic, with plain numbers on it, unless no line is above 0."""
    if axes.dataLim.y1 <= 0:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _rows(rounds: list[int], names: list[str], grid: Floats, label: str, log: bool) -> Figure:
    height = min(10.0, 1.5 + 0.2 * len(grid))
    picture = new_figure(height)
    axes = picture.add_subplot()
    axes.patch.set(**empty_cells())
    axes.grid(visible=False)
    if log:
        grid, label = np.log10(np.where(grid > 0, grid, np.nan)), f"{label} (log10)"
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=COLOURS_OF_VALUES)
    axes.set_yticks(range(len(grid)), [*names, MODEL], fontsize=8.5)
    ticks = thinned(len(rounds), 7, 0.4)
    axes.set_xticks(ticks, [str(rounds[k]) for k in ticks])
    axes.set_xlabel("round")
    picture.colorbar(image, ax=axes, label=label, fraction=0.04, pad=0.01, aspect=6 * height)
    return picture


# One round ------------------------------------------------------------------------------------------------------------


def _sensitivities(run: ReportedRun, ids: list[int], scores: Floats) -> Figure:
    columns = min(3, len(ids))
    lines = -(-len(ids) // columns)
    classes = scores.shape[1]
    inches = min(2.4, max(1.1, 0.14 * classes))
    picture = new_figure(0.5 + lines * (inches + 0.6))
    known = class_counts(run)
    mix = dict(zip(known[0], known[1], strict=True)) if known and known[1].shape[1] == classes else {}
    names = class_names(run, classes) or tuple(map(str, range(classes)))
    ticks = thinned(classes, inches, 0.15)
    grid = picture.add_gridspec(lines, 2 * columns, width_ratios=[1, 24] * columns)
    image = None
    for k, (i, label) in enumerate(zip(ids, client_labels(run, ids), strict=True)):
        line, column = divmod(k, columns)
        strip, axes = (picture.add_subplot(grid[line, 2 * column + j]) for j in (0, 1))
        cells = averaged(scores[k], MOST_INPUTS, axis=1)
        image = axes.imshow(
            cells / (cells.max() or 1), aspect="auto", interpolation="nearest", cmap=COLOURS_OF_VALUES, vmin=0, vmax=1
        )
        axes.set_title(f"client {label}", fontsize=9.5)
        axes.set_yticks([])
        share = np.array(mix[i], np.float64)[:, None] if i in mix else np.zeros((classes, 1))
        strip.imshow(share / max(share.max(), 1), aspect="auto", interpolation="nearest", cmap=shares(), vmin=0, vmax=1)
        strip.set_xticks([])
        strip.set_yticks(
            ticks, [clipped(names[c], 10) for c in ticks] if column == 0 else [""] * len(ticks), fontsize=8
        )
        strip.set_ylabel("class" if column == 0 else "")
        for each in (strip, axes):
            each.grid(visible=False)
        axes.tick_params(labelbottom=k + columns >= len(ids))
        axes.set_xlabel("input of the last layer" if k + columns >= len(ids) else "")
    if image is not None:
        picture.colorbar(
            image, ax=picture.axes, label="share of the client's largest", fraction=0.03, pad=0.01, aspect=40
        )
    return picture


def _local_values(rows: Sequence[Sequence[LocalValues]]) -> Figure:
    columns = max(map(len, rows))
    picture = new_figure(2.5 * len(rows) + 0.4)
    for line, row in enumerate(rows):
        for k, found in enumerate(row):
            axes = picture.add_subplot(len(rows), columns, line * columns + k + 1)
            bins = int(np.clip(len(found.values) / 2, 5, 30))
            axes.hist(found.values, bins=bins, color=tone(0.72), edgecolor=paper(), linewidth=0.6)
            marks = (
                ("new global model", found.after, VERMILLION, "-", 3.4),
                ("mean of the uploads", float(found.values.mean()), BLUE, "--", 1.8),
                ("sent to the clients", found.sent, BLACK, ":", 1.8),
            )
            for name, at, colour, style, width in marks:
                if not np.isnan(at):
                    axes.axvline(at, color=shown(colour), linestyle=style, label=name, linewidth=width)
            axes.set_title(found.name, fontsize=9)
            axes.ticklabel_format(axis="x", useOffset=False, style="plain")
            axes.locator_params(axis="x", nbins=4)
            axes.locator_params(axis="y", integer=True)
            if k == 0:
                axes.set_ylabel("clients")
            if line == len(rows) - 1:
                axes.set_xlabel("value")
    legend(picture, picture.axes[0])
    return picture


# Maps -----------------------------------------------------------------------------------------------------------------


def _map(run: ReportedRun, found: Sequence[KeptUploads], name: str) -> Panel:
    files = [each for each in found if each.params == found[-1].params]
    parts = uploads.relative(files)
    principal, neighbours = uploads.maps(np.concatenate([points for _, points in parts]))
    classes = _majority(run, [int(i) for ids, _ in parts for i in ids])
    rounds = [each.round for each in files]
    ends = np.cumsum([0, *(len(ids) for ids, _ in parts)]).tolist()
    drawn = [("principal components", principal)] + ([(NEIGHBOURS, neighbours)] if neighbours is not None else [])
    coloured = "Colour and mark: the class with most of the client's samples. " if classes else ""
    text = (
        "Each point is a client's upload, as its deviation from the round's mean (FedPake's Fig. 1). All rounds share one map, so "
        f"points that move together have become alike. {coloured}Principal components keep distances, as far as two axes can; "
        "t-SNE keeps neighbours, and its distances between groups mean nothing."
    )
    return Panel(name, "Map of local models", text, lambda: _maps(run, rounds, ends, drawn, classes))


def _majority(run: ReportedRun, ids: Sequence[int]) -> list[int]:
    """Return each client's class with most samples; [] if a client does not report its classes."""
    known = class_counts(run)
    if known is None or not set(ids) <= set(known[0]):
        return []
    largest = dict(zip(known[0], known[1].argmax(axis=1).tolist(), strict=True))
    return [largest[i] for i in ids]


def _maps(
    run: ReportedRun,
    rounds: Sequence[int],
    ends: Sequence[int],
    drawn: Sequence[tuple[str, Floats]],
    classes: list[int],
) -> Figure:
    picture = new_figure(0.7 + 3.3 * len(drawn))
    counts = class_counts(run)
    names = class_names(run, counts[1].shape[1]) if counts else ()
    known = sorted({0} if not classes else set(classes))
    style = {
        c: (colour, MARKERS[k % len(MARKERS)])
        for k, (c, colour) in enumerate(zip(known, colours_of(len(known)), strict=True))
    }
    for line, (kind, points) in enumerate(drawn):
        # a square that holds the points of all rounds
        low, high = points.min(axis=0), points.max(axis=0)
        middle, half = (low + high) / 2, 0.54 * float((high - low).max()) or 1.0
        for k, round in enumerate(rounds):
            axes = picture.add_subplot(len(drawn), len(rounds), line * len(rounds) + k + 1, aspect="equal")
            axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
            own = slice(ends[k], ends[k + 1])
            _points(axes, points[own], classes[own], names, style)
            axes.set_title(f"{kind}, round {round}", fontsize=9.5)
            axes.tick_params(labelleft=k == 0)
            if kind == NEIGHBOURS:
                axes.set(xticks=[], yticks=[])
    labels = {
        label: handle for axes in picture.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if labels:
        order = sorted(labels, key=lambda label: (not label.isdecimal(), len(label), label))
        picture.legend(
            [labels[label] for label in order],
            order,
            loc="outside lower center",
            ncols=min(len(labels), 10),
            title="main class",
        )
    return picture


def _points(
    axes: Axes,
    points: Floats,
    classes: Sequence[int],
    names: Sequence[str],
    style: Mapping[int, tuple[str, str]],
) -> None:
    """Draw clients' points. style: colour and mark of each class; of 0 if the classes are not known."""
    kinds: NDArray[np.int64] = np.array(classes if len(classes) else [0] * len(points))
    for c in np.unique(kinds).tolist():
        at, (colour, marker) = kinds == c, style[c]
        label = (clipped(names[c]) if names else str(c)) if len(classes) else None
        axes.scatter(
            points[at, 0],
            points[at, 1],
            s=34,
            color=colour,
            marker=marker,
            edgecolor=paper(),
            linewidth=0.5,
            label=label,
            alpha=0.9,
        )
