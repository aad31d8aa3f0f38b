from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import fedcac
from strategies.kernels import aggregate, blocks, masks
from tests.conftest import bools
from tests.facts import rejected

moderate = st.floats(-1e3, 1e3, width=32)


@st.composite
def stacks(draw: st.DrawFn) -> np.ndarray:
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 40)))
    return draw(hnp.arrays(np.float32, shape, elements=moderate))


def random_round(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stack, masks and sample counts of a round of n clients."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((n, d), dtype=np.float32)
    bits = np.stack([masks.pack(rng.random(d) < 0.5) for _ in range(n)])
    return W, bits, rng.integers(1, 100, n).astype(np.float64)


# weighted_mean


@given(stacks(), st.data())
def test_weighted_mean_equals_float64_numpy(W: np.ndarray, data: st.DataObject) -> None:
    weights = data.draw(hnp.arrays(np.float64, len(W), elements=st.floats(0.5, 1e4)))
    exact = np.average(W.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(aggregate.weighted_mean(W, weights), exact, rtol=1e-7, atol=1e-9)


@given(
    hnp.arrays(np.float32, 30, elements=st.floats(-(2.0**99), 2.0**99, width=32)),
    st.lists(st.integers(1, 999), min_size=1),
)
def test_identical_uploads_are_unchanged_bit_for_bit(row: np.ndarray, counts: list[int]) -> None:
    W = np.tile(row, (len(counts), 1))
    assert (aggregate.weighted_mean(W, np.array(counts, np.float64)) == row).all()


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [np.nan, 1], [np.inf, 1], [1], [1, 1, 1], [[1, 1]]])
def test_bad_weights(weights: Any) -> None:
    with rejected(ValueError, "", "weights", "2 numbers >= 0", "positive sum"):
        aggregate.weighted_mean(np.ones((2, 3), np.float32), np.array(weights, np.float64))


def test_no_rows() -> None:
    with rejected(ValueError, "", "least one row"):
        aggregate.weighted_mean(np.ones((0, 3), np.float32))


def test_no_columns() -> None:
    assert aggregate.weighted_mean(np.ones((2, 0), np.float32)).shape == (0,)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # several blocks, the last one shorter
    d = 200_000
    W, bits, weights = random_round(7, d)
    members = np.random.default_rng(1).random((7, 7)) < 0.4
    members |= np.eye(7, dtype=bool)

    def reductions() -> list[bytes]:
        results = [aggregate.weighted_mean(W, weights), aggregate.group_means(W, members)]
        return [a.tobytes() for a in (*results, *fedcac.collaborate(W, bits, members, weights))]

    assert d / blocks.COLUMNS > 4, "too few columns for threads"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    alone = reductions()
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert reductions() == alone


# group_means


@given(stacks(), st.data())
def test_group_means_equal_numpy(W: np.ndarray, data: st.DataObject) -> None:
    members = data.draw(hnp.arrays(bool, (3, len(W))))
    members[:, 0] = True
    expected = [W[row].astype(np.float64).mean(axis=0) for row in members]
    np.testing.assert_allclose(aggregate.group_means(W, members), expected, rtol=1e-6, atol=1e-3)


# collaborate


def naive_collaborate(
    W: np.ndarray, M: np.ndarray, members: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """METHODS.md, FedCAC steps 6 and 7, element by element in float64."""
    n, d = W.shape
    mean = np.array([sum(weights[i] * float(W[i, m]) for i in range(n)) / weights.sum() for m in range(d)])
    personalized = np.empty((n, d))
    for i in range(n):
        group = [j for j in range(n) if members[i, j]]
        for m in range(d):
            own = sum(float(W[j, m]) for j in group) / len(group)
            personalized[i, m] = own if M[i, m] else mean[m]
    return mean, personalized


@given(stacks(), st.data())
def test_collaborate_equals_the_naive_reference(W: np.ndarray, data: st.DataObject) -> None:
    n, d = W.shape
    M = data.draw(hnp.arrays(bool, (n, d)))
    members = data.draw(hnp.arrays(bool, (n, n))) | np.eye(n, dtype=bool)
    weights = data.draw(hnp.arrays(np.float64, n, elements=st.integers(1, 500).map(float)))
    bits = np.stack([masks.pack(m) for m in M])
    for got, expected in zip(
        fedcac.collaborate(W, bits, members, weights), naive_collaborate(W, M, members, weights), strict=True
    ):
        assert got.dtype == np.float32
        # float32 sums of up to 6 values below 1e3
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-3)


def test_collaborate_over_several_blocks() -> None:
    d = 3 * blocks.COLUMNS + 11  # not a multiple of 8
    W, bits, weights = random_round(4, d)
    members = np.stack([bools(m) for m in ("1100", "1100", "0010", "0111")])
    mean, personalized = fedcac.collaborate(W, bits, members, weights)
    M = masks.unpack(bits, d)
    np.testing.assert_allclose(mean, np.average(W, axis=0, weights=weights), atol=1e-6)
    for i, group in enumerate([[0, 1], [0, 1], [2], [1, 2, 3]]):
        np.testing.assert_allclose(personalized[i], np.where(M[i], W[group].mean(axis=0), mean), atol=1e-6)
