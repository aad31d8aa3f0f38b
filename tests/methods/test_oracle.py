"""Three rounds of an independent implementation of FedCAC, the authors', through our public functions.

tests/oracle/fedcac_rounds.npz holds numbers only, of a small MLP trained by six clients. Rounds [R] (1, 7 and 11); per round
`before` and `trained` float32 [R, 6, d], parameters before and after local training, are the inputs; `critical` uint8
[R, 6, ceil(d/8)] the packed masks, `overlap` float32 [R, 6, 6], `threshold` float32 [R], `collaborators` bool [R, 6, 6]
(diagonal True), `mean` float32 [R, d] and `personalized` float32 [R, 6, d] the outcome. Scores are distinct: ties do not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies.fedcac import collaborators, personalize, threshold
from strategies.kernels.masks import overlap, pack, top_k
from strategies.kernels.scores import sensitivity

OFF_DIAGONAL = ~np.eye(6, dtype=bool)


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    with np.load(Path(__file__).parent / "oracle" / "fedcac_rounds.npz") as npz:
        return {name: npz[name] for name in npz.files}


def our_masks(oracle: dict[str, Any], r: int) -> np.ndarray:
    pairs = zip(oracle["before"][r], oracle["trained"][r], strict=True)
    sizes, tau = oracle["sizes"].tolist(), float(oracle["tau"])
    return np.stack([pack(top_k(sensitivity(before, after), sizes, tau)) for before, after in pairs])


def num_critical(bits: np.ndarray) -> int:
    return int(np.unpackbits(bits[0]).sum())


@pytest.mark.parametrize("r", range(3))
def test_a_round(oracle: dict[str, Any], r: int) -> None:
    t, beta = int(oracle["rounds"][r]), int(oracle["beta"])
    bits = our_masks(oracle, r)
    assert (bits == oracle["critical"][r]).all()

    O = overlap(bits, num_critical(bits))  # noqa: E741
    np.testing.assert_allclose(O[OFF_DIAGONAL], oracle["overlap"][r][OFF_DIAGONAL], atol=1e-6)
    assert (collaborators(O, t, beta) == oracle["collaborators"][r] & OFF_DIAGONAL).all()
    if t <= beta:
        assert threshold(O, t / beta) == pytest.approx(float(oracle["threshold"][r]), abs=1e-6)

    mean, personalized = personalize(oracle["trained"][r], bits, t, beta=beta, weights=oracle["samples"])
    np.testing.assert_allclose(mean, oracle["mean"][r], rtol=0, atol=1e-6)
    np.testing.assert_allclose(personalized, oracle["personalized"][r], rtol=0, atol=1e-6)


def test_the_oracle_exercises_what_it_should(oracle: dict[str, Any]) -> None:
    assert oracle["rounds"].tolist() == [1, 7, 11] and int(oracle["beta"]) == 10
    assert oracle["collaborators"][:, OFF_DIAGONAL].sum(axis=1).tolist() == [10, 4, 0]
    assert sum(oracle["sizes"]) == oracle["before"].shape[2]
