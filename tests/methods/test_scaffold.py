"""SCAFFOLD: golden rounds on quadratics, control variates' invariant, and the limits: FedAvg's first round, plain SGD alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_app.errors import UserError
from fl_app.layout import NOTHING
from fl_app.transport.wire import Upload, WireError
from strategies.base import LocalUpdate
from strategies.baselines.scaffold import control_change, effective_steps, moved, round_rate
from strategies.kernels.aggregate import mean_block
from tests.conftest import config
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import small


def server_step(
    Y: np.ndarray, x: np.ndarray, c: np.ndarray, changes: np.ndarray, num_clients: int, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """The server's step over a stack Y [N, d]."""
    Y, changes = np.asarray(Y), np.asarray(changes)
    dtype, mean = np.result_type(Y.dtype, np.float32), mean_block(Y, np.ones(len(Y)), len(Y))
    model, control = moved(mean, x, c, changes.sum(axis=0, dtype=np.float64), num_clients, rate)
    return model.astype(dtype), control.astype(dtype)


def test_the_server_reckons_with_the_rate_that_clients_step_with() -> None:
    setting = config(
        method="scaffold", num_server_rounds=30, schedule="cosine", learning_rate=0.2, learning_rate_decay=0.9
    )
    assert [round_rate(setting, t) for t in (1, 16)] == pytest.approx([0.2, 0.2 * 0.9**15 / 2])
    for key, value in (("optimizer", "adamw"), ("optimizer", "adam"), ("clip-norm", 0.5)):
        with pytest.raises(UserError) as caught:
            config(method="scaffold", **{key.replace("-", "_"): value})
        assert (caught.value.key, caught.value.value) == (key, value)


def test_effective_steps_by_hand() -> None:
    # Steps 1..5 on a constant gradient 1 with momentum 0.9 are 1, 1.9, 2.71, 3.439, 4.0951: sum 13.1441.
    assert effective_steps(5, 0.9) == pytest.approx(13.1441, abs=1e-9)
    assert effective_steps(7, 0) == 7 and effective_steps(1, 0.5) == pytest.approx(1)


@given(st.integers(1, 40), st.floats(0, 0.99))
def test_effective_steps_are_those_of_momentum(steps: int, momentum: float) -> None:
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        moved += velocity
    assert effective_steps(steps, momentum) == pytest.approx(moved, rel=1e-6)


def test_quadratics_by_hand() -> None:
    # f = a/2 (w - b)^2, a (1, 3), b (0, 4), two steps of 0.1 from 0: client 2 goes to 1.2, then by 0.1 * 3 * 2.8 to 2.04;
    # c_2 = (0 - 2.04)/0.2 = -10.2; x = 1.02, c = -5.1.
    a, b, eta, steps = np.array([1.0, 3.0]), np.array([0.0, 4.0]), 0.1, 2
    x, c, own = np.zeros(1), np.zeros(1), np.zeros(2)
    wanted = {1: (1.02, -5.1), 2: (1.734, -3.57)}
    for round in range(1, 31):
        y = np.repeat(x, 2)
        for _ in range(steps):
            y = y - eta * (a * (y - b) + c - own)
        changes = control_change(x, y[:, None], c, eta * effective_steps(steps, 0))
        own = own + changes[:, 0]
        if round == 1:
            close(y, [0, 2.04])
            close(own, [0, -10.2])
        x, c = server_step(y[:, None], x, c, changes, 2, 1.0)
        if round in wanted:
            assert (x[0], c[0]) == pytest.approx(wanted[round], abs=1e-9)
        assert c[0] == pytest.approx(own.mean(), abs=1e-12)
    assert x[0] == pytest.approx(2.999996, abs=1e-6)


@given(st.integers(1, 4), st.floats(0.1, 2), st.integers(0, 2**32 - 1))
def test_server_step_in_closed_form(n: int, rate: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    Y, changes, x, c = (
        random.normal(size=(n, 3)),
        random.normal(size=(n, 3)),
        random.normal(size=3),
        random.normal(size=3),
    )
    model, control = server_step(Y, x, c, changes, n + 1, rate)
    np.testing.assert_allclose(model, x + rate * (Y - x).mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(control, c + changes.sum(axis=0) / (n + 1), atol=1e-12)
    assert (server_step(Y, x, c, changes, n, 1.0)[0] == Y.sum(axis=0) / n).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_servers_control_variate_is_the_mean_of_all_clients(tmp_path: Path, momentum: float) -> None:
    federation = Federation(
        tmp_path, "scaffold", sizes=(10, 6, 8, 5), momentum=momentum, weight_decay=0.01, learning_rate_decay=0.9
    )
    for ids in ([0, 1], [1, 3], [0, 1, 2, 3], [2]):
        federation.round(ids=ids)
        own = [s.arrays.get("scaffold.control", np.zeros(federation.layout.d, np.float32)) for s in federation.states]
        close(federation.server.memory["control"], np.mean(own, axis=0, dtype=np.float64))
    assert sum(array.nbytes for array in federation.states[0].arrays.values()) == 4 * federation.layout.d


def test_the_control_variate_is_the_mean_of_a_rounds_gradients(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "scaffold", sizes=(10, 6), momentum=0.0, weight_decay=0.1)
    federation.round()
    ctx, start = federation.context(0, round=2)
    seen: list[Any] = []
    shift = ctx.trainer.tensor(ctx.extras["control"] - federation.states[0].arrays["scaffold.control"])

    def note(weights: Any, gradient: Any) -> None:
        seen.append(gradient.clone() + 0.1 * weights)
        gradient.add_(shift)

    want = ctx.trainer.train(start, correction=note)
    again, received = federation.context(0, round=2)
    update = federation.method.local_update()
    after = update.train(received, federation.states[0], again)
    assert after.params.tobytes() == want.params.tobytes()
    mean = ctx.trainer.vector(sum(seen) / len(seen))
    close(federation.states[0].arrays["scaffold.control"], mean, atol=1e-5)


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_the_first_round_is_uniform_fedavg_bit_for_bit(tmp_path: Path, kinds: dict[str, Any]) -> None:
    federation = Federation(tmp_path, "scaffold", network=lambda: small(**kinds), momentum=0.5, sizes=(10, 1, 8))
    received = federation.server.global_model
    plain = []
    for i in range(3):
        ctx, _ = federation.context(i, round=1)
        plain.append(LocalUpdate[Any]().train(received, federation.states[i], ctx))
    federation.round()
    for got, rows in (
        (federation.server.global_model.params, [m.params for m in plain]),
        (federation.server.global_model.buffers, [m.buffers for m in plain]),
    ):
        assert got.tobytes() == (np.stack(rows).astype(np.float64).sum(axis=0) / 3).astype(np.float32).tobytes()


def test_alone_it_is_plain_sgd(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "scaffold", sizes=(10,))
    model = federation.server.global_model
    for round in range(1, 4):
        ctx, _ = federation.context(0, round=round)
        model = ctx.trainer.train(model)
        federation.round()
        close(federation.server.global_model.params, model.params)
        close(federation.server.memory["control"], federation.states[0].arrays["scaffold.control"])  # c = c_1


def test_a_step_of_the_servers_own(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "scaffold", scaffold={"server_learning_rate": 0.5})
    x = federation.server.global_model.params
    uploads = federation.round()
    close(federation.server.global_model.params, x + 0.5 * (uploads.W.mean(axis=0) - x))


def test_steps_that_cannot_be_are_refused(tmp_path: Path) -> None:
    server = Federation(tmp_path, "scaffold").server
    epochs, size = server.config.local_epochs, server.config.batch_size
    n = 2 * size + 1  # two batches, or three
    for steps in (0, -1, 2.5 * epochs, "3", True, None, 2 * epochs - 1, 3 * epochs + 1):
        with rejected(WireError, "", "steps", f"integer in {2 * epochs}", f"{3 * epochs} for {n} samples"):
            server.check(Upload(NOTHING, num_examples=n, metrics={} if steps is None else {"steps": steps}))
    for steps in (2 * epochs, 3 * epochs):
        server.check(Upload(NOTHING, num_examples=n, metrics={"steps": steps}))
