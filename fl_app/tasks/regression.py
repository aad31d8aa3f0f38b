"""Regression: one number or several, by the squared error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fl_app.metrics import Metric
from fl_app.tasks.task import Task
from fl_app.tasks.torchmetrics_part import functional

if TYPE_CHECKING:
    from torch import Tensor


class Regression(Task):
    """Targets and outputs float32 [n, k].

    RMSE and MAE are over samples and targets together, R2 is the mean over targets; it needs two samples. torchmetrics computes MAE
    and R2; it takes a second to import, so that RMSE, which every round asks for, is the root of torch's own mean squared error.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rmse", higher_is_better=False, low=0, pooling="root-mean-square"),
        Metric("mae", higher_is_better=False, low=0, pooling="mean"),
        Metric("r2", high=1),
    )
    by_torchmetrics: ClassVar[frozenset[str]] = frozenset({"mae", "r2"})

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
                found[name] = float(functional("regression").mean_absolute_error(outputs.flatten(), y.flatten()))
            else:
                found[name] = (
                    float(functional("regression").r2_score(outputs.squeeze(1), y.squeeze(1)))
                    if len(y) > 1
                    else math.nan
                )
        return found
