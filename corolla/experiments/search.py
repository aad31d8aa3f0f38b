"""An adaptive search over a sweep file's `[search]` (`corolla sweep FILE --optuna N`), with Optuna.

A trial draws a value for each key of `[search]`, and runs every combination of the file's grids and variants with these
values: usually the seeds. Its figure is the mean of the runs' final headline on validation data; test data choose nothing.

The study is a SQLite file in the sweep's directory, which Optuna's own tools read. It is bound to the search: the same
command continues it. The draw of a trial depends on its number and on the trials before it, so an interrupted search
continues as it would have without the interruption. A trial that was interrupted is repeated with its values; its runs
are the sweep's, so they continue from their checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import Point, Range, Sweep, identity
from fl_app import extras, tasks
from fl_app.errors import UserError
from fl_app.keys import Scalar

if TYPE_CHECKING:
    from optuna.trial import Trial

STUDY = "study.db"
# digits of a drawn number with a fraction
_DIGITS = 3
_SEARCH, _ENDED, _VALUES = "search", "ended", "values"


@dataclass(frozen=True)
class Drawn:
    """A trial: its number, from 1, and its values by key."""

    number: int
    values: Mapping[str, Scalar]

    def plan(self, sweep: Sweep) -> Sweep:
        """Return the sweep of the trial's runs."""
        own = {key: [value] for key, value in self.values.items()}
        return dataclasses.replace(sweep, search={}, grids=[{**own, **grid} for grid in sweep.grids])


class Study:
    """The trials so far, in a file of a directory."""

    def __init__(self, directory: Path, sweep: Sweep, overrides: Mapping[str, Scalar]) -> None:
        """Open or begin it. Raises UserError without Optuna, and for a file of another search."""
        extras.require("optuna", "--optuna")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space, path = sweep.search, directory / STUDY
        asked = json.dumps([dataclasses.asdict(sweep), dict(overrides)], sort_keys=True)
        self._study = optuna.create_study(
            storage=f"sqlite:///{path}", study_name="corolla", direction="maximize", load_if_exists=True
        )
        if self._study.user_attrs.setdefault(_SEARCH, asked) != asked:
            raise UserError(
                key="--optuna",
                rule=f"{path} is the study of another search, in its file or its --set; choose another --output-dir",
            )
        self._study.set_user_attr(_SEARCH, asked)
        self._open: dict[int, Trial] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state.name != "RUNNING":
                continue
            # an interrupted command began it
            figure = trial.user_attrs.get(_ENDED)
            self._study.tell(trial.number, figure, state=None if figure is not None else optuna.trial.TrialState.FAIL)
            if _ENDED not in trial.user_attrs:
                self._study.enqueue_trial(trial.params)

    @property
    def trials(self) -> list[Drawn]:
        """The trials that have ended, also those whose runs failed."""
        ended = [t for t in self._study.get_trials(deepcopy=False) if _ENDED in t.user_attrs]
        return [Drawn(k, t.user_attrs[_VALUES]) for k, t in enumerate(ended, 1)]

    def ask(self) -> Drawn:
        """Begin the next trial."""
        import optuna

        number = len(self.trials)
        self._study.sampler = optuna.samplers.TPESampler(seed=number)
        trial = self._study.ask()
        values = {key: _drawn(trial, key, space) for key, space in self._space.items()}
        trial.set_user_attr(_VALUES, values)
        self._open[number + 1] = trial
        return Drawn(number + 1, values)

    def tell(self, drawn: Drawn, figure: float | None, higher_is_better: bool) -> None:
        """End a trial. figure: None if its runs failed."""
        import optuna

        trial = self._open.pop(drawn.number)
        value = figure if figure is None or higher_is_better else -figure
        trial.set_user_attr(_ENDED, value)
        self._study.tell(trial, value, state=None if value is not None else optuna.trial.TrialState.FAIL)


def _drawn(trial: Trial, key: str, space: Range | Sequence[Scalar]) -> Scalar:
    if not isinstance(space, Range):
        chosen: object = trial.suggest_categorical(key, list(space))
        return cast(Scalar, chosen)
    if isinstance(space.low, int) and isinstance(space.high, int):
        return trial.suggest_int(key, space.low, space.high, log=space.log)
    value = trial.suggest_float(key, space.low, space.high, log=space.log)
    return min(max(float(f"{value:.{_DIGITS}g}"), space.low), space.high)


def figure_of(points: Sequence[Point], finished: Mapping[str, RecordedRun]) -> float | None:
    """Return the mean over a trial's runs of the final headline on validation data; None if a run lacks it."""
    values = []
    for point in points:
        run, headline = finished.get(identity(point.parsed)), tasks.measured(point.parsed)[0]
        value = None if run is None else run.summary.get(f"final-validation-{headline.name}")
        if value is None or not math.isfinite(value):
            return None
        values.append(float(value))
    return sum(values) / len(values)


def higher_is_better(points: Sequence[Point]) -> bool:
    """Return whether the search maximizes. Raises UserError for runs with different headlines, or without validation data."""
    headlines = {tasks.measured(point.parsed)[0] for point in points}
    if len(headlines) > 1:
        names = ", ".join(sorted(one.name for one in headlines))
        raise UserError(key="--optuna", rule=f"all runs must have one headline metric, got {names}")
    if lacking := [point.name for point in points if not point.parsed.validation_ratio]:
        raise UserError(
            key="--optuna",
            rule=f"chooses on validation data: set validation-ratio above 0 in [settings]; it is 0 in {lacking[0]}",
        )
    return headlines.pop().higher_is_better
