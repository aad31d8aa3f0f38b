"""Pictures of single runs' records, with one function per kind of figure (fl_app/figures.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from corolla.report import charts, frames
from corolla.report.arrays import MANY, Floats, ReportedRun
from corolla.report.charts import ROUNDS, WIDTH, Axis, Chart
from corolla.report.heat_maps import matrix_panel
from corolla.report.pictures import MOST_COLUMNS, MOST_ROWS, Panel, averaged
from corolla.report.recorded import client_labels, groups, layers, links, scalars
from fl_app import figures

MOST_LINES = 7
# (title, caption, chart)
Drawn = tuple[str, str, Callable[[], Chart]]


def of_run(run: ReportedRun) -> Iterator[Panel]:
    """Yield the pictures that the run's method declares and its records have numbers for."""
    taken: set[str] = set()
    for figure in run.figures:
        name = figure.file_name
        while name in taken:
            name += "-"
        own = f"{name}-{run.number.replace('.', '-')}"
        if isinstance(figure, figures.Matrix):
            panel = matrix_panel(own, run, figure)
        else:
            drawn = DRAW[type(figure)](run, figure)
            panel = Panel(own, drawn[0], " ".join(drawn[1].split()), drawn[2]) if drawn else None
        if panel is not None:
            taken.add(name)
            yield panel


# Clients over rounds --------------------------------------------------------------------------------------------------


def _links(run: ReportedRun, figure: figures.Links) -> Drawn | None:
    found = links(run, figure.record)
    if found is None:
        return None
    text = f"{figure.caption} {_above(found[1])} Grey: not in the round."
    return figure.title, text, lambda: _clients_over_rounds(run, *found, Axis(figure.unit, "~g", zero=True), zero=True)


def _scalars(run: ReportedRun, figure: figures.Scalars) -> Drawn | None:
    found = scalars(run, figure.record)
    if found is None:
        return None
    axis = Axis(figure.unit, "~%" if figure.percent else "~g")
    if not found[0]:
        return figure.title, figure.caption, lambda: charts.lines(_means(run, found[1]), ROUNDS, axis)
    text = f"{figure.caption} {_above(found[1])} Grey: nothing was recorded."
    return figure.title, text, lambda: _clients_over_rounds(run, *found, axis)


def _groups(run: ReportedRun, figure: figures.Groups) -> Drawn | None:
    found = groups(run, figure.record)
    if found is None:
        return None
    ids, grid, names = found
    many = len(ids) > MANY
    text = "Above: number of groups among the round's clients. Grey: not in the round."
    if many:
        text = "Above: number of groups among the round's clients. Below: number of these clients in each group."
    labels = client_labels(run, ids)
    counts = np.array([len(np.unique(column[~np.isnan(column)])) or np.nan for column in grid.T], np.float64)
    top = Axis(figure.unit or "groups", "d", zero=True)

    def members() -> Chart:
        if not many:
            return _cells(labels, grid, Axis("group", "d"), "client", names=names)
        sizes = np.array([np.where(counts > 0, (grid == k).sum(axis=0), np.nan) for k in range(len(names))])
        return _cells(names, sizes, Axis("clients", "d"), "group")

    return (
        figure.title,
        f"{figure.caption} {text}",
        lambda: charts.below(_top(run, counts[None], top, _room(names if many else labels)), members(), shared=True),
    )


def _above(grid: Floats) -> str:
    """Return a caption of the line above the rows of clients, and of the rows' order."""
    if len(grid) <= MANY:
        return "Above: the mean over the clients."
    row = (
        f"each row is the mean of about {len(grid) / MOST_ROWS:.0f} neighbours"
        if len(grid) > MOST_ROWS
        else "one row each"
    )
    return (
        "Above: the mean over the clients, the middle half of them (dark band) and the middle 90 % (pale band). Below: the "
        f"clients sorted by their mean over the rounds, {row}."
    )


def _sorted_rows(grid: Floats) -> Floats:
    """Sort clients [N, rounds] by their mean over the rounds, and average neighbours until at most MOST_ROWS rows remain."""
    known = ~np.isnan(grid)
    means = np.where(known, grid, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return averaged(grid[np.argsort(means, kind="stable")], MOST_ROWS)


def _clients_over_rounds(run: ReportedRun, ids: Sequence[int], grid: Floats, axis: Axis, zero: bool = False) -> Chart:
    """Return the mean over the clients, and below it a row per client."""
    many = len(ids) > MANY
    rows = _sorted_rows(grid) if many else grid
    labels = [str(k) for k in range(len(rows))] if many else client_labels(run, ids)
    limits = (0.0, float(np.nanmax(rows)) or 1.0) if zero else None
    title = f"{len(ids):,} clients, least to most" if many else "client"
    below = _cells(labels, rows, axis, title, shown=not many, limits=limits)
    top = _top(run, grid, Axis("mean", axis.format, zero=zero), _room(labels, not many))
    return charts.below(top, below, shared=True)


def _top(run: ReportedRun, grid: Floats, axis: Axis, width: int) -> Chart:
    return charts.lines(_means(run, grid), ROUNDS, axis, height=170 if len(grid) > MANY else 90, width=width)


def _means(run: ReportedRun, grid: Floats) -> charts.Frame:
    """Return the mean over the rows as a line, with quantiles if there are many rows. Rounds without values are left out."""
    present = ~np.isnan(grid).all(axis=0)
    known = grid[:, present]
    columns = {"round": np.flatnonzero(present) + 1, "mean": np.nanmean(known, axis=0)}
    if len(grid) > MANY:
        bands = np.nanpercentile(known, (5, 25, 75, 95), axis=0)
        columns |= dict(zip(("lowest", "low", "high", "highest"), bands, strict=True))
    return frames.marked(pandas.DataFrame({"run": run.method, "method": run.method, **columns}))


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
    starts = (1 + np.linspace(0, grid.shape[1], cells.shape[1] + 1)[:-1]).astype(int).tolist()
    row = "client" if title == "client" else "row"
    frame = frames.grid(rows, starts, cells, row)
    colour = charts.coloured(axis, limits, across=300)
    if names:
        frame = frame.assign(group=[names[int(value)] for value in frame["value"]])
        colour = charts.grouped(names, axis.title)
    height = max(110, min(15 * len(rows), 620))
    order = charts.names("y", row, title, rows, shown)
    return charts.over_rounds(frame, order, colour, axis, height, step, width or _room(rows, shown))


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
        known = ~np.isnan(row)
        columns = {"run": name, "round": np.array(rounds)[known], "mean": row[known]}
        found.append(frames.marked(pandas.DataFrame(columns), k))
    return charts.lines(
        pandas.concat(found, ignore_index=True), ROUNDS, axis, legend="layer", right=True, width=WIDTH - 160
    )


def _side_by_side(found: list[Part]) -> Chart:
    """Return a row per layer and a column per round, one picture beside the other."""
    each, known = [], [""]
    for part, (names, grid) in found:
        ratio = part.percent or part.shares
        top = float(np.nanmax(grid)) if part.whole else 1.0
        axis = Axis(part.unit, "~%" if ratio else "d" if part.whole else "~g")
        limits = (0.0, top or 1.0) if ratio or part.whole else None
        labels = _room(names, False) - _room(names, names != known)
        own = _cells(names, grid, axis, "", names != known, limits, width=WIDTH // len(found) - labels - 20)
        known = names
        each.append(own.properties(title=part.heading) if part.heading else own)
    return charts.beside(*each)


DRAW: Mapping[type[figures.Figure], Callable[[ReportedRun, Any], Drawn | None]] = {
    figures.Links: _links,
    figures.Layers: _layers,
    figures.Scalars: _scalars,
    figures.Groups: _groups,
}
