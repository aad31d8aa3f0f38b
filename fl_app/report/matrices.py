"""The report's pictures of numbers between clients, beside the similarity of the clients' data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from fl_app.report.arrays import Floats, Run
from fl_app.report.figures import COLOURS_OF_VALUES, NEVER, VERMILLION, WIDTH, Drawn, new_figure, thinned
from fl_app.report.kinds import Matrix
from fl_app.report.recorded import by_likeness, class_counts, cosine, matrix

ALIKE = 0.99  # cosine similarity from which two clients' class distributions are called the same
MARGINS = 2.05  # inches beside the matrices


@dataclass(frozen=True)
class _Likeness:
    """Whose data is alike. counts: [N, classes]; similarity: [N, N]; same: pairs that count as the same, bool [N, N]."""

    counts: NDArray[np.int64]
    similarity: Floats
    same: NDArray[np.bool_]

    @property
    def few(self) -> bool:
        """Tell whether pairs with the same data are few enough to be outlined."""
        return bool(self.same.sum() <= (self.same.size - len(self.same)) / 3)


def draw_matrix(run: Run, figure: Matrix) -> Drawn | None:
    """Draw the numbers, and beside them whose data is alike and what it is, if the class counts are known."""
    found = matrix(run, figure.record)
    if found is None:
        return None
    ids, values = found
    off = ~np.eye(len(ids), dtype=bool)
    alike = _likeness(run, ids)
    order = by_likeness(values if alike is None else alike.similarity)
    labels, square = [str(ids[k]) for k in order], np.ix_(order, order)
    width = 0.0 if alike is None else _mix_width(alike.counts)
    side = 4.0 if alike is None else (WIDTH - MARGINS) / (2 + width)
    picture = new_figure(side + 1.75, side + 0.8 if alike is None else WIDTH, arranged=False)
    axes = _place(picture, 0.6, side)
    _square(picture, axes, np.where(off, values, np.nan)[square], labels, figure.heading or figure.title, figure.unit)
    axes.set_ylabel("client")
    text = (
        f"{figure.caption} Each client is a row and a column; neighbours have similar {'values' if alike is None else 'data'}. "
        f"{'Colour' if alike is None else 'Left'}: what was last recorded of each pair; hatched: the client itself, and pairs "
        "that never shared a round. "
    )
    if alike is None:
        return figure.title, text, picture
    axes = _place(picture, side + 1.15, side)
    shown = np.where(off, alike.similarity, np.nan)
    _square(picture, axes, shown[square], labels, "Similarity of class distributions", "cosine similarity", (0.0, 1.0))
    if alike.few:
        for k in (0, 1):
            _outline(picture.axes[2 * k], alike.same[square])
    _class_mix(picture, _place(picture, 2 * side + 1.5, side, width * side), alike.counts[order])
    return f"{figure.title}, and whose data is alike", text + _agreement(figure.value, values, alike, off), picture


def _likeness(run: Run, ids: list[int]) -> _Likeness | None:
    told = class_counts(run)
    if told is None or not set(ids) <= set(told[0]):
        return None
    counts = told[1][[told[0].index(i) for i in ids]]
    similarity = cosine(counts)
    return _Likeness(counts, similarity, (similarity >= ALIKE) & ~np.eye(len(ids), dtype=bool))


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
    axes.set_xticks(thinned(counts.shape[1], 2.0, 0.2))
    axes.set_xlabel("class (label index)")
    figure.colorbar(image, cax=figure.axes[-1], orientation="horizontal", label="share of samples", ticks=[0, 0.5, 1])


def _agreement(name: str, values: Floats, alike: _Likeness, off: NDArray[np.bool_]) -> str:
    """Put into words how far the values tell whose data is alike."""
    from scipy.stats import spearmanr

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
