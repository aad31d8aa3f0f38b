"""Layout of tables on a terminal. No name and no number is cut.

A table that is too wide is narrowed in this order. Headings break at hyphens and dots, and long cells wrap at their
spaces. Lines between cells go, then optional columns. Shorter cells wrap, but never the first column, and no note in
brackets. If even that does not fit, each row becomes a list with one line per cell.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

Lines = Sequence[Sequence[str]]

# terminal columns of a cell that does not wrap: at first, and where it is not enough that optional columns are left out
_LONG, _SHORTER = 30, (20, 14, 10, 8)
_KEPT = "\u00a0"


def fit(
    lines: Lines, width: int, may_be_missing: Sequence[str] = (), *, numbers_right: bool = False
) -> tuple[Table | str, list[str]]:
    """Return a table for a terminal, or a text with markup if none fits, and the columns that were left out.

    lines: header first. width: of the terminal. may_be_missing: columns that may be left out, in this order.
    numbers_right: all columns but the first are aligned to the right.
    """
    long = _narrowed(lines, _LONG)
    for rows, lined in ((lines, True), (long, True), (long, False)):
        if needed(rows, lined) <= width:
            return _drawn(rows, lined, numbers_right), []
    missing: list[str] = []
    for name in may_be_missing:
        if name in lines[0]:
            missing.append(name)
            rows = _narrowed(_without(lines, missing), _LONG)
            if needed(rows, lined=False) <= width:
                return _drawn(rows, False, numbers_right), missing
    for most in _SHORTER:
        rows = _narrowed(_without(lines, missing), most)
        if needed(rows, lined=False) <= width:
            return _drawn(rows, False, numbers_right), missing
    header, *body = lines
    # a list has room for all columns
    texts = ["\n".join(f"{name}: {cell}" for name, cell in zip(header, row, strict=True)) for row in body]
    return escape("\n\n".join(texts)), []


def needed(lines: Lines, lined: bool = True) -> int:
    """Return a table's width in terminal columns. lined: with lines between cells."""
    widths = [max(_width(line[k]) for line in lines) for k in range(len(lines[0]))]
    return sum(widths) + (3 * len(widths) + 1 if lined else 2 * (len(widths) - 1))


def _width(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))


def _without(lines: Lines, missing: Sequence[str]) -> Lines:
    kept = [k for k, heading in enumerate(lines[0]) if heading not in missing]
    return [[line[k] for k in kept] for line in lines]


def _narrowed(lines: Lines, most: int) -> Lines:
    """Return a table whose cells wrap beyond `most` terminal columns, and whose headings are no wider than need be."""
    body = [[row[0], *(_wrapped(cell, most) for cell in row[1:])] for row in lines[1:]]
    widths = [max([_width(row[k]) for row in body], default=1) for k in range(len(lines[0]))]
    return [list(map(_broken, lines[0], widths)), *body]


def _wrapped(cell: str, most: int) -> str:
    whole = re.sub(r"\(.*\)", lambda note: note[0].replace(" ", _KEPT), cell)
    lines = textwrap.wrap(whole, most, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_KEPT, " ")


def _broken(heading: str, width: int) -> str:
    """Break a heading at hyphens, dots and spaces into lines of a width, or as short as possible."""
    lines = [""]
    for piece in re.findall(r"[^-. ]+[-. ]?|[-. ]", heading):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _drawn(lines: Lines, lined: bool, numbers_right: bool) -> Table:
    table = Table(box=box.HEAVY_HEAD if lined else None, padding=(0, 1) if lined else (0, 2, 0, 0), pad_edge=lined)
    for k, heading in enumerate(lines[0]):
        table.add_column(escape(heading), justify="right" if numbers_right and k else "left", no_wrap=True)
    for row in lines[1:]:
        table.add_row(*map(escape, row))
    return table
