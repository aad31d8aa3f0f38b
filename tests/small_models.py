"""Models that train in no time: with everything that methods tell apart, and without buffers."""

from __future__ import annotations

from typing import Any

from torch import nn

BATCHNORM: dict[str, Any] = {"model": "tests.small_models:batchnorm"}
GROUP: dict[str, Any] = {"model": "tests.small_models:group"}


def batchnorm(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return two convolutions with BatchNorm, and a classifier: parameters, and buffers of floats and of a counter."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def group(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return a convolution with GroupNorm, which has no buffers, and a classifier."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )
