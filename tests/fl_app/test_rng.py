"""Random generators derived from (seed, round, client id, purpose)."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from fl_app import rng


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("client_id", [rng.NO_CLIENT, 0, 9999])
def test_a_sequence_is_numpys_own_of_the_four_numbers(seed: int, client_id: int) -> None:
    ours = rng.seed_sequence(seed, "train", 12, client_id)
    numpys = np.random.SeedSequence([seed, 12, client_id + 1, zlib.crc32(b"train")])
    assert ours.generate_state(8).tolist() == numpys.generate_state(8).tolist()
    assert ours.spawn(1)[0].generate_state(2).tolist() == numpys.spawn(1)[0].generate_state(2).tolist()
