"""The report's pictures of numbers between clients, beside the similarity of the clients' data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from corolla.report.arrays import Floats, ReportedRun
from corolla.report.figures import WIDTH, Drawn, clipped, new_figure, thinned
from corolla.report.recorded import by_likeness, class_counts, class_names, cosine, matrix
from corolla.report.style import COLOURS_OF_VALUES, VERMILLION, empty_cells, shares, shown
from fl_app.figures import Matrix

# cosine similarity from which two clients' class distributions are called the same
ALIKE = 0.99
MARGINS = 2.05  # inches beside the matrices


@dataclass(frozen=True)
class _Likeness:
    """Whose data is alike. counts: [N, classes]; similarity: [N, N]; same: pairs that count as the same, bool [N, N];
    classes: their names, if known.
    """

    counts: NDArray[np.int64]
    similarity: Floats
    same: NDArray[np.bool_]
    classes: tuple[str, ...]

    @property
    def few(self) -> bool:
        """Tell whether pairs with the same data are few enough to be outlined."""
        return bool(self.same.sum() <= (self.same.size - len(self.same)) / 3)


def draw_matrix(run: ReportedRun, figure: Matrix) -> Drawn | None:
    """Draw the numbers, and beside them whose data is alike and what it is, if the class counts are known."""
    found = matrix(run, figure.record)
    if found is None:
        return None
    ids, values = found
    alike = _likeness(run, ids)
    text = (
        f"{figure.caption} Each client is a row and a column; neighbours have similar {'values' if alike is None else 'data'}. "
        f"{'Colour' if alike is None else 'Left'}: what was last recorded of each pair; hatched: the client itself, and pairs "
        "that never shared a round. "
    )
    if alike is None:
        return figure.title, text, lambda: _alone(figure, ids, values)
    text += _agreement(figure.value, values, alike)
    return f"{figure.title}, and whose data is alike", text, lambda: _beside(figure, ids, values, alike)


def _alone(figure: Matrix, ids: list[int], values: Floats) -> Figure:
    side, order = 4.0, by_likeness(values)
    picture = new_figure(side + 1.75, side + 0.8, arranged=False)
    axes = _place(picture, 0.6, side)
    _square(axes, values, ids, order, figure.heading or figure.title, figure.unit)
    axes.set_ylabel("client")
    return picture


def _beside(figure: Matrix, ids: list[int], values: Floats, alike: _Likeness) -> Figure:
    order = by_likeness(alike.similarity)
    # Width of the classes' picture, in widths of a matrix.
    width = float(min(0.75, max(0.4, alike.counts.shape[1] / 16)))
    side = (WIDTH - MARGINS) / (2 + width)
    below = max((0.085 * len(clipped(name)) - 0.35 for name in alike.classes), default=0.0)
    picture = new_figure(side + 1.75 + max(below, 0), arranged=False)
    axes = _place(picture, 0.6, side)
    _square(axes, values, ids, order, figure.heading or figure.title, figure.unit)
    axes.set_ylabel("client")
    other = _place(picture, side + 1.15, side)
    _square(other, alike.similarity, ids, order, "Similarity of class distributions", "cosine similarity", (0.0, 1.0))
    if alike.few:
        for each in (axes, other):
            _outline(each, alike.same[np.ix_(order, order)])
    _class_mix(_place(picture, 2 * side + 1.5, side, width * side), alike.counts[order], alike.classes)
    return picture


def _likeness(run: ReportedRun, ids: list[int]) -> _Likeness | None:
    known = class_counts(run)
    if known is None or not set(ids) <= set(known[0]):
        return None
    counts = known[1][[known[0].index(i) for i in ids]]
    similarity = cosine(counts)
    same = (similarity >= ALIKE) & ~np.eye(len(ids), dtype=bool)
    return _Likeness(counts, similarity, same, class_names(run, counts.shape[1]))


def _place(figure: Figure, left: float, height: float, width: float = 0.0) -> Axes:
    """Axes and, below them, axes for their colours; all in inches, width 0: square. Equal heights need fixed places."""
    whole, total = figure.get_size_inches()
    width = width or height
    axes = figure.add_axes((left / whole, (total - 0.4 - height) / total, width / whole, height / total))
    figure.add_axes((left / whole, 0.55 / total, width / whole, 0.13 / total))
    return axes


def _square(
    axes: Axes,
    values: Floats,
    ids: list[int],
    order: list[int],
    title: str,
    unit: str,
    limits: tuple[Any, Any] = (None, None),
) -> None:
    n, labels = len(ids), [str(ids[k]) for k in order]
    cells = np.where(np.eye(n, dtype=bool), np.nan, values)[np.ix_(order, order)]
    axes.patch.set(**empty_cells())
    image = axes.imshow(
        cells, cmap=COLOURS_OF_VALUES, vmin=limits[0], vmax=limits[1], interpolation="nearest", aspect="equal"
    )
    axes.grid(visible=False)
    axes.set_title(title)
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    side = axes.get_position().height * figure.get_figheight()
    ticks = thinned(n, side, 0.085)
    size = min(9.0, max(6.5, side / n * 72 * 0.9))
    names = [labels[k] for k in ticks]
    axes.set_xticks(ticks, names, fontsize=size, rotation=90 if n > 14 else 0)
    axes.set_yticks(ticks, names, fontsize=size)
    axes.set_xlabel("client")
    figure.colorbar(image, cax=figure.axes[-1], orientation="horizontal", label=unit)


def _outline(axes: Axes, cells: NDArray[np.bool_]) -> None:
    width = float(np.clip(36 / len(cells), 0.6, 2))
    for i, j in zip(*np.nonzero(cells), strict=True):
        box = Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=shown(VERMILLION), linewidth=width)
        axes.add_patch(box)


def _class_mix(axes: Axes, counts: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Rows of the matrices beside it: what share of a client's samples is of which class."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    rows = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(rows, cmap=shares(), vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    axes.grid(visible=False)
    axes.set_title("Classes")
    axes.set_yticks([])
    ticks = thinned(counts.shape[1], axes.get_position().width * figure.get_figwidth(), 0.17)
    names = [clipped(classes[k]) for k in ticks] if classes else [str(k) for k in ticks]
    upright = max(map(len, names)) <= 2
    axes.set_xticks(ticks, names, rotation=0 if upright else 90, fontsize=None if upright else 8.5)
    axes.set_xlabel("class" if classes else "class (label index)")
    figure.colorbar(image, cax=figure.axes[-1], orientation="horizontal", label="share of samples", ticks=[0, 0.5, 1])


def _agreement(name: str, values: Floats, alike: _Likeness) -> str:
    """Put into words how far the values tell whose data is alike."""
    from scipy.stats import spearmanr

    off = ~np.eye(len(values), dtype=bool)
    known, same, similarity = off & ~np.isnan(values), alike.same, alike.similarity
    text = "Middle: cosine similarity of the two clients' class counts. Right: each row's classes. "
    if alike.few and (known & same).any() and (known & ~same).any():
        text += (
            f"Outlined: pairs with the same class distribution (cosine at least {ALIKE}); their mean {name} is "
            f"{values[known & same].mean():.3f}, that of all other pairs {values[known & ~same].mean():.3f}. "
        )
    if np.unique(similarity[known]).size > 1 and np.unique(values[known]).size > 1:
        rank = spearmanr(values[known], similarity[known]).statistic
        text += f"Rank correlation of the two matrices: {rank:.2f} (1: the {name} orders all pairs as their data does)."
    return text
