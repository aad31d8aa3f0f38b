"""From samples as a data set holds them to what a model is given: the task's inputs, then the key `normalize`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_app.tasks import Task

NOTHING: tuple[float, ...] = ()


class Inputs:
    """Turns samples [m, ...] of one data set into inputs, and leaves the samples as they are.

    normalize: as the key of that name; mean, std: of the data set, per channel of images, per feature (the last axis) of anything
    else, needed by `mean-std` alone. dimensions: of a sample.
    """

    def __init__(
        self,
        task: Task,
        normalize: str,
        dimensions: int,
        device: torch.device,
        mean: Sequence[float] = NOTHING,
        std: Sequence[float] = NOTHING,
    ) -> None:
        self.task = task
        shift = {"mean-std": (mean, std), "symmetric": ((0.5,), (0.5,))}.get(normalize)
        axes = (1, -1, 1, 1) if dimensions == 3 else (*[1] * dimensions, -1)
        self._shift = shift and [torch.tensor(values, device=device).view(axes) for values in shift]

    def __call__(self, samples: Tensor) -> Tensor:
        """Return what the model is given, float32 [m, ...] unless the task says otherwise."""
        x = self.task.inputs(samples)
        if self._shift is not None:
            x = x.sub(self._shift[0]).div_(
                self._shift[1]
            )  # first a copy: the task may have returned the samples themselves
        return x
