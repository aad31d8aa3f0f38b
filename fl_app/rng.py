"""Random generators derived from (seed, round, client id, purpose), equal in every process and on every machine."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

NO_CLIENT = -1


def seed_sequence(seed: int, purpose: str, round: int = 0, client_id: int = NO_CLIENT) -> np.random.SeedSequence:
    """Return the seed sequence of one purpose. Distinct arguments give independent streams."""
    words = seed, round, client_id + 1, zlib.crc32(purpose.encode())
    # NumPy reads an array of words faster than a list of integers, and makes the same sequence of it.
    fits = 0 <= min(words) and max(words) < 2**32
    return np.random.SeedSequence(np.array(words, np.uint32) if fits else words)


def generator(seed: int, purpose: str, round: int = 0, client_id: int = NO_CLIENT) -> np.random.Generator:
    """Return a NumPy generator for one purpose."""
    return np.random.default_rng(seed_sequence(seed, purpose, round, client_id))


def torch_seed(seed: int, purpose: str, round: int = 0, client_id: int = NO_CLIENT) -> int:
    """Return a 63-bit seed for torch.Generator.manual_seed."""
    return int(seed_sequence(seed, purpose, round, client_id).generate_state(1, np.uint64)[0] >> 1)


def seed_global(seed: int) -> None:
    """Seed the global generators of NumPy and `random`, for a user's model that draws from them."""
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a user's model may use it
    random.seed(seed)


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Restore the state of the global generators of NumPy, Python and torch (the CPU's) at the end of the block."""
    import torch

    numpy_state, state = np.random.get_state(), random.getstate()  # noqa: NPY002 - a user's model may use it
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002 - a user's model may use it
        random.setstate(state)
