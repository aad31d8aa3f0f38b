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

    total: float32, on any device. deviation: of the noise, above 0. The result has the sum's shape, dtype and device.
    The noise is drawn on the CPU, so every device gets the same.
    """
    if not 0 < deviation < math.inf:
        raise ValueError(f"deviation must be above 0 and finite, got {deviation}")
    step = 2.0 ** math.floor(math.log2(deviation * STEP))
    flat = total.detach().cpu().contiguous().reshape(-1)
    result = torch.empty_like(flat)
    normals = _Normals(stream, deviation / step)
    for start in range(0, flat.numel(), 2 * _PAIRS):
        part = slice(start, start + 2 * _PAIRS)
        steps = normals.draw(len(flat[part])).add_(flat[part], alpha=1 / step).round_()
        result[part] = steps.mul_(step)
    return result.reshape(total.shape).to(total.device)


class _Normals:
    """Normals by the transform of Box and Muller, in float64. They reach 9.42 deviations."""

    def __init__(self, stream: SecureRandom, deviation: float) -> None:
        self._stream, self._deviation = stream, deviation
        self._words = torch.empty(2 * _PAIRS, dtype=torch.int64)
        self._uniform = torch.empty(2 * _PAIRS, dtype=torch.float64)
        self._normals = torch.empty(2 * _PAIRS, dtype=torch.float64)

    def draw(self, n: int) -> Tensor:
        """Return n normals, float64 [n], at most 2 * _PAIRS. The next draw overwrites them."""
        pairs = -(-n // 2)
        words = self._words[: 2 * pairs]
        self._stream.fill(words.numpy())
        # 63 bits without a sign: small numbers keep their 53 digits, from which far normals come
        words[:pairs] &= 2**63 - 1
        uniform = self._uniform[: 2 * pairs].copy_(words)
        radius, angle = uniform[:pairs], uniform[pairs:]
        # half a unit keeps the logarithm finite
        radius.mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2 * self._deviation**2).sqrt_()
        angle.mul_(2 * math.pi * 2.0**-64)
        normals = self._normals[: 2 * pairs]
        torch.cos(angle, out=normals[:pairs]).mul_(radius)
        torch.sin(angle, out=normals[pairs:]).mul_(radius)
        return normals[:n]
