"""Krum and the geometric median choose once a round: every array that a method averages comes from the same clients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from corolla.testing import federation
from strategies import METHODS
from strategies.base import Uploads
from strategies.base.server_half import Turn
from strategies.base.state import State
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.ifca import cluster_means
from strategies.engine.attempt import RoundAttempt
from strategies.engine.plain import PlainRounds
from strategies.kernels.parts import head_slots
from strategies.kernels.robust import Averaging, choosing, total_distances
from tests.conftest import IN_TWO_ROUNDS, Run
from tests.facts import rejected
from tests.methods.federation import Federation
from tests.small_models import BATCHNORM

Arrays = list[NDArray[Any]]

CLIENTS = 7
# one cluster: smaller ones are averaged plainly
SETTINGS: dict[str, dict[str, Any]] = {"ifca": {"clusters": 1}, "fedconcat": {"clusters": 1}}
# of the others FedAvg's server half averages
OWN_MEANS = ("fedavg", "fedcac", "pfedme", "pfedfda", "fedgen", "ifca", "fedconcat")
ABLE = [name for name, method in METHODS.items() if "krum" in method.strategy.means.rules]


def stacks_of(uploads: Uploads) -> Arrays:
    """Return what a round's uploads hold of floating-point arrays, [N, ...] each."""
    stacks = [uploads.W, uploads.B, *uploads.extras.values()]
    return [stack.reshape(len(stack), -1).copy() for stack in stacks if stack.size and stack.dtype.kind == "f"]


def averages_of(state: State) -> Arrays:
    """Return what the server made of them: its global model, and what it remembers."""
    found = [state.model.params, state.model.buffers, *state.memory.values()]
    return [np.asarray(array).reshape(-1).copy() for array in found]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arrays, Arrays]]:
    """Note what goes into every round's server step, and what comes out of it."""
    seen: list[tuple[Arrays, Arrays]] = []
    original = PlainRounds.update

    def update(self: PlainRounds, attempt: RoundAttempt, accepted: Any) -> State:
        stacks = stacks_of(accepted)
        state = original(self, attempt, accepted)
        seen.append((stacks, averages_of(state)))
        return state

    monkeypatch.setattr(PlainRounds, "update", update)
    return seen


@pytest.mark.parametrize(
    "method", [name if name in OWN_MEANS else pytest.param(name, marks=pytest.mark.nightly) for name in ABLE]
)
def test_all_that_is_averaged_is_one_clients(run: Run, rounds: list[tuple[Arrays, Arrays]], method: str) -> None:
    own = {**IN_TWO_ROUNDS.get(method, {}), **({method: SETTINGS[method]} if method in SETTINGS else {})}
    few = {"train_samples": 10, "test_samples": 4, "batch_size": 5}
    run(**{"method": method, **BATCHNORM, "robust": "krum", "num_clients": CLIENTS, "seed": 1, **few, **own})
    assert len(rounds) == 2
    for stacks, averages in rounds:
        chosen = [
            {i for i, row in enumerate(stack) if any(np.array_equal(row, average) for average in averages)}
            for stack in stacks
        ]
        assert all(chosen) and set.intersection(*chosen), chosen


def test_fedgens_teacher_is_of_the_chosen_client(tmp_path: Path) -> None:
    f = Federation(tmp_path, "fedgen", sizes=[8, 9, 7, 8, 6], robust="krum", fedgen={"teacher": "ensemble"})
    uploads = f.round()
    slot = head_slots(f.server.layout)[0]
    heads = f.server.teachers(uploads, np.ones((5, 3)), Turn(f.config, uploads=uploads))[0]
    averaged = f.server.averaging_of(uploads).mean(uploads.W)
    assert (heads.reshape(-1) == averaged[slot.start : slot.stop]).all()


# By hand ----------------------------------------------------------------------------------------------------------------

# Krum asks for the 5 - 1 - 2 = 2 nearest. By the weights alone it chooses client 1 (sums of squared distances 5, 2, 5, 25, 181),
# by the statistics alone client 4 (100, 13, 113, 10, 5).
W = np.array([[0], [1], [2], [-3], [11]], np.float32)
B = np.array([[10], [4], [-6], [1], [2]], np.float32)


@pytest.mark.parametrize("rule", sorted(choosing()))
def test_by_hand_arrays_choose_together(rule: Any) -> None:
    apart = Averaging(rule)
    if rule == "krum":
        assert [apart.mean(W).tolist(), apart.mean(B).tolist()] == [[1], [2]]
    together = apart.of([W, B])
    # median squared distances: of the weights 4, 1, 4, 16, 100, of the statistics 64, 9, 64, 9, 4
    usual = [4.0, 9.0]
    scaled = np.concatenate([W / np.sqrt(usual[0]), B / np.sqrt(usual[1])], axis=1, dtype=np.float64)
    distances = ((scaled[:, None] - scaled) ** 2).sum(axis=2)
    np.testing.assert_allclose(total_distances(together.apart or ()), distances)
    at = np.stack([together.mean(W), together.mean(B)], axis=1)[0] / np.sqrt(usual)
    if rule == "krum":
        nearest = np.sort(distances, axis=1)[:, 1:3].sum(axis=1)
        np.testing.assert_allclose(at, scaled[nearest.argmin()])
    else:
        total = np.linalg.norm(scaled - at, axis=1).sum()
        steps = np.random.default_rng(0).normal(0, 0.01, (200, 2))
        assert all(total <= np.linalg.norm(scaled - at - step, axis=1).sum() + 1e-6 for step in steps)


def test_large_numbers_do_not_decide_alone() -> None:
    # Client 0 lies in its weights, and sends the very middle of the statistics, which are a thousand times as large.
    W = np.array([[50], [1], [2], [3], [4]], np.float32)
    B = 1000 * np.array([[0], [3], [-3.5], [7], [-8]], np.float32)
    krum = Averaging("krum")
    assert krum.mean(np.hstack([W, B]))[0] == 50
    assert krum.of([W, B]).mean(W)[0] != 50


def test_most_clients_with_the_same_array_do_not_hide_a_liar() -> None:
    W = np.array([[1], [2], [3], [4], [2.4]], np.float32)
    B = np.array([[7], [7], [7], [7], [1e6]], np.float32)
    for rule in sorted(choosing()):
        both = Averaging(rule).of([W, B])  # type: ignore[arg-type]
        assert 7 <= both.mean(B)[0] < 8


def test_one_array_is_chosen_as_before() -> None:
    X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    nothing = np.zeros((6, 0), np.float32)
    for rule in sorted(choosing()):
        plain = Averaging(rule)  # type: ignore[arg-type]
        assert (plain.of([X, nothing]).mean(X) == plain.mean(X)).all()
    assert Averaging("median").of([X]) is not None and Averaging("median").of([X]).apart is None


@given(st.integers(0, 2**32 - 1), st.integers(3, 7), st.sampled_from(sorted(choosing())))
def test_groups_choose_together(seed: int, n: int, rule: Any) -> None:
    """Members of a group are weighed alike in every array: rows that hold their own numbers tell the weights."""
    draw = np.random.default_rng(seed)
    X, Y = (draw.normal(size=(n, 3)).astype(np.float32) for _ in range(2))
    names = np.eye(n, dtype=np.float32)
    members = (draw.random((2, n)) < 0.6) | (np.arange(n) < 1)
    averaging = Averaging(rule).of([X, Y])
    weights = averaging.group_means(names, members)
    for stack in (X, Y):
        np.testing.assert_allclose(averaging.group_means(stack, members), weights @ stack, rtol=1e-4, atol=1e-4)
    for k in range(2):
        alone = averaging.among(members[k]).mean(names[members[k]])
        np.testing.assert_allclose(alone, weights[k], atol=1e-6)
        assert (weights[k][~members[k]] == 0).all()


@pytest.mark.parametrize("rule", sorted(choosing()))
def test_clusters_choose_together(rule: Any) -> None:
    draw, chosen = np.random.default_rng(5), np.array([0, 1, 0, 1, 0, 1, 0])
    X, Y, names = (draw.normal(size=(7, 4)), draw.normal(size=(7, 2)), np.eye(7))
    X, Y, names = (each.astype(np.float32) for each in (X, Y, names))
    averaging = Averaging(rule).of([X, Y])

    def means(stack: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
        return cluster_means(stack, np.ones(7), chosen, np.zeros((3, stack.shape[1]), np.float32), averaging)

    weights = means(names)
    for stack in (X, Y):
        np.testing.assert_allclose(means(stack), weights @ stack, atol=1e-6)
    assert not weights[2].any()


def test_a_mean_over_fewer_rows_is_not_chosen_by_others_distances() -> None:
    with rejected(ValueError, "", "mean over 3", "5 clients", "see Averaging.among"):
        Averaging("krum").of([W, B]).mean(W[:3])


def test_averaging_of_a_method_of_ones_own_chooses_once() -> None:
    """`self.averaging`, without the uploads, is the same choice while the round's uploads are worked on."""
    seen: list[bool] = []

    class Own(FedAvg[Any]):
        def personalize(self, round: int, uploads: Uploads) -> None:
            names = np.eye(len(uploads.ids), dtype=np.float32)
            seen.append(bool((self.averaging.mean(names) == self.averaging_of(uploads).mean(names)).all()))
            seen.append(self.averaging.apart is not None)

    method = dataclasses.replace(METHODS["fedavg"], name="own", strategy=Own)
    federation(method, clients=CLIENTS, d=8, robust="krum").round()
    assert seen == [True, True]
