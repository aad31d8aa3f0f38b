"""Early stopping by the key `stop-when`, and the learning rate of the schedule `plateau`.

`validation-accuracy: 10 rounds without better` ends a run after ten rounds in a row that were not better than the best
round before them. `by 0.01` at the end sets the margin of a better round. A round's figure is in its record: the mean
over its clients of the models that they received, before training, as for `best-` figures. For `loss` it is the
training loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_app import tasks
from fl_app.config import RunConfig
from fl_app.errors import UserError, counted
from fl_app.keys import nearest
from fl_app.metrics import LOSS, VALIDATION, moments

FORM = "`NAME: N rounds without better`, with an optional `by D` at its end"
_RULE = re.compile(r"\s*([\w-]+)\s*:\s*(\d+) rounds? without better(?: by (\d+(?:\.\d*)?(?:e-?\d+)?))?\s*")


@dataclass(frozen=True)
class StopRule:
    """A rule that ends a run early.

    name: the watched figure. record: its name in a round's record. patience: number of rounds without a better one.
    margin: the gain that makes a round better must exceed it.
    """

    name: str
    record: str
    higher_is_better: bool
    patience: int
    margin: float = 0.0

    def ended(self, rounds: Sequence[Mapping[str, Any]]) -> str:
        """Return why a run with these rounds, in order, is over; "" if it is not.

        A round without the figure is not better.
        """
        best: tuple[int, float] | None = None
        for record in rounds:
            value = record.get(self.record)
            gain = (1 if self.higher_is_better else -1) * (value - best[1]) if best and value is not None else math.inf
            if value is not None and gain > self.margin:
                best = record["round"], value
        if best is None or rounds[-1]["round"] - best[0] < self.patience:
            return ""
        margin = f" by {self.margin:g}" if self.margin else ""
        since = rounds[-1]["round"] - best[0]
        return (
            f"stop-when: {self.name} was {best[1]:.4g} in round {best[0]}, and not better{margin} in the "
            f"{counted(since, 'round')} since"
        )

    def drops(self, rounds: Sequence[Mapping[str, Any]]) -> int:
        """Return how often, in rounds in order, `patience` rounds in a row were not better than the best before."""
        best, since, drops = None, 0, 0
        for record in rounds:
            value = record.get(self.record)
            if value is not None and (best is None or (value > best) == self.higher_is_better and value != best):
                best, since = value, 0
                continue
            since += best is not None
            if since == self.patience:
                since, drops = 0, drops + 1
        return drops


def plateau_of(config: RunConfig) -> StopRule | None:
    """Return the rule by which the schedule `plateau` lowers the learning rate, None with another schedule."""
    if not config.patience:
        return None
    loss = VALIDATION + moments(LOSS.name)[0] if config.validation_ratio else LOSS.name
    return StopRule(LOSS.name, loss, False, config.patience)


def rule_of(config: RunConfig) -> StopRule | None:
    """Return the rule of the key `stop-when`, None if it is empty.

    Raises UserError for no rule, or an unknown figure.
    """
    if not config.stop_when:
        return None
    found = _RULE.fullmatch(config.stop_when)
    if found is None or int(found[2]) < 1:
        raise UserError(key="stop-when", rule=f"must be {FORM}", value=config.stop_when)
    if not config.report_accuracy:
        raise UserError(
            key="stop-when",
            rule="with report-accuracy = false clients send no figure to stop by",
            value=config.stop_when,
        )
    name, patience, margin = found[1], int(found[2]), float(found[3] or 0.0)
    watched = {metric.name: (moments(metric.name)[0], metric.higher_is_better) for metric in tasks.measured(config)}
    on_validation = {**watched, LOSS.name: (moments(LOSS.name)[0], False)}
    watched |= {f"{VALIDATION}{own}": (f"{VALIDATION}{record}", up) for own, (record, up) in on_validation.items()}
    if not config.dp_epsilon:
        # with a privacy budget, clients send no training loss
        watched[LOSS.name] = LOSS.name, False
    if name not in watched:
        raise UserError(
            key="stop-when", rule=f"must watch one of {', '.join(watched)}", value=name, hint=nearest(name, watched)
        )
    if name.startswith(VALIDATION) and not config.validation_ratio:
        raise UserError(key="stop-when", rule=f"{name} needs validation data, and validation-ratio is 0")
    return StopRule(name, *watched[name], patience, margin)
