"""A picture of the report: a chart with its title and caption, and its files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from altair.utils.schemapi import debug_mode
from numpy.typing import NDArray

from corolla.report.charts import Axis, Chart
from corolla.report.theme import CONFIG
from fl_app.metrics import Metric

# pixels of a PNG per pixel of the page
SCALE = 1.6
# most letters of a client's name on an axis
ROOM = 20
# most curves with bands in one picture
TOGETHER = 4
# most rows of a picture; more clients than this are averaged with their neighbours
MOST_ROWS = 100
# most rounds that are cells of their own; more are averaged with their neighbours
MOST_COLUMNS = 200


@dataclass(frozen=True)
class Panel:
    """A picture of the report. name: its files' name. caption: explains it. folded: the page shows it on demand.

    draw: returns its chart. switch: by the names of the reader's choices, what changes along the sides that show a field.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Chart]
    folded: bool = False
    switch: Mapping[str, Mapping[str, Any]] | None = None

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The picture as Vega-Lite's JSON. `datasets` has its data as CSV, by name."""
        # checking each part against Vega-Lite's schema takes most of the time; the tests do it
        with debug_mode(False):
            found: dict[str, Any] = self.draw().to_dict(validate=False)
        extra = {"usermeta": {"switch": self.switch}} if self.switch else {}
        return {**found, "config": CONFIG, "description": f"{self.title}. {self.caption}", **extra}

    @cached_property
    def svg(self) -> str:
        """The picture as SVG. Its parts are numbered anew: the program counts on from picture to picture."""
        import vl_convert

        numbers: dict[str, int] = {}
        return re.sub(
            r'(id="|url\(#)([a-z_]+)(\d+)',
            lambda part: f"{part[1]}{part[2]}{numbers.setdefault(part[2] + part[3], len(numbers))}",
            vl_convert.vegalite_to_svg(self.spec),
        )

    def render(self, kind: str = "png") -> bytes:
        """Return the picture as a png, svg or pdf file. Equal pictures give equal bytes, but for pdf."""
        import vl_convert

        if kind == "svg":
            return self.svg.encode()
        found = vl_convert.svg_to_pdf(self.svg) if kind == "pdf" else vl_convert.svg_to_png(self.svg, scale=SCALE)
        return bytes(found)


def listed(numbers: Sequence[object]) -> str:
    """Return the names of runs, given their numbers: `runs 1, 2`."""
    return ("run " if len(numbers) == 1 else "runs ") + ", ".join(map(str, numbers))


def metric_axis(metric: Metric, limits: tuple[float, float] | None = None) -> Axis:
    """Return the axis of a metric on test data, in per cent if it is a ratio."""
    return Axis(f"test {metric.title}", "~%" if metric.ratio else "~g", limits)


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
