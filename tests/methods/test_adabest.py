"""AdaBest: both steps by hand, a run of two rounds by hand, its limit FedAvg, and an absent client's estimate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corolla.testing import federation
from strategies.baselines.adabest import client_step, server_step
from tests.conftest import Run
from tests.methods.federation import Federation, close
from tests.methods.runs import outcome


def test_steps_by_hand() -> None:
    # h = 0.5 (1 - 3) = -1: the model goes on from the mean 3 to 4.
    assert [each.tolist() for each in server_step([3.0], [1.0], beta=0.5)] == [[4.0], [-1.0]]
    # Two rounds after the last: half of 4, and 0.1 of the movement 5 - 3.
    assert client_step([4.0], [5.0], [3.0], rounds=2, mu=0.1).tolist() == [np.float32(2.2)]


@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_a_mean_that_stays_ends_the_drift(d: int, beta: float, seed: int) -> None:
    mean = np.random.default_rng(seed).normal(size=d).astype(np.float32)
    model, h = server_step(mean, mean, beta=beta)
    assert model.dtype == np.float32 and model.tobytes() == mean.tobytes() and not h.any()
    assert server_step(mean, mean + 1, beta=0)[0].tobytes() == mean.tobytes()


def test_two_rounds_by_hand() -> None:
    # Means m1, then m2 = m1 + 1: the models are m1 + 0.5 (m1 - start) and m2 + 0.5.
    W = np.stack([np.arange(8.0), np.arange(8.0) + 2])
    fed = federation("adabest", clients=2, adabest={"beta": 0.5})
    start = fed.server.global_model.params
    fed.round(W)
    close(fed.server.global_model.params, W.mean(0) + 0.5 * (W.mean(0) - start), atol=1e-5)
    fed.round(W + 1)
    close(fed.server.global_model.params, W.mean(0) + 1.5, atol=1e-5)
    close(fed.server.memory["mean"], W.mean(0) + 1)


def test_without_both_weights_it_is_fedavg_bit_for_bit(run: Run) -> None:
    setting = {"model": "mlp", "momentum": 0.5, "evaluate_every": 1, "partition": "iid", "train_samples": 20}
    plain = outcome(run, "fedavg", **setting)
    assert outcome(run, "adabest", adabest={"mu": 0.0, "beta": 0.0}, **setting) == plain
    assert outcome(run, "adabest", **setting) != plain


def test_an_absent_clients_estimate_decays(tmp_path: Path) -> None:
    fed = Federation(tmp_path, "adabest", adabest={"mu": 0.5})
    received = fed.server.global_model.params
    uploads = fed.round()
    h = 0.5 * (received - uploads.W[0])
    close(fed.states[0].arrays["adabest.bias"], h)
    fed.round(ids=[1, 2])
    received = fed.server.global_model.params
    uploads = fed.round()
    close(fed.states[0].arrays["adabest.bias"], h / 2 + 0.5 * (received - uploads.W[0]))
    assert fed.states[0].arrays["adabest.round"].tolist() == [3]
