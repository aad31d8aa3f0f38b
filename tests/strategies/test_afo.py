"""The server's optimizer: its steps by hand, its limits, the methods that it refuses, and a run that is resumed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_app.client_app import app
from corolla.method import FedAvg, NoParams
from corolla.testing import federation
from fl_app.config import parse
from fl_app.errors import MethodError
from fl_app.server import checkpoint
from fl_app.server.run_folder import read_summary
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from strategies.engine.steps import server_optimizer
from strategies.kernels.afo import KINDS, server_step
from tests.conftest import config
from tests.facts import rejected

RATES = {"learning_rate": 0.5, "beta1": 0.5, "beta2": 0.75, "tau": 1.0}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_many_steps_by_loops(kind: str) -> None:
    """Element by element, in float64, as Algorithm 2 is printed."""
    random, eta, b1, b2, tau = np.random.default_rng(0), 0.1, 0.9, 0.99, 1e-3
    w, state = random.normal(size=5), None
    own, m, v = w.tolist(), [0.0] * 5, [tau**2] * 5
    for _ in range(20):
        mean = w + random.normal(size=5) * random.uniform(0, 2, 5)
        w, state = server_step(w, mean, state, kind=kind, learning_rate=eta, beta1=b1, beta2=b2, tau=tau)
        for k in range(5):
            delta = float(mean[k]) - own[k]
            m[k] = b1 * m[k] + (delta if kind == "momentum" else (1 - b1) * delta)
            if kind == "adagrad":
                v[k] += delta**2
            elif kind == "adam":
                v[k] = b2 * v[k] + (1 - b2) * delta**2
            elif kind == "yogi":
                v[k] -= (1 - b2) * delta**2 * (1 if v[k] > delta**2 else -1)
            own[k] += eta * m[k] / (1 if kind == "momentum" else v[k] ** 0.5 + tau)
        np.testing.assert_allclose(w, own, rtol=1e-9)
    assert w.dtype == np.float64
    with rejected(ValueError, "", "w and mean", "shape", "got [5] and [4]"):
        server_step(w, w[:4], state, kind=kind, learning_rate=eta, beta1=b1, beta2=b2, tau=tau)


@given(st.sampled_from(KINDS[1:]), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_blocks_zeros_and_dtypes(kind: str, d: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    w, mean = random.normal(size=(2, d)).astype(np.float32)
    step, state = server_step(w, mean, {}, kind=kind, **RATES)
    assert step.dtype == np.float32 and all(each.dtype == np.float32 for each in state.values())
    # without momentum, no step leaves a model that all clients agree with
    still, _ = server_step(w, w, {}, kind=kind, **{**RATES, "beta1": 0})
    assert still.tobytes() == w.tobytes()
    for k in range(d):
        one, own = server_step(w[k : k + 1], mean[k : k + 1], None, kind=kind, **RATES)
        assert one == step[k : k + 1] and all(own[name] == state[name][k] for name in state)
    # a step goes towards the mean, and adaptive ones no farther than eta (1 - beta1) sqrt(1 / (1 - beta2))
    assert ((step - w) * (mean - w) >= 0).all()
    if kind != "momentum":
        assert (np.abs(step - w) <= 0.5 * 0.5 * 2 + 1e-6).all()


def test_limits() -> None:
    w, mean = np.array([1.0, -2.0]), np.array([3.0, 5.0])
    assert server_step(w, mean, None, kind="none", **RATES)[0].tolist() == mean.tolist()
    plain = {"learning_rate": 1.0, "beta1": 0.0, "beta2": 0.0, "tau": 1.0}
    assert server_step(w, mean, None, kind="momentum", **plain)[0].tolist() == mean.tolist()
    # adam without any memory: eta delta / (|delta| + tau)
    assert server_step(w, mean, None, kind="adam", **plain)[0].tolist() == [1 + 2 / 3, -2 + 7 / 8]
    with rejected(MethodError, "server-optimizer", "none", "momentum", value="sgd"):
        server_step(w, mean, None, kind="sgd", **plain)


def test_two_rounds_by_hand() -> None:
    # Uploads 0..7 and 8 further on: the mean is their middle. The first round of momentum 0.5 goes half way to it.
    W = np.stack([np.arange(8.0), np.arange(8.0) + 8])
    fed = federation("fedavg", clients=2, server_optimizer="momentum", server_beta1=0.5, server_learning_rate=0.5)
    start = fed.server.global_model.params.astype(np.float64)
    fed.round(W)
    first = start + 0.5 * (W.mean(0) - start)
    np.testing.assert_allclose(fed.server.global_model.params, first, rtol=0, atol=1e-5)
    assert set(fed.server.memory) == {"server-optimizer.m"}
    fed.round(W)
    m = 0.5 * (W.mean(0) - start) + W.mean(0) - first
    np.testing.assert_allclose(fed.server.global_model.params, first + 0.5 * m, rtol=0, atol=1e-5)
    np.testing.assert_allclose(fed.server.memory["server-optimizer.m"], m, rtol=0, atol=1e-5)
    assert set(federation("fedavg", clients=2).server.memory) == set()


def test_methods_without_a_mean_global_model_refuse_it_by_name() -> None:
    refused = {name for name in METHODS if not server_optimizer.fits(METHODS[name].strategy)}
    assert {"local", "fedcac", "feddyn", "scaffold", "ifca", "perfedmask"} <= refused
    assert not refused & {"fedavg", "fedprox", "fedper", "fedrep", "ditto", "pfedme", "apfl", "fedobp", "moon"}
    for name in ("fedcac", "scaffold"):
        with rejected(MethodError, "server-optimizer", f"method {name} sets no", "mean global model"):
            METHODS[name].check(config(method=name, server_optimizer="adam"))

    class Own(FedAvg[NoParams]):
        def personalize(self, round: int, uploads: Any) -> None:
            super().personalize(round, uploads)

    class Declared(Own):
        averages = True

    assert not server_optimizer.fits(Own) and server_optimizer.fits(Declared)


def test_a_resumed_run_keeps_the_moments(tmp_path: Path) -> None:
    raw: dict[str, Any] = {
        "method": "fedavg",
        "server-optimizer": "yogi",
        "num-server-rounds": 2,
        "num-clients": 3,
        "train-samples": 24,
        "test-samples": 12,
        "local-epochs": 1,
        "model": "mlp",
        "device": "cpu",
        "checkpoint-every": 1,
        "keep-state": True,
        "run-name": "one",
        "output-dir": str(tmp_path),
        "state-dir": str(tmp_path / "state"),
    }
    parsed = parse(raw, METHOD_PARAMS)
    folder = run(InProcessGrid(app, raw, 3), parsed, lambda *_: None)
    digest = read_summary(folder.path)["digest"]
    (folder.path / "summary.json").unlink()
    for file in (folder.path / checkpoint.DIRECTORY).glob("round-000002.*"):
        file.unlink()
    shutil.rmtree(folder.path / "models", ignore_errors=True)
    again = {**parsed.resolved, "resume": str(folder.path)}
    run(InProcessGrid(app, again, 3), dataclasses.replace(parsed, resume=str(folder.path)), lambda *_: None)
    assert read_summary(folder.path)["digest"] == digest
