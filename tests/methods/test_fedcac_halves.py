"""FedCAC against METHODS.md: the kernels, the server half under partial participation, the client half, every option."""

from __future__ import annotations

from typing import Any

import numpy as np

from client_app.stored_state import StoredState
from fl_app.layout import Layout, Model
from fl_app.transport.wire import encode_upload, payload_bytes
from strategies.base import RoundContext
from strategies.fedcac import (
    FedCACUpdate,
)
from strategies.kernels import masks
from tests.conftest import bools, f32, flat_layout
from tests.methods import halves
from tests.methods.test_fedcac import BITS, LAYOUT, WEIGHTS, B, W

# server half


def server(layout: Layout = LAYOUT, **params: Any) -> Any:
    return halves.server("fedcac", layout, **({"beta": 2} | params))


def play(strategy: Any, round: int, ids: list[int], rows: list[int] | None = None, bits: np.ndarray = BITS) -> None:
    """Give the strategy a round's uploads; by default, client i sends row i of the golden round."""
    rows = ids if rows is None else rows
    strategy.round = round
    B_sent = B[rows, : strategy.layout.b]
    strategy.personalize(round, halves.uploads(ids, W[rows], B_sent, sizes=WEIGHTS[rows], bits=bits[rows]))


def test_the_golden_round_in_the_strategy() -> None:
    strategy = server()
    play(strategy, 1, [0, 1, 2])
    g = 4.25
    assert strategy.model_for(0).params.tolist() == [1, 2, 3, 4, g, g, g, g]
    assert strategy.model_for(1).params.tolist() == [1, 2, 3, g, 5, g, g, g]
    assert strategy.model_for(2).params.tolist() == [g, g, g, g, 3.5, 2.5, 1.5, 0.5]
    # statistics: unweighted over the group: (1+3)/2, (10+20)/2; client 2's own; global: (1+3+16)/4, (10+20+120)/4
    assert strategy.model_for(0).buffers.tolist() == strategy.model_for(1).buffers.tolist() == [2, 15]
    assert strategy.model_for(2).buffers.tolist() == [8, 60]
    assert strategy.global_model.params.tolist() == [g] * 8
    assert strategy.global_model.buffers.tolist() == [5, 37.5]
    assert [strategy.attempt.client_notes[i]["collaborators"].tolist() for i in range(3)] == [[1], [0], []]
    assert strategy.attempt.round_notes["overlap"].tolist() == [[1, 0.75, 0], [0.75, 1, 0.25], [0, 0.25, 1]]


def test_every_mask_must_have_k_ones() -> None:
    layout = flat_layout([5, 3, 1])
    assert server(layout, tau=0.5).expected().num_selected == 2 + 1 + 0
    assert server(layout, tau=0.5).expected().num_params == 9
    assert server(layout, tau=0.5, vanishing_scores="nonzero").expected().num_selected == -1


def test_a_client_that_was_absent_gets_its_old_critical_values_on_the_current_global_model() -> None:
    strategy = server()
    play(strategy, 1, [0, 1, 2])
    play(strategy, 2, [1, 2])
    # round 2, clients 1 and 2 alone: N = 2 and t = beta, so they collaborate. global (w1 + 2 w2)/3.
    g = ((W[1].astype(np.float64) + 2 * W[2].astype(np.float64)) / 3).astype(np.float32)
    np.testing.assert_allclose(strategy.global_model.params, g, rtol=1e-6)
    absent = strategy.model_for(0)
    assert absent.params[:4].tolist() == [1, 2, 3, 4]  # its u from round 1
    assert (absent.params[4:] == strategy.global_model.params[4:]).all()
    # its statistics from round 1
    assert absent.buffers.tolist() == [2, 15]
    # who took part got the new mean: (w1 + w2)/2 on the mask of client 1
    assert strategy.model_for(1).params[:3].tolist() == [4.75, 4.75, 4.75]


def test_a_client_never_seen_gets_the_plain_global_model() -> None:
    strategy = server()
    assert strategy.model_for(7).params.tolist() == [-1] * 8  # the initial model
    play(strategy, 1, [0, 2])
    assert strategy.model_for(7).params is strategy.global_model.params
    np.testing.assert_allclose(strategy.model_for(7).buffers, [(1 + 2 * 8) / 3, (10 + 2 * 60) / 3], rtol=1e-6)


# options


def test_collaboration_none() -> None:
    strategy = server(collaboration="none")
    play(strategy, 1, [0, 1, 2])
    assert strategy.model_for(0).params[:4].tolist() == W[0, :4].tolist()
    assert strategy.model_for(0).params[4:].tolist() == [4.25] * 4
    assert strategy.model_for(0).buffers.tolist() == B[0].tolist()
    assert strategy.attempt.client_notes[0]["collaborators"].tolist() == []


def test_collaboration_top() -> None:
    # most alike: 0 -> 1, 1 -> 0, 2 -> 1 (1/4 against 0): client 2, alone by threshold, now has client 1; not symmetric
    strategy = server(collaboration="top", num_collaborators=1)
    play(strategy, 9, [0, 1, 2])  # t > beta does not matter
    assert [strategy.attempt.client_notes[i]["collaborators"].tolist() for i in range(3)] == [[1], [0], [1]]
    assert strategy.model_for(2).params[4:].tolist() == ((W[1] + W[2]) / 2)[4:].tolist()
    everyone = server(collaboration="top", num_collaborators=5)
    play(everyone, 9, [0, 1, 2])
    np.testing.assert_allclose(everyone.model_for(2).params[4:], W.mean(axis=0)[4:], rtol=1e-6)


def test_non_critical_as_critical() -> None:
    # the whole model from the group: u_0 everywhere; for client 2, alone, its own model
    strategy = server(non_critical="as-critical")
    play(strategy, 1, [0, 1, 2])
    assert strategy.model_for(0).params.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert strategy.model_for(2).params.tolist() == W[2].tolist()
    play(strategy, 2, [1, 2])
    # absent: no part of it is global
    assert strategy.model_for(0).params.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_weighting_uniform() -> None:
    strategy = server(weighting="uniform")
    play(strategy, 1, [0, 1, 2])
    np.testing.assert_allclose(strategy.global_model.params, W.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(strategy.global_model.buffers, B.mean(axis=0), rtol=1e-6)
    assert strategy.model_for(0).params[:4].tolist() == [1, 2, 3, 4]


# client half


def context(layout: Layout = LAYOUT, **keys: Any) -> RoundContext[Any]:
    return halves.context("fedcac", layout, **keys)


BEFORE = Model(np.zeros(8, np.float32), np.zeros(2, np.float32))
AFTER = Model(f32(1, -8, 3, 4, -5, 6, 2, 7), f32(1, 2))  # scores are its squares


def mask_of(**changes: Any) -> list[bool]:
    ctx = context(**changes)
    upload = FedCACUpdate().upload(BEFORE, AFTER, StoredState(), ctx)
    assert upload.mask is not None
    return list(masks.unpack(upload.mask, ctx.layout.d).tolist())


def test_upload_by_hand() -> None:
    upload = FedCACUpdate().upload(BEFORE, AFTER, StoredState(), context(tau=0.5))
    assert upload.mask is not None
    # parameters 1, 4, 5, 7: |-8|, |-5|, 6, 7
    assert upload.mask.tolist() == [0b10110010]
    assert upload.model.params.tolist() == AFTER.params.tolist() and upload.model.buffers.tolist() == [1, 2]
    assert upload.num_examples == 12
    assert payload_bytes(encode_upload(upload)) == 4 * (8 + 2) + 1


def test_vanishing_scores_may_all_be_critical() -> None:
    tiny = Model(f32(1e-6, -1e-7, 0, 1e-8, -5, 6, 2, 7), f32(1, 2))
    update, layout = FedCACUpdate(), flat_layout([4, 4], [2])
    for rule, expected in (("ranked", "1100 0101"), ("nonzero", "1101 0101")):
        upload = update.upload(BEFORE, tiny, StoredState(), context(layout, tau=0.5, vanishing_scores=rule))
        assert upload.mask is not None and masks.unpack(upload.mask, 8).tolist() == bools(expected).tolist()


def test_selection_sensitivity_reverse_takes_the_least_sensitive() -> None:
    assert mask_of(tau=0.5, selection="sensitivity-reverse") == (~bools("0100 1101")).tolist()
    assert mask_of(tau=0.25, selection="sensitivity-reverse") == bools("1000 0010").tolist()


def test_selection_random() -> None:
    layout = flat_layout([40, 60])
    after = Model(np.arange(100, dtype=np.float32), np.zeros(0, np.float32))
    before = Model(np.zeros(100, np.float32), np.zeros(0, np.float32))

    def draw(**changes: Any) -> np.ndarray:
        upload = FedCACUpdate().upload(before, after, StoredState(), context(layout, selection="random", **changes))
        assert upload.mask is not None
        return masks.unpack(upload.mask, 100)

    first = draw()
    assert [first[:40].sum(), first[40:].sum()] == [20, 30]
    assert (first == draw()).all()
    assert (first != masks.top_k(after.params, (40, 60), 0.5)).any()
    assert (first != draw(client_id=1)).any() and (first != draw(round=2)).any()


def test_batchnorm_statistics_local_on_the_client() -> None:
    ctx = context(batchnorm_statistics="local")
    update, state = FedCACUpdate(), StoredState()
    upload = update.upload(BEFORE, AFTER, state, ctx)
    assert upload.model.buffers.size == 0 and upload.mask is not None
    update.keep_local(AFTER, state, ctx)
    received = Model(np.arange(8, dtype=np.float32), np.zeros(0, np.float32))
    merged = update.merge(received, state, ctx)
    assert merged.params.tolist() == list(range(8)) and merged.buffers.tolist() == [1, 2]  # its own statistics
    first = update.merge(received, StoredState(), ctx)
    # before its first training: the initial model's
    assert first.buffers.tolist() == [0, 0]
