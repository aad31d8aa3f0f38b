"""The data frame of `corolla.compare`, which prints what one can read: columns with values, in the terminal's width."""

from __future__ import annotations

import shutil
from html import escape

import pandas


class ComparisonFrame(pandas.DataFrame):  # type: ignore[misc]
    """A data frame that prints its columns with values, and names the others below.

    If its columns do not fit beside each other they are printed below each other, a row for each.
    """

    def __repr__(self) -> str:
        """Return the columns with values as text."""
        shown, without = _with_values(self)
        width = shutil.get_terminal_size().columns
        texts = [each.to_string(float_format="{:.4g}".format, na_rep="–") for each in (shown, shown.T)]
        fitting = [text for text in texts if max(map(len, text.splitlines())) <= width]
        narrow = shown.to_string(float_format="{:.4g}".format, na_rep="–", line_width=width)
        return "\n".join([fitting[0] if fitting else narrow, *without])

    def _repr_html_(self) -> str | None:
        """Return the columns with values as HTML."""
        shown, without = _with_values(self)
        return "".join([shown._repr_html_() or "", *(f"<p>{escape(line)}</p>" for line in without)])


def _with_values(frame: pandas.DataFrame) -> tuple[pandas.DataFrame, list[str]]:
    """Return a frame's columns that have a single value in any row, and lines that name the others."""
    tables = [name for name in frame.columns if frame[name].map(lambda value: isinstance(value, dict)).any()]
    shown = pandas.DataFrame(frame).dropna(axis="columns", how="all").drop(columns=tables)
    without = [str(name) for name in frame.columns if name not in shown.columns and name not in tables]
    lines = {"no values": without, "by client, not shown": list(map(str, tables))}
    return shown, [f"{what}: {', '.join(names)}" for what, names in lines.items() if names]
