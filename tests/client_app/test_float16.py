"""Gradients in float16: the loss is scaled, so that none vanishes and none is infinite."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from client_app.trainer import LOSS_SCALE, LocalTrainer
from fl_app import weights
from fl_app.errors import UserError
from fl_app.server.run_folder import read_metrics
from tests.client_app.test_train import mlp, trainer, with_batchnorm
from tests.conftest import Run, config


def gradient(own: LocalTrainer, factor: float) -> Tensor:
    """Return the gradient of the loss times a factor, and divide it by the factor again."""
    own.load(weights.read(own.module))

    def objective(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return own.loss(own.logits(module, x), y) * factor

    own.differentiate(*own.samples(np.arange(20)), objective)
    return own.gradient.clone() / factor


@pytest.mark.parametrize("make", [mlp, with_batchnorm])
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4])
def test_the_gradient_is_that_of_float32(make: Any, factor: float) -> None:
    build = functools.cache(make)
    exact = gradient(trainer(build, batch_size=20), factor)
    half = trainer(build, batch_size=20, precision="float16")
    found = gradient(half, factor)
    assert (found - exact).norm() < 0.02 * exact.norm()
    # a large gradient lowers the factor on the loss for the next steps
    assert (half._loss_scale < LOSS_SCALE) == (factor > 1)


def test_without_scaling_small_gradients_vanish() -> None:
    own = trainer(precision="float16")
    own._loss_scale = 1.0
    assert not gradient(own, 1e-9).any()


def test_a_backward_pass_adds_to_the_gradient() -> None:
    own = trainer(precision="float16")
    own.load(weights.read(mlp()))
    x, y = own.samples(np.arange(20))
    own.gradient.fill_(1.0)
    own.backward(own.task.loss(own.logits(own.module, x), y))
    added = own.gradient - 1
    own.gradient.zero_()
    own.backward(own.task.loss(own.logits(own.module, x), y))
    torch.testing.assert_close(added, own.gradient, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "perfedavg"])
def test_a_run_learns_as_in_float32(run: Run, method: str) -> None:
    ends = []
    for precision in ("float32", "float16"):
        found = run(method=method, precision=precision, num_server_rounds=3, run_name=precision)
        ends.append([record["loss"] for record in read_metrics(found.path)])
    assert ends[0] != ends[1] and ends[0] == pytest.approx(ends[1], rel=0.02)


def test_records_gradients_are_not_scaled() -> None:
    with pytest.raises(UserError) as caught:
        config(precision="float16", dp_epsilon=8.0)
    assert caught.value.key == "precision"
