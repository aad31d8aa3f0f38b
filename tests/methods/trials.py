"""What methods are tried on beside tests/methods/runs.py: a client with convolutions and BatchNorm, runs without own notes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from client_app.stored_state import StoredState
from fl_app.layout import Model
from strategies.base import RoundContext
from tests.conftest import Run
from tests.methods import runs

SIDE, CLASSES = 8, 4


def outcome(run: Run, method: str, **changes: Any) -> tuple[list[Any], bytes]:
    """Run a method; return all it recorded but times, bytes sent and notes of its own, and the global model's file."""
    records, files = runs.outcome(run, method, **changes)
    assert not any(record["failures"] for record in records)
    return [_common(record) for record in records], files["global.safetensors"]


def _common(value: Any) -> Any:
    own = ("personal-parameters", "personal-share", "loaded-share", "upload-bytes")
    return {k: _common(v) for k, v in value.items() if k not in own} if isinstance(value, dict) else value


class Small(nn.Module):
    """Convolutions, of which the device has another order, BatchNorm and classifier: 8x8 images, 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.bn = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)
        self.fc = nn.Linear(2 * 16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(torch.relu(self.bn(self.conv(self.stem(x)))).flatten(1))
        return logits


def client(
    method: str, *, module: nn.Module | None = None, n: int = 20, labels: int = CLASSES, round: int = 1, **changes: Any
) -> RoundContext[Any]:
    """Context of one client with n random samples of the first `labels` classes; `Small` unless a module is given."""
    torch.manual_seed(0)
    random = np.random.default_rng(5)
    x, y = random.integers(0, 256, (n, 1, SIDE, SIDE), np.uint8), random.integers(0, labels, n)
    module = Small() if module is None else module
    return runs.client(method, module, x, y, round=round, num_classes=CLASSES, **changes)


def another(model: Model, seed: int) -> Model:
    """Return a model near another, for what a server might send next."""
    random = np.random.default_rng(seed)
    return Model(model.params + random.normal(0, 0.05, model.params.shape).astype(np.float32), model.buffers)


def copied(state: StoredState) -> StoredState:
    """Return a state with copies of all arrays, as if it had been written and read."""
    return StoredState({name: array.copy() for name, array in state.arrays.items()})
