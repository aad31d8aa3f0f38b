"""What the methods' tests share: runs as numbers, clients with little data, one client's context without a server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from client_app.trainer import LocalTrainer
from fl_app import weights
from fl_app.data import ClientData, DatasetInfo
from fl_app.layout import Layout
from fl_app.server.run_folder import RunFolder, read_metrics
from strategies import METHODS
from strategies.base import RoundContext
from tests.conftest import Run, config

_names = itertools.count()


def outcome(run: Run, method: str, **changes: Any) -> tuple[list[Any], dict[str, bytes]]:
    """Run a method and return all it recorded but times, and the models it saved."""
    folder = run(method=method, run_name=f"{method}-{next(_names)}", **changes)
    return timeless(folder), {file.name: file.read_bytes() for file in (folder.path / "models").iterdir()}


def timeless(folder: RunFolder) -> list[Any]:
    """Everything a run recorded, but for the time it took."""

    def strip(value: Any) -> Any:
        return {k: strip(v) for k, v in value.items() if k != "seconds"} if isinstance(value, dict) else value

    return [strip(record) for record in read_metrics(folder.path)]


def arrays(directory: Path, *, num_classes: int = 10) -> str:
    """Write a data set of 40 images 8x8 and return it as `dataset`."""
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)
    y = np.arange(40) % num_classes
    np.savez(directory / f"data-{num_classes}.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    return f"npz:{directory / f'data-{num_classes}.npz'}"


def small_clients(directory: Path) -> dict[str, Any]:
    """Client 0 has one sample, client 1 two of ten classes and no test data, client 2 one sample more than a batch."""
    split = directory / "split.npz"
    np.savez(
        split,
        train_idx_0=[3],
        train_idx_1=[4, 14, 24, 5, 15],
        train_idx_2=np.arange(12, 33),
        test_idx_0=[0, 1],
        test_idx_1=np.zeros(0, int),
        test_idx_2=np.arange(5, 15),
    )
    return {"dataset": arrays(directory), "partition": f"file:{split}", "batch_size": 20}


def client(
    method: str,
    module: nn.Module,
    x: np.ndarray,
    y: np.ndarray,
    *,
    round: int = 1,
    num_classes: int = 2,
    extras: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RoundContext[Any]:
    """Context of one client whose training and test data are the images x uint8 [n, 1, S, S] with labels y."""
    parsed, registered = config(method=method, **changes), METHODS[method]
    if registered.wrap is not None:
        module = registered.wrap(module, parsed.params, parsed.seed)
    info = DatasetInfo(1, x.shape[-1], tuple(map(str, range(num_classes))), len(y), len(y), (0.0,), (1.0,))
    layout, initial = Layout.of(module), weights.read(module)
    trainer = LocalTrainer(module, parsed, ClientData(x, y, x, y, info), round, 0)
    shared = registered.shared(layout, parsed.params)
    return RoundContext(parsed, parsed.params, round, 0, layout, shared, lambda: initial, trainer, len(y), extras or {})
