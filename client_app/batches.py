"""One client's samples, resident on the device, and the batches made of them.

Batches come from an own generator seeded by (seed, round, client id, purpose). All random numbers of an epoch are drawn on
the CPU and moved in one copy: a GPU never waits for the host within an epoch, and every device sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_app import rng
from fl_app.config import RunConfig
from fl_app.data import ClientData

_EVALUATION_BATCH = 512


class Batch(NamedTuple):
    """One batch of training, on the device.

    first: whether it opens an epoch. x: float32 [m, C, S, S], normalised and augmented. y: int64 [m]. indices: int64 [m] of
    the samples in the client's training data.
    """

    first: bool
    x: Tensor
    y: Tensor
    indices: Tensor


class Batches:
    """A client's training and test samples on a device.

    avoid_single: a last batch of one sample joins the batch before it, for models with BatchNorm. memory_format: of images.
    """

    def __init__(
        self, config: RunConfig, data: ClientData, device: torch.device, *, round: int, client_id: int,
        avoid_single: bool = False, memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:  # fmt: skip
        self.config, self.device, self.round, self.client_id = config, device, round, client_id
        self._avoid_single, self._format = avoid_single, memory_format
        self._x_train, self.train_labels = self._resident(data.x_train), self._resident(data.y_train)
        self._x_test, self.test_labels = self._resident(data.x_test), self._resident(data.y_test)
        stats = config.normalize == "mean-std"
        self._mean = torch.tensor(data.info.mean if stats else [0.0], device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(data.info.std if stats else [1.0], device=device).view(1, -1, 1, 1)

    def _resident(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)

    def epochs(self, epochs: int, purpose: str) -> Iterator[Batch]:
        """Yield the batches of shuffled epochs. purpose: names the random stream."""
        seed = rng.torch_seed(self.config.seed, purpose, self.round, self.client_id)
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)  # for a user's model with dropout
        n = len(self.train_labels)
        bounds = self._bounds()
        for _ in range(epochs):
            plan = torch.randperm(n, generator=generator)[:, None]
            if self.config.augment == "crop-flip":
                side = self._x_train.shape[-1]
                draws = [crop_flip_draws(stop - start, side, generator) for start, stop in bounds]
                plan = torch.cat([plan, torch.cat(draws)], dim=1)
            plan = plan.to(self.device)
            for start, stop in bounds:
                chosen = plan[start:stop, 0]
                x = self.inputs(self._x_train[chosen])
                if self.config.augment == "crop-flip":
                    x = crop_flip(x, plan[start:stop, 1:])
                yield Batch(start == 0, x, self.train_labels[chosen], chosen)

    def _bounds(self) -> list[tuple[int, int]]:
        """First and last + 1 position of every batch of an epoch."""
        n, size = len(self.train_labels), self.config.batch_size
        bounds = [*range(0, n, size), n]
        if self._avoid_single and size > 1 and len(bounds) > 2 and n - bounds[-2] == 1:
            del bounds[-2]
        return list(zip(bounds, bounds[1:], strict=False))

    def train(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs float32 [m, C, S, S], labels int64 [m]) over the training data in order, nothing augmented."""
        return self._in_order(self._x_train, self.train_labels)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs float32 [m, C, S, S], labels int64 [m]) over the test data in order."""
        return self._in_order(self._x_test, self.test_labels)

    def _in_order(self, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(labels), _EVALUATION_BATCH):
            chosen = slice(start, start + _EVALUATION_BATCH)
            yield self.inputs(images[chosen]), labels[chosen]

    def inputs(self, images: Tensor) -> Tensor:
        """Normalise images uint8 [m, C, S, S] as `normalize` says: float32 of the same shape."""
        x = images.float().div_(255)
        if self.config.normalize == "mean-std":
            x = x.sub_(self._mean).div_(self._std)
        return x.contiguous(memory_format=self._format)


def crop_flip_draws(n: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw what `crop_flip` does to n images: int64 [n, 3], rows to skip, columns to skip, 1 to flip."""
    margin = max(1, side // 8)
    top, left = (torch.randint(0, 2 * margin + 1, (n,), generator=generator) for _ in range(2))
    flip = torch.rand(n, generator=generator) < 0.5
    return torch.stack([top, left, flip.long()], dim=1)


def crop_flip(x: Tensor, draws: Tensor) -> Tensor:
    """Crop after zero padding by an eighth of the side, and flip horizontally, per image.

    x: float32 [n, C, S, S]; draws: int64 [n, 3] of crop_flip_draws, on the same device. Returns the same shape.
    """
    n, _, side, _ = x.shape
    top, left, flip = draws.unbind(1)
    columns = torch.arange(side, device=x.device)
    rows = top[:, None] + columns
    across = left[:, None] + torch.where(flip[:, None] == 1, columns.flip(0), columns)
    padded = pad(x, (max(1, side // 8),) * 4)
    image = torch.arange(n, device=x.device)[:, None, None, None]
    channel = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], across[:, None, None, :]]
