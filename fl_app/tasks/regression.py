"""Regression: one number or several, by the squared error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fl_app.metrics import Metric
from fl_app.tasks import scoring
from fl_app.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor


class Regression(Task):
    """Targets and outputs float32 [n, k].

    rmse and mae are over samples and targets together. r2 is the mean over the targets that are not constant, NaN if
    all are.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rmse", higher_is_better=False, low=0, pooling="root-mean-square"),
        Metric("mae", higher_is_better=False, low=0, pooling="mean"),
        Metric("r2", high=1, undefined="no target varies"),
    )

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the squared error, mean over samples and targets."""
        from torch.nn.functional import mse_loss

        return mse_loss(outputs, y)

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> Mapping[str, float]:
        """Return metrics by name."""
        found: dict[str, float] = {}
        for name in names:
            if name == "rmse":
                found[name] = math.sqrt(float((outputs.double() - y.double()).square().mean()))
            elif name == "mae":
                found[name] = float(np.abs(scoring.array(outputs) - scoring.array(y)).mean())
            else:
                found[name] = scoring.mean_defined(scoring.r2_scores(scoring.array(outputs), scoring.array(y)))
        return found
