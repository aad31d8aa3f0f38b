"""Twelve rounds of an independent implementation of FedCAC (../shared/oracle/README.md) through our public functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies.aggregate import group_means
from strategies.fedcac import collaborators, personalize, threshold
from strategies.masks import overlap, pack, top_k
from strategies.scores import sensitivity

ORACLE = Path(__file__).resolve().parents[2] / "shared" / "oracle" / "fedcac_mlp.npz"
ROUNDS = range(12)
OFF_DIAGONAL = ~np.eye(6, dtype=bool)

pytestmark = pytest.mark.skipif(not ORACLE.is_file(), reason=f"the oracle's data is not here: {ORACLE}")


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    with np.load(ORACLE) as npz:
        arrays = {name: npz[name] for name in npz.files}
    shapes = [tuple(int(n) for n in text.strip("()").split(",") if n.strip()) for text in arrays["param_shapes"]]
    arrays["sizes"] = [int(np.prod(shape)) for shape in shapes]
    assert len(arrays["prev"]) == len(ROUNDS) and sum(arrays["sizes"]) == arrays["prev"].shape[2]
    return arrays


def our_masks(oracle: dict[str, Any], r: int) -> np.ndarray:
    pairs = zip(oracle["prev"][r], oracle["trained"][r], strict=True)
    tau = float(oracle["tau"])
    return np.stack([top_k(sensitivity(before, after), oracle["sizes"], tau) for before, after in pairs])


@pytest.mark.parametrize("r", ROUNDS)
def test_a_round(oracle: dict[str, Any], r: int) -> None:
    beta, W = int(oracle["beta"]), oracle["trained"][r]
    M = our_masks(oracle, r)
    assert (M == oracle["crit"][r].astype(bool)).all()

    bits = np.stack([pack(row) for row in M])
    O = overlap(bits, int(M[0].sum()))  # noqa: E741
    np.testing.assert_allclose(O[OFF_DIAGONAL], oracle["overlap"][r][OFF_DIAGONAL], atol=1e-6)
    np.testing.assert_allclose(O[OFF_DIAGONAL].mean(), oracle["avg"][r], atol=1e-6)
    np.testing.assert_allclose(O[OFF_DIAGONAL].max(), oracle["max"][r], atol=1e-6)

    chosen = collaborators(O, r + 1, beta)
    assert (chosen == oracle["collab"][r].astype(bool) & OFF_DIAGONAL).all()

    mean, personalized = personalize(W, bits, r + 1, beta=beta, weights=oracle["sample_num"])
    np.testing.assert_allclose(mean, oracle["glob"][r], rtol=0, atol=1e-6)
    np.testing.assert_allclose(personalized, oracle["synced"][r], rtol=0, atol=1e-6)

    np.testing.assert_allclose(group_means(W, chosen | np.eye(6, dtype=bool)), oracle["custom"][r], rtol=0, atol=1e-6)


@pytest.mark.parametrize("r", range(10))
def test_the_threshold(oracle: dict[str, Any], r: int) -> None:
    O = overlap(np.stack([pack(row) for row in our_masks(oracle, r)]), int(oracle["crit"][r, 0].sum()))  # noqa: E741
    assert threshold(O, (r + 1) / int(oracle["beta"])) == pytest.approx(float(oracle["threshold"][r]), abs=1e-6)


def test_the_oracle_exercises_what_it_should(oracle: dict[str, Any]) -> None:
    sizes = oracle["collab"].astype(bool)[:, OFF_DIAGONAL].sum(axis=1)
    assert sizes[0] > 0 and (sizes[10:] == 0).all() and len(set(sizes.tolist())) > 2
