"""The example of adapters on a vision transformer: methods send them alone, and peft and timm load what is exported."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import corolla
from corolla.experiments.exported import adapter, run_models
from corolla.experiments.exported.export import FileForm, export
from strategies import METHODS
from tests import examples


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Return examples/lora_vision.py as a module."""
    with examples.example("lora_vision:build", "peft", "timm") as module:
        yield module


@pytest.fixture(scope="module")
def runs(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of each of the example's methods, by name."""
    directory = tmp_path_factory.mktemp("vision")
    example.write_base(directory / "base.safetensors")
    small = {"num_server_rounds": 1, "local_epochs": 1, "train_samples": 40, "test_samples": 20, "in_process": True}
    settings = {**example.settings(directory), **small}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(examples.EXAMPLES)
        for method in example.METHODS:
            corolla.run(method=method, run_name=method, **settings)
    return directory


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module.eval()(torch.linspace(0, 1, 3 * 64).view(3, 1, 8, 8))
    return found


def test_methods_send_adapters_and_the_classifier_or_less(example: Any, runs: Path) -> None:
    sent = {}
    for method in example.METHODS:
        rounds = [json.loads(line) for line in (runs / method / "metrics.jsonl").read_text().splitlines()]
        sent[method] = {row["upload-bytes"] for record in rounds for row in record["clients"].values()}
    width = example.SIZES["embed_dim"]
    # per block 4 x width and 3 width x 4
    lora, classifier = example.SIZES["depth"] * 4 * (width + 3 * width), 10 * (width + 1)
    assert sent["local"] == {0}
    assert sent["fedavg"] == {4 * (lora + classifier)} and sent["fedper"] == {4 * lora}
    # masks travel too
    for method in ("fedcac", "fedobp"):
        assert all(0 < size < 5 * (lora + classifier) for size in sent[method])


@pytest.mark.parametrize("method", ["fedcac", "fedper"])
def test_peft_loads_a_clients_adapter_and_timm_the_merged_model(
    example: Any, runs: Path, tmp_path: Path, method: str
) -> None:
    expected = logits(run_models.load(runs / method, 1, METHODS).module)
    export(runs / method, METHODS, 1, tmp_path / "mine", form=FileForm.peft)
    base = example.plain(1, 10, 8)
    base.load_state_dict(load_file(runs / "base.safetensors"), strict=False)
    network = importlib.import_module("peft").PeftModel.from_pretrained(base, tmp_path / "mine")
    torch.testing.assert_close(logits(network), expected)
    file, _ = export(runs / method, METHODS, 1, tmp_path / "merged", form=FileForm.merged)
    assert file.name == adapter.MERGED
    whole = example.plain(1, 10, 8)
    whole.load_state_dict(load_file(file))
    torch.testing.assert_close(logits(whole), expected, atol=1e-5, rtol=1e-4)
