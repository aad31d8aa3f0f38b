"""The keys `share` and `train`: what travels, what stays as it is, and the check that it is the same on every node."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from client_app.client import CorollaClient
from corolla.experiments.exported import run_models
from fl_app import plugins, trainable_tensors
from fl_app.errors import ConfigurationError, MethodError, RoundFailed
from fl_app.layout import Layout
from fl_app.models import build
from fl_app.narrow_tensors import plain
from fl_app.server.run_folder import read_metrics, read_summary
from fl_app.transport.wire import Download
from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS, Run, config
from tests.facts import rejected

HEAD = {"classifier.weight", "classifier.bias"}


def mlp() -> torch.nn.Module:
    return build("mlp", in_channels=1, num_classes=10, image_size=8)


def test_what_does_not_train_is_no_part_of_the_layout() -> None:
    whole, module = mlp(), mlp()
    trainable_tensors.freeze(module, "classifier.*,fc?.bias")
    layout = Layout.of(module)
    assert layout.names == HEAD | {"fc1.bias", "fc2.bias"} and layout.d == 10 * 64 + 10 + 128 + 64
    assert [name for name, _ in module.named_parameters()] == [slot.name for slot in layout.params]
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(module(x), whole(x))
    assert len(layout.constants) == 64 and not Layout.of(whole).constants
    other = mlp()
    with torch.no_grad():
        other.get_parameter("fc1.weight")[0, 0] += 1
    trainable_tensors.freeze(other, "classifier.*,fc?.bias")
    assert Layout.of(other).constants != layout.constants


def test_what_is_tied_to_a_constant_is_one() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    module[1].weight = module[0].weight
    trainable_tensors.freeze(module, "2.*")
    assert Layout.of(module).names == {"2.weight", "2.bias"}
    assert all(not p.requires_grad or name.startswith("2.") for name, p in module.named_parameters())


class Derived(torch.nn.Module):
    """A network with a buffer that no file has, and a parameter that it keeps from training."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.middle, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 10)
        self.register_buffer("angles", torch.full((1, 4), 0.1), persistent=False)
        self.middle.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.middle(self.base(x.flatten(1)[:, :4]) + self.angles))
        return out


def derived(**_: int) -> torch.nn.Module:
    return Derived()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_buffer_that_no_file_has_is_a_constant_with_its_own_precision(run: Run, dtype: str) -> None:
    module, other = Derived(), Derived()
    other.load_state_dict(module.state_dict())
    other.angles = torch.zeros(1, 4)
    for one in (module, other):
        trainable_tensors.freeze(one, "head.*", dtype)
        assert type(one.angles) is torch.Tensor and "angles" in one.frozen_names  # type: ignore[operator]
    # the model's own code computes it, with the last bits of the processor
    assert Layout.of(module).constants == Layout.of(other).constants
    folder = run(model="tests.fl_app.test_trainable_tensors:derived", train="head.*", frozen_dtype=dtype)
    assert read_summary(folder.path)["failures"] == 0


def test_what_the_model_keeps_from_training_is_a_constant() -> None:
    module = Derived()
    trainable_tensors.freeze(module, "middle.*,head.*")
    assert Layout.of(module).names == {"middle.bias", "head.weight", "head.bias"}
    with rejected(ConfigurationError, "train", "'middle.weight'", "requires_grad", value="middle.weight"):
        trainable_tensors.freeze(Derived(), "middle.weight,head.*")


def test_a_dtype_for_matrices_that_all_train_is_refused() -> None:
    with rejected(ConfigurationError, "frozen-dtype", "no matrix", value="bfloat16"):
        trainable_tensors.freeze(mlp(), "*", "bfloat16")


class Writing(torch.nn.Module):
    """A network that writes into a tensor, in one mode."""

    def __init__(self, name: str, training: bool, how: str) -> None:
        super().__init__()
        self.base, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 10)
        self.register_buffer("seen", torch.zeros(()))
        self.name, self.mode, self.how = name, training, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor = {**dict(self.named_parameters()), **dict(self.named_buffers())}[self.name]
        if self.training == self.mode and self.how == "data":
            tensor.data.add_(1)
        elif self.training == self.mode:
            with torch.no_grad():
                tensor += 1
        out: torch.Tensor = self.head(self.base(x.flatten(1)[:, :4]))
        return out


@pytest.mark.parametrize("how", ["data", "operation"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["base.weight", "seen"])
def test_a_model_that_writes_into_a_constant_is_refused_before_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, training: bool, how: str
) -> None:
    def factory(**_: int) -> torch.nn.Module:
        return Writing(name, training, how)

    monkeypatch.setattr(plugins, "load", lambda *_: factory)
    with rejected(ConfigurationError, "train", "writes into this tensor", value=name):
        run(model="own:writes", train="head.*")


def test_a_tied_tensor_is_matched_by_each_of_its_names() -> None:
    def network() -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        module[1].weight = module[0].weight
        return module

    for patterns, names in {
        "1.weight": {"0.weight"},
        "1.*": {"1.bias", "0.weight"},
        "1": {"1.bias", "0.weight"},
        "0.*": {"0.weight", "0.bias"},
        "?.weight": {"0.weight", "2.weight"},
    }.items():
        module = network()
        assert trainable_tensors.trained(module, patterns) == names
        trainable_tensors.freeze(module, patterns)
        assert Layout.of(module).names == names and (module[0].weight is module[1].weight)
    module = network()
    module[0].weight.requires_grad_(False)
    with rejected(ConfigurationError, "train", "requires_grad", value="0.weight"):
        trainable_tensors.freeze(module, "2,1.weight")
    trainable_tensors.freeze(module, "1.*,2.*")
    assert Layout.of(module).names == {"1.bias", "2.weight", "2.bias"}


def test_patterns() -> None:
    layout = Layout.of(mlp())
    assert trainable_tensors.travelling(config(), layout, layout.names) == layout.names
    assert trainable_tensors.travelling(config(share="*.bias"), layout, frozenset(HEAD)) == {"classifier.bias"}
    with rejected(ConfigurationError, "share", "no tensor of", "model matches 'adapter", "*'", "there are fc1.weight"):
        trainable_tensors.travelling(config(share="adapter.*"), layout, layout.names)
    with rejected(ConfigurationError, "share", "no tensor that", "method fedavg", "matches 'fc1", "*'"):
        trainable_tensors.travelling(config(share="fc1.*"), layout, frozenset(HEAD))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_parts(run: Run, method: str) -> None:
    if METHODS[method].compose is not None:
        facts = ("all layers",) if method == "fedma" else ("larger network", "requires_grad")
        with rejected(MethodError, "train", f"method {method}", *facts, value="*classifier*"):
            run(method=method, train="*classifier*", **IN_TWO_ROUNDS.get(method, {}))
        return
    if method == "heterofl":
        with rejected(MethodError, "train", "heterofl narrows all", "all must train"):
            run(method=method, train="fc2.*,*classifier*")
    more = {"heterofl": {"heterofl": {"rates": "1"}}}.get(method, {})
    folder = run(method=method, train="fc2.*,*classifier*", num_clients=2, num_server_rounds=1, **more)
    summary = read_summary(folder.path)
    assert summary["failures"] == 0 and summary["digest"]


class Still(torch.nn.Module):
    """A network whose own code keeps its first layer from training."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.body, self.head = (torch.nn.Linear(n, m) for n, m in ((64, 8), (8, 8), (8, num_classes)))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.first(x.flatten(1)).relu()).relu())
        return out


def still(in_channels: int, num_classes: int, image_size: int) -> torch.nn.Module:
    return Still(num_classes)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].compose and name != "fedma"])
def test_what_refuses_train_takes_a_model_that_keeps_its_own_tensors(run: Run, method: str) -> None:
    """The refusal of `train` names this way."""
    more = IN_TWO_ROUNDS.get(method, {})
    kept: dict[int, dict[str, Any]] = {}
    for rounds in (2, 3):
        folder = run(
            method=method,
            model="tests.fl_app.test_trainable_tensors:still",
            num_clients=2,
            num_server_rounds=rounds,
            run_name=f"of-{rounds}",
            collect_personal_models=True,
            **more,
        )
        assert read_summary(folder.path)["failures"] == 0
        # the global model, if there is one
        kept[rounds] = load_file(max((folder.path / "models").glob("*.safetensors")))
    same = {name: (kept[2][name] == kept[3][name]).all() for name in kept[2]}
    assert all(same[name] for name in same if "first." in name) and not all(same.values())


def test_bytes_are_four_times_what_is_shared(run: Run) -> None:
    folder = run(method="fedavg", train="classifier.*,fc2.*", share="classifier.*")
    for record in read_metrics(folder.path):
        for client in record["clients"].values():
            assert client["upload-bytes"] == client["download-bytes"] == 4 * (64 * 10 + 10)
    assert set(load_file(folder.path / "models/global.safetensors")) == HEAD


def test_a_frozen_batchnorm_gathers_no_statistics(run: Run) -> None:
    folder = run(model="resnet8", train="fc.*", num_clients=2, num_server_rounds=1)
    assert read_summary(folder.path)["failures"] == 0
    assert set(load_file(folder.path / "models/global.safetensors")) == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_shares_parts_or_refuses_by_name(run: Run, method: str) -> None:
    pattern = "classifier.*" if method in {"lg-fedavg", "fedgen"} else "fc2.*"
    refusal: tuple[str, ...] = ()
    if METHODS[method].compose is not None:
        refusal = (
            "share",
            f"method {method}",
            "all layers" if method == "fedma" else "larger network",
            "leave it unset",
        )
    elif METHODS[method].needs_whole:
        refusal = (f"method {method}", "works on all parameters", "that train", "leave share unset")
    if refusal:
        with rejected(MethodError, *refusal, value=pattern):
            run(method=method, share=pattern, **IN_TWO_ROUNDS.get(method, {}))
        return
    folder = run(method=method, share=pattern, num_clients=2, num_server_rounds=2, collect_personal_models=True)
    assert read_summary(folder.path)["failures"] == 0
    one, other = (load_file(folder.path / f"models/client-{i}.safetensors") for i in range(2))
    # a client's own, and trained
    assert (one["fc1.weight"] != other["fc1.weight"]).any()


def test_another_backbone_is_refused_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    context = CorollaClient._prepare

    def from_another(self: CorollaClient, download: Download) -> Any:
        return context(
            self, dataclasses.replace(download, method={**download.method, trainable_tensors.HASH: "0" * 64})
        )

    monkeypatch.setattr(CorollaClient, "_prepare", from_another)
    with rejected(RoundFailed, "", "train", "frozen tensors", "model mlp differ", "server's"):
        run(train="classifier.*", round_retries=0)


def test_frozen_matrices_are_stored_in_half_the_memory() -> None:
    whole, module = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)) for _ in range(2)
    )
    module.load_state_dict(whole.state_dict())
    module[1].weight = module[0].weight
    trainable_tensors.freeze(module, "2.*", "bfloat16")
    assert module[0].weight.data_ptr() == module[1].weight.data_ptr() and module[0].weight.nbytes == 2 * 16
    assert torch.equal(plain(module[0].weight), whole[0].weight.bfloat16())
    # a vector is small, and layers of normalisation need float32
    assert type(module[0].bias) is torch.Tensor and module[0].bias.nbytes == 4 * 4
    said = Layout.of(module).constants
    x = torch.randn(3, 4)
    expected = module(x)
    trainable_tensors.widen(module)
    assert torch.equal(module(x), expected)
    assert module[1].weight.nbytes == 4 * 16 and torch.equal(module[1].weight, whole[0].weight.bfloat16().float())
    assert Layout.of(module).constants == said != ""


@pytest.mark.parametrize(
    ("model", "train"),
    [("mlp", "classifier.*"), ("tests.small_models:batchnorm", "8.*"), ("tests.small_models:group", "5.*")],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_with_frozen_matrices_of_16_bits(run: Run, model: str, train: str, precision: str) -> None:
    folder = run(frozen_dtype="bfloat16", precision=precision, model=model, train=train, method="fedcac")
    assert len(list(read_metrics(folder.path))) == 2
    trained = run_models.load(folder.path, 0, METHODS)
    assert {tensor.dtype for tensor in trained.module.state_dict().values() if tensor.is_floating_point()} == {
        torch.float32
    }


def test_frozen_matrices_of_16_bits_need_patterns_of_what_trains() -> None:
    with rejected(ConfigurationError, "frozen-dtype", "needs", "bfloat16"):
        config(frozen_dtype="bfloat16")
