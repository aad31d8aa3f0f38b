"""Gaussian noise of differential privacy, without the faults of floating-point normals.

The classic attack (Mironov, CCS 2012) reads the low-order bits of a sum: a generator's normals are few of all floats, so
only some sums are possible for each data set. Here a normal number is made of 127 random bits and has 53 bits itself.
It is added in float64. The sum is then rounded to a multiple of STEP deviations, or of the power of two below it.
Every multiple is possible for every data set, with the probability that the exact normal gives it: about 2^36 of
the numbers added fall on each multiple within a deviation. Rounding follows the noise, so it is post-processing. The
accountant's Gaussian mechanism stays as it is, and the sensitivity as well.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fl_app.privacy.secure_random import SecureRandom

# Largest step between possible sums, in standard deviations of the noise. It adds 2^-34 to the variance at most.
STEP = 2.0**-16
# Pairs of normals made at once. They fit the cache, and PyTorch starts no threads for so few.
_PAIRS = 1 << 14


@torch.no_grad()
def noisy(total: Tensor, deviation: float, stream: SecureRandom) -> Tensor:
    """Return a sum with Gaussian noise in every element, on a grid that does not depend on the sum.

    total: float32, on any device. It is overwritten if it is contiguous and on the CPU. deviation: of the noise, above 0.
    The result has the sum's shape, dtype and device. The noise is drawn on the CPU, so every device gets the same.
    """
    if not 0 < deviation < math.inf:
        raise ValueError(f"deviation must be above 0 and finite, got {deviation}")
    step = 2.0 ** math.floor(math.log2(deviation * STEP))
    flat = total.detach().cpu().contiguous().reshape(-1)
    normals = _Normals(stream, deviation / step)
    for start in range(0, flat.numel(), 2 * _PAIRS):
        part = flat[start : start + 2 * _PAIRS]
        part.copy_(normals.draw(len(part)).add_(part, alpha=1 / step).round_().mul_(step))
    return flat.reshape(total.shape).to(total.device)


class _Normals:
    """Normals by the transform of Box and Muller, in float64. They reach 9.42 deviations."""

    def __init__(self, stream: SecureRandom, deviation: float) -> None:
        self._stream, self._deviation = stream, deviation
        # half a unit keeps the logarithm finite
        self._half = torch.tensor(2.0**-64, dtype=torch.float64)
        self._take(0)

    def _take(self, pairs: int) -> None:
        """Take memory for draws of this many pairs, and name its halves once for all of them."""
        self._pairs = pairs
        self._bits = np.empty(2 * pairs, np.int64)
        self._words = torch.from_numpy(self._bits)
        self._uniform = torch.empty(2 * pairs, dtype=torch.float64)
        self._normals = torch.empty(2 * pairs, dtype=torch.float64)
        self._signed = self._words[:pairs]
        self._radius, self._angle = self._uniform[:pairs], self._uniform[pairs:]
        self._cosines, self._sines = self._normals[:pairs], self._normals[pairs:]

    def draw(self, n: int) -> Tensor:
        """Return n normals, float64 [n], at most 2 * _PAIRS. The next draw overwrites them."""
        if -(-n // 2) != self._pairs:
            self._take(-(-n // 2))
        self._stream.fill(self._bits)
        # 63 bits without a sign: small numbers keep their 53 digits, from which far normals come
        self._signed.bitwise_and_(2**63 - 1)
        self._uniform.copy_(self._words)
        radius = torch.add(self._half, self._radius, alpha=2.0**-63, out=self._radius)
        radius.log_().mul_(-2 * self._deviation**2).sqrt_()
        angle = self._angle.mul_(2 * math.pi * 2.0**-64)
        torch.cos(angle, out=self._cosines).mul_(radius)
        torch.sin(angle, out=self._sines).mul_(radius)
        return self._normals[:n]
