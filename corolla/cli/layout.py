"""Layout of tables on a terminal: the first column stays whole as long as possible, and numbers are never cut.

A table that is too wide is narrowed in this order. Headings break at hyphens and dots, and words wrap. Lines between
cells go, then optional columns. Numbers wrap at their spaces, and the first column wraps. A number always stays with
its number of clients. If even that does not fit, each row becomes a list with one line per cell.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

# terminal columns that each cell needs in addition to its text, with and without lines between cells
_WITH_LINES, _WITHOUT = 3, 2
# least width of a column of words, and of wrapped names
_WORDS, _NAMES = 11, 12
# a word with a digit and more letters than this is not a number but a path, which may be cut
_LONGEST_NUMBER = 24

# _GAP matches the space between a number and its unit or deviation. _TOGETHER replaces this space while a cell is
# wrapped.
_GAP = re.compile(r"(?<=\d) (?=[±%]|\.\.|[kMG]?B\b)|(?<=[±.]) (?=[-+\d])")
# a number with its number of clients: without the latter it means something else
_NOTED = re.compile(r"\S.* \(\d+ of \d+ clients?\)")
_TOGETHER = "\u00a0"

Lines = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Fitted:
    """A table that fits the terminal, header first.

    widths: of its columns; empty if it does not fit as a table. missing: columns that were left out. lined: with lines
    between cells.
    """

    lines: Lines
    widths: Sequence[int]
    missing: Sequence[str] = ()
    lined: bool = True

    @property
    def needed(self) -> int:
        """Width of the table in terminal columns."""
        if self.lined:
            return sum(self.widths) + _WITH_LINES * len(self.widths) + 1
        return sum(self.widths) + _WITHOUT * (len(self.widths) - 1)

    def drawn(self, *, numbers_right: bool = False) -> Table | str:
        """Return it as a table, or as text with markup if it does not fit as a table."""
        header, *body = self.lines
        if not self.widths:
            rows = ["\n".join(f"{name}: {cell}" for name, cell in zip(header, row, strict=True)) for row in body]
            return escape("\n\n".join(rows))
        table = Table() if self.lined else Table(box=None, padding=(0, _WITHOUT, 0, 0), pad_edge=False)
        for k, (name, width) in enumerate(zip(header, self.widths, strict=True)):
            heading = "\n".join(_broken(name, width))
            right = numbers_right and k > 0
            table.add_column(escape(heading), width=width, overflow="fold", justify="right" if right else "left")
        for row in body:
            cells = (_wrapped(cell, width) for cell, width in zip(row, self.widths, strict=True))
            table.add_row(*(escape("\n".join(cell)) for cell in cells))
        return table


def fit(lines: Lines, width: int, may_be_missing: Sequence[str] = ()) -> Fitted:
    """Return a table with widths for a terminal. lines: header first. width: of the terminal; 0: unlimited.

    may_be_missing: columns that may be left out, in this order.
    """
    whole = Fitted(lines, [max(cell_len(line[k]) for line in lines) for k in range(len(lines[0]))])
    if not width or whole.needed <= width:
        return whole
    missing: list[str] = []
    found = _squeezed(Fitted(lines, ()), width) or _squeezed(Fitted(lines, (), lined=False), width)
    for name in (name for name in may_be_missing if name in whole.lines[0]):
        if found:
            return found
        k = list(lines[0]).index(name)
        lines = [[*line[:k], *line[k + 1 :]] for line in lines]
        missing.append(name)
        found = _squeezed(Fitted(lines, (), tuple(missing), lined=False), width)
    rest = Fitted(lines, (), tuple(missing), lined=False)
    found = found or _squeezed(rest, width, numbers_wrap=True) or _squeezed(rest, width, True, names_wrap=True)
    # a list has room for all columns
    return found or Fitted(whole.lines, ())


def _squeezed(table: Fitted, width: int, numbers_wrap: bool = False, names_wrap: bool = False) -> Fitted | None:
    """Return a table with narrower columns that fits; None if that is impossible."""
    header, *body = table.lines
    least, most = [], []
    for k, name in enumerate(header):
        cells = [row[k] for row in body]
        natural = max([cell_len(cell) for cell in cells], default=1)
        if k == 0:
            narrow = min(natural, _NAMES) if names_wrap else natural
        elif _is_numbers(cells) and not numbers_wrap:
            narrow = natural
        else:
            narrow = max([_narrowest(cell, numbers_wrap) for cell in cells], default=1)
        heading = max(map(cell_len, _broken(name, 1)), default=1)
        least.append(max(narrow, heading, 1))
        most.append(max(natural, cell_len(name), 1))
    spare = width - dataclasses.replace(table, widths=least).needed
    if spare < 0:
        return None
    # distribute the remaining width over the columns that can use it, in turn
    wider = [k for k in range(len(header)) if least[k] < most[k]]
    while spare and wider:
        for k in list(wider):
            if spare and least[k] < most[k]:
                least[k], spare = least[k] + 1, spare - 1
            if least[k] >= most[k]:
                wider.remove(k)
    return dataclasses.replace(table, widths=least)


def _narrowest(cell: str, numbers_wrap: bool) -> int:
    """Return the least width of a cell that cuts no number and wraps no short word."""
    words = _kept(cell) if numbers_wrap else _held(cell)
    return max([_least_of(word) for word in words.split(" ")], default=1)


def _held(cell: str) -> str:
    """Return a cell with numbers joined to their units, deviations and numbers of clients."""
    return _GAP.sub(_TOGETHER, _kept(cell))


def _kept(cell: str) -> str:
    """Return a cell with each number joined to its number of clients, which must never break."""
    return _NOTED.sub(lambda found: found[0].replace(" ", _TOGETHER), cell)


def _wrapped(cell: str, width: int) -> list[str]:
    """Wrap a cell at its spaces. A number is separated from its unit or deviation only if both do not fit on one line."""
    lines = textwrap.wrap(_held(cell), width) or [""]
    if any(cell_len(word) > width for word in _held(cell).split(" ") if _TOGETHER in word):
        lines = textwrap.wrap(_kept(cell), width)
    return [line.replace(_TOGETHER, " ") for line in lines]


def _least_of(word: str) -> int:
    is_number = _TOGETHER in word or (any(map(str.isdigit, word)) and len(word) <= _LONGEST_NUMBER)
    return cell_len(word) if is_number else min(cell_len(word), _WORDS)


def _is_numbers(cells: Sequence[str]) -> bool:
    told = [cell for cell in cells if cell not in ("", "–", "n/a")]
    return bool(told) and all(any(map(str.isdigit, cell)) and len(cell) <= _LONGEST_NUMBER for cell in told)


def _broken(heading: str, width: int) -> list[str]:
    """Break a heading at hyphens, dots and spaces into lines of a width, or as short as possible."""
    pieces = re.findall(r"[^-. ]*[-. ]?", heading)
    lines = [""]
    for piece in pieces:
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
