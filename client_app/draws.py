"""Random numbers of training: repeatable ones from a seed, or secret ones where they protect records.

With `dp-epsilon` the batches, the changes of images and dropout are secret. Anyone who knew what the third record of a
batch meets would see the others move up where a record is missing.
"""

from __future__ import annotations

import random
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fl_app import rng
from fl_app.privacy.secure_random import SecureRandom

# words of a Mersenne Twister's state, and their place in that of PyTorch's CPU generator (64 bits each)
_STATE = 624
_TORCH_STATE = slice(3, 3 + _STATE)


class Draws(Protocol):
    """A source of random numbers on the CPU."""

    def integers(self, low: int, high: int, n: int) -> Tensor:
        """Return n integers in [low, high), int64 [n]."""
        ...

    def coins(self, n: int) -> Tensor:
        """Return n fair coins, bool [n]."""
        ...


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


def seed_globals(seed: int, device: torch.device) -> None:
    """Seed the global generators, from which dropout and a user's model draw."""
    if device.type == "cpu":
        # Only the CPU's generator: `torch.manual_seed` also queues the call for accelerators that have not started.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    rng.seed_global(seed)


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
