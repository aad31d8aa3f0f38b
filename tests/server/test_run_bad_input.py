"""Whole runs in one process: the real ServerApp and ClientApp, joined by InProcessGrid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import client_app.client
from fl_app import models
from fl_app.errors import UserError
from fl_app.layout import Layout
from fl_app.server.run_folder import RunFolder, read_metrics
from tests.conftest import Run
from tests.facts import mentions, rejected

METHODS = ("fedavg", "local", "fedcac")


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_metrics(folder.path))


def layout_of(model: str) -> Layout:
    return Layout.of(models.build(model, in_channels=1, num_classes=10, image_size=8))


def no_run_folder(raw: dict[str, Any]) -> bool:
    runs = Path(raw["output-dir"])
    return not runs.exists() or not list(runs.iterdir())


# bad input leaves nothing behind


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "no_such_module:make"}, "model no_such_module:make: cannot import no_such_module"),
        ({"model": "tests.server.test_run_bad_input:raises"}, "the factory raised RuntimeError: no weights"),
        ({"model": "tests.server.test_run_bad_input:wrong_size"}, "must give logits of shape [2, 10], got [2, 11]"),
        ({"model": "json:dumps"}, "model json:dumps: the factory raised TypeError"),
        ({"initial_weights": "/no/such.safetensors"}, "initial-weights /no/such.safetensors: no such file"),
        ({"dataset": "npz:/no/such.npz"}, "/no/such.npz"),
        ({"dataset": "folder:/no/such/folder"}, "/no/such/folder"),
        ({"partition": "file:/no/such.npz"}, "partition: /no/such.npz: no such file or directory"),
        ({"partition": "pathological", "classes_per_client": 11}, "classes-per-client"),
        ({"train_samples": 100_000}, "train-samples"),
        ({"num_clients": 3, "min_available_clients": 4}, "min-available-clients"),
        ({"fedcac": {"tau": "abc"}}, "fedcac.tau: expected a number, got 'abc'"),
        ({"output_dir": "/proc/none"}, "output-dir: cannot create /proc/none/run"),
    ],
)
def test_bad_input_leaves_no_run_folder(
    run: Run, raw_config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as info:
        run(**changes)
    assert words in str(info.value), str(info.value)
    assert len(str(info.value).splitlines()) < 24
    assert no_run_folder(raw_config)


def raises(**shape: int) -> Any:
    raise RuntimeError("no weights")


def wrong_size(in_channels: int, num_classes: int, image_size: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes + 1))


def test_cuda_without_a_gpu(run: Run, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with rejected(UserError, "", "client 0", "device", "cuda asked for", "machine has 0 usable"):
        run(device="cuda")
    assert no_run_folder(raw_config)


def test_a_client_with_another_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = models.build

    def other(name: str, **options: Any) -> Any:
        return original("cnn" if building else name, **options)

    building = False
    original_context = client_app.client.CorollaClient._prepare

    def context(self: Any, download: Any) -> Any:
        nonlocal building
        building = self.client_id == 1
        # else it would use the network that the client before has left
        self.session._left.clear()
        try:
            return original_context(self, download)
        finally:
            building = False

    monkeypatch.setattr(models, "build", other)
    monkeypatch.setattr(client_app.client.CorollaClient, "_prepare", context)
    (failure,) = rounds(run(num_server_rounds=1))[0]["failures"]
    assert failure["client"] == 1 and "received 17226 parameters" in failure["cause"]


def test_nodes_without_their_configuration(raw_config: dict[str, Any], run: Run) -> None:
    with rejected(UserError, "", "SuperNode needs --node-config", "'partition-id=K num-partitions=N'"):
        run(node_configs={1: {"partition-id": "one"}})
    assert no_run_folder(raw_config)
    # the number of clients is the run's: an invitation of a larger federation still holds
    assert len(rounds(run(node_configs={1: {"num-partitions": 5}}))[-1]["clients"]) == 3


def test_clients_whose_data_differ(run: Run, tmp_path: Path, raw_config: dict[str, Any]) -> None:
    nodes = {}
    for i, side in enumerate((8, 8, 10)):
        path = tmp_path / f"site{i}.npz"
        x = np.random.default_rng(i).integers(0, 256, (12, side, side), np.uint8)
        np.savez(path, x_train=x, y_train=np.arange(12) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
        nodes[i] = {"data-path": str(path)}
    with pytest.raises(UserError) as info:
        run(dataset="node", classes="0,1", node_configs=nodes)
    assert mentions(str(info.value), "clients [0, 1]", "1 channels", "2 classes", "8 pixels")
    assert mentions(str(info.value), "clients [2]", "1 channels", "2 classes", "10 pixels")
    assert no_run_folder(raw_config)
    del nodes[2]
    records = rounds(run(dataset="node", classes="0,1", node_configs=nodes, num_clients=2))
    assert records[-1]["evaluation"]["accuracy"] is not None
