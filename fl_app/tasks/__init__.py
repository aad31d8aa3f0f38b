"""Tasks, one file each: the inputs made from arrays, the loss, and the metrics.

torch is imported only for computation. The command never loads it, nor does a client that only returns its properties.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_app import extras, plugins
from fl_app.config.rules import split_names
from fl_app.errors import ConfigurationError, UserError, describe
from fl_app.keys import nearest
from fl_app.metrics import MAX_NUMBER, ONE_CLASS, Metric, range_error
from fl_app.sources import source_of
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
    "normalization",
    "one_class",
    "of",
    "recorded_metrics",
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
        ONE_CLASS.name,
    }
)


def of(config: RunConfig) -> Task:
    """Return a run's task, with the headline that the key `headline` names.

    Raises UserError as `named` does, and for a headline that is no metric of the task.
    """
    task = named(config.task)
    names = [metric.name for metric in task.metrics]
    if config.headline and config.headline not in names:
        raise ConfigurationError(
            key="headline",
            rule=f"must be one of {', '.join(names)}",
            value=config.headline,
            hint=nearest(config.headline, names),
        )
    if config.headline:
        task.judged_by = config.headline
    return task


def named(name: str) -> Task:
    """Return a task by its name, or a user's own by `module:Class`. Raises UserError if the class is no valid task."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if not plugins.is_reference(name):
        raise ConfigurationError(
            key="task", rule=f"must be one of {', '.join(BUILT_IN)}, or module:Class, got {name!r:.100}"
        )
    found = plugins.load("task", name)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise ConfigurationError(key=f"task {name}", rule="must be a class made of fl_app.tasks.Task", value=found)
    try:
        task: Task = found()
    except TypeError as error:
        raise ConfigurationError(key=f"task {name}", rule=f"{error}; it is made without arguments") from None
    names = [metric.name for metric in task.metrics]
    if not names or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)) or _TAKEN & set(names):
        raise ConfigurationError(
            key=f"task {name}",
            rule="needs metrics named in lower case letters, digits and -, every name once and none of "
            f"{', '.join(sorted(_TAKEN))}, got {', '.join(names) or 'none'}",
        )
    return task


def normalization(config: RunConfig, dtype: np.dtype[Any]) -> str:
    """Return the normalization of stored samples of a dtype: `unit`, `mean-std` or `symmetric`.

    `auto` is `unit` for images (uint8), for tokens, and for a task with its own `inputs`; otherwise `mean-std`.
    """
    if config.normalize != "auto":
        return config.normalize
    task = of(config)
    own = source_of(config.dataset).tokens or config.tokenizer or type(task).inputs is not Task.inputs
    left_alone = dtype == np.uint8 or own or task.input_dtype == "int64"
    return "unit" if left_alone else "mean-std"


def measured(config: RunConfig) -> tuple[Metric, ...]:
    """Return the metrics that clients measure: the headline first, then those that the key `metrics` names.

    Raises UserError for a name that is no metric of the task.
    """
    task = of(config)
    known = {metric.name: metric for metric in task.metrics}
    asked = split_names(config.metrics) or tuple(task.usual or known)
    for name in asked:
        if name not in known and name != "all":
            raise ConfigurationError(
                key="metrics", rule=f"must be all, or some of {', '.join(known)}", value=name, hint=nearest(name, known)
            )
    others = (m for m in task.metrics if m is not task.headline and (m.name in asked or "all" in asked))
    return (task.headline, *others)


def measure(task: Task, outputs: Tensor, y: Tensor, names: Iterable[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Return metrics by name, clipped to their ranges, and the errors by name of metrics that failed; these are NaN.

    A metric that fails does not affect the others. A headline beyond MAX_NUMBER is kept: it shows that training
    diverged.
    """
    names = tuple(names)
    values: dict[str, float] = {}
    errors: dict[str, str] = {}
    together: Mapping[str, float] = {}
    rows = {metric.name: metric for metric in task.metrics}
    with contextlib.suppress(Exception):
        together = task.measure(outputs, y, names)
    for name in names:
        try:
            found = together if name in together else task.measure(outputs, y, (name,))
            if name not in found:
                raise ConfigurationError("measure did not return it")
            values[name] = rows[name].clipped(float(found[name]))
            diverged = MAX_NUMBER < abs(values[name]) < math.inf and name == task.headline.name
            if not diverged and (error := range_error(name, values[name], *rows[name].range)):
                raise ConfigurationError(error)
        except Exception as error:
            log.debug("metric %s", name, exc_info=True)
            values[name], errors[name] = math.nan, str(error) if isinstance(error, UserError) else describe(error)
    return values, errors


def one_class(task: Task, outputs: Tensor, y: Tensor) -> float:
    """Return 1 if outputs float32 [n, C] predict one class for all samples, 0 if not.

    NaN: all samples are of the one predicted class, there are fewer than two samples or outputs, or the task has no
    classes. y: the samples' classes, int64 [n].
    """
    if not task.has_classes or outputs.ndim != 2 or outputs.shape[1] < 2 or len(outputs) < 2:
        return math.nan
    answers = outputs.argmax(1)
    alike = bool((answers == answers[0]).all())
    return math.nan if alike and bool((y == answers[0]).all()) else float(alike)


def require_packages(config: RunConfig) -> None:
    """Raise UserError, naming the metric and the extra, if a package for a run's metrics is not installed here."""
    computed = of(config).by_torchmetrics
    if name := next((metric.name for metric in measured(config) if metric.name in computed), ""):
        extras.require("torchmetrics", f"metrics: {name} of task {config.task}")


def recorded_metrics(about: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return the metrics that a run's run.json lists, the headline first; accuracy if it lists none."""
    try:
        told = [Metric(**one) for one in about.get("metrics") or ()]
    except (TypeError, KeyError):
        told = []
    return tuple(told) or (ACCURACY,)
