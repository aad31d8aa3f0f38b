"""Pictures of single runs' records, with one function per kind of figure (fl_app/figures.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import altair as alt
import numpy as np
import pandas

from corolla.report import charts
from corolla.report.arrays import (
    MANY,
    MOST_ROWS,
    Floats,
    Frame,
    ReportedRun,
    averaged,
    client_labels,
    groups,
    layers,
    scalars,
)
from corolla.report.charts import IN_TIME, LATE, LOST, ROUNDS, WIDTH, WORKING, Axis, Chart, Panel
from corolla.report.groups import as_cells, marked
from corolla.report.heat_maps import matrix
from corolla.report.theme import CONFIG
from fl_app import figures
from fl_app.errors import UserError
from fl_app.server import arrivals

MOST_LINES = 7
# most rounds that are cells of their own; more are averaged with their neighbours
MOST_COLUMNS = 200
# the picture of who worked when shows the first rounds and clients: more have no room
ROUNDS_OF_WORKS, CLIENTS_AT_WORK = 20, 60
# (title, caption, chart)
Drawn = tuple[str, str, Callable[[], Chart]]


def of_run(run: ReportedRun) -> Iterator[Panel]:
    """Yield the pictures that the run's method declares and its records have numbers for."""
    taken: set[str] = set()
    for figure in run.figures:
        name = figure.file_name
        while name in taken:
            name += "-"
        drawn = DRAW[type(figure)](run, figure)
        if drawn:
            taken.add(name)
            title, caption, *more = drawn
            yield Panel(f"{name}-{run.number.replace('.', '-')}", title, " ".join(caption.split()), *more)


# Clients over rounds --------------------------------------------------------------------------------------------------


def _numbers(run: ReportedRun, figure: figures.Links | figures.Scalars) -> Drawn | None:
    """Return the picture of a number of every client, or of the round."""
    axis, grey = Axis(figure.unit, zero=True), "not in the round"
    if isinstance(figure, figures.Scalars):
        axis, grey = Axis(figure.unit, "~%" if figure.percent else "~g"), "nothing was recorded"
    found = scalars(run, figure.record)
    if found is None:
        return None
    if not found[0]:
        return figure.title, figure.caption, lambda: charts.lines(_means(run, found[1]), ROUNDS, axis)
    ids, grid = found
    labels, rows, title, above, below = client_labels(run, ids), grid, "client", "the mean over the clients", ""
    if len(ids) > MANY:
        above += ", the middle half of them (dark band) and the middle 90 % (pale band)"
        row = f"each row is the mean of about {len(ids) / MOST_ROWS:.0f} neighbours"
        below = f" Below: the clients sorted by their mean over the rounds, {row if len(ids) > MOST_ROWS else 'one row each'}."
        rows = averaged(grid[np.argsort(pandas.DataFrame(grid).mean(axis=1), kind="stable")], MOST_ROWS)
        labels, title = list(map(str, range(len(rows)))), f"{len(ids):,} clients, least to most"
    limits = (0.0, float(np.nanmax(rows)) or 1.0) if axis.zero else None
    top = Axis("mean", axis.format, zero=axis.zero)
    return (
        figure.title,
        f"{figure.caption} Above: {above}.{below} Grey: {grey}.",
        lambda: _under(
            _means(run, grid), top, _cells(labels, rows, axis, title, title == "client", limits), len(ids) > MANY
        ),
    )


def _groups(run: ReportedRun, figure: figures.Groups) -> Drawn | None:
    found = groups(run, figure.record)
    if found is None:
        return None
    ids, grid, names = found
    counts = pandas.DataFrame(grid).nunique().replace(0, np.nan).to_numpy(np.float64)
    draw, below = (
        partial(_cells, client_labels(run, ids), grid, Axis("group", "d"), "client", names=names),
        "Grey: not in the round.",
    )
    if len(ids) > MANY:
        below = "Below: number of these clients in each group."
        sizes = np.where(counts > 0, np.equal.outer(range(len(names)), grid).sum(axis=1), np.nan)
        draw = partial(_cells, names, sizes, Axis("clients", "d"), "group")
    top = Axis(figure.unit or "groups", "d", zero=True)
    text = f"{figure.caption} Above: number of groups among the round's clients. {below}"
    return figure.title, text, lambda: _under(_means(run, counts[None]), top, draw())


def _under(means: Frame, axis: Axis, cells: Chart, tall: bool = False) -> Chart:
    """Return cells below a line over the same rounds."""
    top = charts.lines(means, ROUNDS, axis, height=170 if tall else 90, width=cells.width)
    return charts.below(top, cells, shared=True)


def _means(run: ReportedRun, grid: Floats) -> Frame:
    """Return the mean over the rows as a line, with quantiles if there are many rows. Rounds without values are left out."""
    known = pandas.DataFrame(grid, columns=range(1, grid.shape[1] + 1)).dropna(axis=1, how="all")
    means = pandas.DataFrame({"run": run.method, "method": run.method, "round": known.columns, "mean": [*known.mean()]})
    if len(grid) > MANY:
        means[["lowest", "low", "high", "highest"]] = known.quantile([0.05, 0.25, 0.75, 0.95]).T.to_numpy()
    return marked(means)


def _room(rows: Sequence[str], shown: bool = True) -> int:
    """Return the width of cells over rounds, beside the names of their rows."""
    return WIDTH - 60 - min(200, charts.LETTER * max(map(len, rows))) * shown


def _cells(
    rows: Sequence[str],
    grid: Floats,
    axis: Axis,
    title: str,
    shown: bool = True,
    limits: tuple[float, float] | None = None,
    names: Sequence[str] = (),
    width: int = 0,
) -> Chart:
    """Return rows over rounds 1 .. last as cells. names: of the values 0, 1, ..."""
    step = math.ceil(grid.shape[1] / MOST_COLUMNS)
    cells = averaged(grid, math.ceil(grid.shape[1] / step), axis=1)
    row = "client" if title == "client" else "row"
    frame = as_cells(
        rows, (1 + np.linspace(0, grid.shape[1], cells.shape[1] + 1)[:-1]).astype(int).tolist(), cells, row
    )
    colour = charts.coloured(axis, limits, across=300)
    if names:
        frame["group"] = frame["value"].map(dict(enumerate(names)))
        colour = alt.Color("group:N").scale(**charts.palette(names)).title(axis.title).legend(orient="right")
    return charts.over_rounds(
        frame,
        charts.names("y", row, title, rows, shown),
        colour,
        axis,
        max(110, min(15 * len(rows), 620)),
        step,
        width or _room(rows, shown),
    )


# Layers ---------------------------------------------------------------------------------------------------------------


# (figure, (names of layers, values [layers, rounds]))
Part = tuple[figures.Layers, tuple[list[str], Floats]]


def _layers(run: ReportedRun, figure: figures.Layers) -> Drawn | None:
    chain: list[figures.Layers] = [figure]
    while chain[-1].beside:
        chain.append(chain[-1].beside)
    found: list[Part] = [(part, values) for part in chain if (values := layers(run, part)) is not None]
    if not found:
        return None
    names, grid = found[0][1]
    if len(found) > 1 or not found[0][0].shares:
        return figure.title, figure.caption, lambda: _side_by_side(found)
    text = (
        f"{figure.caption} A layer's weight and bias count together; the layers sum to 100 %. Rounds without values are "
        "left out."
    )
    axis = Axis(figure.unit, "~%", zero=True)
    if len(names) <= MOST_LINES:
        return figure.title, text, lambda: layer_lines(names, range(1, grid.shape[1] + 1), grid, axis)
    return figure.title, text, lambda: _cells(names, grid, axis, "")


def layer_lines(names: Sequence[str], rounds: Sequence[int], grid: Floats, axis: Axis) -> Chart:
    """Return a line per layer. grid: [layers, rounds]."""
    found = []
    for k, (name, row) in enumerate(zip(names, grid, strict=True)):
        found.append(marked(pandas.DataFrame({"run": name, "round": rounds, "mean": row}).dropna(), k))
    # the legend is beside the lines
    width = WIDTH - charts.SYMBOL - min(charts.LETTER * max(map(len, names)), CONFIG["legend"]["labelLimit"])
    return charts.lines(pandas.concat(found, ignore_index=True), ROUNDS, axis, legend="layer", right=True, width=width)


def _side_by_side(found: list[Part]) -> Chart:
    """Return a row per layer and a column per round, one picture beside the other."""
    each, known = [], [""]
    for part, (names, grid) in found:
        ratio = part.percent or part.shares
        top = float(np.nanmax(grid)) if part.whole else 1.0
        axis = Axis(part.unit, "~%" if ratio else "d" if part.whole else "~g")
        labels = _room(names, False) - _room(names, names != known)
        own = _cells(
            names,
            grid,
            axis,
            "",
            names != known,
            (0.0, top or 1.0) if ratio or part.whole else None,
            width=WIDTH // len(found) - labels - 20,
        )
        known = names
        each.append(own.properties(title=part.heading) if part.heading else own)
    return charts.beside(*each)


# Who worked when ------------------------------------------------------------------------------------------------------


def of_waiting(run: ReportedRun) -> Iterator[Panel]:
    """Yield the picture of a run that recorded arrivals."""
    try:
        lines = arrivals.read(run.path)
    except UserError:
        return
    found, closes = spans(lines[:ROUNDS_OF_WORKS])
    if not found or not (every := sum(len(line["ends"]) for line in lines)):
        return

    def draw() -> Chart:
        frame = pandas.DataFrame(found, columns=["client", "begins", "ends", "became"])
        clients = frame["client"].unique()[:CLIENTS_AT_WORK].tolist()
        frame["client"] = frame["client"].map(dict(zip(clients, client_labels(run, clients), strict=True)))
        return charts.spans(frame.dropna(), pandas.DataFrame({"second": closes}))

    lost = sum(end["fate"] != arrivals.USED for line in lines for end in line["ends"])
    yield Panel(
        f"waiting-{run.number.replace('.', '-')}",
        "Who worked when",
        f"A bar is a client's work on a round, from its download to its upload; a vertical line is the close of a round. "
        f"The first {len(closes)} rounds. In all {len(lines)} rounds {lost} of {every} works ({100 * lost / every:.0f} %) were "
        "thrown away or failed.",
        draw,
    )


def spans(lines: Sequence[arrivals.Line]) -> tuple[list[tuple[int, float, float, str]], list[float]]:
    """Return the works of rounds, and the second at which each round closed. lines: those of arrivals.jsonl, in order.

    A work is its client, its first and last second since the run's start, and what became of it.
    """
    closes = np.cumsum([float(line["seconds"]) for line in lines]).tolist()
    began = {int(line["round"]): end - float(line["seconds"]) for line, end in zip(lines, closes, strict=True)}
    working = {(int(i), int(line["round"])): began[int(line["round"])] for line in lines for i in line["asked"]}
    found = []
    for line in lines:
        for end in line["ends"]:
            begins = working.pop((int(end["client"]), int(line["round"]) - int(end["age"])), None)
            if begins is not None:
                used = LATE if end["age"] else IN_TIME
                became = used if end["fate"] == arrivals.USED else LOST
                found.append((int(end["client"]), begins, began[int(line["round"])] + float(end["second"]), became))
    found += [(client, begins, closes[-1], WORKING) for (client, _), begins in working.items()]
    return sorted(found), closes


DRAW: Mapping[type[figures.Figure], Callable[[ReportedRun, Any], tuple[Any, ...] | None]] = {
    figures.Matrix: matrix,
    figures.Links: _numbers,
    figures.Layers: _layers,
    figures.Scalars: _numbers,
    figures.Groups: _groups,
}
