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

from fl_app import models
from fl_app.errors import MethodError, UserError
from fl_app.layout import Layout
from fl_app.transport.wire import WireError
from strategies.baselines.heterofl import (
    METHOD,
    HeteroFLParams,
    aggregate,
    part_of,
    width_slices,
)
from strategies.kernels.parts import Part
from tests.conftest import config
from tests.facts import rejected
from tests.methods.federation import Federation, close


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


def test_rates_that_are_none() -> None:
    for text in ("", "1, two", "0.5, 0", "1.5"):
        with rejected(MethodError, "heterofl.rates", "numbers"):
            HeteroFLParams(rates=text).widths()


def test_where_slices_of_buffers_lie_in_a_part() -> None:
    part = Part(np.ones(1, bool), np.array([1, 0, 1, 1, 0, 0, 1], bool))
    assert part.among([(0, 3), (3, 6), (6, 7), (4, 6)]) == ((0, 2), (2, 3), (3, 4), (3, 3))
