"""PerFedMask: means and masks by hand and their properties, its limit FedBABU, and what clients train and send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_app import rng
from strategies.baselines.perfedmask import masked_mean, objective, random_masks
from strategies.kernels.aggregate import weighted_mean
from tests.methods.federation import Federation, close
from tests.methods.one_client import small


def test_means_by_hand() -> None:
    # (1 * 1 + 2 * 4)/3 = 3; only the first client trained 2; nobody the third.
    W, trained = np.array([[1.0, 2, 3], [4, 5, 6]]), np.array([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(W, trained, np.array([1, 2]), np.full(3, 9.0)).tolist() == [3, 2, 9]
    assert masked_mean(W.astype(np.float32), trained, np.array([1, 2]), np.full(3, 9, np.float32)).dtype == np.float32


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_means_are_of_those_who_trained(n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    W, sizes = random.normal(size=(n, 6)).astype(np.float32), random.integers(1, 9, n).astype(float)
    trained, before = random.random((n, 6)) < 0.5, random.normal(size=6).astype(np.float32)
    means = masked_mean(W, trained, sizes, before)
    for column in range(6):
        who = trained[:, column]
        want = np.average(W[who, column], weights=sizes[who]) if who.any() else before[column]
        assert means[column] == pytest.approx(want, abs=1e-6)
    assert masked_mean(W, np.ones((n, 6)), sizes, before).tobytes() == weighted_mean(W, sizes).tobytes()


def test_what_masks_cost_by_hand() -> None:
    sizes = np.array([50, 50])
    assert objective(np.ones((3, 2), bool), sizes, 1.0) == 0
    # Disjoint halves: each client's largest share is 1, its layers' 50: 2 * (100 - 50).
    assert objective(np.eye(2, dtype=bool), sizes, 0.5) == 100
    assert objective(np.eye(2, dtype=bool), sizes, 0.75) == 150  # and 25 unused each


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.floats(0.05, 1),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
)
def test_masks_fit_and_are_never_empty(sizes: list[int], capacity: float, clients: int, seed: int) -> None:
    masks = random_masks(sizes, capacity, clients, np.random.default_rng(seed))
    assert masks.shape == (clients, len(sizes)) and masks.any(axis=1).all()
    used = masks @ np.array(sizes)
    assert ((used <= capacity * sum(sizes) + 1e-6) | ((masks.sum(axis=1) == 1) & (used == min(sizes)))).all()
    assert random_masks(sizes, 1.0, clients, np.random.default_rng(seed)).all()
    assert objective(masks, sizes, capacity) >= -1e-9


def deep() -> Any:
    """Three layers in the body, one of them BatchNorm."""
    return small(batchnorm=True)


def test_the_best_of_a_thousand_is_taken(tmp_path: Path) -> None:
    servers = [
        Federation(
            tmp_path, "perfedmask", network=deep, sizes=(4,) * 5, perfedmask={"capacity": 0.8, "masks": m}
        ).server
        for m in ("optimised", "random")
    ]
    stream = rng.generator(servers[0].config.seed, "perfedmask")
    costs = [objective(random_masks([25, 10], 0.8, 5, stream), [25, 10], 0.8) for _ in range(1000)]
    assert (
        objective(servers[0].masks, [25, 10], 0.8)
        == min(costs)
        < costs[0]
        == objective(servers[1].masks, [25, 10], 0.8)
    )
    again = Federation(tmp_path, "perfedmask", network=deep, sizes=(4,) * 5, perfedmask={"capacity": 0.8}).server
    assert (again.masks == servers[0].masks).all()


def test_clients_train_and_send_their_layers_alone(tmp_path: Path) -> None:
    federation = Federation(
        tmp_path,
        "perfedmask",
        network=deep,
        sizes=(10, 6, 8, 9),
        perfedmask={"capacity": 0.8},
        weight_decay=0.1,
        momentum=0.5,
    )
    server = federation.server
    server.masks = np.array([[True, False], [False, True], [True, False], [False, True]])  # instead of the best
    layout = server.layout
    linear = layout.indices(frozenset({"features.weight", "features.bias"}))
    before, sizes = server.global_model.params.copy(), np.array([10, 6, 8, 9])
    federation.rounds, rows, server.protocol.turn = 1, [], federation.latest
    for i in range(4):
        upload = federation.upload(i)
        mine = linear if server.masks[i, 0] else ~linear
        assert (
            upload.model.params.size == mine.sum() == server.protocol.expected_from(i).d
            and upload.model.buffers.size == layout.b
        )
        whole = server.protocol.check(i, upload).model.params
        assert (whole[~mine] == before[~mine]).all() and (whole[mine] != before[mine]).any()
        rows.append(whole)
    federation.rounds = 0
    uploads = federation.round()
    W = np.stack(rows)
    assert uploads.W.tobytes() == W.tobytes()
    # clients that freeze BatchNorm gather statistics too
    assert (uploads.B != federation.initial.buffers).all()
    close(server.global_model.buffers, np.average(uploads.B, axis=0, weights=sizes))
    after = server.global_model.params
    close(after[linear], np.average(W[[0, 2]], axis=0, weights=sizes[[0, 2]])[linear])
    close(after[~linear], np.average(W[[1, 3]], axis=0, weights=sizes[[1, 3]])[~linear])
    kept = after.copy()
    federation.round(ids=[0])
    assert (server.global_model.params[~linear] == kept[~linear]).all()  # nobody trained these
    assert not federation.states[0].arrays
