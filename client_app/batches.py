"""One client's samples, resident on the device, and the batches made of them.

Batches come from an own generator seeded by (seed, round, client id, purpose). All random numbers of an epoch are drawn on
the CPU and moved in one copy: a GPU never waits for the host within an epoch, and every device sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from client_app.augment import AUGMENTATIONS
from fl_app import rng, tasks
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.tasks.task import Inputs


class Batch(NamedTuple):
    """One batch of training, on the device.

    first: whether it opens an epoch. x: float32 [m, ...], normalised and augmented. y: int64 [m] or float32 [m, k].
    indices: int64 [m] of the samples in the client's training data.
    """

    first: bool
    x: Tensor
    y: Tensor
    indices: Tensor


class Batches:
    """A client's training and test samples on a device.

    avoid_single: a last batch of one sample joins the batch before it, for models with BatchNorm (under `drop-last` it goes with
    every incomplete one, under `drop-single` alone). memory_format: of images.
    """

    def __init__(
        self,
        config: RunConfig,
        data: ClientData,
        device: torch.device,
        *,
        round: int,
        client_id: int,
        avoid_single: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.config, self.device, self.round, self.client_id = config, device, round, client_id
        self.task = tasks.of(config)
        self._avoid_single, self._format = avoid_single, memory_format
        self._x_train, self.train_labels = self._resident(data.x_train), self._resident(data.y_train)
        self._x_test, self.test_labels = self._resident(data.x_test), self._resident(data.y_test)
        self._prepared = Inputs(
            self.task, config.normalize, self._x_train.ndim - 1, device, data.info.mean, data.info.std
        )
        if self._x_train.ndim != 4:
            self._format = torch.contiguous_format

        # with larger ones a CPU is 1.5 to 2 times as slow
        self._evaluation_batch = 128 if device.type == "cpu" else 512
        # training samples that batches are made of, on the CPU; None: all
        self._used: Tensor | None = None
        # Set if batches are drawn at random: each sample's chance, batches per epoch, the generator.
        self.poisson: tuple[float, int, torch.Generator] | None = None

    def _resident(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)

    def leave_out(self, samples: np.ndarray) -> None:
        """Make no batches of some training samples any more: int64 [m], fewer than there are."""
        used = np.setdiff1d(np.arange(len(self.train_labels)), samples)
        self._used = torch.from_numpy(used) if len(used) < len(self.train_labels) else None

    @property
    def num_used(self) -> int:
        """Training samples that batches are made of."""
        return len(self.train_labels) if self._used is None else len(self._used)

    def epochs(self, epochs: int, purpose: str) -> Iterator[Batch]:
        """Yield the batches of shuffled epochs. purpose: names the random stream."""
        if self.poisson:
            # with a seed that others know, a record's augmentation would show which others are in its batch
            generator = self.poisson[2]
            seed = int(torch.randint(2**63 - 1, (), generator=generator))
        else:
            seed = rng.torch_seed(self.config.seed, purpose, self.round, self.client_id)
            generator = torch.Generator().manual_seed(seed)
        # for a user's model with dropout
        torch.manual_seed(seed)
        rng.seed_global(seed)
        n, augment = self.num_used, AUGMENTATIONS[self.config.augment]
        bounds = self._bounds()
        for _ in range(epochs):
            if self.poisson:
                order, bounds = _poisson_batches(n, *self.poisson)
            else:
                order = torch.randperm(n, generator=generator)
            plan = (order if self._used is None else self._used[order])[: bounds[-1][1], None]
            if augment is not None:
                side = self._x_train.shape[-1]
                draws = [augment.draws(stop - start, side, generator) for start, stop in bounds]
                plan = torch.cat([plan, torch.cat(draws)], dim=1)
            plan = plan.to(self.device)
            for batch, (start, stop) in enumerate(bounds):
                chosen = plan[start:stop, 0]
                x = self.inputs(self._x_train[chosen])
                if augment is not None:
                    x = augment.apply(x, plan[start:stop, 1:])
                yield Batch(batch == 0, x, self.train_labels[chosen], chosen)

    def alternating_epochs(self, epochs: int, purposes: Iterable[str]) -> Iterator[tuple[str, Batch]]:
        """Yield (purpose, batch): `epochs` times an epoch of every purpose's stream."""
        streams = [(purpose, self.epochs(epochs, purpose)) for purpose in purposes]
        batches_per_epoch = len(self._bounds())
        for _ in range(epochs):
            for purpose, stream in streams:
                for batch in islice(stream, batches_per_epoch):
                    yield purpose, batch

    def _bounds(self) -> list[tuple[int, int]]:
        """First and last + 1 position of every batch of an epoch; samples beyond the last one's are not used in it."""
        n, size = self.num_used, self.config.batch_size
        bounds = [*range(0, n, size), n]
        # samples of the last batch, if it is not the only one
        left = n - bounds[-2] if len(bounds) > 2 else size
        single = left == 1 < size
        if self.config.drop_last and left < size or self.config.drop_single and single:
            del bounds[-1]
        elif self._avoid_single and single:
            del bounds[-2]
        return list(zip(bounds, bounds[1:], strict=False))

    def chosen(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (inputs float32 [m, C, S, S], labels int64 [m]) of chosen training samples, nothing augmented."""
        return self.inputs(self._x_train[indices]), self.train_labels[indices]

    def blank(self, n: int) -> Tensor:
        """Return n samples of zeros, as they are kept."""
        return self._x_train.new_zeros((n, *self._x_train.shape[1:]))

    def train(self, chosen: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs float32 [m, C, S, S], labels int64 [m]) over training samples, default all, in order, nothing augmented."""
        if chosen is None:
            return self._in_order(self._x_train, self.train_labels)
        return (self.chosen(part) for part in torch.split(chosen, self._evaluation_batch))

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs float32 [m, C, S, S], labels int64 [m]) over the test data in order."""
        return self._in_order(self._x_test, self.test_labels)

    def _in_order(self, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(labels), self._evaluation_batch):
            chosen = slice(start, start + self._evaluation_batch)
            yield self.inputs(images[chosen]), labels[chosen]

    def inputs(self, images: Tensor) -> Tensor:
        """Return the model's inputs for samples, by the task and the key `normalize`."""
        return self._prepared(images).contiguous(memory_format=self._format)


def _poisson_batches(
    n: int, rate: float, batches: int, generator: torch.Generator
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Draw batches that hold each of n samples with a chance of its own: (samples int64 [m], first and last + 1 of every batch)."""
    parts = [(torch.rand(n, generator=generator) < rate).nonzero()[:, 0] for _ in range(batches)]
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    return torch.cat(parts), list(zip(ends, ends[1:], strict=False))
