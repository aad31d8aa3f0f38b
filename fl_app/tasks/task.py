"""What a task is: subclass `Task` in a file of your own, and name it `task = "module:Class"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_app.metrics import Metric

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Task:
    """One kind of learning.

    metrics: the first is the headline, what rounds are judged by. usual: names of those an evaluation measures unless the key
    `metrics` says otherwise; empty: all. by_torchmetrics: names of those that need torchmetrics, an optional package.
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

        Asked for several, it may raise for one of them: it is asked for each by itself then.

        outputs: float32, what the model gave for all of it; y: the targets. names: of the metrics that are asked for.
        """
        raise NotImplementedError(f"{type(self).__name__} measures nothing")

    def predict(self, outputs: Tensor) -> Tensor:
        """Turn a model's outputs into predictions; by default they are that."""
        return outputs


class Inputs:
    """Turns samples [m, ...] of one data set into inputs: the task's, then the key `normalize`. It leaves the samples as they are.

    normalize: as the key of that name; mean, std: of the data set, per channel of images, per feature (the last axis) of anything
    else, needed by `mean-std` alone. dimensions: of a sample.
    """

    def __init__(
        self,
        task: Task,
        normalize: str,
        dimensions: int,
        device: torch.device,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
    ) -> None:
        import torch

        self.task = task
        shift = {"mean-std": (mean, std), "symmetric": ((0.5,), (0.5,))}.get(normalize)
        axes = (1, -1, 1, 1) if dimensions == 3 else (*[1] * dimensions, -1)
        self._shift = shift and [torch.tensor(values, device=device).view(axes) for values in shift]

    def __call__(self, samples: Tensor) -> Tensor:
        """Return what the model is given, float32 [m, ...] unless the task says otherwise."""
        x = self.task.inputs(samples)
        if self._shift is not None:
            mean, std = self._shift
            # `sub` copies: the task may have returned the samples themselves
            x = x.sub(mean).div_(std)
        return x
