"""`clip-norm` bounds every step of a client, also those that a method takes by itself: with a limit of nearly 0 nothing moves."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS
from tests.methods.federation import Federation

# what a client learns by steps of its own beside the model; 1 at first
LEARNED = {
    "apfl": ("apfl.alpha", "apfl.params"),
    "apple": ("apple.relations",),
    "fedala": ("fedala.weights",),
    "flute": ("local.params",),
    "partialfed": ("partialfed.choices",),
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_step_is_longer_than_the_limit(tmp_path: Path, method: str) -> None:
    federation: Any = Federation(tmp_path, method, momentum=0.0, weight_decay=0.0, **IN_TWO_ROUNDS.get(method, {}))
    federation.round()
    federation.rounds += 1
    federation.config = dataclasses.replace(federation.config, clip_norm=1e-9)
    update, state = federation.method.local_update(), copy.deepcopy(federation.states[1])
    before = {name: np.copy(array) for name, array in state.arrays.items()}
    ctx, received = federation.context(1)
    start = update.merge(received, state, ctx)
    tested = update.personal(start, state, ctx)
    trained = update.train(start, state, ctx)
    update.keep_local(trained, state, ctx)
    # FedAMP trains from the client's own model
    began = tested if method == "fedamp" else start
    np.testing.assert_allclose(trained.params, began.params, atol=1e-5)
    if method == "perfedavg":
        np.testing.assert_allclose(tested.params, start.params, atol=1e-5)
    for name in LEARNED.get(method, ()):
        np.testing.assert_allclose(state.arrays[name], before.get(name, 1.0), atol=1e-5)
