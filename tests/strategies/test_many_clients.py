"""Kernels over hundreds of clients: their own ways to a sum give what the plain formula gives, and tiny factors cost nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import fedcac
from strategies.baselines import fedamp, feddwa
from strategies.fedpake import num_differing
from strategies.kernels import aggregate, blocks, masks, robust, trimming
from tests.conftest import config, flat_layout

moderate = st.floats(-1e3, 1e3, width=32)


@pytest.fixture
def two_are_many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make two clients so many that every sum takes its own way."""
    monkeypatch.setattr(aggregate, "MANY", 2)
    monkeypatch.setattr(aggregate, "_SPARSE", 1)
    yield


@st.composite
def stacks(draw: st.DrawFn, least: int = 2) -> np.ndarray:
    shape = (draw(st.integers(least, 7)), draw(st.integers(1, 40)))
    return draw(hnp.arrays(np.float32, shape, elements=moderate))


@st.composite
def stacks_and_weights(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    W = draw(stacks())
    shape = (draw(st.integers(1, 5)), len(W))
    return W, draw(hnp.arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.25, -0.5, 1.0, 1e-40, 1e-60])))


# weighted sums


@pytest.mark.usefixtures("two_are_many")
@given(stacks_and_weights())
def test_sums_term_by_term_equal_the_product(case: tuple[np.ndarray, np.ndarray]) -> None:
    W, weights = case
    expected = np.where(np.abs(weights) < 1e-30, 0, weights) @ W.astype(np.float64)
    np.testing.assert_allclose(aggregate.mix(W, weights), expected, rtol=1e-5, atol=1e-3)
    own = W.copy()
    if len(weights) == len(W):
        np.testing.assert_array_equal(aggregate.mix(own, weights, out=own), aggregate.mix(W, weights))


def test_rows_of_few_terms_and_of_many_side_by_side() -> None:
    rng = np.random.default_rng(0)
    n = aggregate.MANY + 3
    W = rng.standard_normal((n, 9_000), dtype=np.float32)
    weights = rng.random((n, n))
    # all but every third row have two terms, the last of them none
    few = np.arange(n) % 3 > 0
    weights[few, 2:] = 0
    weights[n - 1] = 0
    np.testing.assert_allclose(aggregate.mix(W, weights), weights @ W.astype(np.float64), atol=2e-3)
    members = weights > 0
    members[n - 1, 7] = True
    means = (members @ W.astype(np.float64)) / members.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(aggregate.group_means(W, members), means, atol=1e-5)


def test_factors_that_float32_cannot_multiply_with_are_zero() -> None:
    weights = np.array(
        [[1.0, 1e-39, 1e-30, 1e-32, 0.5], [2e-38, 1e-39, 2e-38, 0, -1e-40], [-1.0, -1e-37, 1e-46, 1e-300, 0]]
    )
    assert aggregate.factors(weights).tolist() == [
        [1, 0, np.float32(1e-30), 0, 0.5],
        [np.float32(2e-38), 0, np.float32(2e-38), 0, 0],
        [-1, 0, 0, 0, 0],
    ]
    # what is left is a normal number, or 0
    left = np.abs(aggregate.factors(10.0 ** -np.random.default_rng(0).uniform(0, 60, (50, 50))))
    assert ((left == 0) | (left >= np.finfo(np.float32).tiny)).all()


@given(stacks_and_weights())
def test_tiny_factors_leave_the_other_terms_bits(case: tuple[np.ndarray, np.ndarray]) -> None:
    W, weights = case
    without = np.where(np.abs(weights) < 1e-30, 0, weights)
    np.testing.assert_array_equal(aggregate.mix(W, weights), aggregate.mix(W, without))


# distances


def naive(V: np.ndarray, W: np.ndarray) -> np.ndarray:
    return ((V[:, None].astype(np.float64) - W[None].astype(np.float64)) ** 2).sum(axis=2)


@pytest.mark.usefixtures("two_are_many")
@given(stacks(), st.data())
def test_distances_of_many_equal_the_formula(W: np.ndarray, data: st.DataObject) -> None:
    V = data.draw(hnp.arrays(np.float32, W.shape, elements=moderate))
    most = np.abs(W).max(initial=1) ** 2 * W.shape[1]
    np.testing.assert_allclose(aggregate.squared_distances(W, V), naive(V, W), rtol=1e-6, atol=1e-6 * most)
    np.testing.assert_allclose(aggregate.squared_distances(W), naive(W, W), rtol=1e-6, atol=1e-6 * most)
    few = V[: len(V) // 2 + 1]
    np.testing.assert_allclose(aggregate.distances_between(few, W), naive(few, W), rtol=1e-6, atol=1e-6 * most)
    np.testing.assert_array_equal(np.diag(aggregate.squared_distances(W, W)), 0)


@pytest.mark.parametrize("two", [False, True])
def test_close_clusters_are_measured_as_exactly_as_pairs(monkeypatch: pytest.MonkeyPatch, two: bool) -> None:
    rng = np.random.default_rng(0)
    # clusters in clusters, a first row far from all: hardly any digit of their distances is in products of differences from it
    places = rng.choice([1e3, -2e3, 3e3], (300, 1)) + rng.choice([0, 0.1], (300, 1))
    W = (places + 1e-3 * rng.standard_normal((300, 40))).astype(np.float32)
    W[0] = 1e6
    W[5] = W[6]
    V = W + np.float32(1e-3) * rng.standard_normal(W.shape, dtype=np.float32) if two else None
    singly = []
    monkeypatch.setattr(aggregate, "_directly", lambda *arguments: singly.append(np.count_nonzero(arguments[3])))
    found = aggregate.squared_distances(W, V)
    np.testing.assert_allclose(found, naive(W if V is None else V, W), rtol=1e-4, atol=1e-9)
    if V is None:
        assert found[5, 6] == found[6, 5] == 0
    # tens of thousands of pairs lie close
    assert sum(singly) < 10 * len(W)


def test_narrow_blocks_leave_the_means_bits() -> None:
    rng = np.random.default_rng(0)
    W = rng.standard_normal((300, 40_961), dtype=np.float32)
    weights = rng.integers(1, 9, 300).astype(np.float64)
    whole = aggregate.mean_block(W, weights, weights.sum()).astype(np.float32)
    np.testing.assert_array_equal(aggregate.weighted_mean(W, weights), whole)
    assert [blocks.columns_for(n) for n in (1, 255, 256, 1000, 10_000, 10**6)] == [
        32768,
        32768,
        32768,
        8192,
        4096,
        4096,
    ]


# medians


@pytest.mark.parametrize("n", [256, 257])
def test_columns_of_many_are_sorted_as_by_the_network(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    W = np.random.default_rng(n).integers(-50, 50, (n, 40)).astype(np.float32)
    np.testing.assert_array_equal(np.array(trimming.ascending(W.copy())), np.sort(W, axis=0))
    many = trimming.trimmed(W, np.arange(n), n // 4), robust.distances_to_median(W, range(n))
    monkeypatch.setattr(aggregate, "MANY", n + 1)
    one_by_one = trimming.trimmed(W, np.arange(n), n // 4), robust.distances_to_median(W, range(n))
    for a, b in zip(many, one_by_one, strict=True):
        np.testing.assert_array_equal(a, b)


# counts


@given(st.integers(1, 30), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_counts_in_small_blocks(n: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.random((n, d)) < 0.4
    classes = rng.integers(0, 6, (n, d)).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "_BLOCK_WORDS", 1)
        patch.setattr("strategies.fedpake._BLOCK_WORDS", 1)
        common = masks.common_ones(np.stack([masks.pack(row) for row in chosen]))
        differing = num_differing(classes, 5)
    np.testing.assert_array_equal(common, chosen.astype(np.int64) @ chosen.T.astype(np.int64))
    np.testing.assert_array_equal(differing, (classes[:, None] != classes).sum(axis=2))


# neighbours


def test_the_strongest_of_each_row() -> None:
    weights = np.array([[0, 0.3, 0.1, 0.3], [0.2, 0, 0.2, 0.2], [0, 0, 0, 0.4]])
    assert fedamp.strongest(weights, 1).tolist() == [[0, 0.3, 0, 0], [0.2, 0, 0, 0], [0, 0, 0, 0.4]]
    assert fedamp.strongest(weights, 2).tolist() == [[0, 0.3, 0, 0.3], [0.2, 0, 0.2, 0], [0, 0, 0, 0.4]]
    for everybody in (0, 4, 9):
        np.testing.assert_array_equal(fedamp.strongest(weights, everybody), weights)


@given(stacks(), st.integers(0, 8), st.booleans())
def test_attention_to_so_many_others_sums_to_one(W: np.ndarray, neighbours: int, convex: bool) -> None:
    weights = fedamp.attention(W / 1e3, sigma=1.0, alpha=0.5, convex=convex, neighbours=neighbours)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    others = weights.copy()
    np.fill_diagonal(others, 0)
    assert (np.count_nonzero(others, axis=1) <= (neighbours or len(W))).all()
    if not neighbours:
        np.testing.assert_array_equal(weights, fedamp.attention(W / 1e3, sigma=1.0, alpha=0.5, convex=convex))


def test_fedcac_keeps_the_collaborators_most_alike() -> None:
    overlap = np.array([[1, 0.9, 0.8, 0.1], [0.9, 1, 0.7, 0.1], [0.8, 0.7, 1, 0.6], [0.1, 0.1, 0.6, 1]])
    everybody = fedcac.collaborators(overlap, 1, 100)
    assert everybody.sum(axis=1).tolist() == [2, 2, 3, 1]
    for neighbours, expected in ((0, everybody), (1, [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]])):
        half = fedcac.FedCAC.of_settings(config(method="fedcac", fedcac={"neighbours": neighbours, "beta": 100}))
        half.layout = flat_layout([2, 2], [1])
        np.testing.assert_array_equal(half.choose(overlap, 1), np.array(expected, bool))


def test_feddwa_weights_do_not_depend_on_the_way_to_the_distances() -> None:
    rng = np.random.default_rng(0)
    W = rng.standard_normal((300, 70), dtype=np.float32)
    V = W + np.float32(0.1) * rng.standard_normal(W.shape, dtype=np.float32)
    many = feddwa.neighbour_weights(V, W, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "MANY", 10_000)
        np.testing.assert_allclose(many, feddwa.neighbour_weights(V, W, 5), rtol=1e-9)
