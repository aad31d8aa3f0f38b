"""What is learned: one file per task says how arrays become inputs, what the loss is, and what is measured.

torch is imported when something is computed, not before: the command and a client that was only asked for its properties never
load it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fl_app import extras, plugins
from fl_app.config.rules import split_names
from fl_app.errors import UserError, describe
from fl_app.metrics import MAX_NUMBER, Metric, range_error
from fl_app.tasks.classification import ACCURACY, Classification
from fl_app.tasks.multi_label import MultiLabel
from fl_app.tasks.regression import Regression
from fl_app.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from fl_app.config import RunConfig

log = logging.getLogger("corolla")

__all__ = [
    "ACCURACY",
    "BUILT_IN",
    "Classification",
    "Metric",
    "MultiLabel",
    "Regression",
    "Task",
    "measure",
    "measured",
    "named",
    "of",
    "recorded_headline",
    "require_packages",
]

BUILT_IN: Mapping[str, type[Task]] = {
    "classification": Classification,
    "multi-label": MultiLabel,
    "regression": Regression,
}

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TAKEN = frozenset(
    {
        "loss",
        "sha256",
        "buffers-sha256",
        "digest",
        "digest-version",
        "test-samples",
        "clients",
        "failures",
        "absent",
        "undefined",
        "metric-errors",
    }
)


def of(config: RunConfig) -> Task:
    """Return a run's task. Raises UserError as `named` does."""
    return named(config.task)


def named(name: str) -> Task:
    """Return a task by its name, or the user's own by `module:Class`. Raises UserError if that is no task."""
    if name in BUILT_IN or not plugins.is_reference(name):
        return BUILT_IN[name]()
    found = plugins.load("task", name)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise UserError(f"task {name}: must be a class made of fl_app.tasks.Task, got {found!r}")
    try:
        task: Task = found()
    except TypeError as error:
        raise UserError(f"task {name}: {error}; it is made without arguments") from None
    names = [metric.name for metric in task.metrics]
    if not names or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)) or _TAKEN & set(names):
        raise UserError(
            f"task {name}: needs metrics named in lower case letters, digits and -, every name once and none of "
            f"{', '.join(sorted(_TAKEN))}, got {', '.join(names) or 'none'}"
        )
    return task


def measured(config: RunConfig) -> tuple[Metric, ...]:
    """Return what an evaluation of all clients measures: the headline, and what the key `metrics` asks for.

    Raises UserError for a name that is none of the task's.
    """
    task = of(config)
    known = {metric.name: metric for metric in task.metrics}
    asked = split_names(config.metrics) or tuple(task.usual or known)
    for name in asked:
        if name not in known and name != "all":
            raise UserError(f"metrics: must be all, or some of {', '.join(known)}, got {name!r}")
    return tuple(m for m in task.metrics if m is task.headline or m.name in asked or "all" in asked)


def measure(task: Task, outputs: Tensor, y: Tensor, names: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Return metrics by name, clipped to their ranges, and by name why some are NaN: they could not be had.

    A metric that fails costs no other one. A headline beyond all bounds stays, since it shows that training diverged.
    """
    names = tuple(names)
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    together: Mapping[str, float] = {}
    with contextlib.suppress(Exception):
        together = task.measure(outputs, y, names)
    rows = {metric.name: metric for metric in task.metrics}
    for name in names:
        try:
            found = together if name in together else task.measure(outputs, y, (name,))
            if name not in found:
                raise UserError("measure did not return it")
            values[name] = rows[name].clipped(float(found[name]))
            diverged = name == task.headline.name and MAX_NUMBER < abs(values[name]) < math.inf
            if not diverged and (error := range_error(name, values[name], *rows[name].range)):
                raise UserError(error)
        except Exception as error:
            log.debug("metric %s", name, exc_info=True)
            values[name], errors[name] = math.nan, str(error) if isinstance(error, UserError) else describe(error)
    return values, errors


def require_packages(config: RunConfig) -> None:
    """Raise UserError, naming the metric and the extra, if a run's metrics cannot be computed by a client here."""
    computed = of(config).by_torchmetrics
    if name := next((metric.name for metric in measured(config) if metric.name in computed), ""):
        extras.require("torchmetrics", f"metrics: {name} of task {config.task}")


def recorded_headline(about: Mapping[str, Any]) -> Metric:
    """Return the headline metric that a run's run.json tells; accuracy for runs that tell none.

    Runs of earlier versions do not tell how it is pooled: every headline was averaged over samples.
    """
    found = about.get("metrics")
    try:
        return Metric(**{"pooling": "mean"} | found[0]) if found else ACCURACY
    except (TypeError, KeyError):
        return ACCURACY
