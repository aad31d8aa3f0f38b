"""FedFomo: weights by hand and their properties, who is offered whose model, mixing on held-out data, and its limit Local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_app.layout import Model
from strategies.base import LocalUpdate
from strategies.baselines.fedfomo import held_out, model_weights, most_liked, scores
from tests.methods.federation import Federation, close
from tests.methods.one_client import client, same, samples, small


def offered_to(server: Any, client_id: int) -> list[int]:
    found: list[int] = server.offered(server.state, client_id, server.attempt)
    return found


def test_weights_by_hand() -> None:
    # Gains (0.5, 0.1, -0.2) over distances (1, 0.1, 2) + 1e-5: 0.499995, 0.999900, cut to 0; over their sum.
    close(model_weights(1, [0.5, 0.9, 1.2], [1, 0.1, 2]), np.array([0.333353, 0.666647, 0]))
    assert model_weights(1, [1, 1.5], [1, 1]).tolist() == [0, 0]
    close(scores(1, [0.5, 1.2], [1, 2]), np.array([0.499995, -0.1]), 1e-5)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=6), st.floats(0, 10))
def test_weights_are_a_mixture_or_nothing(models: list[tuple[float, float]], baseline: float) -> None:
    weights = model_weights(baseline, [m[0] for m in models], [m[1] for m in models])
    assert (weights >= 0).all()
    gains = any(loss < baseline for loss, _ in models)
    assert weights.sum() == pytest.approx(1 if gains else 0)


@given(st.integers(0, 6), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_the_most_liked_of_the_others(count: int, exploration: float, seed: int) -> None:
    affinity = np.random.default_rng(seed).integers(-2, 3, 5).astype(np.float32)
    others = [0, 2, 3, 4]
    chosen = most_liked(affinity, others, count, np.random.default_rng(seed), exploration)
    assert len(chosen) == len(set(chosen)) == min(count, 4) and set(chosen) <= set(others)
    if not exploration:
        assert chosen == sorted(others, key=lambda i: (-affinity[i], i))[:count]


def test_exploration_falls_round_by_round_down_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path, "fedfomo", fedfomo={"exploration": 0.3, "exploration_decay": 0.1})
    federation.round()
    seen: list[float] = []

    def note(affinity: Any, others: Any, count: int, stream: Any, exploration: float) -> list[int]:
        seen.append(exploration)
        return most_liked(affinity, others, count, stream, exploration)

    monkeypatch.setattr("strategies.baselines.fedfomo.most_liked", note)
    for round in range(1, 7):
        federation.server.attempt.round = round
        offered_to(federation.server, 0)
    assert seen == pytest.approx([0.3, 0.2, 0.1, 0, 0, 0], abs=1e-12) and min(seen) == 0


def test_held_out_samples_are_the_clients_for_good() -> None:
    for n, count in ((1, 0), (2, 1), (3, 1), (10, 2), (33, 7)):
        held = [held_out(client("fedfomo", small(), *samples(n), round=round)) for round in (1, 5)]
        assert len(held[0]) == count and held[0].tolist() == held[1].tolist()
    assert not len(held_out(client("fedfomo", small(), *samples(10), fedfomo={"validation_ratio": 0.0})))


def test_training_leaves_them_out() -> None:
    ctx = client("fedfomo", small(), *samples(10))
    held = held_out(ctx)
    ctx.trainer.leave_out(held)
    seen = [i for _ in ctx.trainer.batches(1) for i in ctx.trainer.indices.tolist()]
    assert sorted(seen) == sorted(set(range(10)) - set(held.tolist()))


def learnable(*args: Any, **changes: Any) -> Federation:
    """A federation whose labels can be learned: which of the first three pixels is brightest."""
    federation = Federation(*args, **changes)
    federation.data = [(x, x.reshape(len(x), -1)[:, :3].argmax(axis=1)) for x, _ in federation.data]
    return federation


def by_hand(federation: Federation, i: int) -> tuple[Model, np.ndarray]:
    """A client's next start and scores, in float64, from what it keeps and is sent."""
    ctx, received = federation.context(i)
    state = federation.states[i].arrays
    names = [("fedfomo.start.params", "fedfomo.start.buffers"), ("fedfomo.own.params", "fedfomo.own.buffers")]
    base, own = (Model(state[a], state[b]) for a, b in names)
    more = ctx.extras.get("models", np.zeros((0, 0)))
    others = [received, *map(Model, more, ctx.extras.get("model-statistics", np.zeros((len(more), 0), np.float32)))]
    held = held_out(ctx)
    losses = [ctx.trainer.sample_losses(m, held).astype(np.float64).mean() for m in (base, own, *others)]
    candidates = np.stack([m.params for m in (own, *others)]).astype(np.float64)
    gains = (losses[0] - np.array(losses[1:])) / (np.linalg.norm(candidates - base.params, axis=1) + 1e-5)
    used = np.maximum(gains, 0)
    if not used.any():
        return base, gains[1:]
    statistics = np.stack([m.buffers for m in (own, *others)])
    return Model(*((used / used.sum() @ stack).astype(np.float32) for stack in (candidates, statistics))), gains[1:]


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_rounds_by_hand(tmp_path: Path, kinds: dict[str, Any]) -> None:
    setting: dict[str, Any] = {"sizes": (30, 25, 40, 20), "network": lambda: small(**kinds)}
    federation = learnable(tmp_path, "fedfomo", fedfomo={"models": 2, "exploration": 0.0}, **setting)
    uploads = federation.round()
    first = [federation.context(i)[1] for i in range(4)]  # ties: the lower ids
    assert [[j for j in range(4) if first[i].params.tobytes() == uploads.W[j].tobytes()] for i in range(4)] == [
        [1],
        [0],
        [0],
        [0],
    ]
    assert (uploads.extras["scores"] == 0).all()
    mixed = 0
    for _ in range(2):
        federation.server.attempt.round = federation.rounds + 1
        offered = [offered_to(federation.server, i) for i in range(4)]
        want = [by_hand(federation, i) for i in range(4)]
        affinity = [federation.server.personal[i]["affinity"].copy() for i in range(4)]
        uploads = federation.round()
        for i in range(4):
            state = federation.states[i].arrays
            close(state["fedfomo.start.params"], want[i][0].params)
            close(state["fedfomo.start.buffers"], want[i][0].buffers)
            mixed += (want[i][1] > 0).any()
            assert state["fedfomo.own.params"].tobytes() == uploads.W[i].tobytes()
            close(uploads.extras["scores"][i], want[i][1], 1e-4)
            affinity[i][offered[i]] += uploads.extras["scores"][i]
            close(federation.server.personal[i]["affinity"], affinity[i])
            assert sum(array.nbytes for array in state.values()) == 8 * (federation.layout.d + federation.layout.b)
    assert mixed


def test_only_clients_that_were_seen_are_offered(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "fedfomo", sizes=(10, 6, 8, 7))
    federation.round(ids=[1])
    assert offered_to(federation.server, 0) == offered_to(federation.server, 1) == []
    assert federation.context(0)[1] is federation.server.global_model
    assert federation.context(1)[1].params.tobytes() == federation.server.personal[1]["params"].tobytes()
    federation.round(ids=[0, 1])
    assert (
        offered_to(federation.server, 0) == [1]
        and offered_to(federation.server, 1) == [0]
        and not offered_to(federation.server, 2)
    )
    uploads = federation.round(ids=[0, 1, 2])
    assert uploads.extras["scores"][0, 0] != 0 and (uploads.extras["scores"][:, 1:] == 0).all()
    ctx, _ = federation.context(0)
    assert ctx.extras["models"].shape == (1, federation.layout.d)


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_without_models_it_is_local_on_what_is_not_held_out(tmp_path: Path, kinds: dict[str, Any]) -> None:
    setting: dict[str, Any] = {"network": lambda: small(**kinds), "learning_rate": 0.1, "sizes": (30, 25)}
    federation = learnable(tmp_path, "fedfomo", fedfomo={"models": 0}, **setting)
    own = [federation.initial] * 2
    stayed = 0
    for round in range(1, 5):
        uploads = federation.round()
        assert not uploads.extras
        for i in range(2):
            ctx, _ = federation.context(i, round=round)
            held = held_out(ctx)
            ctx.trainer.leave_out(held)
            before = own[i]
            own[i] = LocalUpdate[Any]().train(before, federation.states[i], ctx)
            mine = Model(uploads.W[i], uploads.B[i])
            assert same(mine, own[i])
            losses = [ctx.trainer.sample_losses(m, held).mean(dtype=np.float64) for m in (before, own[i])]
            # it made things worse: next time from where it began
            if losses[1] >= losses[0]:
                own[i], stayed = before, stayed + 1
    assert stayed < 8
