"""One client's samples, resident on the device, and the batches made of them.

Batches come from a separate generator, seeded by (seed, round, client id, purpose). All random numbers of an epoch are
drawn on the CPU and moved in one copy. So a GPU never waits for the host within an epoch, and every device sees the
same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from client_app.augment import AUGMENTATIONS
from client_app.draws import SecretDraws, SeededDraws, hide_globals, seed_globals
from fl_app import rng, tasks
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.tasks.task import Inputs

# On these devices all training inputs are computed once, if they have at most READY_BYTES. A GPU runs a batch's few
# operations faster than they can be launched. A CPU has better use for the memory.
READY_ON, READY_BYTES = {"cuda"}, 256 << 20
Part = Literal["test", "validation"]
"""The kinds of samples beside those for training."""


class Batch(NamedTuple):
    """One batch of training, on the device.

    first: whether it opens an epoch. x: float32 [m, ...], normalised and augmented. y: int64 [m] or float32 [m, k].
    indices: int64 [m], the samples' positions in the client's training data.
    """

    first: bool
    x: Tensor
    y: Tensor
    indices: Tensor


class Batches:
    """A client's training, test and validation samples on a device.

    avoid_single: for models with BatchNorm, a last batch of one sample joins the batch before it. Where `drop-last` or
    `drop-single` is set, they drop that batch instead. memory_format: of images.
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
        self._x_validation = self._resident(data.x_validation)
        self._validation_labels = self._resident(data.y_validation)
        # the number of training samples that a privacy budget is planned for
        self.num_told = data.num_train
        normalize = tasks.normalization(config, data.x_train.dtype)
        self._prepared = Inputs(self.task, normalize, self._x_train.ndim - 1, device, data.info.mean, data.info.std)
        if self._x_train.ndim != 4:
            self._format = torch.contiguous_format

        # larger batches make a CPU 1.5 to 2 times slower
        self._evaluation_batch = 128 if device.type == "cpu" else 512
        self._ready = self._made_ready()
        # positions of the training samples in use, on the CPU; None: all
        self._used: Tensor | None = None
        # Set if batches are drawn at random: each sample's probability, batches per epoch, the source.
        self.poisson: tuple[float, int, SecretDraws] | None = None

    def _resident(self, array: np.ndarray) -> Tensor:
        # an array of its own, not a view into a data set's file
        own = array if array.base is None and array.flags.c_contiguous and array.flags.writeable else np.array(array)
        return torch.from_numpy(own).to(self.device)

    def _moved(self, plan: Tensor) -> Tensor:
        """Copy drawn numbers to the device. On a GPU the copy is queued, and this thread does not wait."""
        return plan.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else plan

    def _made_ready(self) -> Tensor | None:
        """Return the inputs of all training samples, or None if batches cannot be taken from them.

        Channels-last images are stored as [n, H, W, C].
        """
        samples = self._x_train
        own = type(self.task).__module__.startswith("fl_app.")
        if self.device.type not in READY_ON or not own or 4 * samples.numel() > READY_BYTES:
            return None
        ready = self.inputs(samples)
        return ready.permute(0, 2, 3, 1).contiguous() if self._format == torch.channels_last else ready

    def _training_inputs(self, chosen: Tensor) -> Tensor:
        if self._ready is None:
            return self.inputs(self._x_train[chosen])
        x = self._ready[chosen]
        return x.permute(0, 3, 1, 2) if self._format == torch.channels_last else x

    def leave_out(self, samples: np.ndarray) -> None:
        """Exclude training samples from all later batches: int64 [m], not all samples."""
        used = np.setdiff1d(np.arange(len(self.train_labels)), samples)
        self._used = torch.from_numpy(used) if len(used) < len(self.train_labels) else None

    @property
    def num_used(self) -> int:
        """The number of training samples that batches are made of."""
        return len(self.train_labels) if self._used is None else len(self._used)

    def epochs(self, epochs: int, purpose: str) -> Iterator[Batch]:
        """Yield the batches of shuffled epochs. purpose: names the random stream."""
        # a user's model may have dropout, which uses the global generators
        source: SeededDraws | SecretDraws
        if self.poisson:
            source = self.poisson[2]
            hide_globals(source.stream, self.device)
        else:
            seed = rng.torch_seed(self.config.seed, purpose, self.round, self.client_id)
            source = SeededDraws(seed)
            seed_globals(seed, self.device)
        n, augment = self.num_used, AUGMENTATIONS[self.config.augment]
        bounds = self._bounds()
        for _ in range(epochs):
            if self.poisson:
                order, bounds = _poisson_batches(n, *self.poisson)
            elif isinstance(source, SeededDraws):
                order = torch.randperm(n, generator=source.generator)
            plan = (order if self._used is None else self._used[order])[: bounds[-1][1], None]
            if augment is not None:
                side = self._x_train.shape[-1]
                draws = [augment.draws(stop - start, side, source) for start, stop in bounds]
                plan = torch.cat([plan, torch.cat(draws)], dim=1)
            plan = self._moved(plan)
            for batch, (start, stop) in enumerate(bounds):
                chosen = plan[start:stop, 0]
                if self.poisson and self.device.type != "cpu":
                    hide_globals(self.poisson[2].stream, self.device)
                x = self._training_inputs(chosen)
                if augment is not None:
                    x = augment.apply(x, plan[start:stop, 1:])
                yield Batch(batch == 0, x, self.train_labels[chosen], chosen)

    def alternating_epochs(self, epochs: int, purposes: Iterable[str]) -> Iterator[tuple[str, Batch]]:
        """Yield (purpose, batch): `epochs` times, one epoch of each purpose's stream in turn."""
        streams = [(purpose, self.epochs(epochs, purpose)) for purpose in purposes]
        batches_per_epoch = len(self._bounds())
        for _ in range(epochs):
            for purpose, stream in streams:
                for batch in islice(stream, batches_per_epoch):
                    yield purpose, batch

    def _bounds(self) -> list[tuple[int, int]]:
        """Return every batch's first and last + 1 position in an epoch. Samples after the last batch are unused."""
        n, size = self.num_used, self.config.batch_size
        bounds = [*range(0, n, size), n]
        # samples in the last batch, unless it is the only one
        left = n - bounds[-2] if len(bounds) > 2 else size
        single = left == 1 < size
        if self.config.drop_last and left < size or self.config.drop_single and single:
            del bounds[-1]
        elif self._avoid_single and single:
            del bounds[-2]
        return list(zip(bounds, bounds[1:], strict=False))

    def chosen(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (inputs float32 [m, C, S, S], labels int64 [m]) of chosen training samples, without augmentation."""
        return self.inputs(self._x_train[indices]), self.train_labels[indices]

    def blank(self, n: int) -> Tensor:
        """Return n samples of zeros, in the stored dtype and shape."""
        return self._x_train.new_zeros((n, *self._x_train.shape[1:]))

    def train(self, chosen: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs float32 [m, C, S, S], labels int64 [m]) over training samples in order, without augmentation.

        chosen: positions of the samples, int64 [n]; default all.
        """
        if chosen is None:
            return self._in_order(self._x_train, self.train_labels)
        return (self.chosen(part) for part in torch.split(chosen, self._evaluation_batch))

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs float32 [m, C, S, S], labels int64 [m]) over the test data in order."""
        return self.in_order("test")

    def labels_of(self, part: Part) -> Tensor:
        """Return the targets of test or validation data, [n] or [n, k]."""
        return self.test_labels if part == "test" else self._validation_labels

    def in_order(self, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs float32 [m, C, S, S], labels int64 [m]) over test or validation data in order."""
        samples = self._x_test if part == "test" else self._x_validation
        return self._in_order(samples, self.labels_of(part))

    def _in_order(self, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if 0 < labels.shape[0] <= self._evaluation_batch:
            yield self.inputs(images), labels
            return
        for start in range(0, len(labels), self._evaluation_batch):
            chosen = slice(start, start + self._evaluation_batch)
            yield self.inputs(images[chosen]), labels[chosen]

    def inputs(self, images: Tensor) -> Tensor:
        """Return the model's inputs for samples, by the task and the key `normalize`."""
        return self._prepared(images).contiguous(memory_format=self._format)


def _poisson_batches(n: int, rate: float, batches: int, source: SecretDraws) -> tuple[Tensor, list[tuple[int, int]]]:
    """Draw batches in which each of n samples is included independently with probability `rate`.

    Returns (samples int64 [m], first and last + 1 position of every batch).
    """
    parts = [source.included(n, rate) for _ in range(batches)]
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    return torch.cat(parts), list(zip(ends, ends[1:], strict=False))
