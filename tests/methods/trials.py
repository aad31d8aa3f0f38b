"""One client without a server, one round without a network, and whole runs to compare: what several methods are tried on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from client_app.state import State
from client_app.trainer import LocalTrainer
from fl_app import weights
from fl_app.data import ClientData, DatasetInfo
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import read_metrics
from strategies import METHODS
from strategies.base import RoundContext
from tests.conftest import Run, config

_names = itertools.count()
SIDE, CLASSES = 8, 4


def outcome(run: Run, method: str, **changes: Any) -> tuple[list[Any], bytes]:
    """Run a method; return all it recorded but the times and notes of its own, and the global model's file."""
    folder = run(method=method, run_name=f"{method}-{next(_names)}", **changes)
    records = [_common(record) for record in read_metrics(folder.path)]
    assert not any(record["failures"] for record in records)
    return records, (folder.path / "models" / "global.safetensors").read_bytes()


def _common(value: Any) -> Any:
    own = ("seconds", "personal-parameters", "upload-bytes")
    return {k: _common(v) for k, v in value.items() if k not in own} if isinstance(value, dict) else value


def small_clients(directory: Path) -> dict[str, Any]:
    """Settings: client 0 has one training sample, client 1 four of two classes and no test data, client 2 a batch and one."""
    x = np.random.default_rng(0).integers(0, 256, (40, SIDE, SIDE, 1), np.uint8)
    y = np.arange(40) % 10
    np.savez(directory / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    np.savez(
        directory / "split.npz", train_idx_0=[3], train_idx_1=[4, 14, 24, 5], train_idx_2=np.arange(12, 33),
        test_idx_0=[0, 1], test_idx_1=np.zeros(0, int), test_idx_2=np.arange(9),
    )  # fmt: skip
    return {"dataset": f"npz:{directory / 'data.npz'}", "partition": f"file:{directory / 'split.npz'}", "batch_size": 20}


class Small(nn.Module):
    """Convolution, BatchNorm, classifier: 8x8 images, 4 classes; 4 channels, so that the device's order differs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2 * 36, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))
        return logits


def client(
    method: str, *, module: nn.Module | None = None, n: int = 20, labels: int = CLASSES, round: int = 1, **changes: Any
) -> RoundContext[Any]:  # fmt: skip
    """Context of one client with n random samples of the first `labels` classes; `Small` unless a module is given."""
    torch.manual_seed(0)
    module = Small() if module is None else module
    parsed = config(method=method, **changes)
    random = np.random.default_rng(5)
    x, y = random.integers(0, 256, (n, 1, SIDE, SIDE), np.uint8), random.integers(0, labels, n)
    info = DatasetInfo(1, SIDE, tuple("0123"), n, n, (0.0,), (1.0,))
    layout, initial = Layout.of(module), weights.read(module)
    trainer = LocalTrainer(module, parsed, ClientData(x, y, x, y, info), round, 0)
    shared = METHODS[method].shared(layout, parsed.params)
    return RoundContext(parsed, parsed.params, round, 0, layout, shared, lambda: initial, trainer, n, {})


def another(model: Model, seed: int) -> Model:
    """Return a model near another, for what a server might send next."""
    random = np.random.default_rng(seed)
    return Model(model.params + random.normal(0, 0.05, model.params.shape).astype(np.float32), model.buffers)


def copied(state: State) -> State:
    """Return a state with copies of all arrays, as if it had been written and read."""
    return State({name: array.copy() for name, array in state.arrays.items()})
