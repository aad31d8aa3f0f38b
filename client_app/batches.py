"""One client's samples, resident on the device, and the batches made of them.

Batches come from a separate generator, seeded by (seed, round, client id, purpose). All random numbers of an epoch are
drawn on the CPU and moved in one copy: its order, and the random changes of images. So a GPU never waits for the host
within an epoch, and every device sees the same batches.

With `dp-epsilon` the batches, the changes of images and dropout are secret. Anyone who knew what the third record of a
batch meets would see the others move up where a record is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from fl_app import rng, tasks
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.privacy.secure_random import SecureRandom
from fl_app.tasks.task import Inputs, Task

# On these devices all training inputs are computed once, if they have at most READY_BYTES. A GPU runs a batch's few
# operations faster than they can be launched. A CPU has better use for the memory.
READY_ON, READY_BYTES = {"cuda"}, 256 << 20
Part = Literal["train", "test", "validation"]
"""The kinds of samples."""
MAX_DEGREES = 15
# angles are drawn in millionths of a degree
_PER_DEGREE = 10**6
# words of a Mersenne Twister's state, and their place in that of PyTorch's CPU generator (64 bits each)
_STATE = 624
_TORCH_STATE = slice(3, 3 + _STATE)


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
        task: Task | None = None,
        avoid_single: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.config, self.device, self.round, self.client_id = config, device, round, client_id
        self.task = task or tasks.of(config)

        def resident(array: np.ndarray) -> Tensor:
            # an array of its own, not a view into a data set's file
            own = array.base is None and array.flags.c_contiguous and array.flags.writeable
            return torch.from_numpy(array if own else np.array(array)).to(device)

        x, y = data.validation or (data.x_train[:0], data.y_train[:0])
        # samples and targets
        self.parts: dict[Part, tuple[Tensor, Tensor]] = {
            "train": (resident(data.x_train), resident(data.y_train)),
            "test": (resident(data.x_test), resident(data.y_test)),
            "validation": (resident(x), resident(y)),
        }
        self._x_train, self.train_labels = self.parts["train"]
        # the number of training samples that a privacy budget is planned for
        self.num_told = len(data.y_train) + data.unknown[0]
        normalize = tasks.normalization(config, data.x_train.dtype)
        self._prepared = Inputs(self.task, normalize, self._x_train.ndim - 1, device, data.info.mean, data.info.std)
        self._avoid_single = avoid_single
        self._format = memory_format if self._x_train.ndim == 4 else torch.contiguous_format
        # larger batches make a CPU 1.5 to 2 times slower
        self._evaluation_batch = 128 if device.type == "cpu" else 512
        # the inputs of all training samples, channels-last images as [n, H, W, C]; None: each batch makes its own
        self._ready: Tensor | None = None
        own = type(self.task).__module__.startswith("fl_app.")
        if device.type in READY_ON and own and 4 * self._x_train.numel() <= READY_BYTES:
            ready = self.inputs(self._x_train)
            self._ready = ready.permute(0, 2, 3, 1).contiguous() if self._format == torch.channels_last else ready
        # positions of the training samples in use, on the CPU; None: all
        self._used: Tensor | None = None
        # Set if batches are drawn at random: each sample's probability, batches per epoch, the source.
        self.poisson: tuple[float, int, SecretDraws] | None = None

    def leave_out(self, samples: np.ndarray) -> None:
        """Exclude training samples from all later batches: int64 [m], not all samples."""
        used = np.setdiff1d(np.arange(len(self.train_labels)), samples)
        self._used = torch.from_numpy(used) if len(used) < len(self.train_labels) else None

    def epochs(self, epochs: int, purpose: str) -> Iterator[Batch]:
        """Yield the batches of shuffled epochs. purpose: names the random stream."""
        # a user's model may have dropout, which uses the global generators
        source: SeededDraws | SecretDraws
        if self.poisson:
            source = self.poisson[2]
            hide_globals(source.stream, self.device)
        else:
            seed = rng.torch_seed(self.config.seed, purpose, self.round, self.client_id)
            rng.seed_global(seed)
            source = SeededDraws(seed)
            if self.device.type == "cpu":
                # Only the CPU's generator: `torch.manual_seed` also queues the call for accelerators that have not started.
                torch.default_generator.manual_seed(seed)
            else:
                torch.manual_seed(seed)
        n, augment = len(self.train_labels if self._used is None else self._used), AUGMENTATIONS[self.config.augment]
        bounds = self._bounds()
        for _ in range(epochs):
            if isinstance(source, SeededDraws):
                order = torch.randperm(n, generator=source.generator)
            elif self.poisson:
                rate, count, _ = self.poisson
                # each sample is in each batch independently
                drawn = [source.included(n, rate) for _ in range(count)]
                ends = np.cumsum([0, *map(len, drawn)]).tolist()
                order, bounds = torch.cat(drawn), list(zip(ends, ends[1:], strict=False))
            plan = (order if self._used is None else self._used[order])[: bounds[-1][1], None]
            if augment is not None:
                side = self._x_train.shape[-1]
                draws = [augment.draws(stop - start, side, source) for start, stop in bounds]
                plan = torch.cat([plan, torch.cat(draws)], dim=1)
            if self.device.type == "cuda":
                # the copy is queued, and this thread does not wait
                plan = plan.pin_memory().to(self.device, non_blocking=True)
            for batch, (start, stop) in enumerate(bounds):
                chosen = plan[start:stop, 0]
                if self.poisson and self.device.type != "cpu":
                    hide_globals(self.poisson[2].stream, self.device)
                if self._ready is None:
                    x = self.inputs(self._x_train[chosen])
                else:
                    x = self._ready[chosen]
                    x = x.permute(0, 3, 1, 2) if self._format == torch.channels_last else x
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
        n, size = len(self.train_labels if self._used is None else self._used), self.config.batch_size
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

    def in_order(self, part: Part, chosen: Tensor | None = None) -> Iterable[tuple[Tensor, Tensor]]:
        """Return pairs (inputs float32 [m, C, S, S], labels int64 [m]) of samples in order, without augmentation.

        chosen: positions of the samples, int64 [n]; default all.
        """
        images, labels = self.parts[part]
        size = self._evaluation_batch
        if chosen is None and 0 < len(labels) <= size:
            return [(self.inputs(images), labels)]
        parts: Iterable[Any] = (slice(start, start + size) for start in range(0, len(labels), size))
        if chosen is not None:
            parts = torch.split(chosen, size)
        return ((self.inputs(images[places]), labels[places]) for places in parts)

    def inputs(self, images: Tensor) -> Tensor:
        """Return the model's inputs for samples, by the task and the key `normalize`."""
        return self._prepared(images).contiguous(memory_format=self._format)


# Random numbers of training: repeatable ones from a seed, or secret ones where they protect records


class SeededDraws:
    """PyTorch's generator, from a seed that everyone may know."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, low: int, high: int, n: int) -> Tensor:
        """Return n integers in [low, high), int64 [n]."""
        return torch.randint(low, high, (n,), generator=self.generator)

    def coins(self, n: int) -> Tensor:
        """Return n fair coins, bool [n]."""
        return torch.rand(n, generator=self.generator) < 0.5


class SecretDraws:
    """A cryptographic stream."""

    def __init__(self, stream: SecureRandom) -> None:
        self.stream = stream

    def integers(self, low: int, high: int, n: int) -> Tensor:
        """Return n integers in [low, high), int64 [n]."""
        return torch.from_numpy(self.stream.integers(low, high, n))

    def coins(self, n: int) -> Tensor:
        """Return n fair coins, bool [n]."""
        return self.integers(0, 2, n) == 1

    def included(self, n: int, rate: float) -> Tensor:
        """Return the positions of n records that enter a batch, each with probability `rate`: int64 [m], ascending."""
        return torch.from_numpy(np.flatnonzero(self.stream.uniform(n) < rate))


def hide_globals(stream: SecureRandom, device: torch.device) -> None:
    """Give the global generators states that follow from no seed.

    A Mersenne Twister's whole state is drawn, 19,937 bits. An accelerator's generator has only a seed of 64 bits, so
    each batch needs a new one.
    """
    if device.type != "cpu":
        torch.manual_seed(int(stream.integers(0, 2**63 - 1, 1)[0]))
    words = stream.words(3 * _STATE) & np.uint64(0xFFFFFFFF)
    state = torch.default_generator.manual_seed(0).get_state()
    state[: 8 * _TORCH_STATE.stop].view(torch.int64)[_TORCH_STATE] = torch.from_numpy(words[:_STATE].astype(np.int64))
    torch.default_generator.set_state(state)
    np.random.seed(words[_STATE : 2 * _STATE].astype(np.uint32))  # noqa: NPY002 - a user's model may use it
    random.seed(words[2 * _STATE :].tobytes())


# Random changes of training images, on the device


def crop_flip_draws(n: int, side: int, source: SeededDraws | SecretDraws) -> Tensor:
    """Draw the changes of `crop_flip` for n images: int64 [n, 3], rows to skip, columns to skip, 1 to flip."""
    margin = max(1, side // 8)
    top, left = (source.integers(0, 2 * margin + 1, n) for _ in range(2))
    flip = source.coins(n)
    return torch.stack([top, left, flip.long()], dim=1)


def crop_flip(x: Tensor, draws: Tensor) -> Tensor:
    """Pad with zeros by an eighth of the side, crop back, and flip horizontally, per image.

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


def crop_flip_rotate_draws(n: int, side: int, source: SeededDraws | SecretDraws) -> Tensor:
    """Draw the changes of `crop_flip_rotate` for n images, int64 [n, 4].

    The columns are those of crop_flip_draws and an angle in millionths of a degree.
    """
    limit = MAX_DEGREES * _PER_DEGREE
    moves = crop_flip_draws(n, side, source)
    return torch.cat([moves, source.integers(-limit, limit + 1, n)[:, None]], dim=1)


def crop_flip_rotate(x: Tensor, draws: Tensor) -> Tensor:
    """`crop_flip`, then rotate about the centre by up to MAX_DEGREES either way.

    x: float32 [n, C, S, S]; draws: int64 [n, 4] of crop_flip_rotate_draws, on the same device. Returns the same shape.
    """
    return rotate(crop_flip(x, draws[:, :3]), torch.deg2rad(draws[:, 3] / _PER_DEGREE))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn images counterclockwise about their centre: bilinear, zeros from outside.

    x: float32 [n, C, S, S]; angles: float32 [n], radians. Returns the same shape.
    """
    side = x.shape[-1]
    # pixel centres; the image's edges are at -1 and 1
    from_centre = (2 * torch.arange(side, device=x.device) + 1 - side) / side
    across, down = from_centre[None, None, :], from_centre[None, :, None]
    sin, cos = angles.sin()[:, None, None], angles.cos()[:, None, None]
    # Rows run downwards. A pixel of the turned image comes from its place turned clockwise.
    grid = torch.stack([cos * across - sin * down, sin * across + cos * down], dim=-1)
    return grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


class Augmentation(NamedTuple):
    """A random change of images, as two functions. Images are normalised first: pixels from outside are 0.

    draws: (n images, their side, source) -> int64 [n, k] on the CPU; apply: (float32 [n, C, S, S], draws) -> the
    same shape.
    """

    draws: Callable[[int, int, SeededDraws | SecretDraws], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]


AUGMENTATIONS: Mapping[str, Augmentation | None] = {
    "none": None,
    "crop-flip": Augmentation(crop_flip_draws, crop_flip),
    "crop-flip-rotate": Augmentation(crop_flip_rotate_draws, crop_flip_rotate),
}
