"""CFL: splits by hand and their properties, its limit FedAvg, repeated splits, and clients that come late or stay away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies.base import Uploads
from strategies.baselines.cfl import split
from tests.methods import halves
from tests.methods.federation import Federation, close


def test_splits_by_hand() -> None:
    # Two pull left, two right: the mean is 0, the longest 2. -cos within a side is -1, across it 1.
    updates = np.array([[1.0, 0], [-1, 0], [2, 0], [-2, 0]])
    assert split(updates, 0.4, 1.6) == ([0, 2], [1, 3])
    assert split(updates, 0.4, 2.0) is None  # not longer than eps2
    # the mean is not shorter than eps1
    assert split(updates + [0, 0.4], 0.4, 1.6) is None
    assert split(updates, 0, 0) is None
    assert split(updates[:2] * 4, 0.4, 1.6) is None  # not more than two
    # Complete linkage by angle: 0 and 40 degrees are nearest, then 170 joins 200, at last all.
    angles = np.radians([0, 170, 40, 200])
    assert split(np.stack([np.cos(angles), np.sin(angles)], 1), 9, 0) == ([0, 2], [1, 3])


@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_a_split_is_two_parts_of_all(n: int, seed: int) -> None:
    updates = np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)
    parts = split(updates, np.inf, 0)
    if n < 3:
        assert parts is None
        return
    assert parts is not None and parts[0][0] == 0
    assert sorted(parts[0] + parts[1]) == list(range(n)) and parts[1]
    mean, longest = np.linalg.norm(updates.mean(axis=0)), np.linalg.norm(updates, axis=1).max()
    assert split(updates, mean * 0.999, 0) is None and split(updates, np.inf, longest * 1.001) is None
    assert split(updates, mean * 1.001, longest * 0.999) == parts
    assert split(updates * 4, np.inf, 0) == parts  # by angles alone


def test_equal_and_zero_updates_can_be_split() -> None:
    for updates in (np.ones((4, 2)), np.zeros((4, 2))):
        parts = split(updates, 9, -1)
        assert parts is not None and sorted(parts[0] + parts[1]) == [0, 1, 2, 3]


def moved(server: Any, ids: list[int], by: dict[int, tuple[float, float]]) -> Uploads:
    """Uploads that move the first two parameters of what each client was sent."""
    W = np.stack([server.model_for(i).params for i in ids])
    W[:, :2] += np.array([by[i] for i in ids], np.float32)
    return halves.uploads(ids, W)


def clusters(server: Any) -> list[int]:
    return [server.clusters()[i] for i in sorted(server.personal)]


def test_a_second_split_is_of_clients_not_of_positions(tmp_path: Path) -> None:
    server = Federation(tmp_path, "cfl", sizes=(4,) * 8, cfl={"eps1": 0.4, "eps2": 1.6, "start": 1}).server
    start = server.global_model.params.copy()
    right, left = (3.0, 0.0), (-3.0, 0.0)
    by = {i: right if i % 2 else left for i in range(8)}
    everybody = list(range(8))
    server.personalize(1, moved(server, everybody, by))
    assert clusters(server) == [0] * 8  # not before `start` is over
    server.personalize(2, moved(server, everybody, by))
    assert clusters(server) == [0, 1] * 4 and server.exported() is None
    close(server.model_for(0).params[:2] - start[:2], [-3, 0])
    close(server.model_for(1).params[:2] - start[:2], [3, 0])

    up, down = (0.0, 2.0), (0.0, -2.0)
    by = {1: up, 3: down, 5: up, 7: down, 0: right, 2: right, 4: right, 6: right}
    before = server.model_for(3).params.copy()
    server.personalize(3, moved(server, everybody, by))
    assert clusters(server) == [0, 1, 0, 2, 0, 1, 0, 2]
    close(server.model_for(7).params[:2] - before[:2], [0, -2])
    assert server.memory["models"].shape[0] == 3
    assert server.attempt.round_notes["cluster-sizes"] == [4, 2, 2]


def test_clusters_without_all_members_wait(tmp_path: Path) -> None:
    server = Federation(tmp_path, "cfl", sizes=(4,) * 5, cfl={"start": 0}).server
    by = {0: (3.0, 0.0), 1: (-3.0, 0.0), 2: (3.0, 0.0), 3: (-3.0, 0.0), 4: (1.0, 0.0)}
    server.personalize(1, moved(server, [0, 1, 2, 3, 4], {i: (0.1, 0.0) for i in range(5)}))
    server.personalize(2, moved(server, [0, 1, 2, 3], by))
    assert clusters(server) == [0] * 5
    server.personalize(3, moved(server, [0, 1, 2, 3, 4], by))
    assert clusters(server) == [0, 1, 0, 1, 0]
    model = server.model_for(1).params.copy()
    server.personalize(4, moved(server, [0, 2], by))
    # a cluster without participants stays
    assert server.model_for(1).params.tobytes() == model.tobytes()


def test_a_late_client_joins_those_that_move_as_it_does(tmp_path: Path) -> None:
    server = Federation(tmp_path, "cfl", sizes=(4,) * 6, cfl={"start": 0}).server
    by = {0: (3.0, 0.0), 1: (-3.0, 0.0), 2: (3.0, 0.0), 3: (-3.0, 0.0)}
    server.personalize(1, moved(server, [0, 1, 2, 3], by))
    assert clusters(server) == [0, 1, 0, 1]
    assert server.model_for(4).params.tobytes() == server.model_for(0).params.tobytes()
    first, second = server.model_for(0).params.copy(), server.model_for(1).params.copy()
    server.personalize(2, moved(server, [0, 1, 3, 4], {0: (0.0, 1.0), 1: (1.0, 0.0), 3: (1.0, 0.0), 4: (1.3, 0.1)}))
    assert clusters(server) == [0, 1, 0, 1, 1]
    close(server.model_for(0).params[:2], first[:2] + [0, 1])
    # its update, from its cluster's model
    close(server.model_for(4).params[:2], second[:2] + [1.1, 0.1 / 3])
    # alone in the round: the first cluster
    server.personalize(3, moved(server, [5], {5: (1.0, 0.0)}))
    assert server.clusters()[5] == 0
