"""Pictures of matrices between clients, beside the similarity of the clients' data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from corolla.report.arrays import MANY, Floats, ReportedRun
from corolla.report.figures import MOST_ROWS, WIDTH, Drawn, averaged, clipped, inches, new_figure, thinned
from corolla.report.recorded import by_likeness, class_counts, class_names, client_labels, cosine, matrix
from corolla.report.style import COLOURS_OF_VALUES, VERMILLION, empty_cells, shares, shown
from fl_app.figures import Matrix

# two class distributions count as equal from this cosine similarity on
ALIKE = 0.99
MARGINS = 2.05  # inches beside the matrices
# Sorting this many clients takes a second. For more clients, this many are drawn, at equal distances.
MOST_CLIENTS = 1000


@dataclass(frozen=True)
class _Likeness:
    """Similarity of clients' data. counts: [N, classes]. similarity: [N, N].

    same: pairs that count as equal, bool [N, N]. classes: their names, if known.
    """

    counts: NDArray[np.int64]
    similarity: Floats
    same: NDArray[np.bool_]
    classes: tuple[str, ...]

    @property
    def few(self) -> bool:
        """Whether equal pairs are few enough to be told apart."""
        return bool(self.same.sum() <= (self.same.size - len(self.same)) / 3)

    @property
    def outlined(self) -> bool:
        """Whether equal pairs are outlined."""
        return self.few and len(self.same) <= MANY


def draw_matrix(run: ReportedRun, figure: Matrix) -> Drawn | None:
    """Return the picture of a matrix. If class counts are known, the similarity of the clients' data is beside it."""
    found = matrix(run, figure.record)
    if found is None:
        return None
    ids, values = found
    everybody = len(ids)
    if everybody > MOST_CLIENTS:
        kept = np.linspace(0, everybody - 1, MOST_CLIENTS).astype(int)
        ids, values = [ids[k] for k in kept], values[np.ix_(kept, kept)]
    alike = _likeness(run, ids)
    text = (
        f"{figure.caption} {_rows(everybody)}; neighbours have similar {'values' if alike is None else 'data'}. "
        f"{'Colour' if alike is None else 'Left'}: the last recorded value of each pair; hatched: a client with itself, and "
        "pairs that never shared a round. "
    )
    if alike is None:
        return figure.title, text, lambda: _alone(figure, client_labels(run, ids), values)
    text += _agreement(figure.value, values, alike)
    return (
        f"{figure.title}, and similarity of the clients' data",
        text,
        lambda: _beside(figure, client_labels(run, ids), values, alike),
    )


def _rows(clients: int) -> str:
    """Return a sentence about the meaning of rows and columns."""
    if clients <= MOST_ROWS:
        return "Each client is a row and a column"
    of = f"{MOST_CLIENTS:,} of the {clients:,}" if clients > MOST_CLIENTS else f"the {clients:,}"
    return f"Each row and column is the mean of about {min(clients, MOST_CLIENTS) / MOST_ROWS:.0f} neighbours among {of} clients"


def _alone(figure: Matrix, clients: list[str], values: Floats) -> Figure:
    side, order, more = 4.0, by_likeness(values), _more(clients)
    picture = new_figure(side + 1.75 + more, side + 0.8 + more, arranged=False)
    axes = _place(picture, 0.6 + more, side)
    _square(axes, values, clients, order, figure.heading or figure.title, figure.unit)
    return picture


def _beside(figure: Matrix, clients: list[str], values: Floats, alike: _Likeness) -> Figure:
    order = by_likeness(alike.similarity)
    # width of the classes' picture, in widths of a matrix
    width = float(min(0.75, max(0.4, alike.counts.shape[1] / 16)))
    more = _more(clients)
    side = (WIDTH - MARGINS - 2 * more) / (2 + width)
    below = max((0.085 * len(clipped(name)) - 0.35 for name in alike.classes), default=0.0)
    picture = new_figure(side + 1.75 + max(below, more), arranged=False)
    axes = _place(picture, 0.6 + more, side)
    _square(axes, values, clients, order, figure.heading or figure.title, figure.unit)
    other = _place(picture, side + 1.15 + 2 * more, side)
    _square(
        other,
        alike.similarity,
        clients,
        order,
        "Similarity of class distributions",
        "cosine similarity",
        (0.0, 1.0),
        False,
    )
    if alike.outlined:
        for each in (axes, other):
            _outline(each, alike.same[np.ix_(order, order)])
    _class_mix(_place(picture, 2 * side + 1.5 + 2 * more, side, width * side), alike.counts[order], alike.classes)
    return picture


def _more(clients: Sequence[str]) -> float:
    """Return the extra inches that clients' names need beside and below a matrix, compared with numbers."""
    return max(inches(clients) - 0.3, 0)


def _likeness(run: ReportedRun, ids: list[int]) -> _Likeness | None:
    known = class_counts(run)
    if known is None or not set(ids) <= set(known[0]):
        return None
    counts = known[1][[known[0].index(i) for i in ids]]
    similarity = cosine(counts)
    same = (similarity >= ALIKE) & ~np.eye(len(ids), dtype=bool)
    return _Likeness(counts, similarity, same, class_names(run, counts.shape[1]))


def _place(figure: Figure, left: float, height: float, width: float = 0.0) -> Axes:
    """Return axes with axes for their colour bar below, in inches; width 0: square. Equal heights need fixed positions."""
    whole, total = figure.get_size_inches()
    width = width or height
    axes = figure.add_axes((left / whole, (total - 0.4 - height) / total, width / whole, height / total))
    figure.add_axes((left / whole, 0.55 / total, width / whole, 0.13 / total))
    return axes


def _square(
    axes: Axes,
    values: Floats,
    clients: list[str],
    order: list[int],
    title: str,
    unit: str,
    limits: tuple[Any, Any] = (None, None),
    leftmost: bool = True,
) -> None:
    n, labels = len(clients), [clients[k] for k in order]
    cells = np.where(np.eye(n, dtype=bool), np.nan, values)[np.ix_(order, order)]
    cells = averaged(averaged(cells, MOST_ROWS), MOST_ROWS, axis=1)
    axes.patch.set(**empty_cells())
    image = axes.imshow(
        cells, cmap=COLOURS_OF_VALUES, vmin=limits[0], vmax=limits[1], interpolation="nearest", aspect="equal"
    )
    axes.grid(visible=False)
    axes.set_title(title)
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    side = axes.get_position().height * figure.get_figheight()
    if n > MANY:
        _shares_of_clients(axes, len(cells), leftmost)
        axes.set_xlabel(f"{n:,} clients")
    else:
        ticks = thinned(n, side, 0.085)
        size = min(9.0, max(6.5, side / n * 72 * 0.9))
        names = [labels[k] for k in ticks]
        axes.set_xticks(ticks, names, fontsize=size, rotation=90 if n > 14 or sum(map(len, names)) > 30 else 0)
        axes.set_yticks(ticks, names, fontsize=size)
        axes.set_xlabel("client")
        axes.set_ylabel("client" if leftmost else "")
    figure.colorbar(image, cax=figure.axes[-1], orientation="horizontal", label=unit)


def _shares_of_clients(axes: Axes, rows: int, leftmost: bool) -> None:
    """Label the axes in per cent of the clients: names of this many would be unreadable."""
    places, names = np.linspace(-0.5, rows - 0.5, 5), ["0 %", "", "50 %", "", "100 %"]
    axes.set_xticks(places, names, fontsize=9)
    axes.set_yticks(places, names if leftmost else [""] * len(names), fontsize=9)


def _outline(axes: Axes, cells: NDArray[np.bool_]) -> None:
    width = float(np.clip(36 / len(cells), 0.6, 2))
    for i, j in zip(*np.nonzero(cells), strict=True):
        box = Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=shown(VERMILLION), linewidth=width)
        axes.add_patch(box)


def _class_mix(axes: Axes, counts: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Draw each client's share of samples per class, in the rows of the matrices beside it."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    rows = averaged(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), MOST_ROWS)
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
    """Return sentences that compare the values with the similarity of the clients' data."""
    from scipy.stats import spearmanr

    off = ~np.eye(len(values), dtype=bool)
    known, same, similarity = off & ~np.isnan(values), alike.same, alike.similarity
    text = "Middle: cosine similarity of the two clients' class counts. Right: each row's classes. "
    if alike.few and (known & same).any() and (known & ~same).any():
        pairs = f"pairs with the same class distribution (cosine at least {ALIKE}{', outlined' * alike.outlined})"
        text += (
            f"Mean {name}: {values[known & same].mean():.3f} for {pairs}, "
            f"{values[known & ~same].mean():.3f} for all other pairs. "
        )
    if np.unique(similarity[known]).size > 1 and np.unique(values[known]).size > 1:
        rank = spearmanr(values[known], similarity[known]).statistic
        text += f"Rank correlation of the two matrices: {rank:.2f} (1: the {name} orders all pairs as their data does)."
    return text
