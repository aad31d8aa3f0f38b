"""MOON: its loss by hand and its properties, the limits bit for bit, which models it compares, and clients with little data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from client_app.stored_state import StoredState
from fl_app import weights
from fl_app.layout import Model
from strategies.base import LocalUpdate
from strategies.baselines.moon import METHOD, contrastive_loss
from tests.conftest import Run
from tests.methods.runs import client, outcome
from tests.small_models import BATCHNORM


def by_torch(z: Any, z_global: Any, z_previous: Any, temperature: float) -> tuple[float, np.ndarray]:
    at = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    others = (torch.tensor(other, dtype=torch.float64) for other in (z_global, z_previous))
    value = contrastive_loss(at, *others, temperature=temperature)
    assert value.ndim == 0
    value.backward()  # type: ignore[no-untyped-call]
    assert at.grad is not None
    return value.item(), at.grad.numpy()


def test_by_hand() -> None:
    # Sample 1: cos(z, z_g) = (12 + 12)/25 = 0.96, cos(z, z_prev) = 4/5 = 0.8: softplus(-0.16/0.5) = log(1 + e^-0.32) = 0.545924.
    # Sample 2: cos(z, z_g) = 0, cos(z, z_prev) = 1/sqrt(2): softplus(1.414214) = 1.631804. Mean 1.088864.
    # Gradient of cos(z, a): (a/|a| - cos z/|z|)/|z|. Sample 2, z = (1, 0): (0, 0.707107) of z_prev minus (0, 1) of z_g =
    # (0, -0.292893), times sigmoid(1.414214)/0.5 = 1.608859, over n = 2: (0, -0.235612).
    value, gradient = by_torch([[3, 4], [1, 0]], [[4, 3], [0, 2]], [[0, 1], [1, 1]], 0.5)
    assert value == pytest.approx(1.088864, abs=1e-6)
    np.testing.assert_allclose(gradient, [[-0.059231, 0.044423], [0, -0.235612]], atol=1e-6)


def log_1_plus_exp(x: float) -> float:
    return float(np.logaddexp(0, x))


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from([1e-3, 0.1, 0.5, 2.0]), st.integers(0, 2**32 - 1))
def test_properties(n: int, width: int, temperature: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    z, z_global, z_previous = random.normal(0, 1, (3, n, width))
    value, gradient = by_torch(z, z_global, z_previous, temperature)
    low, high = log_1_plus_exp(-2 / temperature), log_1_plus_exp(2 / temperature)
    assert low * (1 - 1e-9) <= value <= high * (1 + 1e-9)
    sizes = np.linalg.norm(gradient, axis=1) * np.linalg.norm(z, axis=1)
    assert (np.abs((gradient * z).sum(axis=1)) <= 1e-9 * (1 + sizes)).all()
    for scaled in range(3):  # by powers of two, exactly
        factors = 2.0 ** random.integers(-3, 4, (n, 1))
        features = (a * factors if k == scaled else a for k, a in enumerate((z, z_global, z_previous)))
        again, _ = by_torch(*features, temperature=temperature)
        assert again == pytest.approx(value, rel=1e-12, abs=1e-15)


def test_equal_references_teach_nothing() -> None:
    value, gradient = by_torch([[1, 2]], [[3, -1]], [[3, -1]], 0.5)
    assert value == pytest.approx(np.log(2)) and np.abs(gradient).max() < 1e-15


def test_no_features_and_small_temperatures_stay_finite() -> None:
    assert by_torch([[0, 0]], [[1, 0]], [[0, 1]], 0.5)[0] == pytest.approx(np.log(2))
    value, gradient = by_torch([[1, 0]], [[-1, 1e-9]], [[1, 1e-9]], 1e-4)
    assert value == pytest.approx(2e4) and np.isfinite(gradient).all()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def test_it_compares_with_the_received_and_its_own_last_model_in_evaluation_mode() -> None:
    # One batch: what the method's step must be, from torch alone.
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (6, 1, 2, 2), np.uint8), np.arange(6) % 3
    mu, tau, eta = 3.0, 0.7, 0.5
    ctx = client(
        "moon",
        small(),
        x,
        y,
        num_classes=3,
        batch_size=6,
        local_epochs=1,
        learning_rate=eta,
        moon={"mu": mu, "temperature": tau},
    )
    update, state, start = METHOD.local_update(), StoredState(), ctx.initial()
    previous = update.train(start, state, ctx)
    assert {name: array.tobytes() for name, array in state.arrays.items()} == {
        "moon.params": previous.params.tobytes(),
        "moon.buffers": previous.buffers.tobytes(),
    }
    received = Model(
        start.params + random.normal(0, 0.3, start.params.size).astype(np.float32), previous.buffers + 0.25
    )
    after = update.train(received, state, ctx)

    networks = {}
    for name, model in {"own": received, "global": received, "previous": previous}.items():
        networks[name] = small()
        weights.write(networks[name], model)
    images, labels = torch.tensor(x).float() / 255, torch.tensor(y)
    features = networks["own"][:-1](images)
    with torch.no_grad():
        z_global, z_previous = (networks[name].eval()[:-1](images) for name in ("global", "previous"))
    loss = cross_entropy(networks["own"][-1](features), labels)
    (loss + mu * contrastive_loss(features, z_global, z_previous, temperature=tau)).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in networks["own"].parameters():
            assert parameter.grad is not None
            parameter -= eta * parameter.grad
    want = weights.read(networks["own"])
    np.testing.assert_allclose(after.params, want.params, atol=1e-6)
    # the references gathered no statistics
    np.testing.assert_allclose(after.buffers, want.buffers, atol=1e-6)
    assert ctx.trainer.last_loss == pytest.approx(loss.item(), abs=1e-6)  # type: ignore[attr-defined]
    plain = LocalUpdate[Any]().train(received, StoredState(), ctx)
    assert np.abs(after.params - plain.params).max() > 1e-3
    assert state.arrays["moon.params"].tobytes() == after.params.tobytes()


def test_local_statistics(run: Run) -> None:
    setting = {**BATCHNORM, "train_samples": 12, "collect_personal_models": True}
    records, saved = outcome(run, "moon", moon={"batchnorm_statistics": "local"}, **setting)
    # three clients and the global model
    assert len(set(saved.values())) == 4
    assert records[1]["upload-bytes"] == records[1]["download-bytes"] == 3 * 4 * 1458
