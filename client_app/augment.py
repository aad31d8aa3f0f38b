"""Random changes of training images, on the device.

The random numbers are drawn on the CPU together with the epoch's order. Images are normalised first, so pixels that
enter from outside the image are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from client_app.draws import Draws

MAX_DEGREES = 15
# angles are drawn in millionths of a degree
_PER_DEGREE = 10**6


@dataclass(frozen=True)
class Augmentation:
    """A random change, as two functions.

    draws: (n images, their side, source) -> int64 [n, k] on the CPU; apply: (float32 [n, C, S, S], draws) -> the
    same shape.
    """

    draws: Callable[[int, int, Draws], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]


def crop_flip_draws(n: int, side: int, source: Draws) -> Tensor:
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


def crop_flip_rotate_draws(n: int, side: int, source: Draws) -> Tensor:
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


AUGMENTATIONS: Mapping[str, Augmentation | None] = {
    "none": None,
    "crop-flip": Augmentation(crop_flip_draws, crop_flip),
    "crop-flip-rotate": Augmentation(crop_flip_rotate_draws, crop_flip_rotate),
}
