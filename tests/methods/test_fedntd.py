"""FedNTD: its loss by hand and against a naive reference, its limits bit for bit, and clients with little data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from client_app.stored_state import StoredState
from fl_app.errors import UserError
from fl_app.layout import Layout
from strategies.baselines.fedntd import METHOD, FedNTDParams, not_true_distillation
from tests.conftest import Run
from tests.methods.runs import client, outcome
from tests.small_models import BATCHNORM


def naive(logits: np.ndarray, reference: np.ndarray, y: np.ndarray, temperature: float) -> tuple[float, np.ndarray]:
    """Loss and gradient, one sample and one class at a time."""
    n, num_classes = logits.shape
    total, gradient = 0.0, np.zeros((n, num_classes))
    for s in range(n):
        others = [c for c in range(num_classes) if c != y[s]]
        p, q = (
            {c: math.exp(row[c] / temperature) / sum(math.exp(row[k] / temperature) for k in others) for c in others}
            for row in (logits[s], reference[s])
        )
        total += temperature**2 * sum(q[c] * (math.log(q[c]) - math.log(p[c])) for c in others) / n
        for c in others:
            gradient[s, c] = temperature * (p[c] - q[c]) / n
    return total, gradient


def by_torch(logits: Any, reference: Any, y: Any, temperature: float) -> tuple[float, np.ndarray]:
    at = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    value = not_true_distillation(
        at, torch.tensor(reference, dtype=torch.float64), torch.tensor(y), temperature=temperature
    )
    assert value.ndim == 0
    value.backward()  # type: ignore[no-untyped-call]
    assert at.grad is not None
    return value.item(), at.grad.numpy()


def test_by_hand() -> None:
    # Not-true logits (0, 1, -1), the global model's (1, 1, -1). p = (1, e, 1/e) / (1 + e + 1/e) = (0.244728, 0.665241, 0.090031),
    # q = (e, e, 1/e) / (2e + 1/e) = (0.468310, 0.468310, 0.063379); p - q = (-0.223582, 0.196930, 0.026652).
    # L = sum q ln(q/p) = 0.468310 (0.649003 - 0.351001) + 0.063379 * -0.351001 = 0.117293.
    logits, reference, y = [[2.0, 0, 1, -1]], [[0.0, 1, 1, -1]], [0]
    value, gradient = by_torch(logits, reference, y, 1)
    assert value == pytest.approx(0.117293, abs=1e-6)
    np.testing.assert_allclose(gradient, [[0, -0.223582, 0.196930, 0.026652]], atol=1e-6)
    assert by_torch(logits, reference, y, 3)[0] == pytest.approx(0.116611, abs=1e-6)


@given(st.integers(1, 5), st.integers(2, 6), st.sampled_from([0.3, 1.0, 3.0]), st.integers(0, 2**32 - 1))
def test_against_a_naive_reference(n: int, num_classes: int, temperature: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits, reference = random.normal(0, 2, (2, n, num_classes))
    y = random.integers(0, num_classes, n)
    value, gradient = by_torch(logits, reference, y, temperature)
    want = naive(logits, reference, y, temperature)
    np.testing.assert_allclose(value, want[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-9, atol=1e-12)
    assert value >= -1e-14
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-12)
    assert (gradient[np.arange(n), y] == 0).all()
    if num_classes == 2:
        assert value == 0 and (gradient == 0).all()
    shifted = reference.copy()
    # what w_g says of the true class plays no part
    shifted[np.arange(n), y] += 5
    assert by_torch(logits, shifted, y, temperature)[0] == value


def test_large_logits_stay_finite() -> None:
    value, gradient = by_torch([[500.0, -500, 0]], [[-500.0, 500, 0]], [2], 1)
    assert value == pytest.approx(1000) and np.isfinite(gradient).all()


class Scores(nn.Module):
    """Logits that are its only parameters, per pixel value 0 or 1: [n, 1, 1, 1] -> [n, 3]; no Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([[0.5, 0.0, -0.5], [0.0, 1.0, 0.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x.flatten().round().long()]


def test_two_steps_by_hand_on_a_model_without_a_linear_layer() -> None:
    # The logits are the parameters: a step subtracts eta (softmax - onehot)/n and eta beta tau (p - q)/n per sample; q is that
    # of the start. The training loss that is reported is the mean cross-entropy, without the distillation.
    beta, tau, eta, y = 2.0, 2.0, 0.7, np.array([2, 0])
    x = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
    module = Scores()
    ctx = client(
        "fedntd",
        module,
        x,
        y,
        num_classes=3,
        batch_size=2,
        local_epochs=2,
        learning_rate=eta,
        fedntd={"beta": beta, "temperature": tau},
    )
    start = ctx.initial()
    table = start.params.reshape(2, 3).astype(np.float64)
    first = table.copy()
    for _ in range(2):
        shares = np.exp(table) / np.exp(table).sum(axis=1, keepdims=True)
        loss = -np.log(shares[[0, 1], y]).mean()
        gradient = (shares - np.eye(3)[y]) / 2
        table = table - eta * (gradient + beta * naive(table, first, y, tau)[1])
    after = METHOD.local_update().train(start, StoredState(), ctx)
    np.testing.assert_allclose(after.params.reshape(2, 3), table, atol=1e-6)
    assert ctx.trainer.last_loss == pytest.approx(loss, abs=1e-6)  # type: ignore[attr-defined]


def test_local_statistics_do_not_travel(run: Run) -> None:
    setting = {**BATCHNORM, "fedntd": {"batchnorm_statistics": "local"}, "train_samples": 12}
    records, _ = outcome(run, "fedntd", **setting)
    whole, _ = outcome(run, "fedntd", **BATCHNORM, train_samples=12)
    saved = [whole[0][f"{way}-bytes"] - records[0][f"{way}-bytes"] for way in ("upload", "download")]
    # three clients; running means and variances
    assert saved == [3 * 4 * 2 * (8 + 16)] * 2


def test_a_classifier_of_one_class_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(UserError, match="its classifier has 1"):
        METHOD.shared(Layout.of(module), FedNTDParams())
