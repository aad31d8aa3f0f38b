"""Random numbers that protect people: AES-256 in counter mode, with a key that never leaves its process.

Noise, batches of runs with `dp-epsilon`, secrets and nonces come from here alone. The generators of PyTorch, NumPy and
`random` repeat for 32-bit seeds, or can be continued from their outputs. Who finds the seed can subtract the noise.

A deployment's keys come from the operating system (`secret`). In a simulation all clients are on one machine, and a
run must repeat: there the key follows from the seed (`SecureRandom.of_seed`), and hides nothing from anyone who knows it.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

KEY_BYTES = 32
# most bytes of the keystream made at once, and bytes of one of AES's blocks
_CHUNK, _BLOCK = 1 << 18, 16


def secret(nbytes: int = KEY_BYTES) -> bytes:
    """Return bytes for a key, a secret or a nonce, from the operating system's generator."""
    return os.urandom(nbytes)


class SecureRandom:
    """A stream of random numbers. No party without its key can tell them from chance, or one from the others.

    A key has one stream, so no two objects may have one key, except to repeat a simulation. A stream belongs to the
    process that made it. It raises RuntimeError in a forked child, which would draw its parent's numbers again.
    """

    def __init__(self, key: bytes) -> None:
        """Begin the stream of a key of 32 bytes. Raises ValueError for another length."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key must have {KEY_BYTES} bytes, got {len(key)}")
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._process = os.getpid()
        self._zeros, self._end = memoryview(bytes(_CHUNK)), bytearray(2 * _BLOCK)

    @classmethod
    def of_secret(cls) -> SecureRandom:
        """Return a stream that nobody can repeat."""
        return cls(secret())

    @classmethod
    def of_seed(cls, seed: int, purpose: str, round: int = 0, client_id: int = -1) -> SecureRandom:
        """Return a simulation's stream, equal in every process. Distinct arguments give unrelated streams."""
        label = json.dumps(["corolla simulation", seed, purpose, round, client_id])
        return cls(hashlib.sha256(label.encode()).digest())

    def __reduce__(self) -> NoReturn:
        """Refused: the key must not leave the process."""
        raise TypeError("a secure stream cannot be copied or pickled")

    def fill(self, array: NDArray[np.generic]) -> None:
        """Overwrite a contiguous array with random bytes. Raises ValueError for another, RuntimeError after a fork."""
        if os.getpid() != self._process:
            raise RuntimeError("a secure stream must not be continued in a forked process")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError("the array must be contiguous and writeable")
        target = array.reshape(-1).view(np.uint8)
        # the cipher asks for a block of room behind its output: all but the end is written where it stays
        direct = max(len(target) - _BLOCK, 0)
        for start in range(0, direct, _CHUNK):
            size = min(_CHUNK, direct - start)
            self._stream.update_into(self._zeros[:size], target[start : start + size + _BLOCK].data)
        left = len(target) - direct
        self._stream.update_into(self._zeros[:left], self._end)
        target[direct:] = np.frombuffer(self._end, np.uint8, left)

    def words(self, n: int) -> NDArray[np.uint64]:
        """Return n random words, uint64 [n]."""
        words = np.empty(n, np.uint64)
        self.fill(words)
        return words

    def uniform(self, n: int) -> NDArray[np.float64]:
        """Return n numbers in [0, 1), float64 [n]: multiples of 2^-53."""
        return (self.words(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, low: int, high: int, n: int) -> NDArray[np.int64]:
        """Return n integers in [low, high), int64 [n]. Probabilities differ by at most 2^-64. Raises ValueError if empty."""
        if not 0 < high - low < 2**63:
            raise ValueError(f"the range must have 1 to 2^63 - 1 integers, got [{low}, {high})")
        return (self.words(n) % np.uint64(high - low)).astype(np.int64) + low
