"""What a task is: subclass `Task` in a file of your own, and name it `task = "module:Class"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_app.metrics import Metric

if TYPE_CHECKING:
    from torch import Tensor


class Task:
    """One kind of learning.

    metrics: the first is the headline, what rounds are judged by. usual: names of those an evaluation measures unless the key
    `metrics` says otherwise; empty: all. by_torchmetrics: names of those that torchmetrics, an optional package, computes.
    has_classes: targets are labels, int64 [n]; otherwise numbers, float32 [n, k]. input_dtype: of what the model is given.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
    usual: ClassVar[tuple[str, ...]] = ()
    by_torchmetrics: ClassVar[frozenset[str]] = frozenset()
    has_classes: ClassVar[bool] = False
    input_dtype: ClassVar[str] = "float32"

    @property
    def headline(self) -> Metric:
        """The metric that rounds are judged by."""
        return self.metrics[0]

    @property
    def cross_entropy(self) -> bool:
        """Whether the loss is the mean cross-entropy of labels, of which methods may use closed forms."""
        return False

    def check(self, y: NDArray[Any]) -> str:
        """Say what is wrong with targets float32 [n, k], "" if nothing is; asked once, when a data set is prepared."""
        return "" if np.isfinite(y).all() else "hold finite numbers"

    def inputs(self, x: Tensor) -> Tensor:
        """Turn samples as the data set holds them into what the model is given, before `normalize`; on the device.

        x: [m, ...], uint8 for images, else float32, or int64 where the data are integers. Images are scaled to [0, 1].
        """
        import torch

        return x.float().div_(255) if x.dtype is torch.uint8 else x.float()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, a scalar. outputs: float32, what the model gave; y: the targets."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the samples' losses, a scalar."""
        return self.loss(outputs, y) * len(y)

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> Mapping[str, float]:
        """Return metrics by name on a client's test data, of which there is some; NaN where one is not defined.

        outputs: float32, what the model gave for all of it; y: the targets. names: of the metrics that are asked for.
        """
        raise NotImplementedError(f"{type(self).__name__} measures nothing")

    def predict(self, outputs: Tensor) -> Tensor:
        """Turn a model's outputs into predictions; by default they are that."""
        return outputs
