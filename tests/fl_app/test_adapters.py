"""Adapters that alone train, in a method that splits the model: which of them travel, and which stay."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fl_app.server.run_folder import read_metrics
from tests.fl_app.test_split import LoRA
from tests.test_all_methods import start


def by_hand(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return two layers, each with an adapter."""
    inputs = in_channels * image_size**2
    return nn.Sequential(nn.Flatten(), LoRA(nn.Linear(inputs, 16)), nn.ReLU(), LoRA(nn.Linear(16, num_classes)))


def by_peft(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the same layers with adapters of the package peft."""
    peft: Any = importlib.import_module("peft")
    inputs = in_channels * image_size**2
    plain = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, num_classes))
    made: nn.Module = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["1", "3"]))
    return made


@pytest.mark.parametrize(
    ("model", "train"), [("by_hand", "*.down.weight, *.up.weight"), ("by_peft", "*lora_A*, *lora_B*")]
)
def test_fedper_keeps_the_classifiers_adapter_and_sends_the_bodys(tmp_path: Path, model: str, train: str) -> None:
    if model == "by_peft":
        pytest.importorskip("peft")
    sent = []
    for method in ("fedavg", "fedper", "lg-fedavg"):
        folder, _ = start(tmp_path, method, method=method, model=f"tests.fl_app.test_adapters:{model}", train=train)
        sent.append({row["upload-bytes"] for record in read_metrics(folder.path) for row in record["clients"].values()})
    body, head = 4 * (64 * 2 + 2 * 16), 4 * (16 * 2 + 2 * 10)
    assert sent == [{body + head}, {body}, {head}]
