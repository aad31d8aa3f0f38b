"""What a client process keeps between messages, and when it does not."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import nn

from client_app.client_app import app
from client_app.flat import FlatModule
from client_app.session import Network, Session
from client_app.trainer import LocalTrainer
from fl_app import checksums, models, server_app, trainable_tensors, weights
from fl_app.config import parse
from fl_app.errors import ConfigurationError, RoundFailed, UserError
from fl_app.layout import Layout
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.transport.inprocess import InProcessGrid
from fl_app.weights import save_safetensors
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Run, config
from tests.facts import rejected

DIGITS: dict[str, Any] = {"train-samples": 20, "test-samples": 8, "num-clients": 3, "model": "mlp"}


def test_one_run_has_one_session(data_dir: Path) -> None:
    config = DIGITS | {"data-dir": str(data_dir)}
    first = Session.of(config, 3, 1)
    assert Session.of(dict(config), 3, 1) is first
    assert first.opened("") is first.opened("")
    for other in (Session.of(config | {"seed": 1}, 3, 1), Session.of(config, 4, 1), Session.of(config, 3, 2)):
        assert other is not first and other is not Session.of(config, 3, 1)


@pytest.mark.parametrize(("value", "words"), [(2, ""), (2.0, "expected an integer"), (True, "expected an integer")])
def test_equal_values_of_other_types_are_other_configs(data_dir: Path, value: Any, words: str) -> None:
    Session.of(DIGITS | {"local-epochs": 2}, 3, 1)
    Session.of(DIGITS | {"local-epochs": 1}, 3, 1)
    if not words:
        assert Session.of(DIGITS | {"local-epochs": value}, 3, 1).config.local_epochs == 2
        return
    with pytest.raises(UserError, match=words):
        Session.of(DIGITS | {"local-epochs": value}, 3, 1)


def test_damaged_data_are_found_by_an_open_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.session.LOOK_EVERY", 0)
    session = Session.of(DIGITS | {"data-dir": str(tmp_path)}, 3, 1)
    session.opened("").client(0)
    (images,) = tmp_path.glob("datasets/*/x_train.npy")
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged"):
        session.opened("").client(0)


def test_stamps_change_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    stamps = checksums.stamps_in(tmp_path)
    assert checksums.unchanged(stamps)
    (tmp_path / "a").write_text("other")
    assert not checksums.unchanged(stamps)
    (tmp_path / "a").unlink()
    assert not checksums.unchanged(stamps)


def samples(path: Path, shift: float) -> None:
    g = np.random.default_rng(0)
    y = g.integers(0, 3, 120)
    x = (np.eye(3)[y] * 5 + g.normal(size=(120, 3)) + shift).astype("f4")
    np.savez(path, x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])


def final_model(folder: RunFolder) -> bytes:
    """Return a run's model, and remove the run: the next one has the same config."""
    content = (folder.path / "models" / "global.safetensors").read_bytes()
    shutil.rmtree(folder.path)
    return content


def test_a_second_run_in_one_process_reads_files_that_have_changed(run: Run, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": "fedavg",
        "num_clients": 2,
        "dataset": f"npz:{tmp_path / 'data.npz'}",
        "train_samples": 20,
        "test_samples": 8,
        "normalize": "unit",
    }
    found = []
    for shift in (0.0, 40.0, 0.0):
        samples(tmp_path / "data.npz", shift)
        found.append(final_model(run(**settings)))
    assert found[0] == found[2] != found[1]


def test_initial_weights_are_those_of_the_file_at_the_time(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "start.safetensors"
    found = []
    for seed in (3, 4, 3):
        module = models.build("mlp", in_channels=1, num_classes=10, image_size=8, seed=seed)
        save_safetensors(file, Layout.of(module), weights.read(module))
        found.append(final_model(run(method="fedavg", num_clients=2, initial_weights=str(file))))
    assert found[0] == found[2] != found[1]


def test_a_weights_file_that_changes_during_a_run_is_noticed(tmp_path: Path) -> None:
    """Frozen tensors do not travel: training on others than the server's would go unnoticed."""
    file = tmp_path / "start.safetensors"

    def write(seed: int) -> None:
        module = models.build("mlp", in_channels=1, num_classes=10, image_size=8, seed=seed)
        save_safetensors(file, Layout.of(module), weights.read(module))

    class Overwriting(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if any(message.metadata.group_id == "2" for message in messages):
                write(4)
            return super().push_messages(messages)

    write(3)
    raw = DIGITS | {
        "method": "fedavg",
        "num-server-rounds": 2,
        "initial-weights": str(file),
        "train": "fc2*",
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
        "data-dir": str(tmp_path),
    }
    config = parse(raw, METHOD_PARAMS)
    with rejected(RoundFailed, "", "frozen tensors", "model mlp differ", "server's"):
        server_app.run(Overwriting(app, raw, 3), config, lambda what, done, total: None)


def test_a_partition_file_that_has_changed_is_another_partition(run: Run, tmp_path: Path) -> None:
    found = []
    for first in (0, 400, 0):
        parts = {f"{side}_idx_{i}": np.arange(20) + first + 20 * i for i in range(2) for side in ("train", "test")}
        np.savez(tmp_path / "part.npz", **parts)
        found.append(final_model(run(method="fedavg", num_clients=2, partition=f"file:{tmp_path / 'part.npz'}")))
    assert found[0] == found[2] != found[1]


# networks


def run_with(directory: Path, leave: Callable[[Session, Network, FlatModule], None], **keys: Any) -> str:
    """Return the digest of a run in which clients leave their networks so."""
    raw: dict[str, Any] = DIGITS | {
        "num-server-rounds": 2,
        "local-epochs": 1,
        "batch-size": 8,
        "device": "cpu",
        **{key: str(directory) for key in ("output-dir", "state-dir", "data-dir")},
        **keys,
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "leave", leave)
        folder = server_app.run(InProcessGrid(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None)
    digest = str(read_summary(folder.path)["digest"])
    shutil.rmtree(folder.path)
    return digest


def spoilt(session: Session, network: Network, flat: FlatModule) -> None:
    """Leave a network as a careless client might."""
    for vector in (flat.weights, flat.statistics, flat.gradient, flat.epoch_loss):
        vector.fill_(np.nan)
    for parameter in flat.module.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    for buffer in flat.module.buffers():
        if not buffer.is_floating_point():
            buffer.fill_(99)
    for layer in flat.module.modules():
        layer.eval()
        layer.register_forward_hook(lambda *_: pytest.fail("a hook of another client was called"))
        layer.note = "of another client"  # type: ignore[assignment]
    left(session, network, flat)
    assert session._left


left = Session.leave


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"method": "fedavg", "momentum": 0.9}, id="fedavg"),
        pytest.param(
            {"method": "fedavg", "model": "tests.small_models:batchnorm", "train-samples": 17}, id="batchnorm"
        ),
        pytest.param({"method": "fedavg", "model": "resnet8", "train": "layer3*,fc*"}, id="constants"),
        pytest.param({"method": "fedper", "finetune-epochs": 1}, id="local-tensors"),
        pytest.param({"method": "fedrep"}, id="frozen-parts"),
        pytest.param({"method": "fedala"}, id="own-loop"),
        pytest.param({"method": "apfl"}, id="two-models"),
        pytest.param({"method": "fedcac"}, id="scores"),
        pytest.param({"method": "feddpa"}, id="fisher"),
        pytest.param({"method": "moon"}, id="features"),
        pytest.param({"method": "fedselect"}, id="alternation"),
    ],
)
def test_what_a_client_does_to_a_network_does_not_reach_the_next(tmp_path: Path, keys: dict[str, Any]) -> None:
    fresh = run_with(tmp_path, lambda *_: None, **keys)
    assert run_with(tmp_path, spoilt, **keys) == fresh


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"method": "fedavg"}, True),
        ({"method": "fedem"}, True),
        ({"method": "fedavg", "model": "module:factory"}, True),
        ({"method": "module:METHOD"}, True),
        ({"method": "fedavg", "dp-epsilon": 5.0}, False),
    ],
)
def test_networks_that_may_keep_more_are_built_for_every_client(keys: dict[str, Any], kept: bool) -> None:
    method = METHODS["fedavg" if ":" in keys["method"] else keys["method"]]
    fields = {name.replace("-", "_"): value for name, value in keys.items()}
    session = Session(dataclasses.replace(config(), **fields), method)
    flat = FlatModule(models.build("mlp", in_channels=1, num_classes=10, image_size=8), torch.device("cpu"))
    session.leave(Network("key", flat.module, *[None] * 4), flat)  # type: ignore[arg-type]
    assert bool(session._left) is kept


class Holder:
    """What a layer may hold, in every form."""

    def __init__(self) -> None:
        self.seen, self.by_name, self.sets, self.array = [0], {"first": [1]}, {1, 2}, np.zeros(3)
        self.deep = ({"a": [{"b": [1]}]},)
        self.count = self.counter()

    def counter(self) -> Callable[[], int]:
        """Return a function with a variable."""
        number = 0

        def count() -> int:
            nonlocal number
            number += 1
            return number

        return count


def small() -> nn.Module:
    """Return a small network whose second layer holds something."""
    module = models.build("mlp", in_channels=1, num_classes=10, image_size=8)
    module.fc1.holder, module.fc1.own = Holder(), ["first"]  # type: ignore[union-attr, assignment]
    module.fc1.itself = {"cycle": module}  # type: ignore[union-attr, assignment]
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda holder: holder.seen.append(holder),
        lambda holder: holder.by_name["first"].append(2),
        lambda holder: holder.by_name.pop("first"),
        lambda holder: holder.sets.clear(),
        lambda holder: holder.array.__iadd__(1),
        lambda holder: holder.deep[0]["a"][0]["b"].clear(),
        lambda holder: setattr(holder, "more", 3),
        lambda holder: holder.count(),
    ],
    ids="list value key set array deep attribute closure".split(),
)
def test_a_network_whose_contents_have_changed_is_built_anew(change: Callable[[Any], object]) -> None:
    flat = FlatModule(small(), torch.device("cpu"))
    assert flat.is_restorable
    change(flat.module.fc1.holder)
    assert not flat.is_restorable


def test_what_layers_hold_by_name_is_given_back() -> None:
    flat = FlatModule(small(), torch.device("cpu"))
    layer: Any = flat.module.fc1
    own = layer.own
    layer.own, layer.more, layer.itself["second"] = ["second"], 3, 4
    assert flat.is_restorable
    flat.reset()
    assert layer.own is own and not hasattr(layer, "more") and layer.itself == {"cycle": flat.module}


@pytest.mark.parametrize("value", [torch.Generator(), iter([1]), threading.Lock()], ids=lambda v: type(v).__name__)
def test_a_network_that_holds_what_cannot_be_given_back_is_built_anew(value: object) -> None:
    module = small()
    module.fc1.holder.seen.append({"inner": value})  # type: ignore[union-attr]
    assert not FlatModule(module, torch.device("cpu")).is_restorable


def test_a_tensor_of_no_name_keeps_a_network_until_it_is_written() -> None:
    module = small()
    module.fc1.scales = [torch.ones(1)]  # type: ignore[union-attr, assignment]
    flat = FlatModule(module, torch.device("cpu"))
    assert flat.is_restorable
    module.fc1.scales[0].mul_(2)  # type: ignore[union-attr]
    assert not flat.is_restorable


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.__setitem__((0, 0), 0),
        lambda weight: weight.data.mul_(0.5),
        lambda weight: setattr(weight, "data", weight.data * 0.5),
    ],
    ids=["operation", "data", "memory"],
)
def test_a_write_into_a_frozen_tensor_is_named(write: Callable[[Any], object], dtype: str) -> None:
    module = models.build("resnet8", in_channels=1, num_classes=10, image_size=8)
    trainable_tensors.freeze(module, "fc*", dtype)
    flat = FlatModule(module, torch.device("cpu"))
    for _ in range(2):
        Session.refuse_written(flat)
    write(module.conv1.weight)
    with rejected(ConfigurationError, "train", "frozen tensors", "written", value="conv1.weight"):
        # the values of all are compared in turns
        for _ in range(100):
            Session.refuse_written(flat)


def test_a_model_of_the_users_own_that_keeps_nothing_is_built_once(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "simple.py").write_text(SIMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"method": "fedavg", "model": "simple:factory"}
    fresh = run_with(tmp_path, lambda *_: None, **keys)
    built = len(importlib.import_module("simple").built)
    assert run_with(tmp_path, spoilt, **keys) == fresh
    # a session builds one for the first message, and the server and the checks build some
    assert len(importlib.import_module("simple").built) - built < built / 2


SIMPLE = """
from torch import nn

built = []

class Simple(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x) / self.passes

def factory(in_channels, num_classes, image_size):
    built.append(1)
    return Simple(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


def test_a_model_of_the_users_own_counts_from_zero_at_every_client(tmp_path: Path, monkeypatch: Any) -> None:
    """What it keeps in its attributes is what its factory gave it."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"method": "fedavg", "model": "counting:factory"}
    assert run_with(tmp_path, left, **keys) == run_with(tmp_path, lambda *_: None, **keys)


COUNTING = """
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.linear, self.seen = nn.Linear(features, classes), [0]

    def forward(self, x):
        self.seen[0] += 1
        return self.linear(x.flatten(1)) / self.seen[0]

def factory(in_channels, num_classes, image_size):
    return Counting(in_channels * image_size**2, num_classes)
"""


def test_a_task_that_failed_leaves_no_network(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Session] = []

    def fail(trainer: LocalTrainer, *_: Any, **__: Any) -> Any:
        trainer.module.eval()
        raise UserError("no training")

    def note(session: Session, network: Network, flat: FlatModule) -> None:
        sessions.append(session)

    monkeypatch.setattr(LocalTrainer, "train", fail)
    monkeypatch.setattr(Session, "leave", note)
    with pytest.raises(UserError):
        run(method="fedavg", num_clients=2)
    assert not sessions


def test_one_process_builds_a_runs_network_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server leaves it for the clients; another run's is another one."""
    built: list[str] = []
    build = models.build
    monkeypatch.setattr(models, "build", lambda name, **more: built.append(name) or build(name, **more))
    digests = [
        read_summary(run(method="fedcac", num_clients=3, num_server_rounds=1, seed=seed, run_name=name).path)["digest"]
        for seed, name in ((0, "first"), (1, "second"), (0, "third"))
    ]
    assert len(built) == 3
    assert digests[0] == digests[2] != digests[1]
