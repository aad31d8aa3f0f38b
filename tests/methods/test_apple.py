"""APPLE: mixtures, the fading pull and one batch by hand, what clients are sent, and a client alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from client_app.stored_state import StoredState
from strategies.baselines.apple import METHOD, fade, mix
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import client, samples, small


def regularizer(p: ArrayLike, p0: ArrayLike, round: int, *, mu: float, loosen_rounds: int) -> float:
    """Return lambda(t) mu/2 ||p - p0||^2 (Eq. 5). p, p0: [N]; round: t, from 1; mu, loosen_rounds: the parameters."""
    apart = np.asarray(p, np.float64) - np.asarray(p0, np.float64)
    return fade(round, loosen_rounds) * mu / 2 * float(apart @ apart)


def test_by_hand() -> None:
    assert mix(np.array([[1, 2], [3, 8]], np.float32), [0.5, 0.25]).tolist() == [1.25, 3]
    # lambda over 4 rounds: 1, (1 + cos 45 degrees) / 2, 1/2, ...
    assert [fade(t, 4) for t in (1, 3, 5, 9)] == pytest.approx([1, 0.5, 0, 0]) and fade(1, 0) == 0
    # ||(1, 2)||^2 = 5, halved, times mu 0.1 and lambda 1/2
    assert regularizer([1, 2.5], [0, 0.5], 3, mu=0.1, loosen_rounds=4) == pytest.approx(0.125)


def test_mixtures_and_the_pulls_slope_by_loops() -> None:
    random = np.random.default_rng(0)
    W, p, p0 = random.normal(size=(4, 6)), random.normal(size=4), random.uniform(size=4)
    close(mix(W, p), np.array([sum(p[j] * W[j, k] for j in range(4)) for k in range(6)]), atol=1e-12)
    # the update's pull lambda(t) mu (p - p0) is the regularizer's gradient
    rates: dict[str, Any] = {"mu": 0.3, "loosen_rounds": 5}
    for t in (1, 2, 5, 6):
        for j, e in enumerate(np.eye(4) * 1e-5):
            slope = (regularizer(p + e, p0, t, **rates) - regularizer(p - e, p0, t, **rates)) / 2e-5
            assert slope == pytest.approx(fade(t, 5) * 0.3 * (p[j] - p0[j]), abs=1e-8)
    assert mix(np.ones((1, 3)), [2.0]).tolist() == [2, 2, 2] and regularizer(p, p, 1, **rates) == 0
    with rejected(ValueError, "", "[N, d] and p [N]", "got [4, 6] and [3]"):
        mix(W, p[:3])


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_mixture_is_linear(n: int, d: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    W, p, q = random.normal(size=(n, d)), random.normal(size=n), random.normal(size=n)
    close(mix(W, p + 2 * q), mix(W, p) + 2 * mix(W, q), atol=1e-9)
    close(mix(W, np.eye(n)[0]), W[0], atol=0)


def test_a_batch_by_hand() -> None:
    # Four clients; this one, 0, was sent the core models of 2 and 3. Client 1's counts as the initial model.
    images, labels = samples(6)
    random = np.random.default_rng(0)
    own = {"relation_rate": 0.01, "mu": 0.5, "loosen_rounds": 4, "core_rate": 0.0}
    setting: dict[str, Any] = {"batch_size": 6, "local_epochs": 1, "learning_rate": 0.1}
    prior, p = np.full(4, 0.25), np.array([0.4, 0.1, 0.3, -0.2])
    first = client("apple", small(), images, labels, apple=own, **setting).initial()
    W = random.normal(0, 0.3, (2, first.params.size)).astype(np.float32)
    start = dataclasses.replace(first, params=first.params + random.normal(0, 0.3, W[0].size).astype(np.float32))
    extras = {"ids": np.array([2, 3]), "models": W, "prior": prior}
    ctx = client("apple", small(), images, labels, round=3, extras=extras, apple=own, **setting)
    update, state = METHOD.local_update(), StoredState({"apple.relations": p})
    theta = 0.4 * start.params + 0.1 * first.params + 0.3 * W[0] - 0.2 * W[1]
    close(update.personal(start, state, ctx).params, theta)
    trainer: Any = ctx.trainer
    trainer.load(type(start)(theta.astype(np.float32), start.buffers))
    ((x, y),) = trainer.batches()
    trainer.differentiate(x, y)
    g = trainer.vector(trainer.gradient).astype(np.float64)
    after = update.train(start, state, ctx)
    # eta is 0.1 times four clients (core-rate 0), p_00 is 0.4; lambda(3) over 4 rounds is 1/2
    close(after.params, start.params - 0.4 * 0.4 * g, atol=1e-5)
    slopes = np.array([start.params @ g, first.params @ g, W[0] @ g, W[1] @ g])
    close(state.arrays["apple.relations"], p - 0.01 * (slopes + 0.25 * (p - prior)), atol=1e-5)


def test_the_first_step_has_the_weight_of_the_own_core_model(tmp_path: Path) -> None:
    # Nobody has sent a core model yet: theta is the initial model, and a client moves a third as far as alone.
    alone: Any = Federation(tmp_path / "1", "local", local_epochs=1, batch_size=10)
    fed: Any = Federation(tmp_path / "2", "apple", local_epochs=1, batch_size=10, apple={"relation_rate": 0.0})
    close(fed.models, np.stack([fed.initial.params] * 3))
    moved = fed.round().W - fed.initial.params
    alone.round()
    close(moved, (alone.models - fed.initial.params) / 3, atol=1e-6)


def test_clients_are_sent_other_core_models(tmp_path: Path) -> None:
    fed: Any = Federation(tmp_path, "apple", sizes=(10, 6, 8), apple={"relation_rate": 0.0})
    # these clients do not declare their sizes, so all count equally
    server, prior = fed.server, np.full(3, 1 / 3)
    # at first all have the initial model
    assert set(server.download_extras(0)) == {"prior"}
    close(fed.models, np.stack([fed.initial.params] * 3))
    W = fed.round(ids=[0, 1]).W
    close(server.download_extras(0)["prior"], prior, atol=1e-12)
    # client 2 has not trained: its core model is the initial model, for the others and for itself
    close(fed.models[0], prior[2] * fed.initial.params + prior[:2] @ W, atol=1e-5)
    close(fed.models[2], prior[2] * fed.initial.params + prior[:2] @ W, atol=1e-5)
    assert server.download_extras(0)["ids"].tolist() == [1] and server.download_extras(2)["ids"].tolist() == [0, 1]
    assert all(set(state.arrays) <= {"apple.relations"} for state in fed.states)


def test_a_limit_takes_new_core_models_then_the_largest_weights(tmp_path: Path) -> None:
    fed: Any = Federation(tmp_path, "apple", sizes=(6, 6, 6, 6), apple={"models": 2})

    def sent() -> list[int]:
        fed.server.keep_for(0, **{**fed.server.personal[0], "relations": np.array([0.9, 0.1, -0.3, 0.2])})
        return fed.server.download_extras(0)["ids"].tolist()

    fed.round()
    # none has been sent yet: the largest |p|
    assert sent() == [2, 3]
    fed.round(ids=[0])
    # only 1 is new
    assert sent() == [1, 2] and fed.server.personal[0]["seen"].tolist() == [False, False, True, True]
    fed.round(ids=[0])
    assert sent() == [2, 3] and fed.server.personal[0]["seen"].tolist() == [False, True, True, True]


def test_one_client_alone_is_local(tmp_path: Path) -> None:
    own: Any = Federation(tmp_path, "apple", sizes=(10,), apple={"relation_rate": 0.0}, momentum=0.5)
    plain: Any = Federation(tmp_path, "local", sizes=(10,), momentum=0.5)
    for _ in range(2):
        own.round()
        plain.round()
        assert own.models.tobytes() == plain.models.tobytes()
