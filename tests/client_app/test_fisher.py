"""The Fisher information's diagonal: layer by layer as one sample at a time, and what cannot be done layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from client_app.fisher import by_layer, by_sample, known_layers
from fl_app import models, weights
from fl_app.layout import Layout, Model
from fl_app.trainable_tensors import freeze
from tests.client_app.test_train import CLASSES, mlp, trainer, with_batchnorm


class InPlace(nn.Module):
    """Overwrites what its layers give, has a shortcut and strides, and one layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm = nn.Conv2d(1, 4, 3, stride=2, padding=1, dilation=1), nn.GroupNorm(2, 4)
        self.b, self.short = nn.Conv2d(4, 4, (3, 1), padding=(1, 0), bias=False), nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(64, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu_(self.norm(torch.relu_(self.a(x))))
        out = self.b(z)
        out += self.short(z)
        logits: Tensor = self.fc(torch.relu_(out).flatten(1))
        return logits


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.fc = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.b(torch.relu(self.b(torch.relu(self.a(x.flatten(1))))))))
        return logits


class Own(nn.Module):
    """Has a parameter of its own, and gives Linear layers many vectors per sample."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.fc = nn.Linear(8, 5), nn.Linear(40, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.7)) if own else 0.7

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.rows(x.squeeze(1)) * self.scale).flatten(1))
        return logits


def resnet(norm: str) -> nn.Module:
    return models.build("resnet8", in_channels=1, num_classes=CLASSES, image_size=8, norm=norm)


KNOWN: list[Callable[[], nn.Module]] = [mlp, with_batchnorm, InPlace, lambda: resnet("batch"), lambda: resnet("group")]


def naive(make: Callable[[], nn.Module], model: Model, x: Tensor, y: Tensor) -> np.ndarray:
    """One sample after the other, float64."""
    module = make()
    weights.write(module, model)
    module.double().eval()
    total = np.zeros(model.params.size)
    for i in range(len(y)):
        module.zero_grad()
        nn.functional.cross_entropy(module(x[i : i + 1].double()), y[i : i + 1]).backward()
        gradients = [q.grad if q.grad is not None else torch.zeros_like(q) for q in module.parameters()]
        total += torch.cat([g.reshape(-1) for g in gradients]).square().numpy()
    return total / len(y)


@pytest.mark.parametrize("make", [*KNOWN, Twice, lambda: Own(True), lambda: Own(False)])
def test_the_mean_of_squared_gradients(make: Callable[[], nn.Module]) -> None:
    model = weights.read(make())
    model.buffers[:] = np.random.default_rng(0).random(model.buffers.size) + 0.5
    t = trainer(make, n=9)
    got = t.fisher(model)
    want = naive(make, model, *t.samples(np.arange(9)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 * want.max())
    assert got.dtype == np.float32 and t.read().params.tobytes() == model.params.tobytes()
    assert t.read().buffers.tobytes() == model.buffers.tobytes()


@pytest.mark.parametrize("make", KNOWN)
def test_layer_by_layer_is_one_by_one(make: Callable[[], nn.Module]) -> None:
    module = make().eval()
    for parameter in list(module.parameters())[:2]:
        parameter.requires_grad_(False)  # as a user's model may
    x, y = torch.rand(5, 1, 8, 8), torch.tensor([0, 1, 2, 1, 0])
    layers = by_layer(module, known_layers(module), x.clone(), y)
    assert len(layers) == len(list(module.parameters()))
    for got, want in zip(layers, by_sample(module, x, y), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("make", KNOWN)
@pytest.mark.parametrize("kept", ["*weight", "*bias"])
def test_weights_without_their_biases(make: Callable[[], nn.Module], kept: str) -> None:
    """What trains has the entries it has if all trains."""

    def partly() -> nn.Module:
        module = make()
        freeze(module, f"{kept},{next(iter(dict(module.named_parameters())))}")
        return module

    every, t = Layout.of(make()), trainer(partly, n=20)
    some = Layout.of(t.module)
    assert 0 < some.d < every.d and known_layers(t.module)
    expected = trainer(make, n=20).fisher(weights.read(make()))
    got = t.fisher(weights.read(partly()))
    np.testing.assert_allclose(
        got, every.take(Model(expected, np.zeros(every.b, np.float32)), some.names).params, rtol=1e-4
    )
    assert (got > 0).any()


def test_what_is_not_done_layer_by_layer() -> None:
    x, y = torch.rand(5, 1, 8, 8), torch.tensor([0, 1, 2, 1, 0])
    assert not known_layers(Own(True)) and not known_layers(nn.Conv2d(4, 4, 3, groups=2))
    assert not known_layers(nn.BatchNorm2d(4, track_running_stats=False)) and not known_layers(
        nn.Conv2d(1, 1, 3, padding="same")
    )
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert not known_layers(tied)
    for module in (Twice(), Own(False)):
        assert known_layers(module) and not by_layer(module, known_layers(module), x, y)


def test_chosen_samples_and_chunks() -> None:
    t, model = trainer(mlp, n=150), weights.read(mlp())
    np.testing.assert_allclose(t.fisher(model), naive(mlp, model, *t.samples(np.arange(150))), rtol=1e-4, atol=1e-9)
    few = t.fisher(model, 7)
    assert few.tobytes() == t.fisher(model, 7).tobytes() != t.fisher(model).tobytes() == t.fisher(model, 150).tobytes()
