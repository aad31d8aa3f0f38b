"""The pictures of one run as Altair charts, for notebooks: `run.plot.accuracy()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt

from corolla.report.arrays import read_runs
from corolla.report.groups import grouped
from corolla.report.page import pictures_of
from corolla.report.theme import CONFIG


class Plots:
    """A function for each picture that the report of this run has. `dir(run.plot)` lists them.

    A function returns an Altair chart, which can be changed and saved: `run.plot.accuracy().properties(title="July")`.
    """

    def __init__(self, path: Path) -> None:
        groups = grouped(read_runs([path]))
        shared, own = pictures_of(groups)
        number = groups[0].first.number
        every = [*shared, *(panel for panels in own.values() for panel in panels)]
        self._panels = {panel.name.removesuffix(f"-{number}").replace("-", "_"): panel for panel in every}

    def __getattr__(self, name: str) -> Any:
        """Return the function that draws a picture. Raises AttributeError if the run has none of this name."""
        panel = None if name.startswith("_") else self._panels.get(name)
        if panel is None:
            raise AttributeError(f"the run has no picture {name!r}, only {', '.join(self._panels)}")

        def draw() -> alt.TopLevelMixin:
            return panel.draw().add_params(*(alt.param(**setting) for setting in CONFIG["params"]))

        draw.__doc__ = f"{panel.title}. {panel.caption}"
        return draw

    def __dir__(self) -> list[str]:
        """Return the pictures' names."""
        return [*self._panels]

    def __repr__(self) -> str:
        """Return the pictures' names with their titles."""
        return "\n".join(f"{name}(): {panel.title}" for name, panel in self._panels.items())
