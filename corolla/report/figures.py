"""What all pictures of the report share: a picture and its files, axes, legends; matplotlib's objects, no pyplot."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from corolla.report.groups import Group, short
from corolla.report.style import DARK, LIGHT, Look, looks

# inches, shown as 1100 pixels
WIDTH = 11.0
DPI = 160
# curves whose spread can share one picture
TOGETHER = 4


@dataclass(frozen=True)
class Panel:
    """A picture of the report. name: of its files; caption: how to read it; folded: the page shows it on demand.

    draw: called anew for every rendering, with the settings of light or dark pictures in force.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    folded: bool = False

    def render(self, kind: str = "png", dark: bool = False) -> bytes:
        """Return the picture as a png, svg or pdf file; the same bytes every time."""
        out = io.BytesIO()
        with rc_context(DARK if dark else LIGHT):
            dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            self.draw().savefig(out, format=kind, dpi=DPI, metadata=dates)
        return out.getvalue()


def new_figure(height: float, width: float = WIDTH, arranged: bool = True) -> Figure:
    """Return an empty figure, sizes in inches; arranged: what is put into it finds its place by itself."""
    figure = Figure(figsize=(width, height), layout="constrained" if arranged else None)
    FigureCanvasAgg(figure)
    return figure


# Pieces ---------------------------------------------------------------------------------------------------------------


def styled(groups: Sequence[Group]) -> dict[int, Look]:
    """Return each group's look, by its number."""
    return {group.number: look for group, look in zip(groups, looks([g.method for g in groups]), strict=True)}


def listed(numbers: Sequence[object]) -> str:
    """Name runs by their numbers."""
    return ("run " if len(numbers) == 1 else "runs ") + ", ".join(map(str, numbers))


def percent_axis(axes: Axes, label: str) -> None:
    """Make y a percentage, of values that are ratios."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}"))
    axes.set_ylabel(label)


def metric_axis(groups: Sequence[Group]) -> Callable[[Axes], None]:
    """Return what makes y the groups' headline metric, of ratios a percentage."""
    metric = groups[0].first.headline

    def label(axes: Axes) -> None:
        if metric.ratio:
            percent_axis(axes, f"test {metric.title} (%)")
        else:
            axes.set_ylabel(f"test {metric.title}")

    return label


def rounds_axis(axes: Axes, last: int = 0) -> None:
    """Make x the round; last: of those that lines run to, 0 leaves the limits."""
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
    # points: a label's letters, line and gaps
    column = 5.9 * max(map(len, labels)) + 62
    columns = max(1, min(len(labels), int(72 * WIDTH / column)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.6, fontsize=9.5)


def small_multiples(groups: Sequence[Group], draw: Callable[[Axes, Group, bool], None]) -> tuple[Figure, list[Axes]]:
    """One small picture per group, with the others in grey behind it. draw(axes, group, in_focus)."""
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
    """Label only the left and lowest axes of small multiples."""
    for k, axes in enumerate(grid):
        x(axes)
        y(axes)
        if k % columns:
            axes.set_ylabel("")
        if k + columns < len(grid):
            axes.set_xlabel("")


def thinned(count: int, inches: float, needed: float) -> list[int]:
    """Positions of the labels that fit when each needs so many inches."""
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9) if inches / count * s >= needed)
    return list(range(0, count, step))


def clipped(name: str, length: int = 16) -> str:
    """Cut a name that is too long for an axis."""
    return name if len(name) <= length else name[: length - 1] + "…"


Drawn = tuple[str, str, Callable[[], Figure]]  # title, caption, picture
