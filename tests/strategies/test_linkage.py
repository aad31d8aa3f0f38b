from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies.kernels.linkage import ALONE, held, partition, regrouped


def alike(n: int, *pairs: tuple[int, int, float]) -> np.ndarray:
    similarity = np.full((n, n), 0.1)
    for i, j, value in pairs:
        similarity[i, j] = similarity[j, i] = value
    np.fill_diagonal(similarity, 1)
    return similarity


def random_similarity(n: int, seed: int) -> np.ndarray:
    half = np.triu(np.random.default_rng(seed).random((n, n)), 1)
    return half + half.T + np.eye(n)


def test_average_linkage_by_hand() -> None:
    # 0-1 at .9; 2 has .8 and .6 with them, on average .7: joins at .7, not at .71. 3 and 4 are two: nobody's group.
    similarity = alike(5, (0, 1, 0.9), (0, 2, 0.8), (1, 2, 0.6), (3, 4, 0.95))
    assert partition(similarity, 0.7 - 1e-9).tolist() == [0, 0, 0, ALONE, ALONE]
    assert partition(similarity, 0.71).tolist() == [ALONE] * 5
    assert partition(similarity, 0.0).tolist() == [0] * 5


def test_equal_to_the_highest_overlap_is_together() -> None:
    similarity = alike(4, (1, 2, 0.8), (1, 3, 0.8), (2, 3, 0.8))
    assert partition(similarity, 0.8).tolist() == [ALONE, 0, 0, 0]


@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 999))
def test_a_partition_into_groups_of_three_and_more(n: int, threshold: float, seed: int) -> None:
    similarity = random_similarity(n, seed)
    labels = partition(similarity, threshold)
    numbers, counts = np.unique(labels[labels != ALONE], return_counts=True)
    assert (counts >= 3).all() and numbers.tolist() == list(range(len(numbers)))


def test_who_was_only_added_to_a_sum_uses_none() -> None:
    # 2 has no sum: its others were moved
    labels = np.array([0, 0, 0, 1, 1, 1, ALONE, 2])
    assert held({ALONE: [6], 1: [3, 4, 5, 7], 0: [0, 1, 2]}, labels).tolist() == [2, 2, 2, 1, 1, 1, ALONE, ALONE]


def test_who_is_absent_keeps_its_group() -> None:
    labels = np.array([0, 0, 0, 2, 2, 2, ALONE, 0])
    # 0 to 3 are there: 0, 1 and 2 are a new group, 3 has none
    after = regrouped(labels, np.array([0, 1, 2, 3]), np.array([0, 0, 0, ALONE]))
    assert after.tolist() == [3, 3, 3, ALONE, 2, 2, ALONE, 0]
    # with all there, groups are the new ones and nothing else
    parts = np.array([1, 1, 1, 0, 0, 0, ALONE, ALONE])
    assert regrouped(labels, np.arange(8), parts).tolist() == parts.tolist()
    # the first time all were alike
    assert regrouped(np.zeros(6, int), np.arange(3), np.array([0, 0, 0])).tolist() == [1, 1, 1, 0, 0, 0]
    assert regrouped(np.full(4, ALONE), np.arange(3), np.array([0, 0, 0])).tolist() == [0, 0, 0, ALONE]
