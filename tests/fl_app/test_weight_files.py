"""Weights in shards with an index, read one tensor at a time, and every way in which index and shards may not fit."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from client_app.client_app import app as client_app
from corolla.api.checks import check_files
from fl_app import models, server_app, weight_files, weights
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.server.run_folder import check_unchanged, read_about
from fl_app.transport.flower import Message
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from strategies.base.method import Method
from tests.conftest import Run, config, flat
from tests.facts import mentions, rejected
from tests.fl_app.test_models import same, small
from tests.fl_app.test_weights import initial_model

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{k:05}-of-00003.safetensors" for k in (1, 2, 3)]


def in_shards(module: nn.Module, folder: Path) -> Path:
    """Write a module's tensors into three shards, in turn, and their index. Return the folder."""
    folder.mkdir(exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    places = {name: SHARDS[k % len(SHARDS)] for k, name in enumerate(state)}
    for shard in SHARDS:
        save_file({name: state[name] for name, place in places.items() if place == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("named", ["", INDEX])
@pytest.mark.parametrize("name", ["mlp", "resnet8"])
def test_shards_give_what_one_file_gives(tmp_path: Path, name: str, named: str) -> None:
    module = small(name, seed=1)
    folder = in_shards(module, tmp_path / "model")
    assert same(initial_model(small(name), str(folder / named)), weights.read(module))


def test_a_folder_stands_for_its_only_file(tmp_path: Path) -> None:
    module = small("mlp", seed=1)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert same(initial_model(small("mlp"), str(tmp_path)), weights.read(module))
    save_file(module.state_dict(), tmp_path / "other.safetensors")
    with rejected(UserError, tmp_path.name, "one safetensors file", "model.safetensors, other.safetensors"):
        initial_model(small("mlp"), str(tmp_path))
    (tmp_path / "empty").mkdir()
    with rejected(UserError, "empty", "one safetensors file", "neither"):
        initial_model(small("mlp"), str(tmp_path / "empty"))


def test_one_tensor_of_a_file_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, taken = small("resnet8"), list[weakref.ref[Tensor]]()
    read = weight_files._read

    def watched(file: Path, name: str) -> Tensor:
        assert not [one for one in taken if one() is not None], name
        tensor = read(file, name)
        taken.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(weight_files, "_read", watched)
    initial_model(module, str(in_shards(module, tmp_path / "model")))
    assert len(taken) == sum(tensor.is_floating_point() for tensor in module.state_dict().values())


def change_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return a change of a folder that changes its index."""

    def changed(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return changed


def change_shard(k: int, change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """Return a change of a folder that changes its k-th shard's tensors."""

    def changed(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / SHARDS[k]).items()}
        change(tensors)
        save_file(tensors, folder / SHARDS[k])

    return changed


# a change of the folder, the file that the error names, and what it says. The mlp's tensors by shard: fc1.weight and
# fc2.bias, fc1.bias and classifier.weight, fc2.weight and classifier.bias
WRONG: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    "a shard is missing": (lambda folder: (folder / SHARDS[1]).unlink(), INDEX, ("lacks 1 of 3 shards", SHARDS[1])),
    "a shard is cut": (
        lambda folder: (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes()[:-1]),
        SHARDS[1],
        ("not a readable safetensors file",),
    ),
    "a shard lacks a tensor": (change_shard(1, lambda t: t.pop("fc1.bias")), SHARDS[1], ("lacks fc1.bias", INDEX)),
    "a shard has another tensor": (
        change_shard(2, lambda t: t.update(x=torch.zeros(1))),
        SHARDS[2],
        ("has x", INDEX, "another model"),
    ),
    "a tensor has another shape": (
        change_shard(0, lambda t: t.update({"fc2.bias": torch.zeros(3)})),
        "model",
        (f"wrong shape or type (1): fc2.bias [3] in {SHARDS[0]}, expected [64]",),
    ),
    "a value is infinite": (
        change_shard(2, lambda t: t["classifier.bias"].fill_(torch.inf)),
        "model",
        ("finite", f"classifier.bias in {SHARDS[2]}"),
    ),
    "the model has another name": (
        lambda folder: (
            change_shard(0, lambda t: t.update({"fc9.bias": t.pop("fc2.bias")}))(folder),
            change_index(lambda index: index["weight_map"].update({"fc9.bias": index["weight_map"].pop("fc2.bias")}))(
                folder
            ),
        ),
        "model",
        (f"unexpected (1): fc9.bias [64] in {SHARDS[0]}",),
    ),
    "the index has no table": (lambda folder: (folder / INDEX).write_text("{}"), INDEX, ("weight_map",)),
    "the index is a list": (lambda folder: (folder / INDEX).write_text("[1]"), INDEX, ("weight_map",)),
    "the index is no JSON": (lambda folder: (folder / INDEX).write_bytes(b"\xff"), INDEX, ("weight_map",)),
    "the table has numbers": (
        change_index(lambda index: index["weight_map"].update({"fc1.bias": 1})),
        INDEX,
        ("weight_map", "each tensor's shard"),
    ),
    "a shard lies elsewhere": (
        change_index(lambda index: index["weight_map"].update({"fc1.bias": "../secret.safetensors"})),
        INDEX,
        ("must lie beside it", "'../secret.safetensors'"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_by_file_and_tensor(tmp_path: Path, case: str) -> None:
    change, file, words = WRONG[case]
    folder = in_shards(small("mlp", seed=1), tmp_path / "model")
    change(folder)
    with pytest.raises(UserError) as caught:
        initial_model(small("mlp"), str(folder))
    path = folder if file == "model" else folder / file
    text = str(caught.value)
    assert text.startswith(f"initial-weights {path}: ") and all(word in text for word in words), text


def test_shards_that_give_a_part_name_the_rest(tmp_path: Path) -> None:
    module, lines = small("mlp", seed=1), list[str]()
    folder = in_shards(module, tmp_path / "model")
    change_shard(0, lambda t: t.update({"fc2.bias": torch.zeros(3)}))(folder)
    model = initial_model(small("mlp"), str(folder), partial=True, told=lines.append)
    (line,) = lines
    assert "5 of 6 tensors" in line and "from the seed (1): fc2.bias [64]" in line
    assert f"fc2.bias [3] in {SHARDS[0]}" in line
    assert not same(model, weights.read(module))


def test_a_missing_folder_is_refused_before_a_run(tmp_path: Path) -> None:
    folder = in_shards(small("mlp"), tmp_path / "model")
    check_files(config(initial_weights=str(folder)))
    with rejected(UserError, "initial-weights", "modle", "did you mean"):
        check_files(config(initial_weights=str(tmp_path / "modle")))


def test_a_client_that_lacks_a_shard_says_so_before_the_run(run: Run, tmp_path: Path) -> None:
    folder = in_shards(models.build("mlp", in_channels=1, num_classes=10, image_size=8), tmp_path / "model")
    (folder / SHARDS[1]).unlink()
    with pytest.raises(UserError) as caught:
        run(method="fedavg", num_clients=2, model="mlp", train="classifier.*", initial_weights=str(folder))
    assert mentions(str(caught.value), "client 0", INDEX, "lacks 1 of 3 shards", SHARDS[1])
    assert not (tmp_path / "runs").exists()


def test_a_client_reads_its_sites_own_copy(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = models.build("mlp", in_channels=1, num_classes=10, image_size=8, seed=1)
    servers, own = tmp_path / "servers.safetensors", in_shards(module, tmp_path / "own")
    save_file(module.state_dict(), servers)
    settings: dict[str, Any] = {"method": "fedavg", "num_clients": 2, "model": "mlp", "train": "classifier.*"}
    settings |= {"initial_weights": str(servers), "available_timeout": 10.0}
    monkeypatch.setenv(weight_files.VARIABLE, str(own))
    folder = run(**settings, run_name="equal").path
    assert set(load_file(folder / "models" / "global.safetensors")) == {"classifier.weight", "classifier.bias"}
    change_shard(1, lambda t: t["fc1.bias"].add_(1))(own)
    with rejected(UserError, "", "train", "frozen tensors", "differ from the server's"):
        run(**settings, run_name="other")
    (own / SHARDS[1]).unlink()
    with rejected(UserError, "", f"initial-weights {own / INDEX}", "lacks 1 of 3 shards", SHARDS[1]):
        run(**settings, run_name="gone")
    # a run that names no file reads none
    run(**settings | {"initial_weights": ""}, run_name="seeded")


def test_a_deployments_server_holds_no_frozen_tensor_in_rounds(
    raw_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, frozen, held = Method.network, list[weakref.ref[Tensor]](), list[bool]()
    folder = in_shards(models.build("mlp", in_channels=1, num_classes=10, image_size=8, seed=1), tmp_path / "model")

    def noted(*arguments: Any, **more: Any) -> nn.Module:
        module = network(*arguments, **more)
        frozen.append(weakref.ref(module.get_buffer("fc1.weight")))
        return module

    class Deployed(InProcessGrid):
        def _handle(self, message: Message) -> Message:
            if message.metadata.message_type == "train":
                gc.collect()
                held.append(frozen[0]() is not None)
            return super()._handle(message)

    monkeypatch.setattr(Method, "network", noted)
    settings = {"method": "fedavg", "num-clients": 2, "model": "mlp", "train": "classifier.*"}
    raw = raw_config | settings | {"initial-weights": str(folder)}
    server_app.run(Deployed(client_app, raw, 2), parse(raw, METHOD_PARAMS), lambda what, done, total: None)
    assert held and not any(held)


def test_a_run_from_shards_is_one_from_the_whole_file_and_notices_a_change(
    run: Run, raw_config: dict[str, Any], tmp_path: Path
) -> None:
    module = models.build("mlp", in_channels=1, num_classes=10, image_size=8, seed=1)
    folder = in_shards(module, tmp_path / "model")
    save_file(module.state_dict(), tmp_path / "whole.safetensors")
    settings: dict[str, Any] = {"method": "fedavg", "num_clients": 2, "model": "mlp", "train": "classifier.*"}
    found = [
        run(**settings, initial_weights=str(path), run_name=path.stem)
        for path in (folder, tmp_path / "whole.safetensors")
    ]
    one, other = ((each.path / "models" / "global.safetensors").read_bytes() for each in found)
    assert one == other and len(read_about(found[0].path)["initial-weights-sha256"]) == 64
    same_keys = raw_config | flat({**settings, "initial_weights": str(folder), "run_name": "model"})
    check_unchanged(found[0].path, parse(same_keys, METHOD_PARAMS))
    change_shard(1, lambda t: t["fc1.bias"].add_(1))(folder)
    with rejected(UserError, "initial-weights", "model", "has changed since"):
        check_unchanged(found[0].path, parse(same_keys, METHOD_PARAMS))
