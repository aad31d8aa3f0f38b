"""FedPAC: statistics and programs by hand, the program's optimum, its limit FedRep, and two rounds by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from strategies.baselines.fedpac import head_weights, on_simplex, statistics
from tests.facts import rejected
from tests.methods.federation import Federation, close


def test_statistics_by_hand() -> None:
    # Class 0: half of the samples, mean 2: h = 1. Class 1: h = 2. Squares: (1 + 9 + 16 + 16) / 4 = 10.5; 10.5 - 5 over 4.
    h, v = statistics(np.array([[1], [3], [4], [4]], np.float32), np.array([0, 0, 1, 1]), 3)
    assert h.tolist() == [[1], [2], [0]] and v == pytest.approx(5.5 / 4)
    # a single sample has no variance
    assert statistics(np.array([[3]], np.float32), np.array([0]), 1)[1] == 0


def test_weights_by_hand() -> None:
    # Equal statistics: weights go as 1 / v.
    close(head_weights(np.ones((2, 3)), [1.0, 3.0]), np.array([[0.75, 0.25], [0.75, 0.25]]))
    # Client 0: min a^2 + (1 - a)^2 (1 + 4): a = 5 / 6. Client 1 the same, the other way round.
    close(head_weights(np.array([[0.0], [2.0]]), [1.0, 1.0]), np.array([[5 / 6, 1 / 6], [1 / 6, 5 / 6]]))
    # Without variance, a client's own head has no cost at all.
    close(head_weights(np.array([[[0.0]], [[2.0]]]), [0.0, 0.0]), np.eye(2))


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_no_other_weights_cost_less(n: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    S, v = random.normal(size=(n, width)), random.uniform(0.01, 2, n)
    weights = head_weights(S, v)
    assert weights.shape == (n, n) and (weights >= 0).all()
    close(weights.sum(axis=1), np.ones(n), atol=1e-12)
    for own, row in zip(S, weights, strict=True):
        apart = own - S
        Q = np.diag(v) + apart @ apart.T
        # at the optimum, weight can go to no head with a smaller slope
        slope = Q @ row
        assert (slope >= row @ slope - 1e-8).all()
        assert row == pytest.approx(on_simplex(7 * Q), abs=1e-8)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_weights_beside_a_general_solver(n: int) -> None:
    random = np.random.default_rng(n)
    S, v = random.normal(size=(n, 3, 2)), random.uniform(0.01, 2, n)
    weights = head_weights(S, v)
    for i in range(n):

        def cost(a: np.ndarray, i: int = i) -> float:
            apart = sum(a[j] * (S[i] - S[j]) for j in range(n))
            return float((a**2 * v).sum() + (apart**2).sum())

        total = {"type": "eq", "fun": lambda a: a.sum() - 1}
        found = minimize(cost, np.full(n, 1 / n), bounds=[(0, 1)] * n, constraints=total, tol=1e-12)
        assert found.success
        close(weights[i], found.x, atol=1e-4)
        assert cost(weights[i]) <= found.fun + 1e-9


def test_one_client_and_bad_variances() -> None:
    assert head_weights(np.ones((1, 2, 3)), [0.0]).tolist() == [[1]] == head_weights(np.zeros((1, 4)), [2.0]).tolist()
    for v in ([1.0], [1.0, -1], [1.0, np.nan]):
        with rejected(ValueError, "", "2 numbers >= 0", "many as S", "clients"):
            head_weights(np.ones((2, 3)), v)


def test_without_weight_and_mixture_it_is_fedrep_bit_for_bit(tmp_path: Path) -> None:
    common: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "local_epochs": 3}
    plain: Any = Federation(tmp_path, "fedrep", fedrep={"head_epochs": 1, "body_epochs": 3}, **common)
    some: Any = Federation(tmp_path, "fedpac", fedpac={"weight": 0.0, "combine": False}, **common)
    for _ in range(3):
        plain.round()
        some.round()
        assert plain.models.tobytes() == some.models.tobytes()


def test_the_heads_rate_by_hand(tmp_path: Path) -> None:
    # One step of the head at the initial body: three times the rate moves it three times as far. The body's step is the run's.
    one: dict[str, Any] = {"local_epochs": 1, "batch_size": 10}
    plain: Any = Federation(tmp_path / "1", "fedpac", **one)
    fast: Any = Federation(tmp_path / "3", "fedpac", fedpac={"head_rate": 3.0}, **one)
    none: Any = Federation(tmp_path / "0", "fedpac", fedpac={"head_rate": 0.0}, **one)
    at, start = plain.server.at_head, plain.initial.params
    a, b, c = (f.round().W - start for f in (plain, fast, none))
    close(b[:, at], 3 * a[:, at])
    assert (c[:, at] == 0).all() and (c[:, ~at] != 0).any() and (a[:, at] != 0).all(axis=0).any()
    # with the head as it was, the body's one step has the run's rate
    ctx, model = none.context(0)
    trainer: Any = ctx.trainer
    trainer.load(model)
    ((x, y),) = trainer.batches(1, "train-body")
    trainer.load(dataclasses.replace(model, params=start))
    trainer.differentiate(x, y)
    close(c[0, ~at], -0.1 * trainer.vector(trainer.gradient)[~at])


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    federation: Any = Federation(tmp_path, "fedpac")
    server, sizes = federation.server, np.array([10, 6, 8])
    first = federation.round()
    at = server.at_head
    for _ in range(2):
        uploads = first if federation.rounds == 1 else federation.round()
        alpha = head_weights(uploads.extras["shares"], uploads.extras["variance"][:, 0])
        close(server.global_model.params, np.average(uploads.W, axis=0, weights=sizes))
        for i in range(3):
            close(server.model_for(i).params[at], alpha[i] @ uploads.W[:, at])
            assert (server.model_for(i).params[~at] == server.global_model.params[~at]).all()
    counts = uploads.extras["counts"]
    means = (uploads.extras["prototypes"] * counts[..., None]).sum(0) / counts.sum(0)[:, None]
    close(server.memory["prototypes"], means)
    # a client that is away keeps its head, on the new body
    kept = server.model_for(2).params[at].copy()
    federation.round(ids=[0, 1])
    assert (server.model_for(2).params[at] == kept).all()
    assert not any(state.arrays for state in federation.states)
