"""FedDWA: its weights by hand and their properties, its limit FedDAC, both kinds of guidance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.baselines import feddwa
from strategies.baselines.feddwa import neighbour_weights
from tests.methods.federation import Federation, close
from tests.methods.one_client import small


def test_weights_by_hand() -> None:
    # g = 0: squared distances 0.25, 2.25, 16 -> 4 : 0.444 = 0.9 : 0.1. g = 1: 0.25, 0.25, 9. g = 5: 20.25, 12.25, 1, of which the
    # two nearest are 1/12.25 : 1 = 0.075472 : 0.924528.
    weights = neighbour_weights(np.array([[0.0], [1.0], [5.0]]), np.array([[0.5], [1.5], [4.0]]), 2)
    close(weights, np.array([[0.9, 0.1, 0], [0.5, 0.5, 0], [0, 0.075472, 0.924528]]))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_rows_are_weights_of_at_most_k(n: int, k: int, seed: int) -> None:
    guidance, models = np.random.default_rng(seed).normal(size=(2, n, 4)).astype(np.float32)
    weights = neighbour_weights(guidance, models, k)
    assert (weights >= 0).all() and ((weights > 0).sum(axis=1) <= k).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    distances = ((guidance[:, None].astype(float) - models) ** 2).sum(axis=2)
    for row, near in zip(weights, distances, strict=True):
        # proportional to the inverse
        np.testing.assert_allclose(row[row > 0] * near[row > 0], (row * near).max(), rtol=1e-4)


@pytest.mark.parametrize("guidance", ["trained", "extrapolated"])
def test_one_client_gets_its_own_model_back(tmp_path: Path, guidance: str) -> None:
    federation = Federation(tmp_path, "feddwa", feddwa={"guidance": guidance}, network=lambda: small(batchnorm=True))
    uploads = federation.round(ids=[1])
    back = federation.server.model_for(1)
    assert back.params.tobytes() == uploads.W[0].tobytes() and back.buffers.tobytes() == uploads.B[0].tobytes()
    assert federation.server.model_for(0) is federation.server.global_model  # the initial model


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_it_is_feddac_without_important_parameters_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, momentum: float
) -> None:
    monkeypatch.setattr(feddwa, "STREAM", "feddac.guidance")
    common: dict[str, Any] = {"sizes": (10, 6, 8, 7), "local_epochs": 1, "momentum": momentum}
    ours = Federation(tmp_path, "feddwa", feddwa={"neighbours": 2}, **common)
    theirs = Federation(tmp_path, "feddac", feddac={"tau": 0.0, "guidance": "one-step", "neighbours": 2}, **common)
    for ids in ([0, 1, 2, 3], [0, 2, 3], [1, 2]):
        ours.round(ids=ids)
        theirs.round(ids=ids)
        for i in range(4):
            assert ours.server.model_for(i).params.tobytes() == theirs.server.model_for(i).params.tobytes()


def test_guidance_as_far_again_as_the_client_went(tmp_path: Path) -> None:
    federation = Federation(
        tmp_path, "feddwa", feddwa={"guidance": "extrapolated", "neighbours": 2}, network=lambda: small(batchnorm=True)
    )
    for _ in range(2):
        sent = [federation.server.model_for(i).params for i in range(3)]
        uploads = federation.round()
        assert not uploads.extras
        weights = neighbour_weights(2 * uploads.W - np.stack(sent), uploads.W, 2)
        for i in range(3):
            close(federation.server.model_for(i).params, weights[i] @ uploads.W)
            close(federation.server.model_for(i).buffers, weights[i] @ uploads.B)


def test_guidance_is_trained_on_from_the_model(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "feddwa")
    uploads = federation.round(ids=[2])
    ctx, received = federation.context(2, round=1)
    after = ctx.trainer.train(federation.initial)
    assert uploads.W[0].tobytes() == after.params.tobytes()
    assert (
        uploads.extras["guidance"][0].tobytes() == ctx.trainer.train(after, purpose="feddwa.guidance").params.tobytes()
    )
