"""Pictures of single runs' records, with one drawing function per kind of figure (fl_app/figures.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from corolla.report.arrays import MANY, Floats, ReportedRun
from corolla.report.figures import (
    MOST_ROWS,
    Drawn,
    Panel,
    averaged,
    clipped,
    new_figure,
    percent_axis,
    rounds_axis,
    thinned,
)
from corolla.report.matrices import draw_matrix
from corolla.report.recorded import client_labels, groups, layers, links, scalars
from corolla.report.style import COLOURS, COLOURS_OF_VALUES, LINES, MARKERS, Look, empty_cells, looks
from fl_app import figures

MOST_LINES = 7
# fewer whole numbers than this get one colour each
MOST_COLOURS = 12


def of_run(run: ReportedRun) -> Iterator[Panel]:
    """Yield the pictures that the run's method declares and its records have numbers for."""
    taken: set[str] = set()
    for figure in run.figures:
        drawn = DRAW[type(figure)](run, figure)
        if drawn is None:
            continue
        title, caption, draw = drawn
        name = figure.file_name
        while name in taken:
            name += "-"
        taken.add(name)
        yield Panel(f"{name}-{run.number.replace('.', '-')}", title, " ".join(caption.split()), draw)


# Clients over rounds --------------------------------------------------------------------------------------------------


def _links(run: ReportedRun, figure: figures.Links) -> Drawn | None:
    found = links(run, figure.record)
    if found is None:
        return None
    ids, grid = found

    def draw() -> Figure:
        picture, top, axes, inches = _clients_over_rounds(client_labels(run, ids), grid)
        top.set_ylim(0, 1.1 * max(_mean_line(top, grid, run), 0.5))
        if len(ids) > MANY:
            image = _heat(axes, _sorted_rows(grid))
        else:
            image = _heat(axes, grid, int(np.nanmax(grid)))
        bar = picture.colorbar(image, ax=axes, label=figure.unit, fraction=0.04, pad=0.01, aspect=6 * inches)
        bar.ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
        return picture

    return figure.title, f"{figure.caption} {_above(grid)} Hatched: not in the round.", draw


def _scalars(run: ReportedRun, figure: figures.Scalars) -> Drawn | None:
    found = scalars(run, figure.record)
    if found is None:
        return None
    ids, grid = found[0], 100 * found[1] if figure.percent else found[1]

    def of_rounds() -> Figure:
        picture = new_figure(3.6)
        axes = picture.add_subplot()
        _mean_line(axes, grid, run)
        axes.set_ylabel(figure.unit)
        rounds_axis(axes, grid.shape[1])
        return picture

    def of_clients() -> Figure:
        picture, top, axes, inches = _clients_over_rounds(client_labels(run, ids), grid, line=1.6)
        _mean_line(top, grid, run)
        image = _heat(axes, _sorted_rows(grid) if len(ids) > MANY else grid, low=None)
        picture.colorbar(image, ax=axes, label=figure.unit, fraction=0.04, pad=0.01, aspect=6 * inches)
        return picture

    if not ids:
        return figure.title, figure.caption, of_rounds
    return (
        figure.title,
        f"{figure.caption} {_above(grid)} Hatched: nothing was recorded.",
        of_clients,
    )


def _groups(run: ReportedRun, figure: figures.Groups) -> Drawn | None:
    found = groups(run, figure.record)
    if found is None:
        return None
    ids, grid, names = found
    counts = np.array([len(np.unique(column[~np.isnan(column)])) for column in grid.T], np.float64)

    def draw() -> Figure:
        picture, top, axes, inches = _clients_over_rounds(client_labels(run, ids), grid)
        _mean_line(top, np.where(counts, counts, np.nan)[None], run)
        top.set(ylabel=figure.unit or "groups", ylim=(0, 1.1 * counts.max()))
        top.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        image = _heat(axes, grid, len(names) - 1)
        bar = picture.colorbar(image, ax=axes, label="group", fraction=0.04, pad=0.01, aspect=6 * inches)
        ticks = thinned(len(names), inches, 0.15)
        bar.set_ticks(ticks, labels=[names[k] for k in ticks])
        bar.ax.minorticks_off()
        return picture

    def sizes() -> Figure:
        members = np.array([(grid == k).sum(axis=0) for k in range(len(names))], np.float64)
        picture, top, axes, inches = _over_rounds(len(names), grid.shape[1])
        _mean_line(top, np.where(counts, counts, np.nan)[None], run)
        top.set(ylabel=figure.unit or "groups", ylim=(0, 1.1 * counts.max()))
        top.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        ticks = thinned(len(names), inches, 0.15)
        axes.set_yticks(ticks, [clipped(names[k]) for k in ticks], fontsize=9)
        axes.set_ylabel("group")
        image = _heat(axes, np.where(counts, members, np.nan))
        picture.colorbar(image, ax=axes, label="clients", fraction=0.04, pad=0.01, aspect=6 * inches)
        return picture

    text = "Above: number of groups among the round's clients. Hatched: not in the round."
    if len(ids) > MANY:
        text = "Above: number of groups among the round's clients. Below: number of these clients in each group."
    return figure.title, f"{figure.caption} {text}", sizes if len(ids) > MANY else draw


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


def _clients_over_rounds(clients: Sequence[str], grid: Floats, line: float = 1.1) -> tuple[Figure, Axes, Axes, float]:
    """Return a figure, axes for a line over rounds, axes below with a row per client, and these rows' height in inches.

    line: height of the upper axes in inches.
    """
    if len(clients) > MANY:
        picture, top, axes, inches = _over_rounds(MANY // 2, grid.shape[1], 2.4)
        top.set_ylabel("mean, quantiles")
        rows = min(len(clients), MOST_ROWS)
        axes.set_yticks(np.linspace(-0.5, rows - 0.5, 5), [f"{share} %" for share in (0, 25, 50, 75, 100)], fontsize=9)
        axes.set_ylabel(f"{len(clients):,} clients, least to most")
        return picture, top, axes, inches
    picture, top, axes, inches = _over_rounds(len(clients), grid.shape[1], line)
    ticks = thinned(len(clients), inches, 0.15)
    axes.set_yticks(ticks, [clients[k] for k in ticks], fontsize=9)
    axes.set_ylabel("client")
    return picture, top, axes, inches


def _over_rounds(rows: int, rounds: int, line: float = 1.1) -> tuple[Figure, Axes, Axes, float]:
    """Return a figure, axes for a line over rounds, axes below for `rows` rows, and these rows' height in inches.

    line: height of the upper axes in inches.
    """
    inches = min(7.0, max(1.2, 0.17 * rows))
    picture = new_figure(inches + 1.1 + line)
    spec = picture.add_gridspec(2, 1, height_ratios=[line, inches])
    top = picture.add_subplot(spec[0])
    top.set_ylabel("mean")
    top.tick_params(labelbottom=False)
    axes = picture.add_subplot(spec[1], sharex=top)
    axes.set_xlim(0.5, rounds + 0.5)
    rounds_axis(axes)
    return picture, top, axes, inches


def _mean_line(axes: Axes, grid: Floats, run: ReportedRun) -> float:
    """Draw the mean over the rows in the method's colour, with quantiles if there are many rows.

    Return the largest drawn value. Rounds without values are left out.
    """
    present = ~np.isnan(grid).all(axis=0)
    rounds, mean = np.arange(1, grid.shape[1] + 1)[present], np.nanmean(grid[:, present], axis=0)
    look = looks([run.method])[0]
    axes.plot(rounds, mean, clip_on=False, **look.line_style(len(rounds)))
    if len(grid) <= MANY:
        return float(mean.max())
    lowest, low, high, highest = np.nanpercentile(grid[:, present], (5, 25, 75, 95), axis=0)
    for (bottom, top), alpha in (((lowest, highest), 0.12), ((low, high), 0.25)):
        axes.fill_between(rounds, bottom, top, color=look.drawn(), alpha=alpha, linewidth=0)
    return float(max(mean.max(), highest.max()))


def _heat(axes: Axes, grid: Floats, levels: int = 0, top: float | None = None, low: float | None = 0) -> Any:
    """Draw rows over rounds 1 .. last as an image, and return it.

    levels: the largest value, if values are whole numbers. Few levels get one colour each.
    """
    axes.patch.set(**empty_cells())
    axes.grid(visible=False)
    extent = (0.5, grid.shape[1] + 0.5, grid.shape[0] - 0.5, -0.5)
    colours: dict[str, Any] = {"cmap": COLOURS_OF_VALUES, "vmin": low, "vmax": top or levels or None}
    if 0 < levels < MOST_COLOURS:
        norm = BoundaryNorm(np.arange(-0.5, levels + 1), levels + 1)
        colours = {"cmap": colormaps[COLOURS_OF_VALUES].resampled(levels + 1), "norm": norm}
    return axes.imshow(grid, aspect="auto", interpolation="nearest", extent=extent, **colours)


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
    draw = _few_shares if len(names) <= MOST_LINES else _many_shares
    return figure.title, text, lambda: draw(figure, names, grid)


def _side_by_side(found: list[Part]) -> Figure:
    """Draw a row per layer and a column per round, one picture beside the other."""
    most = max(len(names) for _, (names, _) in found)
    height = min(10.0, 1.3 + max(0.24 * most, 1.0))
    picture = new_figure(height)
    previous: list[str] = []
    for k, (part, (names, grid)) in enumerate(found):
        axes = picture.add_subplot(1, len(found), k + 1)
        ratio = part.percent or part.shares
        levels = int(np.nanmax(grid)) if part.whole else 0
        image = _heat(
            axes, 100 * grid if ratio else grid, levels, 100.0 if ratio else None, 0 if ratio or part.whole else None
        )
        if part.heading:
            axes.set_title(part.heading)
        axes.set_yticks(range(len(names)), names if names != previous else [""] * len(names), fontsize=8.5)
        bar = picture.colorbar(image, ax=axes, label=part.unit, fraction=0.05, pad=0.02, aspect=6 * height)
        if levels:
            whole = (
                range(levels + 1) if levels < MOST_COLOURS else MaxNLocator("auto", integer=True).tick_values(0, levels)
            )
            bar.set_ticks(list(whole))
        rounds_axis(axes)
        previous = names
    return picture


def _few_shares(figure: figures.Layers, names: list[str], grid: Floats) -> Figure:
    """Draw a line per layer."""
    picture = new_figure(4.2)
    axes = picture.add_subplot()
    rounds = np.arange(1, grid.shape[1] + 1)
    for k, (name, row) in enumerate(zip(names, grid, strict=True)):
        known = ~np.isnan(row)
        look = Look(COLOURS[k % len(COLOURS)], LINES[k % len(LINES)], MARKERS[k])
        axes.plot(rounds[known], row[known], label=name, **look.line_style(int(known.sum())))
    percent_axis(axes, figure.unit)
    axes.set_ylim(-0.03, 1.03)
    rounds_axis(axes, grid.shape[1])
    picture.legend(loc="outside right upper", handlelength=3.6, title="layer")
    return picture


def _many_shares(figure: figures.Layers, names: list[str], grid: Floats) -> Figure:
    """Draw a row per layer."""
    height = min(9.0, 1.2 + 0.2 * len(names))
    picture = new_figure(height)
    axes = picture.add_subplot()
    image = _heat(axes, 100 * grid)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    picture.colorbar(image, ax=axes, label=figure.unit, fraction=0.04, pad=0.01, aspect=6 * height)
    rounds_axis(axes)
    return picture


DRAW: dict[type[figures.Figure], Callable[[ReportedRun, Any], Drawn | None]] = {
    figures.Matrix: draw_matrix,
    figures.Links: _links,
    figures.Layers: _layers,
    figures.Scalars: _scalars,
    figures.Groups: _groups,
}
