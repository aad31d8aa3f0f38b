"""One client of a method on made-up data: the context its half is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_app.layout import Model
from strategies.base import RoundContext
from tests.methods import runs

BATCHNORM_SEED = 3


class Small(nn.Module):
    """4 pixels -> 5 features, normalised or not, with or without dropout -> classifier."""

    def __init__(self, classes: int = 3, *, batchnorm: bool = False, dropout: float = 0) -> None:
        super().__init__()
        self.features = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5) if batchnorm else nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.classifier = nn.Linear(5, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.dropout(torch.relu(self.norm(self.features(x.flatten(1)))))
        logits: torch.Tensor = self.classifier(hidden)
        return logits


def small(classes: int = 3, **kinds: Any) -> nn.Module:
    """The same initial weights every time."""
    torch.manual_seed(BATCHNORM_SEED)
    return Small(classes, **kinds)


def client(
    method: str,
    module: nn.Module,
    pixels: np.ndarray,
    labels: np.ndarray,
    *,
    classes: int = 3,
    round: int = 1,
    extras: Mapping[str, np.ndarray] | None = None,
    **changes: Any,
) -> RoundContext[Any]:
    """Context of client 0 whose training and test data are these: uint8 [n, 1, S, S], int64 [n]."""
    small_steps: dict[str, Any] = {"batch_size": 4, "local_epochs": 2, "learning_rate": 0.1}
    return runs.client(
        method, module, pixels, labels, round=round, num_classes=classes, extras=extras, **(small_steps | changes)
    )


def samples(n: int = 10, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of 2 x 2 pixels, uint8 [n, 1, 2, 2], and labels, int64 [n]."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (n, 1, 2, 2), dtype=np.uint8), draw.integers(0, classes, n)


def same(a: Model, b: Model) -> bool:
    """Whether two models are equal, bit for bit."""
    return a.params.tobytes() == b.params.tobytes() and a.buffers.tobytes() == b.buffers.tobytes()
