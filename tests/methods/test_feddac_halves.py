"""FedDAC against METHODS.md: a round by hand, the weights' properties, a naive reference, limits, server and client half."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from client_app.stored_state import StoredState
from fl_app.config import parse
from fl_app.layout import Layout, Model
from fl_app.server import client_arrays
from fl_app.transport.wire import encode_upload, payload_bytes
from strategies import METHOD_PARAMS
from strategies.feddac import (
    METHOD,
    FedDACUpdate,
)
from strategies.kernels import aggregate, masks
from tests.conftest import f32, flat_layout
from tests.methods import halves
from tests.methods.test_feddac import BITS, LAYOUT, W0, B, U, V, W, expected

# server half


def server(layout: Layout = LAYOUT, **params: Any) -> Any:
    own = {"tau": 0.5, "alpha": 4, "self_weight": 0.3, "neighbours": 3}
    return halves.server("feddac", layout, **(own | params))


def play(
    strategy: Any, round: int, ids: list[int], bits: np.ndarray = BITS, extras: dict[str, np.ndarray] | None = None
) -> None:
    strategy.round = round
    B_sent = B[ids, : strategy.layout.b]
    strategy.personalize(round, halves.uploads(ids, W[ids], B_sent, bits=bits[ids], extras=extras))


def test_the_golden_round_in_the_strategy() -> None:
    strategy = server()
    play(strategy, 1, [0, 1, 2])
    got = np.stack([strategy.model_for(i).params for i in range(3)])
    np.testing.assert_allclose(got, expected(U, V), rtol=1e-6)
    # statistics as in FedCAC: unweighted over the group, client 2's own
    assert [strategy.model_for(i).buffers.tolist() for i in range(3)] == [[2, 15], [2, 15], [8, 60]]
    assert [strategy.attempt.client_notes[i]["collaborators"].tolist() for i in range(3)] == [[1], [0], []]
    assert strategy.attempt.client_notes[0]["neighbours"] == {"0": 0.444444, "1": 0.444444, "2": 0.111111}
    assert strategy.attempt.round_notes["overlap"].tolist() == [[1, 0.75, 0], [0.75, 1, 0.25], [0, 0.25, 1]]


def test_absent_clients_get_their_last_model_and_new_ones_the_initial_one() -> None:
    strategy = server(run={"fraction_train": 0.5})
    assert strategy.model_for(0).params.tolist() == [-1] * 8
    play(strategy, 1, [0, 1, 2])
    before = strategy.model_for(0)
    play(strategy, 2, [1, 2])
    assert (strategy.model_for(0).params == before.params).all() and strategy.model_for(0).buffers.tolist() == [2, 15]
    assert strategy.model_for(9).params.tolist() == [-1] * 8 and strategy.model_for(9).buffers.tolist() == [-1, -1]
    assert strategy.exported() is None
    client_arrays.spill(strategy.personal, [1, 2], 0, strategy.folder.path)
    # no earlier round's stack is kept alive by one row
    assert strategy.personal[0]["params"].base is None


def test_collaboration_none() -> None:
    strategy = server(collaboration="none")
    play(strategy, 1, [0, 1, 2])
    assert strategy.model_for(0).params[:4].tolist() == W[0, :4].tolist()
    assert strategy.model_for(0).buffers.tolist() == B[0].tolist()
    assert strategy.attempt.client_notes[0]["collaborators"].tolist() == []


def test_the_time_factor_is_the_configured_one() -> None:
    # mean 0.533, maximum 0.8: at t/alpha = 24/100 the thresholds are 0.664 and 0.597
    overlap = np.array([[1, 0.8, 0.6], [0.8, 1, 0.2], [0.6, 0.2, 1]])
    assert not server(alpha=100).choose(overlap, 24)[0, 2]
    assert server(alpha=100, time_factor="linear").choose(overlap, 24)[0, 2]


def test_dp_counts_the_guidance_models_epoch() -> None:
    plain = parse({"method": "feddac", "local-epochs": 3}, METHOD_PARAMS)
    guided = parse({"method": "feddac", "local-epochs": 3, "feddac.guidance": "one-step"}, METHOD_PARAMS)
    assert (METHOD.dp_epochs_of(plain), METHOD.dp_epochs_of(guided)) == (3, 4)


def test_collaboration_static_is_the_mean_overlap_in_every_round() -> None:
    # mean 1/3: only the pair (0, 1), and still so after alpha
    for round in (1, 99):
        strategy = server(collaboration="static")
        play(strategy, round, [0, 1, 2])
        assert [strategy.attempt.client_notes[i]["collaborators"].tolist() for i in range(3)] == [[1], [0], []]


def test_weighting_none_is_fedavg_on_the_less_important_parameters_bit_for_bit() -> None:
    strategy = server(weighting="none")
    play(strategy, 1, [0, 1, 2])
    fedavg = aggregate.weighted_mean(W)
    for i in range(3):
        rest = ~masks.unpack(BITS[i], 8)
        assert strategy.model_for(i).params[rest].tobytes() == fedavg[rest].tobytes()
    np.testing.assert_allclose(strategy.model_for(0).params[:4], W0[:4] + 0.6, rtol=1e-6)
    assert "neighbours" not in strategy.attempt.client_notes[0]
    nothing = server(weighting="none", tau=0.0)
    play(nothing, 1, [0, 1, 2], bits=np.zeros((3, 1), np.uint8))
    assert all(nothing.model_for(i).params.tobytes() == fedavg.tobytes() for i in range(3))
    assert nothing.attempt.client_notes[0]["collaborators"].tolist() == []  # K = 0: nobody


def test_one_step_guidance_is_expected_and_used() -> None:
    strategy = server(guidance="one-step")
    assert strategy.expected().extras == {"guidance": ("<f4", (8,))} and server().expected().extras == {}
    play(strategy, 1, [0, 1, 2], extras={"guidance": np.stack([W0 + 1, W0 + 2, W0 + 3])})
    got = np.stack([strategy.model_for(i).params for i in range(3)])
    np.testing.assert_allclose(got, expected(U, [22 / 19, 2, 54 / 19]), rtol=1e-6)


def test_every_mask_must_have_k_ones() -> None:
    assert server(flat_layout([10, 3, 1]), tau=0.3).expected().num_selected == 3


# client half


class Trainer:
    """Adds 1 to every parameter."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def train(self, start: Model, **options: Any) -> Model:
        self.calls.append(options)
        return Model(start.params + 1, start.buffers)


@pytest.mark.parametrize("guidance", ["trained", "one-step"])
def test_upload(guidance: str) -> None:
    trainer = Trainer()
    before, after = Model(np.zeros(8, np.float32), f32(0, 0)), Model(f32(1, -8, 3, 4, -5, 6, 2, 7), f32(1, 2))
    ctx = halves.context("feddac", LAYOUT, trainer=trainer, tau=0.25, guidance=guidance)
    upload = FedDACUpdate().upload(before, after, StoredState(), ctx)
    assert upload.mask is not None and upload.mask.tolist() == [0b10000010]  # |-8| and 7
    assert upload.model is after and upload.num_examples == 12
    extra = 4 * 8 if guidance == "one-step" else 0
    assert payload_bytes(encode_upload(upload)) == 4 * (8 + 2) + 1 + extra
    if extra:
        assert upload.extras["guidance"].tolist() == (after.params + 1).tolist()
        assert trainer.calls == [{"epochs": 1, "purpose": "feddac.guidance"}]
    else:
        assert not upload.extras and not trainer.calls
