"""The data frame of `corolla.compare`, which prints only columns with values."""

from __future__ import annotations

from html import escape

import pandas


class Comparison(pandas.DataFrame):  # type: ignore[misc]
    """A data frame that prints its columns with values, and names the others below."""

    def __repr__(self) -> str:
        """Return the columns with values as text."""
        shown, without = _with_values(self)
        return "\n".join([repr(shown), *without])

    def _repr_html_(self) -> str | None:
        """Return the columns with values as HTML."""
        shown, without = _with_values(self)
        return "".join([shown._repr_html_() or "", *(f"<p>{escape(line)}</p>" for line in without)])


def _with_values(frame: pandas.DataFrame) -> tuple[pandas.DataFrame, list[str]]:
    """Return a frame's columns that have a value in any row, and a line that names the others; no line without any."""
    shown = pandas.DataFrame(frame).dropna(axis="columns", how="all")
    without = [str(name) for name in frame.columns if name not in shown.columns]
    return shown, [f"no values: {', '.join(without)}"] * bool(without)
