"""Adapters of peft on a network of transformers: methods on what trains, and an export that both packages load."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import corolla
from corolla.experiments.exported import adapter, run_models
from corolla.experiments.exported.export import FileForm, export, export_each
from corolla.experiments.runs import RecordedRun
from fl_app import model_card
from fl_app.errors import UserError
from strategies import METHODS
from strategies.base import handed_on
from tests import examples
from tests.conftest import Command, Run
from tests.facts import mentions, rejected

IDS = torch.tensor([[2, 9, 14, 0, 0], [5, 6, 7, 8, 1], [0, 0, 0, 0, 0]])


@pytest.fixture(scope="module")
def example() -> Any:
    """Return examples/lora_text.py as a module."""
    with examples.example("lora_text:build", "peft") as module:
        yield module


@pytest.fixture(scope="module")
def directory(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with the example's base model and texts, which this process's variables name."""
    made = tmp_path_factory.mktemp("texts")
    example.write_base(made / "base")
    example.write_texts(made / "texts.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(example.BASE, str(made / "base"))
        patch.chdir(examples.EXAMPLES)
        yield made


def trained(example: Any, directory: Path, method: str) -> Path:
    settings = {**example.settings(directory), "num_server_rounds": 1, "local_epochs": 1, "in_process": True}
    if not (folder := directory / method).exists():
        corolla.run(method=method, run_name=method, **settings)
    return folder


@pytest.fixture
def fedcac(example: Any, directory: Path) -> Path:
    return trained(example, directory, "fedcac")


def sent(folder: Path) -> set[int]:
    rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["upload-bytes"] for record in rounds for row in record["clients"].values()}


def test_methods_send_adapters_and_the_classifier_or_less(example: Any, directory: Path) -> None:
    bytes_up = {method: sent(trained(example, directory, method)) for method in example.METHODS}
    # two layers with two adapters of 64 x 4 and 4 x 64, and a classifier of 64 x 3 and 3
    lora, classifier = 2 * 2 * 2 * 4 * 64, 64 * 3 + 3
    assert bytes_up["local"] == {0}
    assert bytes_up["fedavg"] == {4 * (lora + classifier)} and bytes_up["fedper"] == {4 * lora}
    # masks of critical parameters travel too
    assert all(4 * (lora + classifier) < size < 5 * (lora + classifier) for size in bytes_up["fedcac"])


def logits(module: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return module(IDS).numpy()


def loaded(example: Any, network: Any) -> nn.Module:
    """Return a network of transformers or peft as the run's model."""
    made: nn.Module = example.Classifier(network).eval()
    return made


def base_model(directory: Path) -> Any:
    transformers = importlib.import_module("transformers")
    return transformers.AutoModelForSequenceClassification.from_pretrained(directory / "base", num_labels=3)


@pytest.mark.parametrize("client", [0, 3])
def test_peft_loads_a_clients_adapter(example: Any, directory: Path, fedcac: Path, tmp_path: Path, client: int) -> None:
    file, _ = export(fedcac, METHODS, client, tmp_path / "mine", form=FileForm.peft)
    assert file == tmp_path / "mine" / adapter.ADAPTER
    network = importlib.import_module("peft").PeftModel.from_pretrained(base_model(directory), tmp_path / "mine")
    expected = logits(run_models.load(fedcac, client, METHODS).module)
    np.testing.assert_allclose(logits(loaded(example, network)), expected, atol=1e-6)
    assert not np.allclose(logits(loaded(example, base_model(directory))), expected, atol=1e-3)
    names = load_file(file)
    assert names and all("lora_" in name or "classifier" in name for name in names)
    card = model_card.read(file)
    assert card["run"]["name"] == "fedcac" and card["model"] == f"client-{client}"
    assert {path.name for path in file.parent.iterdir()} == {
        adapter.ADAPTER,
        f"{adapter.ADAPTER}.json",
        f"{adapter.ADAPTER}.plugins",
        "adapter_config.json",
    }


def test_transformers_loads_the_merged_model(example: Any, directory: Path, fedcac: Path, tmp_path: Path) -> None:
    file, _ = export(fedcac, METHODS, 1, tmp_path / "merged", form=FileForm.merged)
    transformers = importlib.import_module("transformers")
    network = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    expected = logits(run_models.load(fedcac, 1, METHODS).module)
    np.testing.assert_allclose(logits(loaded(example, network)), expected, atol=1e-5)
    assert file.name == adapter.MERGED and not any("lora_" in name for name in load_file(file))


def test_an_adapter_beside_a_rounded_base_model_needs_one(
    example: Any, directory: Path, tmp_path: Path, command: Command
) -> None:
    settings = {**example.settings(directory), "num_server_rounds": 1, "local_epochs": 1, "in_process": True}
    corolla.run(method="fedavg", run_name="rounded", frozen_dtype="bfloat16", **settings)
    folder = directory / "rounded"
    said = {}
    for form in ("--peft", "--merged"):
        code, _, said[form] = command("export", folder, "--to", tmp_path, form, "--quiet")
        assert code == 0, said
    # once for all clients
    assert said["--peft"].count("frozen-dtype") == 1 and mentions(said["--peft"], "bfloat16", "--merged")
    assert "frozen-dtype" not in said["--merged"]
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    expected = logits(run_models.load(folder, 0, METHODS).module)
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "east-merged")
    np.testing.assert_allclose(logits(loaded(example, merged)), expected, atol=1e-5)
    as_it_is, rounded = base_model(directory), base_model(directory)
    with torch.no_grad():
        for matrix in (parameter for parameter in rounded.parameters() if parameter.dim() > 1):
            matrix.copy_(matrix.bfloat16())
    found, exact = (
        logits(loaded(example, peft.PeftModel.from_pretrained(base, tmp_path / "east-adapter")))
        for base in (as_it_is, rounded)
    )
    np.testing.assert_allclose(exact, expected, atol=1e-6)
    assert np.abs(found - expected).max() > 100 * np.abs(exact - expected).max()
    code, _, err = command("export", directory / "fedcac", "--peft", "--output", tmp_path / "plain")
    assert code == 0 and "frozen-dtype" not in err


def test_each_clients_adapter_is_in_a_folder_of_its_name(
    directory: Path, fedcac: Path, tmp_path: Path, command: Command
) -> None:
    code, out, err = command("export", fedcac, "--to", tmp_path, "--peft")
    assert code == 0, err
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{desk}-adapter" for desk in ("east", "north", "south", "west")
    }
    code, out, err = command("verify", tmp_path / "east-adapter" / adapter.ADAPTER)
    assert code == 0 and "sound" in out
    code, _, err = command("export", fedcac, "--peft", "--merged")
    assert code != 0 and "--peft and --merged exclude each other" in err


class Unfilled(nn.Module):
    """The example's network, built of its base model's configuration without the values."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
        config = transformers.AutoConfig.from_pretrained(os.environ["LORA_TEXT_BASE"], num_labels=classes)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        network = transformers.AutoModelForSequenceClassification.from_config(config)
        self.network = peft.get_peft_model(network, lora)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.network(input_ids=ids.long()).logits
        return answer


def unfilled(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the model of a run."""
    return Unfilled(num_classes)


def test_a_run_starts_from_the_base_models_own_folder(example: Any, directory: Path) -> None:
    settings = {**example.settings(directory), "num_server_rounds": 1, "local_epochs": 1, "in_process": True}
    settings |= {"model": "tests.experiments.test_peft:unfilled", "initial_weights": str(directory / "base")}
    corolla.run(method="fedavg", run_name="filled", **settings)
    found = run_models.load(directory / "filled", 0, METHODS).module.state_dict()
    base = importlib.import_module("transformers").BertModel.from_pretrained(directory / "base").state_dict()
    frozen = {name.replace(".base_layer", ""): tensor for name, tensor in found.items() if ".bert." in name}
    assert base and all(torch.equal(frozen[f"network.base_model.model.bert.{name}"], base[name]) for name in base)


def test_a_network_of_peft_is_shared_with_workers(
    example: Any, directory: Path, fedcac: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handed_on, "_RECEIVED", [])
    recorded = RecordedRun(fedcac, {name: method.params for name, method in METHODS.items()})
    shape = run_models.shape_of(recorded)
    module = METHODS["fedcac"].network(recorded.config, **shape)
    expected = module.state_dict()
    handed_on.leave_network(module)
    with handed_on.sharing() as file:
        assert file is not None
        handed_on.receive(file)
        received = METHODS["fedcac"].network(recorded.config, **shape)
    handed_on.drop_network()
    assert received is not module and received.frozen_names == module.frozen_names
    state = received.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


def test_a_model_without_peft_has_no_adapter(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = run(method="fedavg", num_clients=2)
    with rejected(UserError, "--peft", "one PeftModel", "none"):
        export(folder.path, METHODS, None, tmp_path / "x", form=FileForm.peft)
    with rejected(UserError, "--peft", "one PeftModel", "none"):
        export_each(folder.path, METHODS, 0, tmp_path / "each", form=FileForm.merged)


def test_what_is_missing_is_named_where_peft_is_not_installed(run: Run, tmp_path: Path) -> None:
    folder = run(method="fedavg", num_clients=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with rejected(UserError, "", "needs peft", "corolla[peft]"):
            export(folder.path, METHODS, None, tmp_path / "x", form=FileForm.peft)
