"""What a task is: subclass `Task` in a file of your own, and name it `task = "module:Class"`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A metric: its name, its direction, and the numbers it can be. ratio: in [0, 1], shown in per cent."""

    name: str
    higher_is_better: bool = True
    ratio: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest number it can be."""
        if self.ratio:
            return 0.0, 1.0
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    @property
    def best(self) -> Callable[[Iterable[float]], float]:
        """What finds the best of several values."""
        return max if self.higher_is_better else min

    @property
    def title(self) -> str:
        """Its name as headings print it: accuracy, RMSE."""
        return self.name if self.ratio else self.name.upper() if len(self.name) <= 4 else self.name

    def text(self, value: float, digits: int = 2) -> str:
        """Write a value: a ratio in per cent with so many digits, anything else with four that count."""
        return f"{100 * value:.{digits}f}" if self.ratio else f"{value:.4g}"


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
