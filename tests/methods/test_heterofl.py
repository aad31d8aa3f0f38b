"""HeteroFL: corners and means by hand, nested widths, its limit FedAvg, and a narrow network beside a client's own."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_app import models, weights
from fl_app.errors import MethodError, UserError
from fl_app.layout import Layout
from fl_app.transport.wire import WireError
from strategies.baselines.heterofl import (
    METHOD,
    HeteroFLParams,
    aggregate,
    part_of,
    scaled,
    width_slices,
)
from strategies.kernels.parts import Part
from tests.conftest import Run, config
from tests.facts import mentions, rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import small
from tests.methods.runs import outcome
from tests.small_models import BATCHNORM


class Convolutions(nn.Module):
    """A convolution of 4 channels, normalised, flattened from 3 x 3 pixels into 36 inputs of a layer of 6."""

    def __init__(self, channels: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 2)
        self.norm = nn.BatchNorm2d(channels)
        self.hidden = nn.Linear(9 * channels, hidden)
        self.classifier = nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x))).flatten(1)
        out: torch.Tensor = self.classifier(torch.relu(self.hidden(h)))
        return out


def test_corners_by_hand() -> None:
    kept = width_slices(Layout.of(Convolutions()), 0.4)
    shapes = {name: [one.stop for one in slices] for name, slices in kept.items()}
    # ceil(1.6) = 2 channels, 18 of the flattened inputs, ceil(2.4) = 3 hidden outputs; all inputs and classes
    assert shapes == {
        "conv.weight": [2, 1, 2, 2],
        "conv.bias": [2],
        "norm.weight": [2],
        "norm.bias": [2],
        "hidden.weight": [3, 18],
        "hidden.bias": [3],
        "classifier.weight": [3, 3],
        "classifier.bias": [3],
        "norm.running_mean": [2],
        "norm.running_var": [2],
    }
    assert part_of(Layout.of(Convolutions()), 1).params.all()


@given(st.floats(0.05, 1), st.floats(0.05, 1), st.sampled_from(["mlp", "cnn", "resnet8"]))
def test_widths_are_nested_and_fit(a: float, b: float, model: str) -> None:
    layout = LAYOUTS[model]
    narrow, wide = (part_of(layout, rate) for rate in sorted((a, b)))
    assert not (narrow.params & ~wide.params).any() and not (narrow.buffers & ~wide.buffers).any()
    assert narrow.params.any()


class Shortcuts(nn.Module):
    """A layer of 8 below a block of 2 whose shortcut reads the same 8 outputs, below a concatenation if `joined`."""

    def __init__(self, joined: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.inner = nn.Linear(8, 2)
        self.shortcut = nn.Linear(8, 2)
        self.hidden = nn.Linear(10 if joined else 2, 6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        out: torch.Tensor = self.classifier(torch.relu(self.hidden(torch.relu(self.inner(h) + self.shortcut(h)))))
        return out


def test_shortcuts_read_what_the_layer_below_has() -> None:
    # ceil(2.4) = 3 of 8 outputs below both branches of ceil(0.6) = 1, though 8 is also 4 times 2
    kept = width_slices(Layout.of(Shortcuts()), 0.3)
    weights = {name: [one.stop for one in slices] for name, slices in kept.items() if name.endswith("weight")}
    assert weights == {
        "first.weight": [3, 4],
        "inner.weight": [1, 3],
        "shortcut.weight": [1, 3],
        "hidden.weight": [2, 1],
        "classifier.weight": [3, 2],
    }
    layout = LAYOUTS["resnet8"]
    kept = width_slices(layout, 0.3)
    for slot in layout.params[1:]:
        if len(slot.shape) > 1:
            assert kept[slot.name][1].stop == math.ceil(0.3 * slot.shape[1]), slot.name


def test_networks_and_rates_that_cannot_be_narrowed_are_refused() -> None:
    joined = Layout.of(Shortcuts(joined=True))
    with rejected(UserError, "model", "hidden.weight has 10 inputs", "layers before", "2", "8 outputs"):
        width_slices(joined, 0.5)
    with rejected(UserError, "model", "hidden.weight has 10 inputs"):
        METHOD.shared(joined, HeteroFLParams())
    assert METHOD.shared(joined, HeteroFLParams(rates="1")) == joined.names
    for rate in (0.0, 1.5, -1.0, float("nan")):
        with rejected(MethodError, "heterofl.rates", "must be in"):
            width_slices(Layout.of(Shortcuts()), rate)


class Attention(nn.Module):
    """Attention: one tensor holds three layers' weights, and its output layer is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.classifier = nn.Linear(8, 3)


def test_layers_whose_weight_is_not_one_tensor_are_refused() -> None:
    computed = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))
    for network, tensor in (
        (Attention(), "attention.in_proj_weight"),
        (computed, "0.parametrizations.weight.original"),
    ):
        layout = Layout.of(network)
        with rejected(UserError, "model", "method needs layers", f"has {tensor}"):
            METHOD.shared(layout, HeteroFLParams(rates="1, 0.5"))
        assert METHOD.shared(layout, HeteroFLParams(rates="1")) == layout.names


LAYOUTS = {
    name: Layout.of(models.build(name, in_channels=1, num_classes=10, image_size=8))
    for name in ("mlp", "cnn", "resnet8")
}


def test_means_by_hand() -> None:
    previous = {"w": np.full((2, 2), 9.0), "b": np.array([9.0, 9, 9])}
    parts = [{"w": np.array([[1.0]]), "b": np.array([1.0, 2])}, {"w": np.array([[3.0, 5]]), "b": np.array([3.0, 4])}]
    found = aggregate(parts, [0.5, 1], previous)
    assert found["w"].tolist() == [[2, 5], [9, 9]] and found["b"].tolist() == [2, 3, 9]
    with rejected(MethodError, "heterofl", "tensor w", "client 0", "[1, 1]"):
        aggregate(parts, [1, 0.5], previous)
    with rejected(MethodError, "heterofl", "rate per client", "2 clients", value=1):
        aggregate(parts, [1], previous)
    # one client alone, and none
    assert aggregate(parts[:1], [0.5], previous)["b"].tolist() == [1, 2, 9]
    assert aggregate([], [], previous)["b"].tolist() == [9, 9, 9]


def test_a_narrow_network_inside_the_wide_one() -> None:
    # The same outputs, in evaluation and in training mode.
    torch.manual_seed(0)
    wide, own = Convolutions(), Convolutions(2, 3)
    layout = Layout.of(wide)
    part = part_of(layout, 0.5)
    weights.write(own, part.take(weights.read(wide)))
    zeros = weights.read(wide)
    weights.write(wide, part.put(type(zeros)(0 * zeros.params, 0 * zeros.buffers), weights.read(own)))
    x = torch.randn(5, 1, 4, 4)
    for mode in (True, False):
        close(wide.train(mode)(x).detach().numpy(), own.train(mode)(x).detach().numpy())


def test_rounds_by_hand(tmp_path: Path) -> None:
    fed: Any = Federation(tmp_path, "heterofl", network=lambda: small(batchnorm=True), heterofl={"rates": "1, 0.4"})
    server = fed.server
    assert sorted(server.rates) in ([0.4, 0.4, 1], [0.4, 1, 1])
    before = server.global_model
    uploads = fed.round()
    for stack, held, now, old in (
        (
            uploads.W,
            [server.submodel_of(i, server.attempt).params for i in range(3)],
            server.global_model.params,
            before.params,
        ),
        (
            uploads.B,
            [server.submodel_of(i, server.attempt).buffers for i in range(3)],
            server.global_model.buffers,
            before.buffers,
        ),
    ):
        count = np.sum(held, axis=0)
        mean = np.where(count > 0, (stack * held).sum(0) / np.maximum(count, 1), old)
        close(now, mean)
    tensors = server.layout.tensors
    parts = [
        {n: tensors(type(before)(w, b))[n][s] for n, s in width_slices(server.layout, server.rates[i]).items()}
        for i, (w, b) in enumerate(zip(uploads.W, uploads.B, strict=True))
    ]
    for name, value in aggregate(parts, server.rates, tensors(before)).items():
        close(tensors(server.global_model)[name], value)
    for i in range(3):
        sent = fed.upload(i).model
        part = server.submodel_of(i, server.attempt)
        assert sent.params.size == part.params.sum() == server.protocol.expected_from(i).d
        used = fed.evaluated(i)
        assert (used.params[~part.params] == 0).all() and (used.params[part.params] != 0).any()
        hidden = np.zeros(len(used.params), bool)
        for slot in server.layout.params:
            hidden[slot.start : slot.stop] = slot.name.startswith("features")
        # tested as trained: a hidden layer is divided by the rate
        close(used.params, server.exported(i).params / np.where(hidden, server.rates[i], 1))


@pytest.mark.parametrize("scale", [True, False])
def test_fine_tuning_trains_as_a_round_does(tmp_path: Path, scale: bool) -> None:
    # with all samples in one batch, the order of the batches makes no difference
    fed: Any = Federation(tmp_path, "heterofl", batch_size=100, heterofl={"rates": "0.8", "scale": scale})
    update, (ctx, _), state = fed.method.local_update(), fed.context(0), fed.states[0]
    start = fed.evaluated(0)
    tuned = update.finetune(start, state, ctx, ctx.config.local_epochs)
    trained = update.train(update.merge(fed.server.download_for(0, fed.turn(1), "train").model, state, ctx), state, ctx)
    close(tuned.params, update.personal(trained, state, ctx).params)
    assert not (tuned.params[~part_of(fed.layout, 0.8).params]).any() and (tuned.params != start.params).any()


@pytest.mark.parametrize("batchnorm", [False, True])
def test_a_narrow_network_is_tested_as_it_was_trained(tmp_path: Path, batchnorm: bool) -> None:
    """Its outputs in evaluation are those of the last training step, which divides hidden layers by the rate."""
    fed: Any = Federation(
        tmp_path, "heterofl", network=lambda: small(batchnorm=batchnorm), heterofl={"rates": "0.6", "scale": True}
    )
    fed.round()
    update, (ctx, _), state = fed.method.local_update(), fed.context(0), fed.states[0]
    received = update.merge(fed.server.download_for(0, fed.turn(2), "train").model, state, ctx)
    personal = update.personal(received, state, ctx)
    x = torch.randn(7, 1, 2, 2)
    outputs = []
    for model, rate in ((received, 0.6), (personal, 1.0)):
        network = ctx.trainer.module
        weights.write(network, model)
        # statistics as they are, hidden layers as in training
        network.eval()
        network.features.training = True
        with scaled(ctx, rate), torch.no_grad():
            outputs.append(network(x).numpy())
    close(*outputs)
    assert np.abs(personal.params - received.params).max() > 0.01


def test_masked_classes_by_hand(tmp_path: Path) -> None:
    """Client 0 lacks class 2 and client 1 class 0: two clients of three, or all of them, count in a class's row."""
    fed: Any = Federation(tmp_path, "heterofl", heterofl={"rates": "1", "mask_classes": True})
    fed.data = [(x, np.resize(has, len(x))) for (x, _), has in zip(fed.data, ([0, 1], [1, 2], [0, 1, 2]), strict=True)]
    uploads = fed.round()
    assert uploads.extras["classes"].tolist() == [[1, 1, 0], [0, 1, 1], [1, 1, 1]]
    weight, bias = (slot for slot in fed.layout.params if slot.name in fed.layout.classifier)
    mean = uploads.W.mean(axis=0)
    for slot in (weight, bias):
        rows = uploads.W[:, slot.start : slot.stop].reshape(3, 3, -1)
        each = [rows[[0, 2], 0].mean(0), rows[:, 1].mean(0), rows[[1, 2], 2].mean(0)]
        mean[slot.start : slot.stop] = np.concatenate(each)
        # a row that a client masks stays as it was
        start = fed.initial.params[slot.start : slot.stop].reshape(3, -1)
        assert (rows[0, 2] == start[2]).all() and (rows[1, 0] == start[0]).all() and (rows[2] != start).any(1).all()
    close(fed.server.global_model.params, mean)
    for i, lacks in ((0, {2}), (1, {0}), (2, set[int]())):
        used = fed.evaluated(i)
        module = fed.module()
        weights.write(module, used)
        logits = module.eval()(torch.randn(5, 1, 2, 2)).detach().numpy()
        assert {c for c in range(3) if (logits[:, c] == 0).all()} == lacks
        ctx, _ = fed.context(i)
        tuned = fed.method.local_update().finetune(used, fed.states[i], ctx, 1).params
        rows = tuned[weight.start : weight.stop].reshape(3, -1)
        assert {c for c in range(3) if not rows[c].any()} == lacks and (tuned != used.params).any()
    told = METHOD.tested_in(config(method="heterofl", heterofl={"mask_classes": True}))
    assert mentions(told, "logits of classes", "client does not", "have are 0")
    # nobody has class 0: its row stays
    before = fed.server.global_model.params.copy()
    fed.round(ids=[1])
    rows = (each[weight.start : weight.stop].reshape(3, -1) for each in (before, fed.server.global_model.params))
    assert [(old == new).all() for old, new in zip(*rows, strict=True)] == [True, False, False]


def test_masked_classes_are_checked(tmp_path: Path) -> None:
    fed: Any = Federation(tmp_path, "heterofl", heterofl={"mask_classes": True})
    upload = fed.upload(0)
    for told in ([0, 0, 0], [1, 2, 0]):
        with rejected(WireError, "", "array classes", "0 or 1", "1 at least"):
            fed.server.check(dataclasses.replace(upload, extras={"classes": np.array(told, np.uint8)}))
    params = HeteroFLParams(mask_classes=True)
    assert not [*params.problems(config(method="heterofl"))]
    (problem,) = params.problems(config(method="heterofl", task="regression"))
    assert (problem.key, problem.value) == ("heterofl.mask-classes", True)


def test_full_width_is_fedavg_bit_for_bit(run: Run) -> None:
    setting = {"model": "mlp", "momentum": 0.5, "evaluate_every": 1, "partition": "iid", "train_samples": 20}
    records, saved = outcome(run, "heterofl", heterofl={"rates": "1"}, **setting)
    plain = outcome(run, "fedavg", **setting)
    assert saved == plain[1] and [r["accuracy-before"] for r in records] == [r["accuracy-before"] for r in plain[0]]


def test_rates_that_are_none() -> None:
    for text in ("", "1, two", "0.5, 0", "1.5"):
        with rejected(MethodError, "heterofl.rates", "numbers"):
            HeteroFLParams(rates=text).widths()


def test_statistics_of_narrow_networks_are_checked_where_they_lie(run: Run) -> None:
    """The variances of a part have other places in its upload than in the whole network's."""
    records, _ = outcome(run, "heterofl", **BATCHNORM, num_clients=3, train_samples=16, num_server_rounds=1)
    assert not records[0]["failures"] and len(records[0]["clients"]) == 3


def test_where_slices_of_buffers_lie_in_a_part() -> None:
    part = Part(np.ones(1, bool), np.array([1, 0, 1, 1, 0, 0, 1], bool))
    assert part.among([(0, 3), (3, 6), (6, 7), (4, 6)]) == ((0, 2), (2, 3), (3, 4), (3, 3))
