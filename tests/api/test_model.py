"""`corolla.Run.model`: the module answers as the client's model did when it was evaluated last, or there is none and it is said."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import corolla
from client_app.batches import Batches
from fl_app import plugins, tasks
from fl_app.config import parse
from fl_app.data import open_client
from fl_app.errors import UserError
from strategies import METHOD_PARAMS, METHODS
from tests.api.conftest import Start
from tests.facts import mentions, rejected

FEW = ("fedavg", "fedcac", "fedper", "ditto", "fedem", "floco", "ifca", "pfedgate")  # of each kind of export one


IN_TWO_ROUNDS: dict[str, Any] = {"floco": {"projection_round": 2}, "fedconcat": {"encoder_rounds": 1}}


def accuracy(found: corolla.Run, client: int) -> float:
    """Accuracy of a client's loaded model on its test data."""
    config = parse(found.config, METHOD_PARAMS)
    batches = Batches(config, open_client(config, client), torch.device("cpu"), round=0, client_id=client)
    module = found.model(client)
    assert not module.training
    with torch.no_grad():
        outputs = torch.cat([module(x) for x, _ in batches.in_order("test")])
    measured: dict[str, float] = tasks.of(config).measure(outputs, batches.parts["test"][1], ["accuracy"])
    return float(measured["accuracy"])


@pytest.mark.parametrize(
    ("method", "model"),
    [
        pytest.param(method, model, marks=[] if method in FEW and model == "mlp" else pytest.mark.nightly)
        for method in METHODS
        for model in ("mlp", "resnet8")
    ],
)
def test_a_collected_model_answers_as_the_client_did(start: Start, method: str, model: str) -> None:
    found = start(method=method, model=model, collect_personal_models=True, **IN_TWO_ROUNDS)
    for client in range(3):
        assert accuracy(found, client) == pytest.approx(found.clients["evaluation-accuracy"][2, client], abs=1e-6)


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in FEW else pytest.mark.nightly) for m in METHODS])
def test_without_collecting_a_model_is_the_clients_or_an_error_says_why_not(start: Start, method: str) -> None:
    found = start(method=method, **IN_TWO_ROUNDS)
    for client in range(3):
        try:
            measured = accuracy(found, client)
        except UserError as error:
            assert mentions(str(error), "run with --set", "collect-personal-models=true")
        else:
            assert measured == pytest.approx(found.clients["evaluation-accuracy"][2, client], abs=1e-6)


def test_which_methods_need_no_collecting(start: Start) -> None:
    for method in ("fedavg", "fedcac"):
        assert isinstance(start(method=method, run_name=method).model(client=2), torch.nn.Module)
    for method, said in (("fedper", "holds no model of client 2"), ("ditto", "which only the client can make")):
        with rejected(UserError, "", said, "run with --set", "collect-personal-models=true"):
            start(method=method, run_name=method).model(client=2)
    with rejected(
        UserError, "", "fedper leaves classifier.bias", "classifier.weight", "clients", "global cannot predict", "alone"
    ):
        corolla.load("runs/fedper").model()


OWN = """
import torch
from corolla.task import Classification


class Named(Classification):
    pass


def build(in_channels, num_classes, image_size):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(image_size**2, num_classes))
"""


def test_a_program_that_imported_the_runs_own_file_gets_its_model(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_file.py").write_text(OWN)
    found = start(model="own_file:build", task="own_file:Named", run_name="own")
    (tmp_path / "copy").mkdir()
    (tmp_path / "own_file.py").rename(tmp_path / "copy" / "own_file.py")
    plugins.reset()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "copy"), *sys.path])
    mine = importlib.import_module("own_file")
    module = corolla.load("runs/own").model(client=1)
    assert type(tasks.of(parse(found.config, METHOD_PARAMS))) is mine.Named
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    (tmp_path / "copy" / "own_file.py").write_text(OWN + "# changed\n")
    with rejected(
        UserError, "task own_file:Named", "runs/own/plugins/own_file.py", "copy/own_file.py", "other content", "process"
    ):
        corolla.load("runs/own").model(client=1)
    del sys.modules["own_file"]


def test_the_global_model(start: Start) -> None:
    module = start().model()
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("client", [-1, 3, "x", 1.5])
def test_no_such_client(start: Start, client: Any) -> None:
    with rejected(UserError, "client", "0 to 2", value=client):
        start().model(client)


def test_a_flipped_bit_is_noticed(start: Start) -> None:
    found = start(method="fedcac", collect_personal_models=True)
    file = found.path / "models" / "client-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    found.model(client=0)
    with rejected(UserError, "", "client-1.safetensors is not", "the model that", "client 1 was evaluated"):
        found.model(client=1)
    file.write_bytes(content[:50])
    with rejected(UserError, "client-1.safetensors", "safetensors file"):
        found.model(client=1)


def test_a_run_that_does_not_tell_its_shape(start: Start) -> None:
    found = start()
    (found.path / "run.json").unlink()
    with rejected(UserError, "", "does not record", "shape", "data"):
        corolla.Run(found.path).model()
