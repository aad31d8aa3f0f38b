"""What all pictures of the report share: looks, axes, legends, rendering; matplotlib's objects, no pyplot.

Runs are told apart by colour (Okabe-Ito), line style and marker, so also in black and white: one colour per method, one
line style per run of a method, one marker per run.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fl_app.report.arrays import (
    Run,
    short,
)  # fmt: skip

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK, SKY)
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.3, 1.4)), (0, (7, 2, 1.3, 2)), (0, (12, 3)))
MARKERS = "os^DvXP<>dp*"
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "oo", "++")
WIDTH = 11.0  # inches, shown as 1100 pixels
DPI = 160
NEVER: dict[str, Any] = {"hatch": "////", "edgecolor": "0.7", "facecolor": "white"}  # cells that hold nothing
COLOURS_OF_VALUES = "viridis"  # lightness grows with the value, no grey
TOGETHER = 4  # runs whose quartiles can share one picture
STYLE: Any = {
    "font.size": 10, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "0.9", "axes.axisbelow": True,
    "legend.frameon": False, "lines.linewidth": 1.7, "lines.markersize": 6.2, "hatch.linewidth": 0.6,
    "text.parse_math": False, "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """A picture of the report. name: of its file; caption: how to read it."""

    name: str
    title: str
    caption: str
    png: bytes


Drawn = tuple[str, str, Figure]  # title, caption, picture


@dataclass(frozen=True)
class Look:
    """How a run is drawn."""

    colour: str
    line: Any
    marker: str
    turn: int = 0  # whose turn it is to carry a marker, so that lines on top of each other show all markers

    def line_style(self, points: int) -> dict[str, Any]:
        """Arguments for a line with this many points; at most about a dozen carry a marker."""
        step = max(1, math.ceil(points / 12), min(2, points // 4))
        return {
            "color": self.colour, "linestyle": self.line, "marker": self.marker, "markevery": (self.turn % step, step),
            "markeredgecolor": "white", "markeredgewidth": 0.6,
        }  # fmt: skip


def looks(runs: Sequence[Run]) -> dict[int, Look]:
    """Return each run's look, by its number."""
    methods = list(dict.fromkeys(run.method for run in runs))
    seen: dict[str, int] = {}
    out = {}
    for k, run in enumerate(runs):
        group, within = methods.index(run.method), seen.get(run.method, 0)
        seen[run.method] = within + 1
        colour = group if len(methods) > 1 else k
        line = within if len(runs) > len(methods) > 1 else k
        out[run.number] = Look(COLOURS[colour % len(COLOURS)], LINES[line % len(LINES)], MARKERS[k % len(MARKERS)], k)
    return out


def new_figure(height: float, width: float = WIDTH, arranged: bool = True) -> Figure:
    """Return an empty figure, sizes in inches; arranged: what is put into it finds its place by itself."""
    figure = Figure(figsize=(width, height), layout="constrained" if arranged else None)
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """Render a figure."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()


# Pieces ---------------------------------------------------------------------------------------------------------------


def listed(runs: Sequence[Run]) -> str:
    """Name runs by their numbers."""
    return ("run " if len(runs) == 1 else "runs ") + ", ".join(str(run.number) for run in runs)


def percent_axis(axes: Axes, label: str = "test accuracy (%)") -> None:
    """Make y a percentage, of values that are ratios."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}"))
    axes.set_ylabel(label)


def rounds_axis(axes: Axes, last: int = 0) -> None:
    """Make x the round; last: of those that lines run to, 0 leaves the limits."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if last:
        pad = max(0.5, 0.03 * last)
        axes.set_xlim(1 - pad, last + pad)
    axes.set_xlabel("round")


def legend(figure: Figure, axes: Axes, runs: Sequence[Run]) -> None:
    """Put one legend for all runs below the axes; a single run needs none."""
    if len(runs) < 2:
        return
    handles, labels = axes.get_legend_handles_labels()
    column = 5.9 * max(map(len, labels)) + 62  # points: a label's letters, line and gaps
    columns = max(1, min(len(labels), int(72 * WIDTH / column)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.6, fontsize=9.5)


def small_multiples(runs: Sequence[Run], draw: Callable[[Axes, Run, bool], None]) -> tuple[Figure, list[Axes]]:
    """One small picture per run, with the other runs in grey behind it. draw(axes, run, in_focus)."""
    columns = 4 if len(runs) > 4 else len(runs)
    rows = math.ceil(len(runs) / columns)
    figure = new_figure(0.4 + 2.35 * rows)
    first: Axes | None = None
    grid: list[Axes] = []
    for k, run in enumerate(runs):
        axes = figure.add_subplot(rows, columns, k + 1, sharex=first, sharey=first)
        first = first or axes
        for other in runs:
            if other is not run:
                draw(axes, other, False)
        draw(axes, run, True)
        axes.set_title("\n".join(textwrap.wrap(short(run.label, 56), 31)), fontsize=9)
        axes.tick_params(labelleft=k % columns == 0, labelbottom=k + columns >= len(runs))
        grid.append(axes)
    return figure, grid


def thinned(count: int, inches: float, needed: float) -> list[int]:
    """Positions of the labels that fit when each needs so many inches."""
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9) if inches / count * s >= needed)
    return list(range(0, count, step))


def label_outer(grid: list[Axes], columns: int, x: Callable[[Axes], None], y: Callable[[Axes], None]) -> None:
    """Label only the left and lowest axes of small multiples."""
    for k, axes in enumerate(grid):
        x(axes)
        y(axes)
        if k % columns:
            axes.set_ylabel("")
        if k + columns < len(grid):
            axes.set_xlabel("")
