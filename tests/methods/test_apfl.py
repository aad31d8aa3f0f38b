"""APFL: its kernels by hand and against a derivative, its limits bit for bit, a round by hand, its state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from client_app.stored_state import StoredState
from fl_app.layout import Model
from strategies.baselines.apfl import APFLUpdate, mixture, next_alpha
from tests.conftest import f32
from tests.methods.one_client import client, same, samples, small

FIXED = {"alpha_updates": "none"}


def test_next_alpha_by_hand() -> None:
    # <v - w, g> = 2 * 0.5 + (-1) * 1.5 = -0.5; the decay adds 0.02 * 0.5: alpha = 0.5 - 0.1 * (-0.5 + 0.01) = 0.549
    v, w, g = np.array([3.0, 0.0]), np.array([1.0, 1.0]), np.array([0.5, 1.5])
    assert next_alpha(0.5, v, w, g, learning_rate=0.1, decay=0.02) == pytest.approx(0.549, abs=1e-15)
    tensors = [torch.from_numpy(a) for a in (v, w, g)]
    got = next_alpha(0.5, *tensors, learning_rate=0.1, decay=0.02)
    assert type(got) is float and got == pytest.approx(0.549, abs=1e-15)
    assert next_alpha(0.5, v, w, g, learning_rate=10.0, decay=0.0) == 1.0
    assert next_alpha(0.5, w, v, g, learning_rate=10.0, decay=0.0) == 0.0
    assert next_alpha(0.5, v, v, g, learning_rate=0.1, decay=0.02) == pytest.approx(0.5 * (1 - 0.1 * 0.02), abs=1e-15)


@given(st.integers(0, 1000), st.floats(0, 1))
def test_its_slope_is_the_derivative_of_the_loss_by_alpha(seed: int, alpha: float) -> None:
    draw = np.random.default_rng(seed)
    x, y, v, w = draw.normal(size=(6, 3)), draw.integers(0, 2, 6), draw.normal(size=3), draw.normal(size=3)

    def loss(weights: np.ndarray) -> float:
        return float(np.log1p(np.exp(-(2 * y - 1) * (x @ weights))).mean())

    def gradient(weights: np.ndarray) -> np.ndarray:
        sign = 2 * y - 1
        return -(sign / (1 + np.exp(sign * (x @ weights)))) @ x / len(y)

    h, rate = 1e-5, 1e-3
    slope = (loss(mixture(v, w, alpha + h)) - loss(mixture(v, w, alpha - h))) / (2 * h)
    step = next_alpha(alpha, v, w, gradient(mixture(v, w, alpha)), learning_rate=rate, decay=0.0)
    assert step == pytest.approx(min(max(alpha - rate * slope, 0), 1), abs=1e-9)


def test_mixture_is_exact_at_both_ends_and_where_both_are_equal() -> None:
    v, w = f32(1e8, 0.1, -0.0), f32(1.0, 0.1, 3.0)
    assert mixture(v, w, 1.0) is v and mixture(v, w, 0.0) is w
    for alpha in (0.1, 0.3, 0.9):
        assert mixture(w, w, alpha).tobytes() == w.tobytes() and mixture(v, w, alpha).dtype == np.float32


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}, {"dropout": 0.5}, {"batchnorm": True, "dropout": 0.3}])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_uploads_are_fedavgs_with_dropout_batchnorm_and_few_samples(kinds: dict[str, Any], n: int) -> None:
    pixels, labels = samples(n)  # n < 3: classes are missing
    keys = {"momentum": 0.9, "weight_decay": 0.1}
    ctx = client("apfl", small(**kinds), pixels, labels, **keys)
    plain = client("fedavg", small(**kinds), pixels, labels, **keys)
    update, state = APFLUpdate(), StoredState()
    for _ in range(2):
        assert same(update.train(ctx.initial(), state, ctx), plain.trainer.train(plain.initial()))


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}, {"dropout": 0.5}])
def test_alone_and_never_learned_the_personal_model_is_local_training(kinds: dict[str, Any]) -> None:
    keys = {"momentum": 0.9, "weight_decay": 0.1}
    pixels, labels = samples()
    alone = {"alpha": 1.0, **FIXED}
    ctx = client("apfl", small(**kinds), pixels, labels, apfl=alone, **keys)
    plain = client("fedavg", small(**kinds), pixels, labels, **keys)
    update, state = APFLUpdate(), StoredState()
    received, local = ctx.initial(), ctx.initial()
    # the second time it receives something else and goes on from its own
    for _ in range(3):
        after = update.train(received, state, ctx)
        local = plain.trainer.train(local)
        assert same(update.personal(after, state, ctx), local) and same(update.personal(received, state, ctx), local)
        assert ctx.trainer.last_loss == plain.trainer.last_loss  # type: ignore[attr-defined]
        received = Model(received.params + np.float32(0.5), received.buffers)


def test_without_weight_the_own_model_never_moves_and_the_personal_one_is_the_shared_one() -> None:
    ctx = client("apfl", small(), *samples(), momentum=0.9, apfl={"alpha": 0.0, **FIXED})
    update, state, start = APFLUpdate(), StoredState(), ctx.initial()
    after = update.train(start, state, ctx)
    assert state.arrays["apfl.params"].tobytes() == start.params.tobytes()
    assert not same(after, start)
    for model in (start, after):
        assert same(update.personal(model, state, ctx), model)


@pytest.mark.parametrize(("updates", "steps"), [("round", 1), ("first-epoch", 3), ("batch", 6), ("none", 0)])
def test_when_alpha_is_learned(monkeypatch: pytest.MonkeyPatch, updates: str, steps: int) -> None:
    calls: list[float] = []

    def count(alpha: float, *values: Any, **keys: Any) -> float:
        calls.append(alpha)
        return next_alpha(alpha, *values, **keys)

    monkeypatch.setattr("strategies.baselines.apfl.next_alpha", count)
    ctx = client("apfl", small(), *samples(), apfl={"alpha_updates": updates})  # 2 epochs of 3 batches
    update, state = APFLUpdate(), StoredState()
    update.train(ctx.initial(), state, ctx)
    assert len(calls) == steps
    # v = w in a client's first batch: only the decay moves alpha
    if updates in ("round", "none"):
        assert state.arrays["apfl.alpha"][0] == pytest.approx(0.5 * (1 - (0.1 * 0.02 if steps else 0)), abs=1e-15)
    before = state.arrays["apfl.alpha"][0]
    update.train(ctx.initial(), state, ctx)
    assert (state.arrays["apfl.alpha"][0] != before) == bool(steps)


def test_a_client_without_state_uses_what_it_receives() -> None:
    ctx = client("apfl", small(batchnorm=True), *samples())
    assert APFLUpdate().personal(ctx.initial(), StoredState(), ctx) is ctx.initial()


def s(a: float) -> float:
    return 1 / (1 + math.exp(2 * a))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_rounds_by_hand(momentum: float) -> None:
    eta, rho, decay = 0.7, 0.02, 0.05
    pixels, labels = np.full((3, 1, 1, 1), 255, np.uint8), np.zeros(3, np.int64)
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    keys = {"learning_rate": eta, "momentum": momentum, "weight_decay": decay, "batch_size": 1, "local_epochs": 1}
    ctx = client("apfl", module, pixels, labels, classes=2, apfl={"alpha": 0.4}, **keys)
    update, state = APFLUpdate(), StoredState()

    v, alpha = 0.2, 0.4
    # v starts from the model received first
    for received in (0.2, -0.3):
        w, velocity_w, velocity_v, losses = received, 0.0, 0.0, []
        for batch in range(3):
            mix = alpha * v + (1 - alpha) * w
            losses.append(math.log1p(math.exp(-2 * mix)))
            velocity_w = momentum * velocity_w + (-s(w) + decay * w)
            velocity_v = momentum * velocity_v + (-alpha * s(mix) + decay * v)
            step = eta * (-2 * (v - w) * s(mix) + rho * alpha) if batch == 0 else 0
            following = min(max(alpha - step, 0), 1)
            w, v, alpha = w - eta * velocity_w, v - eta * velocity_v, following
        start = Model(f32(received, -received), f32())
        after = update.train(start, state, ctx)
        np.testing.assert_allclose(after.params, [w, -w], rtol=0, atol=1e-6)
        np.testing.assert_allclose(state.arrays["apfl.params"], [v, -v], rtol=0, atol=1e-6)
        assert state.arrays["apfl.alpha"][0] == pytest.approx(alpha, abs=1e-6)
        assert ctx.trainer.last_loss == pytest.approx(np.mean(losses), abs=1e-6)  # type: ignore[attr-defined]
        for model, value in ((start, received), (after, w)):
            want = alpha * v + (1 - alpha) * value
            np.testing.assert_allclose(update.personal(model, state, ctx).params, [want, -want], rtol=0, atol=1e-6)
        assert update.upload(start, after, state, ctx).metrics == {"alpha": state.arrays["apfl.alpha"][0]}


def test_the_mixtures_statistics_are_its_own() -> None:
    ctx = client("apfl", small(batchnorm=True), *samples(), apfl={"alpha": 0.7})
    update, state = APFLUpdate(), StoredState()
    after = update.train(ctx.initial(), state, ctx)
    personal = update.personal(after, state, ctx)
    assert personal.buffers.tobytes() == state.arrays["apfl.buffers"].tobytes() != after.buffers.tobytes()


def test_state_is_as_documented() -> None:
    for kinds in ({}, {"batchnorm": True}):
        ctx = client("apfl", small(**kinds), *samples())
        state = StoredState()
        APFLUpdate().train(ctx.initial(), state, ctx)
        assert sum(a.nbytes for a in state.arrays.values()) == 4 * (ctx.layout.d + ctx.layout.b) + 8


def test_what_a_users_model_holds_fixed_stays_fixed() -> None:
    module = small()
    module.features.requires_grad_(False)
    ctx = client(
        "apfl", module, *samples(), weight_decay=0.1, momentum=0.9, apfl={"alpha": 0.3, "alpha_updates": "batch"}
    )
    update, state, start = APFLUpdate(), StoredState(), ctx.initial()
    for _ in range(2):
        after = update.train(start, state, ctx)
    want = ctx.layout.tensors(start)
    for model in (after, update.personal(after, state, ctx)):
        tensors = ctx.layout.tensors(model)
        assert tensors["features.weight"].tobytes() == want["features.weight"].tobytes()
        assert tensors["classifier.weight"].tobytes() != want["classifier.weight"].tobytes()
