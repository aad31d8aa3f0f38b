"""FedAMP against METHODS.md: attention by hand, its properties and limits, the server and client half."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from client_app.stored_state import StoredState
from fl_app.layout import Model
from fl_app.transport.wire import encode_upload, payload_bytes
from strategies.baselines.fedamp import FedAMPParams, FedAMPUpdate, attention
from strategies.kernels import aggregate
from tests.conftest import f32, flat_layout
from tests.methods import halves

LAYOUT = flat_layout([2], [1])


# The golden round: N = 3, d = 2. Squared distances: (0, 1): 1, (0, 2): 4, (1, 2): 5.
W = np.stack([f32(0, 0), f32(1, 0), f32(0, 2)])


B = np.stack([f32(10), f32(20), f32(40)])


def pull(x: float, sigma: float = 2.0, alpha: float = 1.0) -> float:
    """alpha A'(x), A(x) = 1 - e^(-x/sigma)."""
    return float(alpha / sigma * np.exp(-x / sigma))


# sigma = 2, alpha = 1: xi_01 = e^(-1/2)/2 = 0.3033, xi_02 = e^(-2)/2 = 0.0677, xi_12 = e^(-5/2)/2 = 0.0410
A, C, E = pull(1), pull(4), pull(5)


XI = np.array([[1 - A - C, A, C], [A, 1 - A - E, E], [C, E, 1 - C - E]])


def test_attention_by_hand() -> None:
    got = attention(W, sigma=2, alpha=1)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, XI, rtol=1e-12)
    assert round(A, 4) == 0.3033 and round(C, 4) == 0.0677 and round(E, 4) == 0.0410


def test_a_row_beyond_one_is_scaled() -> None:
    # alpha = 4: row 0 has 4 (A + C) = 1.484 > 1 and is scaled; row 1: 4 (A + E) = 1.377; row 2: 4 (C + E) = 0.435 is not
    got = attention(W, sigma=2, alpha=4)
    np.testing.assert_allclose(got[0], [0, A / (A + C), C / (A + C)])
    np.testing.assert_allclose(got[1], [A / (A + E), 0, E / (A + E)])
    np.testing.assert_allclose(got[2], [4 * C, 4 * E, 1 - 4 * C - 4 * E])


stacks = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 20)), elements=st.floats(-3, 3, width=32))


@given(stacks, st.floats(0.01, 100), st.floats(0.01, 100))
def test_rows_are_convex_combinations(W: np.ndarray, sigma: float, alpha: float) -> None:
    got = attention(W, sigma=sigma, alpha=alpha)
    assert (got >= 0).all()
    np.testing.assert_allclose(got.sum(axis=1), 1)
    order = np.argsort(got, axis=1, kind="stable")
    for i, row in enumerate(order):
        others = [j for j in row if j != i]
        gaps = [((W[i].astype(np.float64) - W[j]) ** 2).sum() for j in others]
        assert all(a >= b * (1 - 1e-6) for a, b in zip(gaps, gaps[1:], strict=False) if got[i, others[0]] > 0)


def test_limits() -> None:
    # nobody is near: local training
    assert (attention(W, sigma=1e-4, alpha=1) == np.eye(3)).all()
    # alpha/sigma: no weight at all
    np.testing.assert_allclose(attention(W, sigma=1e9, alpha=1e-3), np.eye(3), atol=1e-9)
    equal = attention(np.stack([W[0]] * 3), sigma=1, alpha=0.25)
    np.testing.assert_allclose(equal, [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    assert attention(W[:1], sigma=1, alpha=5).tolist() == [[1]]


@pytest.mark.parametrize(
    ("sigma", "alpha", "message"),
    [(0, 1, "sigma must be a number > 0, got 0"), (1, -1, "alpha must be a number > 0, got -1"), (np.nan, 1, "sigma")],
)
def test_attention_refuses(sigma: float, alpha: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(W, sigma=sigma, alpha=alpha)


def test_without_scaling_a_clients_own_weight_is_what_is_left() -> None:
    # alpha = 4, as printed: row 0 keeps 1 - 1.484, a negative weight
    got = attention(W, sigma=2, alpha=4, convex=False)
    np.testing.assert_allclose(got[0], [1 - 4 * (A + C), 4 * A, 4 * C])
    np.testing.assert_allclose(got.sum(axis=1), 1)
    assert (attention(W, sigma=2, alpha=1, convex=False) == attention(W, sigma=2, alpha=1)).all()


def server(**params: Any) -> Any:
    return halves.server("fedamp", LAYOUT, run={"fraction_train": 0.5}, **({"sigma": 2.0} | params))


def play(strategy: Any, round: int, ids: list[int], rows: list[int], stack: np.ndarray = W) -> None:
    strategy.personalize(round, halves.uploads(ids, stack[rows], B[rows]))


def test_the_golden_round_in_the_strategy() -> None:
    # u0 = A w1 + C w2 = (A, 2C); u1 = (1 - A - E) w1 + E w2; u2 = E w1 + (1 - C - E) w2
    strategy = server()
    play(strategy, 1, [4, 5, 7], [0, 1, 2])
    np.testing.assert_allclose(strategy.model_for(4).params, [A, 2 * C], rtol=1e-6)
    np.testing.assert_allclose(strategy.model_for(5).params, [1 - A - E, 2 * E], rtol=1e-6)
    np.testing.assert_allclose(strategy.model_for(7).params, [E, 2 * (1 - C - E)], rtol=1e-6)
    np.testing.assert_allclose([strategy.model_for(i).buffers[0] for i in (4, 5, 7)], XI @ B[:, 0], rtol=1e-6)
    assert strategy.attempt.client_notes[4]["attention"].tolist() == np.round(XI[0], 6).tolist()


def test_partial_participation() -> None:
    strategy = server()
    play(strategy, 1, [0, 1, 2], [0, 1, 2])
    before = strategy.model_for(0)
    stack = W.copy()
    play(strategy, 2, [1, 2], [1, 2], stack)
    stack[:] = 99
    assert (strategy.model_for(0).params == before.params).all()
    np.testing.assert_allclose(strategy.model_for(1).params, [1 - E, 2 * E], rtol=1e-6)
    assert strategy.model_for(3).params.tolist() == [-1, -1]
    assert strategy.exported() is None


def test_an_absent_client_is_mixed_with_the_rounds_uploads() -> None:
    # client 0 stays at (0, 0); clients 1 and 2 move to (0, 1) and (0, 3): distances 1 and 9
    strategy = server()
    play(strategy, 1, [0, 1, 2], [0, 1, 2])
    play(strategy, 2, [1, 2], [1, 2], np.array([[9, 9], [0, 1], [0, 3]], np.float32))
    np.testing.assert_allclose(strategy.model_for(0).params, [0, pull(1) * 1 + pull(9) * 3], rtol=1e-6)


@pytest.mark.parametrize("scaling", ["none", "convex"])
@pytest.mark.parametrize("neighbours", [0, 1])
def test_absent_clients_of_many_are_mixed_together_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, neighbours: int, scaling: str
) -> None:
    moved = np.array([[9, 9], [0, 1], [0, 3]], np.float32)
    clouds = []
    for many in (2, 100):
        monkeypatch.setattr(aggregate, "MANY", many)
        strategy = server(neighbours=neighbours, scaling=scaling, alpha=3.0)
        play(strategy, 1, [0, 1, 2], [0, 1, 2])
        play(strategy, 2, [1], [1])
        play(strategy, 3, [1, 3], [1, 2], moved)
        models = [strategy.model_for(i) for i in (0, 2)]
        clouds.append([vector for model in models for vector in (model.params, model.buffers)])
    for at_once, singly in zip(*clouds, strict=True):
        np.testing.assert_allclose(at_once, singly, rtol=1e-5)


@pytest.mark.parametrize("many", [2, 100])
def test_a_resumed_server_sends_the_same_cloud_models(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(aggregate, "MANY", many)
    strategy, resumed = server(alpha=0.5, alpha_decay_every=2), server(alpha=0.5, alpha_decay_every=2)
    for round, ids, rows in ((1, [0, 1, 2], [0, 1, 2]), (2, [1], [1]), (3, [1, 3], [1, 2])):
        strategy.round = round
        play(strategy, round, ids, rows)
    resumed.round = 3
    resumed.personal = {i: {name: array.copy() for name, array in own.items()} for i, own in strategy.personal.items()}
    for i in (3, 0, 2, 1, 9):
        sent, again = strategy.model_for(i), resumed.model_for(i)
        assert sent.params.tobytes() == again.params.tobytes() and sent.buffers.tobytes() == again.buffers.tobytes()


def test_a_round_changes_only_its_clients_arrays() -> None:
    # a checkpoint writes what changed: clients 0 and 2 keep the arrays of round 1, and lose their cloud models
    strategy = server()
    play(strategy, 1, [0, 1, 2], [0, 1, 2])
    before = {i: own["params"] for i, own in strategy.personal.items()}
    play(strategy, 2, [1], [1])
    assert {i: set(strategy.personal[i]) for i in (0, 2)} == dict.fromkeys((0, 2), {"params", "buffers"})
    assert strategy.personal[0]["params"] is before[0] and strategy.personal[1]["params"] is not before[1]


def test_what_is_exported_is_the_clients_own_model() -> None:
    strategy = server()
    play(strategy, 1, [0, 1, 2], [0, 1, 2])
    assert [strategy.exported(i).params.tolist() for i in range(3)] == W.tolist()


def test_alpha_decays() -> None:
    params = FedAMPParams(alpha=1e4, alpha_decay=0.1, alpha_decay_every=30)
    assert [params.alpha_in(t) for t in (1, 30)] == [1e4, 1e4]
    assert [params.alpha_in(t) for t in (31, 61)] == pytest.approx([1e3, 1e2])


def test_a_negative_own_weight_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("corolla"), "propagate", True)
    play(server(), 1, [0, 1, 2], [0, 1, 2])
    assert not caplog.messages
    strategy = server(alpha=4.0)
    play(strategy, 3, [5, 6, 8], [0, 1, 2])
    play(strategy, 4, [5, 6, 8], [0, 1, 2])
    assert len(caplog.messages) == 1 and "round 3" in caplog.messages[0] and "clients [5, 6]" in caplog.messages[0]


@pytest.mark.parametrize(("lam", "alpha", "mu"), [(1.0, 1.0, 1.0), (3.0, 2.0, 1.5), (0.0, 1.0, 0.0)])
def test_training_pulls_to_the_cloud_model(lam: float, alpha: float, mu: float) -> None:
    class Trainer:
        def train(self, start: Model, **options: Any) -> Model:
            # lambda/(2 alpha) ||w - u||^2 = mu/2 ||w - u||^2, whose gradient is mu (w - u)
            assert set(options) == {"correction"} and (options["correction"] is None) == (mu == 0)
            if mu:
                gradient = torch.ones(2)
                options["correction"](torch.tensor([4.0, 1.0]), gradient)
                assert gradient.tolist() == [1 + 3 * mu, 1 - mu]
            return Model(start.params + 1, start.buffers)

        def tensor(self, vector: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(vector)

    start = Model(f32(1, 2), f32(3))
    ctx = halves.context("fedamp", LAYOUT, initial=start, trainer=Trainer(), lam=lam, alpha=alpha)
    state = StoredState()
    after = FedAMPUpdate().train(start, state, ctx)
    assert after.params.tolist() == [2, 3]
    # the next cloud model: the centre; training goes on from the client's own
    received = Model(f32(1, 2), f32(9))
    again = FedAMPUpdate().train(received, state, ctx)
    assert again.params.tolist() == [3, 4] and again.buffers.tolist() == [3]
    assert FedAMPUpdate().personal(received, state, ctx).params.tolist() == [3, 4]
    upload = FedAMPUpdate().upload(start, after, StoredState(), ctx)
    assert upload.mask is None and payload_bytes(encode_upload(upload)) == 4 * 3 and upload.num_examples == 12
