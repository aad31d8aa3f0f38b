"""The report's pictures of single runs: how the data is split, and what a method recorded about its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fl_app.report.arrays import (
    Floats,
    Run,
    by_likeness,
    class_counts,
    collaborators,
    cosine,
    layer_values,
    overlap,
    personal_shares,
)  # fmt: skip
from fl_app.report.figures import (
    BLACK,
    BLUE,
    COLOURS,
    LINES,
    MARKERS,
    STYLE,
    VERMILLION,
    WIDTH,
    Look,
    Panel,
    listed,
    new_figure,
    percent_axis,
    png,
    rounds_axis,
)  # fmt: skip

NEVER: dict[str, Any] = {"hatch": "////", "edgecolor": "0.7", "facecolor": "white"}  # cells that hold nothing
COLOURS_OF_VALUES = "viridis"  # lightness grows with the value, no grey
ALIKE = 0.99  # cosine similarity from which two clients' class distributions are called the same
MARGINS = 2.05  # inches beside the matrices
MOST_LINES = 7


def partitions(runs: Sequence[Run]) -> Iterator[Panel]:
    """Yield one picture per split of the data, told by the runs' class counts (FedCAC Fig. 8)."""
    groups: dict[bytes, list[Run]] = {}
    for run in runs:
        if found := class_counts(run):
            key = np.concatenate([found[0], found[1].ravel(), found[1].shape]).astype(np.int64).tobytes()
            groups.setdefault(key, []).append(run)
    for k, group in enumerate(groups.values(), 1):
        ids, counts = class_counts(group[0]) or ([], np.zeros((0, 0), np.int64))
        splits = ", ".join(dict.fromkeys(f"{run.value('dataset')}, {run.value('partition')}" for run in group))
        which = "" if len(groups) == 1 else f", {listed(group)}"
        with rc_context(STYLE):
            image = png(_partition(ids, counts))
        yield Panel(
            f"partition-{k}" if len(groups) > 1 else "partition", f"Who has which data{which}",
            f"Training samples per client and class ({splits}); the area of a dot is their number. Columns with the same "
            "dots are clients with the same data distribution, whom personalization should bring together.", image,
        )  # fmt: skip


def of_run(run: Run) -> Iterator[Panel]:
    """Yield the pictures of what the run's method recorded."""
    with rc_context(STYLE):
        for draw in (_overlap, _collaborators, _personal_shares, _dispersion):
            yield from draw(run)


# Data -----------------------------------------------------------------------------------------------------------------


def _partition(ids: list[int], counts: NDArray[np.int64]) -> Figure:
    num_clients, num_classes = counts.shape
    height = min(9.5, 1.3 + max(0.3 * num_classes, 0.8))
    figure = new_figure(height)
    axes = figure.add_subplot()
    cell = min(0.82 * WIDTH / num_clients, (height - 0.9) / num_classes) * 72  # points
    largest = (0.92 * min(cell, 26)) ** 2
    x, y = np.nonzero(counts)
    area = np.maximum(largest * counts[x, y] / counts.max(), 1)
    axes.scatter(x, y, s=area, color=BLUE, edgecolors=BLACK, linewidths=0.4, zorder=2)
    axes.set(xlim=(-0.6, num_clients - 0.4), ylim=(-0.6, num_classes - 0.4), xlabel="client", ylabel="class (label index)")
    positions = _thinned(num_clients, 0.82 * WIDTH, 0.28)
    axes.set_xticks(positions, [str(ids[p]) for p in positions])
    axes.set_yticks(_thinned(num_classes, height - 0.9, 0.17))
    sizes = sorted({_round_number(counts.max() * part) for part in (1.0, 0.5, 0.1)} - {0}, reverse=True)
    handles = [
        axes.scatter([], [], s=max(largest * n / counts.max(), 1), color=BLUE, edgecolors=BLACK, linewidths=0.4)
        for n in sizes
    ]
    figure.legend(
        handles, [str(n) for n in sizes], title="training\nsamples", loc="outside right upper", labelspacing=1.2,
        borderpad=0.8,
    )  # fmt: skip
    return figure


def _thinned(count: int, inches: float, needed: float) -> list[int]:
    """Positions of the labels that fit when each needs so many inches."""
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9) if inches / count * s >= needed)
    return list(range(0, count, step))


def _round_number(value: float) -> int:
    """Round to one leading digit, or to a whole number below 10."""
    if value < 10:
        return round(value)
    power: int = 10 ** (len(str(int(value))) - 1)
    return int(value // power * power)


# Overlap and collaborators (FedCAC, FedDAC) ---------------------------------------------------------------------------


def _overlap(run: Run) -> Iterator[Panel]:
    found = overlap(run)
    if found is None:
        return
    ids, matrix = found
    off = ~np.eye(len(ids), dtype=bool)
    told = class_counts(run)
    counts = told[1][[told[0].index(i) for i in ids]] if told and set(ids) <= set(told[0]) else None
    similarity = None if counts is None else cosine(counts)
    order = by_likeness(matrix if similarity is None else similarity)
    labels, square = [str(ids[k]) for k in order], np.ix_(order, order)
    width = 0.0 if counts is None else _mix_width(counts)
    side = 4.0 if counts is None else (WIDTH - MARGINS) / (2 + width)
    figure = new_figure(side + 1.75, side + 0.8 if counts is None else WIDTH, arranged=False)
    values = np.where(off, matrix, np.nan)
    axes = _place(figure, 0.6, side)
    _square(figure, axes, values[square], labels, "Overlap of critical masks", "share of critical parameters in common")
    axes.set_ylabel("client")
    text = (
        f"Each client is a row and a column; neighbours have similar {'masks' if counts is None else 'data'}. "
        f"{'Colour' if counts is None else 'Left'}: share of its critical parameters that a client has in common with another, "
        "as last recorded; hatched: the client itself, and pairs that never shared a round. "
    )
    if similarity is not None and counts is not None:
        same = off & (similarity >= ALIKE)
        axes = _place(figure, side + 1.15, side)
        shown = np.where(off, similarity, np.nan)
        _square(figure, axes, shown[square], labels, "Similarity of class distributions", "cosine similarity", (0.0, 1.0))
        if same.sum() <= off.sum() / 3:
            for k in (0, 1):
                _outline(figure.axes[2 * k], same[square])
        _class_mix(figure, _place(figure, 2 * side + 1.5, side, width * side), counts[order])
        text += _agreement(matrix, similarity, same, off)
    title = "Overlap of critical parameters" + ("" if counts is None else ", and whose data is alike")
    yield Panel(f"overlap-{run.number}", title, text, png(figure))


def _place(figure: Figure, left: float, height: float, width: float = 0.0) -> Axes:
    """Axes and, below them, axes for their colours; all in inches, width 0: square. Equal heights need fixed places."""
    whole, total = figure.get_size_inches()
    width = width or height
    axes = figure.add_axes((left / whole, 1.35 / total, width / whole, height / total))
    figure.add_axes((left / whole, 0.55 / total, width / whole, 0.13 / total))
    return axes


def _square(
    figure: Figure, axes: Axes, values: Floats, labels: list[str], title: str, unit: str, limits: tuple[Any, Any] = (None, None)
) -> None:
    n = len(labels)
    axes.patch.set(**NEVER)
    image = axes.imshow(values, cmap=COLOURS_OF_VALUES, vmin=limits[0], vmax=limits[1], interpolation="nearest", aspect="equal")
    axes.grid(visible=False)
    axes.set_title(title)
    side = figure.get_figheight() - 1.75
    ticks = _thinned(n, side, 0.085)
    size = min(9.0, max(6.5, side / n * 72 * 0.9))
    names = [labels[k] for k in ticks]
    axes.set_xticks(ticks, names, fontsize=size, rotation=90 if n > 14 else 0)
    axes.set_yticks(ticks, names, fontsize=size)
    axes.set_xlabel("client")
    figure.colorbar(image, cax=figure.axes[-1], orientation="horizontal", label=unit)


def _outline(axes: Axes, cells: NDArray[np.bool_]) -> None:
    width = float(np.clip(36 / len(cells), 0.6, 2))
    for i, j in zip(*np.nonzero(cells), strict=True):
        box = Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=VERMILLION, linewidth=width)
        axes.add_patch(box)


def _mix_width(counts: NDArray[np.int64]) -> float:
    """Width of the classes' picture, in widths of a matrix."""
    return float(min(0.75, max(0.4, counts.shape[1] / 16)))


def _class_mix(figure: Figure, axes: Axes, counts: NDArray[np.int64]) -> None:
    """Rows of the matrices beside it: what share of a client's samples is of which class."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    axes.grid(visible=False)
    axes.set_title("Classes")
    axes.set_yticks([])
    axes.set_xticks(_thinned(counts.shape[1], 2.0, 0.2))
    axes.set_xlabel("class (label index)")
    figure.colorbar(image, cax=figure.axes[-1], orientation="horizontal", label="share of samples", ticks=[0, 0.5, 1])


def _agreement(matrix: Floats, similarity: Floats, same: NDArray[np.bool_], off: NDArray[np.bool_]) -> str:
    """Put into words how far the masks tell whose data is alike."""
    from scipy.stats import spearmanr

    known = off & ~np.isnan(matrix)
    text = "Middle: cosine similarity of the two clients' class counts. Right: each row's classes. "
    if same.any() and same.sum() <= off.sum() / 3 and (known & same).any() and (known & ~same).any():
        text += (
            f"Outlined: pairs with the same class distribution (cosine at least {ALIKE}); their mean overlap is "
            f"{matrix[known & same].mean():.3f}, that of all other pairs {matrix[known & ~same].mean():.3f}. "
        )
    pairs = np.triu(known)
    if np.unique(similarity[pairs]).size > 1 and np.unique(matrix[pairs]).size > 1:
        rank = spearmanr(matrix[pairs], similarity[pairs]).statistic
        text += f"Rank correlation of the two matrices: {rank:.2f} (1: the masks order all pairs as their data does)."
    return text


def _collaborators(run: Run) -> Iterator[Panel]:
    found = collaborators(run)
    if found is None:
        return
    ids, grid = found
    rounds = np.arange(1, grid.shape[1] + 1)
    rows_inches = min(7.0, max(1.2, 0.17 * len(ids)))
    figure = new_figure(rows_inches + 2.2)
    spec = figure.add_gridspec(2, 1, height_ratios=[1.1, rows_inches])
    top = figure.add_subplot(spec[0])
    present = ~np.isnan(grid).all(axis=0)
    style = Look(BLUE, "-", "o").line_style(int(present.sum()))
    mean = np.nanmean(grid[:, present], axis=0)
    top.plot(rounds[present], mean, clip_on=False, **style)
    top.set(ylabel="mean", ylim=(0, 1.1 * max(mean.max(), 0.5)))
    top.tick_params(labelbottom=False)
    axes = figure.add_subplot(spec[1], sharex=top)
    image = _heat(axes, grid, int(np.nanmax(grid)))
    ticks = _thinned(len(ids), rows_inches, 0.15)
    axes.set_yticks(ticks, [str(ids[k]) for k in ticks], fontsize=9)
    axes.set_ylabel("client")
    axes.set_xlim(0.5, grid.shape[1] + 0.5)
    rounds_axis(axes)
    bar = figure.colorbar(image, ax=axes, label="collaborators", fraction=0.04, pad=0.01, aspect=6 * rows_inches)
    bar.ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    yield Panel(
        f"collaborators-{run.number}", "Collaborators over rounds",
        "With how many others a client shares its critical parameters in a round, and above, the mean over the clients. With a "
        "threshold that rises from round to round, as FedCAC's and FedDAC's does, clients start with many collaborators, keep "
        "the most similar ones and end alone. Hatched: not in the round.", png(figure),
    )  # fmt: skip


def _heat(axes: Axes, grid: Floats, levels: int = 0, top: float | None = None) -> Any:
    """Rows over rounds 1 .. last; levels: values are whole numbers up to it, and few enough get one colour each."""
    axes.patch.set(**NEVER)
    axes.grid(visible=False)
    extent = (0.5, grid.shape[1] + 0.5, grid.shape[0] - 0.5, -0.5)
    colours: dict[str, Any] = {"cmap": COLOURS_OF_VALUES, "vmin": 0, "vmax": top or levels or None}
    if 0 < levels < 12:
        norm = BoundaryNorm(np.arange(-0.5, levels + 1), levels + 1)
        colours = {"cmap": colormaps[COLOURS_OF_VALUES].resampled(levels + 1), "norm": norm}
    return axes.imshow(grid, aspect="auto", interpolation="nearest", extent=extent, **colours)


# Layers (FedOBP, FedPake) ---------------------------------------------------------------------------------------------


def _personal_shares(run: Run) -> Iterator[Panel]:
    found = personal_shares(run)
    if found is None:
        return
    names, grid = found
    height = 4.2 if len(names) <= MOST_LINES else min(9.0, 1.2 + 0.2 * len(names))
    figure = new_figure(height)
    axes = figure.add_subplot()
    if len(names) <= MOST_LINES:
        rounds = np.arange(1, grid.shape[1] + 1)
        for k, (name, row) in enumerate(zip(names, grid, strict=True)):
            known = ~np.isnan(row)
            look = Look(COLOURS[k % len(COLOURS)], LINES[k % len(LINES)], MARKERS[k])
            axes.plot(rounds[known], row[known], label=name, **look.line_style(int(known.sum())))
        percent_axis(axes, "share of personal parameters (%)")
        axes.set_ylim(-0.03, 1.03)
        rounds_axis(axes, grid.shape[1])
        figure.legend(loc="outside right upper", handlelength=3.6, title="layer")
    else:
        image = _heat(axes, 100 * grid)
        axes.set_yticks(range(len(names)), names, fontsize=8.5)
        figure.colorbar(image, ax=axes, label="share of personal parameters (%)", fraction=0.04, pad=0.01, aspect=6 * height)
        rounds_axis(axes)
    yield Panel(
        f"personal-{run.number}", "In which layers the personal parameters are",
        "Of all parameters that clients keep personal in a round, the share that lies in each layer, weights and biases "
        "together; the layers sum to 100 %. Rounds in which no client has personal parameters yet are left out.", png(figure),
    )  # fmt: skip


def _dispersion(run: Run) -> Iterator[Panel]:
    kinds = (
        ("high-dispersion", "Parameters of high dispersion", "share of the layer (%)", 100.0),
        ("macro-classes", "Clusters of clients", "clusters", 1.0),
    )
    found = [(kind, values) for kind in kinds if (values := layer_values(run, kind[0])) is not None]
    if not found:
        return
    most = max(len(names) for _, (names, _) in found)
    height = min(10.0, 1.3 + max(0.24 * most, 1.0))
    figure = new_figure(height)
    previous: list[str] = []
    for k, ((_, title, unit, scale), (names, grid)) in enumerate(found):
        axes = figure.add_subplot(1, len(found), k + 1)
        whole = int(np.nanmax(grid)) if scale == 1 else 0
        image = _heat(axes, scale * grid, whole, None if whole else 100.0)
        axes.set_title(title)
        axes.set_yticks(range(len(names)), names if names != previous else [""] * len(names), fontsize=8.5)
        bar = figure.colorbar(image, ax=axes, label=unit, fraction=0.05, pad=0.02, aspect=6 * height)
        if whole:
            bar.set_ticks(range(whole + 1) if whole < 12 else MaxNLocator("auto", integer=True).tick_values(0, whole))
        rounds_axis(axes)
        previous = names
    yield Panel(
        f"dispersion-{run.number}", "Where the clients disagree, layer by layer",
        "Left: share of a layer's parameters whose dispersion over the clients is high. Right: into how many clusters "
        "(Macro-Classes) the clients fall by those parameters; 0 where none is high, 1 where the clients' values agree.",
        png(figure),
    )  # fmt: skip
