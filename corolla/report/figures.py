"""Shared parts of the report's pictures: a picture and its files, axes, legends.

They use matplotlib's objects, not pyplot.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from rich.cells import cell_len

from corolla.report import fonts
from corolla.report.groups import Group, short
from corolla.report.style import DARK, LIGHT, Look, looks

# width of a picture in inches, shown as 1100 pixels
WIDTH = 11.0
DPI = 160
# most letters of a client's name on an axis
ROOM = 20
# most curves with bands in one picture
TOGETHER = 4
# most rows of a picture; more clients than this are averaged with their neighbours
MOST_ROWS = 200


@dataclass(frozen=True)
class Panel:
    """A picture of the report. name: its files' name. caption: explains it. folded: the page shows it on demand.

    draw: called for every rendering, with matplotlib's settings for light or dark pictures.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    folded: bool = False

    def render(self, kind: str = "png", dark: bool = False) -> bytes:
        """Return the picture as a png, svg or pdf file; equal pictures give equal bytes."""
        out = io.BytesIO()
        with rc_context(DARK if dark else LIGHT):
            dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            figure = self.draw()
            needed = fonts.families("".join(text.get_text() for text in fonts.texts(figure)))
            with rc_context({"font.family": needed}):
                # draw again, because texts keep the fonts they were created with
                figure = self.draw() if len(needed) > 1 else figure
                fonts.replace_unknown(figure)
                figure.savefig(out, format=kind, dpi=DPI, metadata=dates)
        return out.getvalue()


def new_figure(height: float, width: float = WIDTH, arranged: bool = True) -> Figure:
    """Return an empty figure, with sizes in inches. arranged: matplotlib arranges its contents."""
    figure = Figure(figsize=(width, height), layout="constrained" if arranged else None)
    FigureCanvasAgg(figure)
    return figure


# Pieces ---------------------------------------------------------------------------------------------------------------


def styled(groups: Sequence[Group]) -> dict[int, Look]:
    """Return each group's look, by its number."""
    return {group.number: look for group, look in zip(groups, looks([g.method for g in groups]), strict=True)}


def listed(numbers: Sequence[object]) -> str:
    """Return the names of runs, given their numbers: `runs 1, 2`."""
    return ("run " if len(numbers) == 1 else "runs ") + ", ".join(map(str, numbers))


def percent_axis(axes: Axes, label: str) -> None:
    """Show y in per cent; its values are ratios."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}"))
    axes.set_ylabel(label)


def metric_axis(groups: Sequence[Group]) -> Callable[[Axes], None]:
    """Return a function that labels y with the groups' headline metric, in per cent if it is a ratio."""
    metric = groups[0].first.headline

    def label(axes: Axes) -> None:
        if metric.ratio:
            percent_axis(axes, f"test {metric.title} (%)")
        else:
            axes.set_ylabel(f"test {metric.title}")

    return label


def rounds_axis(axes: Axes, last: int = 0) -> None:
    """Make x the round. last: last round of the lines; 0 leaves the limits."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if last:
        pad = max(0.5, 0.03 * last)
        axes.set_xlim(1 - pad, last + pad)
    axes.set_xlabel("round")


def legend(figure: Figure, axes: Axes) -> None:
    """Put one legend for all lines below the axes; a single line needs none."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        return
    # width of an entry in points: letters, line and gaps
    column = 5.9 * max(map(len, labels)) + 62
    columns = max(1, min(len(labels), int(72 * WIDTH / column)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.6, fontsize=9.5)


class Labelled(Protocol):
    """Something that has a picture of its own."""

    @property
    def label(self) -> str:
        """Its name in the report."""


One = TypeVar("One", bound=Labelled)


def small_multiples(groups: Sequence[One], draw: Callable[[Axes, One, bool], None]) -> tuple[Figure, list[Axes]]:
    """Return one small picture per group or line, with the others in grey behind it. draw(axes, group, in_focus)."""
    columns = 4 if len(groups) > 4 else len(groups)
    rows = math.ceil(len(groups) / columns)
    figure = new_figure(0.4 + 2.35 * rows if columns > 1 else 4.2)
    first: Axes | None = None
    grid: list[Axes] = []
    for k, group in enumerate(groups):
        axes = figure.add_subplot(rows, columns, k + 1, sharex=first, sharey=first)
        first = first or axes
        for other in groups:
            if other is not group:
                draw(axes, other, False)
        draw(axes, group, True)
        axes.set_title("\n".join(textwrap.wrap(short(group.label, 56), 31)), fontsize=9)
        axes.tick_params(labelleft=k % columns == 0, labelbottom=k + columns >= len(groups))
        grid.append(axes)
    return figure, grid


def label_outer(grid: list[Axes], columns: int, x: Callable[[Axes], None], y: Callable[[Axes], None]) -> None:
    """Label only the left and the lowest axes of small multiples."""
    for k, axes in enumerate(grid):
        x(axes)
        y(axes)
        if k % columns:
            axes.set_ylabel("")
        if k + columns < len(grid):
            axes.set_xlabel("")


def thinned(count: int, inches: float, needed: float) -> list[int]:
    """Return the positions of `count` labels that fit into `inches` if each needs `needed` inches."""
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9) if inches / count * s >= needed)
    return list(range(0, count, step))


def averaged(cells: NDArray[np.float64], most: int, axis: int = 0) -> NDArray[np.float64]:
    """Average neighbouring rows (axis 0) or columns (1) until at most `most` remain. NaN is ignored."""
    count = cells.shape[axis]
    if count <= most:
        return cells
    starts = np.linspace(0, count, most + 1).astype(int)[:-1]
    known = ~np.isnan(cells)
    sums = np.add.reduceat(np.where(known, cells, 0.0), starts, axis=axis)
    numbers = np.add.reduceat(known, starts, axis=axis, dtype=np.int64)
    means: NDArray[np.float64] = np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)
    return means


def clipped(name: str, length: int = 16) -> str:
    """Cut a name that is too long for an axis."""
    return name if len(name) <= length else name[: length - 1] + "…"


def shortened(names: Mapping[int, str], room: int = ROOM) -> list[str]:
    """Return names by number as shown: longer ones than `room` letters lose their middle.

    Names that would then be equal end with their numbers instead.
    """
    cut = {k: _cut(name, room) for k, name in names.items()}
    alike = Counter(cut.values())
    return [
        shown if alike[shown] == 1 or shown == names[k] else f"{names[k][: room - len(str(k)) - 2].rstrip()}… {k}"
        for k, shown in cut.items()
    ]


def _cut(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    end = (room - 1) // 2
    return f"{name[: room - 1 - end]}…{name[-end:]}"


def inches(labels: Sequence[str], size: float = 9.0) -> float:
    """Return the approximate length of the longest label in inches. size: letters in points.

    East Asian letters are twice as wide.
    """
    return 0.0083 * size * max(map(cell_len, labels), default=0)


Drawn = tuple[str, str, Callable[[], Figure]]  # title, caption, picture
