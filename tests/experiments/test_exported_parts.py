"""Exports of runs that train or share a part of the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from corolla.api.settings import look_for_plugins
from corolla.experiments.exported.export import FileForm, export, export_each
from fl_app import models, weights
from fl_app.errors import UserError
from fl_app.layout import Layout
from strategies import METHODS
from tests.conftest import Run
from tests.experiments.test_exported import TINY, answers
from tests.facts import rejected

ADAPTED = """
import torch
from torch import nn

class Adapted(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.backbone, self.adapter = nn.Linear(inputs, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        h = self.backbone(x.flatten(1)).relu()
        return self.head(h + self.adapter(h))

def build(in_channels, num_classes, image_size):
    return Adapted(in_channels * image_size**2, num_classes)
"""


@pytest.fixture
def adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An adapter and a head on a backbone from a file."""
    (tmp_path / "adapted_model.py").write_text(ADAPTED)
    monkeypatch.chdir(tmp_path)
    look_for_plugins()
    torch.manual_seed(3)
    module = models.build("adapted_model:build", in_channels=1, num_classes=10, image_size=8, seed=5)
    weights.save_safetensors(tmp_path / "backbone.safetensors", Layout.of(module), weights.read(module))
    return {
        "model": "adapted_model:build",
        "train": "adapter.*,head.*",
        "initial_weights": str(tmp_path / "backbone.safetensors"),
    }


def test_a_refused_export_makes_no_directory(run: Run, tmp_path: Path) -> None:
    folder = run(method="local", **TINY)
    with rejected(UserError, "", "collect-personal-models"):
        export_each(folder.path, METHODS, None, tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("form", [FileForm.pytorch, FileForm.onnx])
def test_what_did_not_train_is_in_the_file_too(
    run: Run, tmp_path: Path, adapted: dict[str, Any], form: FileForm
) -> None:
    if form is FileForm.onnx:
        pytest.importorskip("onnxruntime")
    folder = run(method="fedavg", **adapted, **TINY)
    file, _ = export(folder.path, METHODS, None, tmp_path / f"x{form.value}", form=form)
    module = models.build("adapted_model:build", in_channels=1, num_classes=10, image_size=8, seed=9)
    weights.load_initial(module, adapted["initial_weights"])
    trained, layout = Layout.of(module), weights.names_in(folder.path / "models" / "global.safetensors")
    assert layout == {"adapter.weight", "adapter.bias", "head.weight", "head.bias"}
    part = weights.load_safetensors(folder.path / "models" / "global.safetensors", trained.subset(layout))
    weights.write(module, trained.put(weights.read(module), part, layout))
    if form is FileForm.pytorch:
        module.load_state_dict(torch.load(file), strict=True)
    samples = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8), np.uint8)
    with torch.no_grad():
        want = module(torch.from_numpy(samples).float() / 255)
    np.testing.assert_allclose(answers(file, samples)[0], want.numpy(), atol=1e-5)


def test_a_backbone_from_a_file_without_a_head(run: Run, tmp_path: Path, adapted: dict[str, Any]) -> None:
    tensors = load_file(adapted["initial_weights"])
    save_file({k: v for k, v in tensors.items() if k.startswith("backbone")}, tmp_path / "part.safetensors")
    part = {"initial_weights": str(tmp_path / "part.safetensors"), "initial_weights_partial": True}
    folder = run(method="fedavg", **adapted | part, **TINY)
    file, _ = export(folder.path, METHODS, None, tmp_path / "x.pt")
    torch.testing.assert_close(torch.load(file)["backbone.weight"], tensors["backbone.weight"])


def test_another_backbone_is_refused(run: Run, tmp_path: Path, adapted: dict[str, Any]) -> None:
    folder = run(method="fedavg", **adapted, **TINY)
    module = models.build("adapted_model:build", in_channels=1, num_classes=10, image_size=8, seed=6)
    weights.save_safetensors(tmp_path / "backbone.safetensors", Layout.of(module), weights.read(module))
    with rejected(UserError, "run", "frozen tensors", "model adapted_model:build differ", "run's"):
        export(folder.path, METHODS, None, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("keys", [{"method": "fedper"}, {"method": "fedavg", "share": "fc*"}], ids=["fedper", "share"])
def test_half_a_model_predicts_nothing(run: Run, tmp_path: Path, keys: dict[str, str]) -> None:
    folder = run(collect_personal_models=True, **keys, **TINY)
    for end in (".pt", *([".onnx"] if importlib.util.find_spec("onnxruntime") else [])):
        with rejected(
            UserError, "", "leaves classifier.bias", "classifier.weight", "clients", "global cannot predict", "alone"
        ):
            export(folder.path, METHODS, None, tmp_path / f"g{end}", form=FileForm(end))
    whole, _ = export(folder.path, METHODS, 1, tmp_path / "c.pt")
    assert answers(whole, np.zeros((1, 1, 8, 8), np.uint8))[0].shape == (1, 10)
