"""FedSelect: growth and means by hand, the invariants of its masks, its limits bit for bit, both halves."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_app.stored_state import StoredState
from fl_app.layout import Model
from fl_app.transport.wire import Upload, WireError, encode_upload, payload_bytes
from strategies.baselines.fedselect import FedSelectUpdate, aggregate, eligible, grow
from strategies.kernels import masks
from strategies.kernels.aggregate import weighted_mean
from tests.conftest import bools, f32, flat_layout
from tests.facts import rejected
from tests.methods import halves
from tests.methods.trials import another, client, copied


def test_growth_by_hand() -> None:
    # Tensors of 8, 2 (a bias) and 6; p 0.25, alpha 0.5.
    # 1: of 8 free, 8 - 0.75*8 = 2; of 6, 6 - round(4.5) = 6 - 4 = 2 (half to even). The largest: 1, 2 | 10, 15.
    # 2: of 6 free, 6 - round(4.5) = 2: 6, 7, which makes 4 = 0.5*8; of 4, 4 - 3 = 1: 11, which makes 3 = 0.5*6.
    # 3: both are at their limit.
    sizes, allowed = (8, 2, 6), np.array([True, False, True])
    change = f32(0, 9, 8, 1, 2, 3, 7, 6, 99, 99, 5, 4, 0, 1, 2, 6)
    mask, want = np.zeros(16, bool), [{1, 2, 10, 15}, {1, 2, 6, 7, 10, 11, 15}, {1, 2, 6, 7, 10, 11, 15}]
    for ones in want:
        mask = grow(mask, change, sizes, rate=0.25, limit=0.5, eligible=allowed)
        assert set(np.flatnonzero(mask).tolist()) == ones
    by_element = grow(np.zeros(16, bool), -change, sizes, rate=0.25, limit=0.5, eligible=np.repeat(allowed, sizes))
    assert set(np.flatnonzero(by_element).tolist()) == want[0]
    # the whole model as one tensor: 14 free, 14 - round(10.5) = 4, the largest anywhere but in the bias
    whole = grow(np.zeros(16, bool), change, (16,), rate=0.25, limit=0.5, eligible=np.repeat(allowed, sizes))
    assert set(np.flatnonzero(whole).tolist()) == {1, 2, 6, 7}


def test_ties_go_to_the_lower_index_and_the_number_is_exact() -> None:
    grown = grow(bools("0100 0000"), f32(0, 5, 0, 0, 0, 0, 0, 0), (8,), rate=0.3, limit=1, eligible=np.ones(1, bool))
    assert np.flatnonzero(grown).tolist() == [0, 1, 2]  # 7 - round(4.9) = 2 more


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_masks_only_grow_and_keep_the_limit(sizes: list[int], rate: float, limit: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    d = sum(sizes)
    allowed, mask = random.random(d) < 0.8, np.zeros(d, bool)
    for _ in range(4):
        change = random.integers(0, 4, d).astype(np.float32)  # ties
        grown = grow(mask, change, sizes, rate=rate, limit=limit, eligible=allowed)
        assert (grown >= mask).all() and not grown[~allowed].any()
        start = 0
        for size in sizes:
            layer = slice(start, start + size)
            new = np.flatnonzero(grown[layer] & ~mask[layer])
            free = np.flatnonzero(allowed[layer] & ~mask[layer])
            room = math.floor(limit * size) - int(mask[layer].sum())
            assert len(new) == max(0, min(len(free) - round((1 - rate) * len(free)), room))
            ranked = sorted(free.tolist(), key=lambda j: (-change[layer][j], j))  # noqa: B023
            assert set(new.tolist()) == set(ranked[: len(new)])
            start += size
        mask = grown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"change": f32(0, np.nan, 1, 2)}, "must be finite, got 1"),
        ({"change": f32(1, 2)}, "sizes sum to 4"),
        ({"rate": 1.5}, r"must be in \[0, 1\]"),
        ({"limit": -0.1}, r"must be in \[0, 1\]"),
        ({"sizes": (3, 2)}, "sizes sum to 5"),
    ],
)
def test_what_growth_refuses(changes: dict[str, Any], words: str) -> None:
    how = {"mask": np.zeros(4, bool), "change": f32(1, 2, 3, 4), "sizes": (4,), "rate": 0.5, "limit": 0.5}
    with pytest.raises(ValueError, match=words):
        grow(**{**how, **changes}, eligible=np.ones(len(changes.get("sizes", (4,))), bool))


def test_biases_are_left_out() -> None:
    ctx = client("fedselect")
    still = ctx.layout.indices(frozenset({"stem.bias", "conv.bias", "bn.bias", "fc.bias"}))
    assert (eligible(ctx.layout, biases=False) == ~still).all() and eligible(ctx.layout, biases=True).all()


def test_means_by_hand() -> None:
    # n = 1, 1, 2. First: shared by all, (1 + 5 + 2*4) / 4 = 3.5. Second: not by client 1, (2 + 2*7) / 3 = 16/3. Third: nobody.
    W = np.array([[1, 2, 0], [5, 0, 0], [4, 7, 0]], np.float32)
    used = np.array([[0, 0, 1], [0, 1, 1], [0, 0, 1]], bool)
    got = aggregate(W, used, np.array([1.0, 1, 2]), f32(8, 8, 9))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [3.5, 16 / 3, 9], rtol=1e-7)
    np.testing.assert_allclose(aggregate(W, used, np.ones(3), f32(8, 8, 9)), [10 / 3, 4.5, 9], rtol=1e-7)
    np.testing.assert_allclose(
        aggregate(W, used, np.array([1, 1, 2]), np.array([8, 8, 9])), [3.5, 16 / 3, 9], rtol=1e-7
    )  # type: ignore[arg-type]
    # what is called personal does not count
    W[used] = 77
    np.testing.assert_allclose(aggregate(W, used, np.array([1.0, 1, 2]), f32(8, 8, 9)), [3.5, 16 / 3, 9], rtol=1e-7)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_means_against_a_naive_reference(n: int, d: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    W, weights, previous = (
        random.normal(size=(n, d)).astype(np.float32),
        random.random(n) + 0.1,
        f32(*random.normal(size=d)),
    )
    used = random.random((n, d)) < random.random(d)
    got = aggregate(W, used, weights, previous)
    for e in range(d):
        who = np.flatnonzero(~used[:, e])
        want = np.average(W[who, e].astype(np.float64), weights=weights[who]) if who.size else previous[e]
        assert got[e] == pytest.approx(want, rel=1e-6, abs=1e-6)
    nobody = np.zeros_like(used)
    assert aggregate(W, nobody, weights, previous).tobytes() == weighted_mean(W, weights).tobytes()


def test_means_refuse_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="needs used"):
        aggregate(np.zeros((2, 3), np.float32), np.zeros((2, 2), bool), np.ones(2), f32(0, 0, 0))
    with pytest.raises(ValueError, match="weights"):
        aggregate(np.zeros((2, 3), np.float32), np.zeros((2, 3), bool), np.zeros(2), f32(0, 0, 0))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_server_half_runs_the_kernel(tmp_path: Path, weighting: str) -> None:
    strategy = halves.server("fedselect", flat_layout([2, 1], [1]), Model(f32(8, 8, 9), f32(0)), weighting=weighting)
    W = np.array([[1, 2, 0], [5, 0, 0], [4, 7, 0]], np.float32)
    used = np.array([[0, 0, 1], [0, 1, 1], [0, 0, 1]], bool)
    bits = np.stack([masks.pack(row) for row in used])
    sizes = np.array([1.0, 1, 2])
    strategy.personalize(1, halves.uploads([4, 5, 9], W, np.array([[1], [2], [3]], np.float32), sizes=sizes, bits=bits))
    weights = sizes if weighting == "samples" else np.ones(3)
    np.testing.assert_array_equal(strategy.global_model.params, aggregate(W, used, weights, f32(8, 8, 9)))
    assert strategy.global_model.buffers.tolist() == [2.25 if weighting == "samples" else 2]
    assert strategy.attempt.client_notes[5] == {"personal-parameters": {"w0": 1, "w1": 1}}
    strategy.check(Upload(Model(W[1], f32(2)), bits[1]))
    with rejected(WireError, "", "1 parameters", "not 0"):
        strategy.check(Upload(Model(f32(5, 3, 0), f32(2)), bits[1]))


def test_participations_in_turn() -> None:
    """Training, growth and merging over three participations; what was selected takes the mean once more, then stays."""
    ctx = client("fedselect", fedselect={"limit": 0.5}, momentum=0.9, weight_decay=0.01, local_epochs=2)
    update, state, start = FedSelectUpdate(), StoredState(), ctx.initial()
    assert update.merge(start, state, ctx) is start
    first = update.train(start, state, ctx)
    assert first.params.tobytes() == ctx.trainer.train(start).params.tobytes()  # FedAvg's
    assert set(state.arrays) == {"fedselect.own", "fedselect.used", "fedselect.mask"}
    d = ctx.layout.d
    assert sum(a.nbytes for a in state.arrays.values()) == 4 * d + 2 * -(-d // 8)
    used, mask = (masks.unpack(state.arrays[f"fedselect.{name}"], d) for name in ("used", "mask"))
    assert not used.any() and mask.any()
    assert update.upload(start, first, state, ctx).model.params.tobytes() == first.params.tobytes()

    received = another(first, 1)
    second_start = update.merge(received, state, ctx)
    assert second_start.params.tobytes() == received.params.tobytes()  # the mean once more
    second = update.train(second_start, copy := copied(state), ctx)
    sides = {"train-personal": ~mask, "train": mask}
    assert second.params.tobytes() == ctx.trainer.alternate(second_start, sides).params.tobytes()
    assert (masks.unpack(copy.arrays["fedselect.used"], d) == mask).all()
    grown = masks.unpack(copy.arrays["fedselect.mask"], d)
    assert (grown >= mask).all() and grown.sum() > mask.sum()
    upload = update.upload(second_start, second, copy, ctx)
    assert not upload.model.params[mask].any() and (upload.model.params == second.params)[~mask].all()
    assert upload.mask is not None and (masks.unpack(upload.mask, d) == mask).all()
    assert payload_bytes(encode_upload(upload)) == 4 * (d + ctx.layout.b) + -(-d // 8)

    third_start = update.merge(another(second, 2), copy, ctx)
    assert (third_start.params == second.params)[mask].all()
    assert (third_start.params == another(second, 2).params)[~mask].all()
    assert update.personal(third_start, copy, ctx) is third_start


def test_a_side_moves_nothing_of_the_other() -> None:
    ctx = client("fedselect", momentum=0.9, weight_decay=0.1)
    start, mask = ctx.initial(), np.random.default_rng(0).random(ctx.layout.d) < 0.3
    personal = ctx.trainer.alternate(start, {"train-personal": ~mask}, epochs=1)
    assert (personal.params == start.params)[~mask].all() and (personal.params != start.params)[mask].any()
    # both sides move the statistics
    assert (personal.buffers != start.buffers).any()


def test_growing_every_third_participation() -> None:
    ctx = client("fedselect", fedselect={"grow_every": 3})
    update, state, model = FedSelectUpdate(), StoredState(), ctx.initial()
    ones = []
    for _ in range(6):
        model = update.train(update.merge(model, state, ctx), state, ctx)
        ones.append(masks.popcount(state.arrays["fedselect.mask"]))
    assert ones[:2] == [0, 0] and ones[2] == ones[3] == ones[4] > 0 and ones[5] > ones[4]


def test_the_whole_model_as_scope() -> None:
    ctx = client("fedselect", fedselect={"scope": "model", "rate": 0.1, "biases": True})
    state = StoredState()
    FedSelectUpdate().train(ctx.initial(), state, ctx)
    assert masks.popcount(state.arrays["fedselect.mask"]) == ctx.layout.d - round(0.9 * ctx.layout.d)


def test_changes_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = client("fedselect")
    broken = dataclasses.replace(ctx.initial(), params=ctx.initial().params * np.float32(np.nan))
    monkeypatch.setattr(ctx.trainer, "train", lambda *_, **__: broken)
    with rejected(ValueError, "", "change", "finite"):
        FedSelectUpdate().train(ctx.initial(), StoredState(), ctx)
