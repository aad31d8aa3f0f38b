"""Per-FedAvg: steps by hand on a quadratic loss, its limit FedAvg, a client's round from torch, and the tested model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client_app.stored_state import StoredState
from fl_app.errors import MethodError
from strategies.baselines.perfedavg import METHOD, step
from tests.conftest import Run
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import client, same, samples, small
from tests.methods.runs import outcome

RATES: dict[str, Any] = {"alpha": 0.25, "beta": 0.5}


def slope(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of x/2 (w - y)^2."""
    return x * (w - y)


def test_steps_by_hand() -> None:
    # D: 2/2 (w - 1)^2 at w = 3 has the gradient 4, so w~ = 3 - 0.25 * 4 = 2. D': 3/2 (w + 1)^2 has there 3 * 3 = 9.
    arguments = np.array([3.0]), np.array([2.0]), np.array([1.0]), np.array([3.0]), np.array([-1.0])
    assert step(slope, *arguments, **RATES, variant="first-order") == [3 - 0.5 * 9]
    # The Hessian on D is 2: the outer gradient is 9 (1 - 0.25 * 2) = 4.5.
    assert step(slope, *arguments, **RATES, variant="hessian-free") == pytest.approx([3 - 0.5 * 4.5], abs=1e-9)
    for name, paper in (("first-order", "FO"), ("hessian-free", "HF")):
        assert step(slope, *arguments, **RATES, variant=name) == step(slope, *arguments, **RATES, variant=paper)
    with rejected(MethodError, "perfedavg.variant", "must be one", value="exact"):
        step(slope, *arguments, **RATES, variant="exact")


@given(st.integers(1, 5), st.floats(0, 0.4), st.integers(0, 2**32 - 1))
def test_hessian_free_is_the_gradient_through_the_inner_step(d: int, alpha: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    w, x1, y1, x2, y2 = random.uniform(-2, 2, (5, d))
    stepped = step(slope, w, x1, y1, x2, y2, alpha=alpha, beta=1.0, variant="hessian-free")

    def loss(at: np.ndarray) -> float:
        inner = at - alpha * slope(at, x1, y1)
        return float((x2 / 2 * (inner - y2) ** 2).sum())

    for k in range(d):
        e = np.eye(d)[k] * 1e-4
        assert w[k] - stepped[k] == pytest.approx((loss(w + e) - loss(w - e)) / 2e-4, abs=1e-5)
    plain = step(slope, w, x1, y1, x2, y2, alpha=0.0, beta=1.0, variant="hessian-free")
    assert (plain == w - slope(w, x2, y2)).all()


@pytest.mark.parametrize("seed", range(3))
def test_both_variants_beside_torchs_second_derivatives(seed: int) -> None:
    # A network of 3 tanh units in float64, as plain arrays of 16 numbers.
    random = np.random.default_rng(seed)
    w, (x1, x2), (y1, y2) = random.normal(size=16), random.normal(size=(2, 5, 3)), random.normal(size=(2, 5))

    def loss(at: torch.Tensor, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        h = torch.tanh(torch.tensor(x) @ at[:9].view(3, 3) + at[9:12])
        return ((h @ at[12:15] + at[15] - torch.tensor(y)) ** 2).mean()

    def gradient(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        point = torch.tensor(at, requires_grad=True)
        found: np.ndarray = torch.autograd.grad(loss(point, x, y), point)[0].numpy()
        return found

    point = torch.tensor(w, requires_grad=True)
    (slope_1,) = torch.autograd.grad(loss(point, x1, y1), point, create_graph=True)
    inner = point - 0.1 * slope_1
    (exact,) = torch.autograd.grad(loss(inner, x2, y2), point)
    stepped = step(gradient, w, x1, y1, x2, y2, alpha=0.1, beta=0.5, variant="hessian-free", delta=1e-5)
    close(stepped, w - 0.5 * exact.numpy(), atol=1e-5)
    plain = step(gradient, w, x1, y1, x2, y2, alpha=0.1, beta=0.5, variant="first-order")
    close(plain, w - 0.5 * gradient(inner.detach().numpy(), x2, y2), atol=1e-12)
    assert np.abs(plain - stepped).max() > 1e-3 and stepped.dtype == np.float64


def test_without_an_inner_step_it_is_fedavg_bit_for_bit(run: Run) -> None:
    setting = {"model": "mlp", "momentum": 0.5, "evaluate_every": 1, "partition": "iid", "train_samples": 20}
    plain = outcome(run, "fedavg", **setting)
    assert outcome(run, "perfedavg", perfedavg={"alpha": 0.0}, **setting) == plain
    assert outcome(run, "perfedavg", **setting) != plain


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_a_clients_batch_is_cut_in_two(variant: str) -> None:
    # One batch of five samples: D has the first two of the shuffled batch, D' the other three.
    images, labels = samples(5)
    ctx = client(
        "perfedavg",
        small(),
        images,
        labels,
        batch_size=5,
        local_epochs=1,
        perfedavg={"alpha": 0.3, "variant": variant, "delta": 0.01},
    )
    start = ctx.initial()
    seen = []
    trainer: Any = ctx.trainer
    plain = trainer.differentiate

    def watched(x: Any, y: Any, **more: Any) -> Any:
        seen.append((len(y), trainer.vector(trainer.weights)))
        value = plain(x, y, **more)
        slopes.append(trainer.vector(trainer.gradient))
        return value

    slopes: list[np.ndarray] = []
    trainer.differentiate = watched
    after = METHOD.local_update().train(start, StoredState(), ctx)
    points = [at for _, at in seen]
    g = slopes[1]
    close(points[1], start.params - 0.3 * slopes[0])
    if variant == "first-order":
        assert [n for n, _ in seen] == [2, 3]
    else:
        assert [n for n, _ in seen] == [2, 3, 2, 2]
        close(points[2], start.params + 0.01 * g)
        close(points[3], start.params - 0.01 * g)
        g = g - 0.3 / 0.02 * (slopes[2] - slopes[3])
    close(after.params, start.params - 0.1 * g, atol=1e-5)


def test_it_is_tested_after_one_step_on_all_data(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "perfedavg", perfedavg={"alpha": 0.3})
    ctx, received = federation.context(0)
    used = METHOD.local_update().personal(received, StoredState(), ctx)
    close(used.params, received.params - 0.3 * ctx.trainer.loss_gradient(received))
    assert not same(used, received)
    federation.round()
    uploads = federation.round()
    close(federation.server.global_model.params, uploads.W.mean(0))
    assert not federation.states[0].arrays
