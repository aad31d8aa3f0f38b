"""pFedSim: similarities and weights by hand, its limit FedAvg, and rounds after the warm-up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.baselines.pfedsim import PFedSimParams, mixing_weights, similarity
from tests.conftest import Run
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.runs import outcome


def test_by_hand() -> None:
    # cosines 0.6, 0 and, negative, -0.8
    found = similarity(np.array([[2.0, 0], [3, 4], [0, -1]]))
    close(found, np.array([[1, 0.6, 0], [0.6, 1, 0], [0, 0, 1]]))
    weights = mixing_weights(found)
    own, other = -np.log(1e-4), -np.log(0.4)
    close(weights[0], np.array([own, other, 0]) / (own + other))
    close(weights[2], np.array([0, 0, 1]))
    assert similarity(np.zeros((2, 3))).tolist() == [[1, 0], [0, 1]]


def test_similarity_beside_the_papers_formula() -> None:
    heads = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    heads[3] = 0
    found = similarity(heads)
    for i in range(5):
        for j in range(5):
            a, b = heads[i].astype(float), heads[j].astype(float)
            lengths = np.sqrt((a * a).sum()) * np.sqrt((b * b).sum())
            want = 1.0 if i == j else max(0.0, (a * b).sum() / lengths) if lengths else 0.0
            assert found[i, j] == pytest.approx(want, abs=1e-12)
    assert similarity(np.ones((1, 2))).tolist() == [[1]] == mixing_weights([[1]]).tolist()
    with rejected(ValueError, "", "heads", "[N, h]", "got [3]"):
        similarity(np.ones(3))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_properties(n: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    heads = random.normal(size=(n, width))
    found = similarity(heads)
    assert (found == found.T).all() and (np.diag(found) == 1).all() and (found >= 0).all() and (found <= 1).all()
    close(similarity(heads * random.uniform(0.1, 9, (n, 1))), found, atol=1e-9)
    weights = mixing_weights(found)
    close(weights.sum(axis=1), np.ones(n), atol=1e-12)
    assert (weights.max(axis=1) <= np.diag(weights) + 1e-12).all()
    close(mixing_weights(np.ones((n, n))), np.full((n, n), 1 / n), atol=1e-12)


def test_all_warm_up_is_fedavg_bit_for_bit(run: Run) -> None:
    setting = {"model": "mlp", "momentum": 0.5, "fraction_train": 0.7, "evaluate_every": 1}
    plain = outcome(run, "fedavg", **setting)
    assert outcome(run, "pfedsim", pfedsim={"warmup": 1.0}, **setting) == plain
    assert outcome(run, "pfedsim", pfedsim={"warmup": 0.5}, **setting) != plain
    assert [PFedSimParams(warmup=part).warmup_rounds(10) for part in (0, 0.29, 0.3, 1)] == [0, 2, 3, 10]


def test_rounds_by_hand(tmp_path: Path) -> None:
    for kind in ("classifier", "rows"):
        fed: Any = Federation(tmp_path, "pfedsim", num_server_rounds=4, pfedsim={"warmup": 0.25, "similarity": kind})
        server = fed.server
        fed.round()
        # the end of the warm-up: one model for all
        warm = server.global_model.params
        assert all(server.model_for(i).params is warm for i in range(3))
        W = fed.round(ids=[0, 1]).W
        assert server.model_for(2).params is warm
        W = np.concatenate([W, fed.round(ids=[2]).W])
        at = server.at_head
        heads = W[:, at].astype(np.float64)
        if kind == "rows":
            rows = heads[:, :15].reshape(3, 3, 5)
            rows = rows / np.linalg.norm(rows, axis=2, keepdims=True)
            found = np.maximum(np.einsum("ick,jck->ij", rows, rows) / 3, 0)
        else:
            found = similarity(heads)
        weights = mixing_weights(np.where(np.eye(3), 1, found))
        for i in range(3):
            sent = server.model_for(i).params
            close(sent[~at], weights[i] @ W[:, ~at], atol=1e-5)
            assert (sent[at] == W[i, at]).all()
    assert server.global_model.params is warm and not any(state.arrays for state in fed.states)
