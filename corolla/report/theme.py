"""The theme of all pictures: light and dark paper, fonts, and each method's colour, line and marker.

A method looks the same in every picture of every report: a hash of its name selects the style. There are nine colours
that colour-blind readers can distinguish (Okabe and Ito's without yellow, and two darker ones). They are too few for
all methods, so lines and markers differ too, also in black and white. Several runs of one method have lighter and
darker shades of its colour, and different lines and markers.

A picture is a Vega-Lite specification. Its colours are expressions of the signal `dark`, so the page turns from light
to dark without drawing anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
# dashes and gaps in pixels
LINES = ([1, 0], [9, 4], [2.5, 2.5], [12, 4, 2.5, 4], [20, 6])
# Vega's names of shapes, and outlines of others in a square from -1 to 1
MARKERS = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "M-.9-.5L-.5-.9L0-.4L.5-.9L.9-.5L.4 0L.9.5L.5.9L0 .4L-.5.9L-.9.5L-.4 0Z",
    "cross",
    "triangle-left",
    "triangle-right",
    "M0-1L.55 0L0 1L-.55 0Z",
    "M0-1L.95-.31L.59.81L-.59.81L-.95-.31Z",
    "M0-1L.26-.31L.95-.31L.4.13L.62.85L0 .45L-.62.85L-.4.13L-.95-.31L-.26-.31Z",
)
# its lightness grows with the value, and it contains no grey
COLOURS_OF_VALUES = "viridis"
# Salt of the hash, chosen so that methods that are often compared get different colours, and no two look the same.
SALT = 1222002
# shades of a method's first, second, ... run: positive towards paper, negative towards ink
SHADES = (0.0, 0.4, -0.35)
PAPER, DARK_PAPER = "#ffffff", "#17181a"


def two(light: str, dark: str) -> dict[str, str]:
    """Return a colour of its own on light and on dark paper."""
    return {"expr": f"dark ? '{dark}' : '{light}'"}


INK, SOFT, FAINT, EMPTY = (
    two("#1b1b1b", "#e4e4e4"),
    two("#777777", "#909090"),
    two("#e4e4e4", "#36383c"),
    two("#dcdcdc", "#45484d"),
)
_TEXT = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12.5, "titleFontWeight": "normal"}
CONFIG: dict[str, Any] = {
    # `client`: the name of the client that is highlighted; empty: none. `moves`: a reader can move the axes
    "params": [{"name": "dark", "value": False}, {"name": "client", "value": ""}, {"name": "moves", "value": True}],
    # a description of each mark is most of a file
    "mark": {"aria": False},
    "background": two(PAPER, DARK_PAPER),
    "font": "system-ui, DejaVu Sans, sans-serif",
    "axis": {**_TEXT, "gridColor": FAINT, "domainColor": SOFT, "tickColor": SOFT, "labelLimit": 200, "titleLimit": 900},
    "axisX": {"labelOverlap": True, "labelFlush": False, "labelSeparation": 6},
    "axisY": {"labelOverlap": True},
    "legend": {
        **_TEXT,
        "orient": "bottom",
        "labelLimit": 400,
        "titleLimit": 500,
        "symbolSize": 80,
        "symbolStrokeWidth": 2,
    },
    "header": {**_TEXT, "labelFontSize": 13, "labelFontWeight": "bold", "labelAnchor": "start", "labelLimit": 420},
    "title": {"color": INK, "fontSize": 13, "anchor": "start", "frame": "group"},
    "view": {"stroke": None},
    "text": {"color": INK},
    "line": {"strokeWidth": 1.9},
}
# of a file
STILL = {**CONFIG, "params": [*CONFIG["params"][:2], {"name": "moves", "value": False}]}


@dataclass(frozen=True)
class Look:
    """Style of a line. colour: one of COLOURS. line: dashes and gaps. shade: from -1 (ink) to 1 (paper)."""

    colour: str
    line: Any
    marker: str
    shade: float = 0.0

    @property
    def drawn(self) -> dict[str, str]:
        """The colour on the current paper."""
        return two(self.on(dark=False), self.on(dark=True))

    def on(self, dark: bool) -> str:
        """Return the colour on light or dark paper."""
        base = ON_DARK[self.colour] if dark else self.colour
        share, to_paper = abs(self.shade), self.shade >= 0
        # black cannot get darker
        if self.colour == BLACK and not to_paper:
            share, to_paper = 0.65, True
        target = (DARK_PAPER if dark else PAPER) if to_paper else (PAPER if dark else BLACK)
        mixed = ((1 - share) * a + share * b for a, b in zip(bytes_of(base), bytes_of(target), strict=True))
        return "#" + "".join(f"{round(value):02x}" for value in mixed) if share else base


def bytes_of(colour: str) -> bytes:
    """Return red, green and blue of a colour, given as #rrggbb."""
    return bytes.fromhex(colour[1:])


def of_colour(colour: str) -> dict[str, str]:
    """Return one of COLOURS on the current paper."""
    return Look(colour, None, "").drawn


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
    for method in methods:
        k = seen[method] = seen.get(method, -1) + 1
        colour, line, marker = of_method(method)
        line, marker = (line + k) % len(LINES), (marker + k) % len(MARKERS)
        out.append(Look(COLOURS[colour], LINES[line], MARKERS[marker], SHADES[k % len(SHADES)]))
    return out


def plain_looks(count: int) -> list[Look]:
    """Return the looks of lines that belong to no method, in colours and then in shades of them."""
    return [
        Look(COLOURS[k % 9], LINES[k % len(LINES)], MARKERS[k % len(MARKERS)], SHADES[k // 9 % len(SHADES)])
        for k in range(count)
    ]
