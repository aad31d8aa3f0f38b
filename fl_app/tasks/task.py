"""The base class of tasks: subclass `Task` in a file of your own, and name it `task = "module:Class"`."""

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

    metrics: the first is the headline, unless the key `headline` names another; rounds are judged by it. usual: names
    of metrics that are measured unless the key `metrics` is set; empty: all. by_torchmetrics: names of metrics that
    need torchmetrics, an optional package. has_classes: targets are labels, int64 [n]; otherwise numbers, float32 [n,
    k]. input_dtype: dtype of the model's inputs.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
    # name of the headline metric; empty: the first
    judged_by: str = ""
    usual: ClassVar[tuple[str, ...]] = ()
    by_torchmetrics: ClassVar[frozenset[str]] = frozenset()
    has_classes: ClassVar[bool] = False
    input_dtype: ClassVar[str] = "float32"

    @property
    def headline(self) -> Metric:
        """The metric that rounds are judged by."""
        return next((metric for metric in self.metrics if metric.name == self.judged_by), self.metrics[0])

    @property
    def cross_entropy(self) -> bool:
        """Whether the loss is the mean cross-entropy of labels. Methods may use closed forms then."""
        return False

    def check(self, y: NDArray[Any]) -> str:
        """Return the rule that targets float32 [n, k] break, as the end of "must ..."; "" if they are valid.

        It is called once, when a data set is prepared.
        """
        return "" if np.isfinite(y).all() else "hold finite numbers"

    def inputs(self, x: Tensor) -> Tensor:
        """Return the model's inputs from stored samples, before `normalize`. It runs on the device.

        x: [m, ...], uint8 for images, else float32, or int64 for integer data. Images are scaled to [0, 1].
        """
        import torch

        return x.float().div_(255) if x.dtype is torch.uint8 else x.float()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, a scalar. outputs: the model's, float32; y: the targets."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the samples' losses, a scalar."""
        return self.loss(outputs, y) * len(y)

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> Mapping[str, float]:
        """Return metrics by name on a client's test data, at least one sample; NaN means undefined.

        If it raises for several names, it is called again for each name alone.

        outputs: the model's for all samples, float32; y: the targets. names: of the metrics to return.
        """
        raise NotImplementedError(f"{type(self).__name__} measures nothing")

    def predict(self, outputs: Tensor) -> Tensor:
        """Return a model's outputs as predictions; by default unchanged."""
        return outputs


class Inputs:
    """Converts samples [m, ...] of one data set to inputs: first by the task, then by the key `normalize`.

    The samples stay unchanged. normalize: as the key of this name. mean, std: of the data set, per channel of images,
    per feature (the last axis) of other samples; only `mean-std` needs them. dimensions: number of axes of a sample.
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
        """Return the model's inputs, float32 [m, ...] unless the task returns another dtype."""
        x = self.task.inputs(samples)
        if self._shift is not None:
            mean, std = self._shift
            # `sub` copies: the task may have returned the samples themselves
            x = x.sub(mean).div_(std)
        return x
