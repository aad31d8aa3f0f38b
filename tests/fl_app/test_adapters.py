"""Adapters that alone train, in a method that splits the model: which of them travel, and which stay."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_app.server.run_folder import read_metrics
from fl_app.tracing import traced
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


SCORE = "base_model.model.score"
BASE = {f"{SCORE}.base_layer.weight", f"{SCORE}.base_layer.bias"}
LORA = BASE | {f"{SCORE}.lora_A.default.weight", f"{SCORE}.lora_B.default.weight"}
SAVED = f"{SCORE}.modules_to_save.default"

# arguments of LoraConfig, the classifier's tensors, the module that holds them, and whether this is one linear layer
ADAPTED: dict[str, tuple[dict[str, Any], set[str], str, bool]] = {
    "everywhere": ({"target_modules": ["body", "score"]}, LORA, SCORE, False),
    "with dropout": ({"target_modules": ["body", "score"], "lora_dropout": 0.1}, LORA, SCORE, False),
    "with a magnitude": (
        {"target_modules": ["body", "score"], "use_dora": True},
        LORA | {f"{SCORE}.lora_magnitude_vector.default.weight"},
        SCORE,
        False,
    ),
    "on the classifier alone": ({"target_modules": ["score"]}, LORA, SCORE, False),
    "beside a saved classifier": (
        {"target_modules": ["body"], "modules_to_save": ["score"]},
        {f"{SAVED}.weight", f"{SAVED}.bias"},
        SAVED,
        True,
    ),
    "beside saved layers that are not used": (
        {"target_modules": ["body"], "modules_to_save": ["score", "spare"]},
        {f"{SAVED}.weight", f"{SAVED}.bias"},
        SAVED,
        True,
    ),
}


class Scores(nn.Module):
    """A body and its classifier, and a layer registered last that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score, self.spare = nn.Linear(64, 16), nn.Linear(16, 10), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.score(self.body(x.flatten(1)).relu())
        return answer


@pytest.mark.parametrize("case", ADAPTED)
def test_an_adapter_of_peft_belongs_to_the_layer_that_it_adapts(case: str) -> None:
    peft = pytest.importorskip("peft")
    arguments, classifier, layer, linear = ADAPTED[case]
    module = peft.get_peft_model(Scores(), peft.LoraConfig(r=2, **arguments)).eval()
    split = traced(module, torch.zeros(2, 1, 8, 8))[1]
    assert (split.classifier, split.layer, split.linear, split.fault) == (classifier, layer, linear, "")
    trains = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert not trains & split.unused - {name for name in trains if ".spare." in name}
