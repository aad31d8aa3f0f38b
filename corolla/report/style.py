"""Style of pictures: light and dark paper, and each method's colour, line and marker.

A method looks the same in every picture of every report: a hash of its name selects the style. There are nine colours
that colour-blind readers can distinguish (Okabe and Ito's without yellow, and two darker ones). They are too few for
all methods, so lines and markers differ too, also in black and white. Several runs of one method have lighter and
darker shades of its colour, and different lines and markers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, WINE, INDIGO = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#332288",
)
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, BLACK, SKY, WINE, INDIGO)
ON_DARK = {
    BLUE: "#2D8FD5",
    VERMILLION: "#E8701A",
    GREEN: "#00AD7E",
    PURPLE: "#DB8FB9",
    ORANGE: "#E9A820",
    SKY: "#7CC8F2",
    BLACK: "#F0F0F0",
    WINE: "#A93F7B",
    INDIGO: "#6A36FE",
}
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.3, 1.4)), (0, (7, 2, 1.3, 2)), (0, (12, 3)))
MARKERS = "os^DvXP<>dp*"
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "oo", "++")
# its lightness grows with the value, and it contains no grey
COLOURS_OF_VALUES = "viridis"
# Salt of the hash, chosen so that methods that are often compared get different colours, and no two look the same.
SALT = 1222002
# shades of a method's first, second, ... run: positive towards paper, negative towards ink
SHADES = (0.0, 0.4, -0.35)

_COMMON: Any = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 6.2,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "corolla",
    "pdf.fonttype": 42,
}
LIGHT: Any = _COMMON
DARK_PAPER, DARK_INK = "#17181a", "#e4e4e4"
DARK: Any = (
    _COMMON
    | dict.fromkeys(
        (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "legend.labelcolor",
        ),
        DARK_INK,
    )
    | dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), DARK_PAPER)
    | {"grid.color": "0.22"}
)


# Light and dark, from matplotlib's current settings -------------------------------------------------------------------


def on_dark() -> bool:
    """Return whether a dark picture is being drawn."""
    return bool(rcParams["figure.facecolor"] == DARK_PAPER)


def paper() -> str:
    """Return the colour of the background."""
    return DARK_PAPER if on_dark() else "white"


def tone(part: float) -> str:
    """Return a grey between ink (0) and paper (1)."""
    return f"{0.9 - 0.81 * part:.3f}" if on_dark() else f"{part:.3f}"


def shown(colour: str) -> str:
    """Return the variant of one of COLOURS for the current paper."""
    return ON_DARK[colour] if on_dark() else colour


def colours_of(count: int) -> list[str]:
    """Return this many different colours for the current paper: COLOURS, or a rainbow if these are too few."""
    if count <= len(COLOURS):
        return [shown(colour) for colour in COLOURS[:count]]
    return [to_hex(colormaps["turbo"](place)) for place in np.linspace(0.04, 0.96, count)]


def empty_cells() -> dict[str, Any]:
    """Return the style of cells without a value."""
    return {"hatch": "////", "edgecolor": tone(0.7), "facecolor": paper()}


def shares() -> Any:
    """Return the colour map of shares: paper for 0, ink for 1."""
    return LinearSegmentedColormap.from_list("shares", [DARK_PAPER, "#f5f5f5"]) if on_dark() else "Greys"


# Methods --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """Style of a line. colour: one of COLOURS. shade: from -1 (ink) to 1 (paper)."""

    colour: str
    line: Any
    marker: str
    # offset of the markers, so that lines on top of each other show all their markers
    turn: int = 0
    shade: float = 0.0

    def drawn(self) -> str:
        """Return the colour on the current paper."""
        return self.on(on_dark())

    def on(self, dark: bool) -> str:
        """Return the colour on light or dark paper."""
        base = ON_DARK[self.colour] if dark else self.colour
        share, to_paper = abs(self.shade), self.shade >= 0
        # black cannot get darker
        if self.colour == BLACK and not to_paper:
            share, to_paper = 0.65, True
        target = (DARK_PAPER if dark else "white") if to_paper else ("white" if dark else "black")
        r, g, b = ((1 - share) * a + share * b for a, b in zip(to_rgb(base), to_rgb(target), strict=True))
        return to_hex((r, g, b)) if share else base

    def line_style(self, points: int) -> dict[str, Any]:
        """Return matplotlib's arguments for a line with this many points. At most about a dozen of them carry a marker."""
        step = max(1, math.ceil(points / 12), min(2, points // 4))
        return {
            "color": self.drawn(),
            "linestyle": self.line,
            "marker": self.marker,
            "markevery": (self.turn % step, step),
            "markeredgecolor": paper(),
            "markeredgewidth": 0.6,
        }


def of_method(name: str) -> tuple[int, int, int]:
    """Return a method's indices into COLOURS, LINES and MARKERS, which depend only on its name."""
    number = int.from_bytes(hashlib.sha256(f"{SALT} {name}".encode()).digest()[:8], "big")
    number, colour = divmod(number, len(COLOURS))
    number, line = divmod(number, len(LINES))
    return colour, line, number % len(MARKERS)


def looks(methods: Sequence[str]) -> list[Look]:
    """Return the looks of lines, by their methods: equal methods get other lines, markers and shades of one colour."""
    seen: dict[str, int] = {}
    out = []
    for turn, method in enumerate(methods):
        k = seen[method] = seen.get(method, -1) + 1
        colour, line, marker = of_method(method)
        line, marker = (line + k) % len(LINES), (marker + k) % len(MARKERS)
        out.append(Look(COLOURS[colour], LINES[line], MARKERS[marker], turn, SHADES[k % len(SHADES)]))
    return out
