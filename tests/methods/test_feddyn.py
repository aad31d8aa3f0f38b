"""FedDyn: the server's step in closed form, the drift's invariant, and the first round, which is FedProx and an extrapolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from client_app.stored_state import StoredState
from fl_app import models
from fl_app.layout import Layout
from strategies.baselines.feddyn import METHOD, moved
from strategies.baselines.fedprox import FedProxUpdate
from strategies.kernels.aggregate import mean_block
from tests.conftest import Run, f32
from tests.methods.federation import Federation, close
from tests.methods.one_client import client, same, samples, small

A, B, ALPHA = np.array([1.0, 3.0]), np.array([0.0, 4.0]), 0.5


def server_step(W: np.ndarray, w_global: np.ndarray, h: np.ndarray, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """The server's step over a stack W [N, d]."""
    W = np.asarray(W)
    dtype = np.result_type(W.dtype, np.float32)
    model, drift = moved(mean_block(W, np.ones(len(W)), len(W)), w_global, h, len(W) / num_clients)
    return model.astype(dtype), drift.astype(dtype)


def quadratic_rounds(rounds: int) -> list[tuple[np.ndarray, float, float]]:
    """W, w, h of rounds with f_i = a_i/2 (w - b_i)^2, every client at the exact minimum of its regularized loss."""
    w, h, drift, seen = np.zeros(1), np.zeros(1), np.zeros(2), []
    for _ in range(rounds):
        # a (w - b) + alpha (w - w_g + lambda) = 0
        W = (A * B + ALPHA * (w - drift)) / (A + ALPHA)
        drift = drift + W - w
        w, h = server_step(W[:, None], w, h, 2)
        seen.append((W, float(w[0]), float(h[0])))
    return seen


def test_quadratics_by_hand() -> None:
    # Round 1 from 0: W = ab/(a + 0.5) = 0 and 12/3.5 = 3.428571; mean 1.714286 = h; w = mean + h.
    rounds = quadratic_rounds(30)
    close(rounds[0][0], [0, 3.428571])
    assert rounds[0][1:] == pytest.approx((3.428571, 1.714286), abs=1e-6)
    close(rounds[1][0], [1.142857, 3.428571])
    assert rounds[1][1:] == pytest.approx((2.857143, 0.571429), abs=1e-6)
    # the optimum is 12/4 = 3; FedAvg's fixed point 2
    assert rounds[29][1] == pytest.approx(2.999902, abs=1e-6)


def test_partial_participation_by_hand() -> None:
    # mean - w_g = (1, -1), a quarter of the clients: h = (0.5, 0) + (0.25, -0.25); w = (2, 0) + h.
    w, h = server_step(f32(2, 0)[None], f32(1, 1), f32(0.5, 0), 4)
    assert w.tolist() == [2.75, -0.25] and h.tolist() == [0.75, -0.25] and w.dtype == h.dtype == np.float32


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_server_step_in_closed_form(n: int, absent: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    W, w, h = random.normal(size=(n, 5)), random.normal(size=5), random.normal(size=5)
    new, drift = server_step(W, w, h, n + absent)
    np.testing.assert_allclose(drift, h + (W - w).sum(axis=0) / (n + absent), atol=1e-12)
    np.testing.assert_allclose(new, W.mean(axis=0) + drift, atol=1e-12)


def test_the_servers_drift_is_the_mean_of_all_clients(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "feddyn", sizes=(10, 6, 8, 5), feddyn={"alpha": 0.3}, momentum=0.5)
    for ids in ([0, 1], [1, 3], [0, 1, 2, 3], [2]):
        federation.round(ids=ids)
        drifts = [s.arrays.get("feddyn.drift", np.zeros(federation.layout.d, np.float32)) for s in federation.states]
        close(federation.server.memory["h"], np.mean(drifts, axis=0, dtype=np.float64))


def test_what_does_not_travel_is_not_pulled_to_where_it_began(run: Run, tmp_path: Path) -> None:
    folder = run(method="feddyn", share="classifier.*", keep_state=True, num_server_rounds=3, feddyn={"alpha": 1.0})
    layout = Layout.of(models.build("mlp", in_channels=1, num_classes=10, image_size=8, norm="batch", seed=0))
    shared = layout.indices(layout.classifier)
    drifts = [
        load(p.read_bytes()[32:])["feddyn.drift"] for p in sorted((tmp_path / "state").rglob("client-*/000003*.state"))
    ]
    assert folder.path.exists() and len(drifts) == 3
    assert all(np.any(drift[shared]) and not np.any(drift[~shared]) for drift in drifts)


def test_the_first_round_is_fedprox_and_an_extrapolation(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "feddyn", network=lambda: small(batchnorm=True))
    start = federation.server.global_model
    uploads = federation.round()
    close(federation.server.global_model.params, 2 * uploads.W.mean(axis=0, dtype=np.float64) - start.params)
    close(federation.server.global_model.buffers, uploads.B.mean(axis=0))  # not extrapolated


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
@pytest.mark.parametrize("n", [1, 10])
def test_the_first_training_is_fedprox_bit_for_bit(n: int, kinds: dict[str, Any]) -> None:
    common: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01}
    ours = client("feddyn", small(**kinds), *samples(n), feddyn={"alpha": 0.2}, **common)
    theirs = client("fedprox", small(**kinds), *samples(n), fedprox={"mu": 0.2}, **common)
    state, update = StoredState(), METHOD.local_update()
    after = update.train(ours.initial(), state, ours)
    assert same(after, FedProxUpdate().train(theirs.initial(), StoredState(), theirs))
    assert (state.arrays["feddyn.drift"] == after.params - ours.initial().params).all()
    # from the same start, pulled elsewhere
    again = update.train(ours.initial(), state, ours)
    assert not same(again, after)
    assert sum(array.nbytes for array in state.arrays.values()) == 4 * ours.layout.d
