"""The pictures of one run as Altair charts, for notebooks: `run.plot.accuracy()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt

from corolla.report.arrays import read_runs
from corolla.report.features import of_features
from corolla.report.groups import grouped
from corolla.report.page import pictures_of
from corolla.report.pictures import Panel
from corolla.report.theme import CONFIG

if TYPE_CHECKING:
    from corolla.experiments.exported.client_answers import ClientAnswers

OF_MODELS = ("confusion", "features")
"""Pictures that test the final models when they are first asked for."""


class Plots:
    """A function for each picture that the report of this run has. `dir(run.plot)` lists them.

    A function returns an Altair chart, which can be changed and saved: `run.plot.accuracy().properties(title="July")`.
    `confusion` and `features` test the run's final models, and are not listed. tested: returns these models' answers.
    """

    def __init__(self, path: Path, tested: Callable[[Path], Sequence[ClientAnswers]]) -> None:
        groups = grouped(read_runs([path]))
        shared, own = pictures_of(groups)
        self._run, self._tested = groups[0].first, tested
        self._panels = self._named([*shared, *(panel for panels in own.values() for panel in panels)])

    def _named(self, panels: Sequence[Panel]) -> dict[str, Panel]:
        return {panel.name.removesuffix(f"-{self._run.number}").replace("-", "_"): panel for panel in panels}

    def __getattr__(self, name: str) -> Any:
        """Return the function that draws a picture. Raises AttributeError if the run has none of this name."""
        if name in OF_MODELS and name not in self._panels:
            self._panels |= self._named([*of_features(self._run, self._tested(self._run.path))])
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
