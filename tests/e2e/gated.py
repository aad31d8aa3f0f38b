"""Models for tests: `--set model=gated:mlp` stops in the middle of training while a test wants it to, `gated:wide` is large,
`gated:normed` has BatchNorm.

Every SuperNode of a test has its own directory in $COROLLA_GATE. A client process that begins to train adds its pid to
`trainings`; the n-th of them waits while a file `hold-n` exists. Each of them first sleeps for the seconds in the file
`sleep`, if there is one. Without the variable it is an ordinary model.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

from torch import Tensor, nn


@functools.cache
def _number_of_this_training() -> int:
    """Tell the test about this process, once, and return how many have begun to train before it and with it."""
    path = Path(os.environ["COROLLA_GATE"]) / "trainings"
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    seconds = path.with_name("sleep")
    time.sleep(float(seconds.read_text()) if seconds.exists() else 0)
    return len(path.read_text().splitlines())


class Gated(nn.Sequential):
    """Layers in a row whose training can be held."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and "COROLLA_GATE" in os.environ:
            hold = Path(os.environ["COROLLA_GATE"]) / f"hold-{_number_of_this_training()}"
            while hold.exists():
                time.sleep(0.05)
        output: Tensor = super().forward(x)
        return output


def mlp(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    return Gated(nn.Flatten(), nn.Linear(in_channels * image_size**2, 32), nn.ReLU(), nn.Linear(32, num_classes))


def normed(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return a small model with buffers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def wide(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return 1.2 MB of parameters that train in no time: a server that keeps what it should drop soon shows it."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(in_channels * image_size**2, 4096), nn.ReLU(), nn.Linear(4096, num_classes)
    )


def large(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return 4.9 MB of parameters whose training can be held: a round of a few clients fills a small disk."""
    width = 16384
    return Gated(nn.Flatten(), nn.Linear(in_channels * image_size**2, width), nn.ReLU(), nn.Linear(width, num_classes))
