"""FAVOR: rewards, targets, a step and choices by hand, components, its limit FedAvg, and what a run learns from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_app.errors import ConfigurationError
from strategies import METHODS
from strategies.base import State
from strategies.baselines.favor import chosen, components_of, initial_network, learned, reward, targets, values_of
from strategies.baselines.favor import network as network_of
from tests.conftest import Run, config
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.runs import outcome


def test_by_hand() -> None:
    assert reward(0.9, target=0.9, base=64) == 0 and reward(0.4, target=0.9, base=64) == pytest.approx(-7 / 8)
    # One unit: Q(s) = (relu(s), 2 relu(s)); the copy halves it, and has 1 for the first client.
    network = {"w0": np.ones((1, 1)), "b0": np.zeros(1), "w1": np.array([[1.0], [2]]), "b1": np.zeros(2)}
    copy = {**network, "w1": network["w1"] / 2, "b1": np.array([1.0, 0])}
    assert values_of(network, np.array([[3.0], [-1]])).tolist() == [[3, 6], [0, 0]]
    # Q's best is the second client, which the copy values at 3.
    assert targets(network, copy, np.array([1.0]), np.array([[3.0]]), 0.5).tolist() == [2.5]
    # Q(3, 0) = 3 is 2 too large: the output weight falls by 0.1 * 2 * 3, the hidden one by 0.1 * 2 * 1 * 3.
    after = learned(network, np.array([[3.0]]), np.array([0]), np.array([1.0]), 0.1)
    close(after["w1"], np.array([[0.4], [2]]))
    close(after["w0"], np.array([[0.4]]))
    stream = np.random.default_rng(0)
    assert chosen(np.array([1.0, 5, 5, 2]), [0, 1, 3], 2, 0.0, stream) == [1, 3]
    assert chosen(np.array([1.0, 5]), [0, 1], 9, 1.0, stream) == [0, 1]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_a_step_is_torchs(n: int, actions: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    network = initial_network(3, 5, actions, random)
    states, goals, chosen_ones = random.normal(size=(n, 3)), random.normal(size=n), random.integers(0, actions, n)
    tensors = {name: torch.tensor(layer, requires_grad=True) for name, layer in network.items()}
    h = torch.relu(torch.tensor(states) @ tensors["w0"].T + tensors["b0"])
    values = (h @ tensors["w1"].T + tensors["b1"])[torch.arange(n), torch.tensor(chosen_ones)]
    ((values - torch.tensor(goals)) ** 2).mean().div(2).backward()  # type: ignore[no-untyped-call]
    after = learned(network, states, chosen_ones, goals, 0.3)
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        close(after[name], network[name] - 0.3 * tensor.grad.numpy(), atol=1e-9)


@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_components_keep_all_that_models_differ_in(n: int, seed: int) -> None:
    W = np.random.default_rng(seed).normal(size=(n, 9)).astype(np.float32)
    mean, axes = components_of(W, 99)
    assert axes.shape == (n, 9)
    # n models differ in n - 1 directions
    close(axes[:-1] @ axes[:-1].T, np.eye(n - 1), atol=1e-4)
    close((W - mean) @ axes.T @ axes + mean, W, atol=1e-3)
    assert components_of(W, 1)[1].shape == (1, 9)


def test_with_all_clients_it_is_fedavg_bit_for_bit(run: Run) -> None:
    setting = {"model": "mlp", "momentum": 0.5}
    assert outcome(run, "favor", **setting)[1] == outcome(run, "fedavg", **setting)[1]


def test_what_it_learns_from(tmp_path: Path) -> None:
    own = {"hidden": 4, "epsilon": 0.0, "target": 0.5, "copy_every": 4}
    fed: Any = Federation(tmp_path, "favor", sizes=(6, 6, 6, 6), fraction_train=0.5, favor=own)
    server = fed.server
    assert server.sample([0, 1, 2, 3], 1) == [0, 1, 2, 3]
    fed.round()
    assert server.memory["clients"].shape == (4, 4) and "last.actions" not in server.memory
    values = values_of(network_of(server.memory, "q."), server.observed(server.memory)[None])[0]
    drawn = server.sample([0, 1, 2, 3], 2)
    assert drawn == sorted(np.argsort(-values)[:2].tolist())
    before = server.observed(server.memory)
    fed.round(ids=drawn)
    assert server.memory["last.actions"].tolist() == drawn and (server.memory["last.state"] == before).all()
    assert "seen.rewards" not in server.memory
    # the third round's clients report the accuracy of the second's model
    state, network = server.observed(server.memory), network_of(server.memory, "q.")
    plain = server.update

    def told(state: State, uploads: Any, turn: Any) -> Any:
        metrics = [{"accuracy-before": 0.4}, {"accuracy-before": 0.6}]
        return plain(state, dataclasses.replace(uploads, metrics=metrics), turn)

    server.update = told
    fed.round(ids=[0, 1])
    assert server.memory["seen.actions"].tolist() == drawn and not server.memory["seen.rewards"].any()
    assert (server.memory["seen.states"] == before).all() and (server.memory["seen.following"] == state).all()
    assert any((network_of(server.memory, "q.")[name] != network[name]).any() for name in network)
    assert all((network_of(server.memory, "copy.")[name] == network[name]).all() for name in network)


def test_the_state_has_the_model_that_is_sent(tmp_path: Path) -> None:
    """The server's optimizer, of step size 1/2, moves the model half of the way to the mean."""
    keys = {"server_optimizer": "momentum", "server_learning_rate": 0.5, "server_beta1": 0.0}
    fed: Any = Federation(tmp_path, "favor", sizes=(6, 6, 6), favor={"hidden": 4}, **keys)
    start = fed.initial.params
    W = fed.round().W
    sent = start + (W.mean(axis=0) - start) / 2
    close(fed.server.global_model.params, sent)
    mean, axes = components_of(W, 100)
    close(fed.server.observed(fed.server.memory)[:3], (sent - mean) @ axes.T, atol=1e-4)
    assert np.abs(fed.server.observed(fed.server.memory)[:3]).max() > 1e-2


def test_a_run_without_accuracies_is_refused() -> None:
    with rejected(ConfigurationError, "report-accuracy", "true for favor"):
        METHODS["favor"].check(config(method="favor", report_accuracy=False))
