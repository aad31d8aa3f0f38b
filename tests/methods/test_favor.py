"""FAVOR: choices by hand, and the state beside a server optimizer. test_references.py has its equations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from strategies.baselines.favor import chosen, components_of
from tests.methods.federation import Federation, close


def test_chosen_clients_by_hand() -> None:
    stream = np.random.default_rng(0)
    assert chosen(np.array([1.0, 5, 5, 2]), [0, 1, 3], 2, 0.0, stream) == [1, 3]
    assert chosen(np.array([1.0, 5]), [0, 1], 9, 1.0, stream) == [0, 1]


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
