"""FedCAC against METHODS.md: the kernels, the server half under partial participation, the client half, every option."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.fedcac import (
    collaborators,
    mask_overlap,
    personalize,
    top_k_similar,
    with_vanishing,
)
from strategies.kernels import masks
from tests.conftest import bools, f32, flat_layout
from tests.facts import rejected

LAYOUT = flat_layout([8], [2])


# The golden round: N = 3, d = 8, K = 4. Sums of columns are made to be simple: w0 + w1 + 2 w2 = 17 everywhere.
W = np.stack([f32(0, 1, 2, 3, 4, 5, 6, 7), f32(2, 3, 4, 5, 6, 7, 8, 9), f32(7.5, 6.5, 5.5, 4.5, 3.5, 2.5, 1.5, 0.5)])


B = np.stack([f32(1, 10), f32(3, 20), f32(8, 60)])


WEIGHTS = np.array([1.0, 1.0, 2.0])


BITS = np.stack([masks.pack(bools(m)) for m in ("1111 0000", "1110 1000", "0000 1111")])


def symmetric(values: np.ndarray) -> np.ndarray:
    return np.asarray((values + values.T) / 2 * (1 - np.eye(len(values))) + np.eye(len(values)))


overlaps = st.integers(2, 7).flatmap(lambda n: hnp.arrays(np.float64, (n, n), elements=st.floats(0, 1))).map(symmetric)


def test_collaborators_by_hand() -> None:
    O = np.array([[1, 0.8, 0.5], [0.8, 1, 0.2], [0.5, 0.2, 1]])  # noqa: E741
    # mean over pairs (0.8 + 0.5 + 0.2)/3 = 0.5, maximum 0.8; t/beta = 1/10: threshold 0.53, so only 0 and 1.
    assert collaborators(O, 1, 10).tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    # A threshold just above 0.5 lets the pair (0, 2) out; with a third weak pair the mean falls and lets it in:
    # mean 7/15 = 0.4667, threshold 0.4667 + 0.0333 = 0.5 at t/beta = 0.1 (0.49 at 0.07)
    O[1, 2] = O[2, 1] = 0.1
    assert collaborators(O, 7, 100)[0].tolist() == [False, True, True]
    assert collaborators(O, 20, 100)[0].tolist() == [False, True, False]  # threshold 0.533


def test_collaborators_of_one_client() -> None:
    assert collaborators(np.eye(1), 1, 10).tolist() == [[False]]


@given(st.floats(0, 1), st.integers(2, 12), st.integers(1, 30))
def test_equal_overlaps_make_everyone_collaborate(value: float, n: int, round: int) -> None:
    # The mean of equal numbers may be rounded above them: the cap at O_max is what makes everyone qualify.
    O = np.where(np.eye(n, dtype=bool), 1.0, value)  # noqa: E741
    assert (collaborators(O, round, 30) == ~np.eye(n, dtype=bool)).all()


@given(overlaps)
def test_only_the_most_alike_pairs_at_beta(O: np.ndarray) -> None:  # noqa: E741, N803
    highest = O[~np.eye(len(O), dtype=bool)].max()
    assert (collaborators(O, 10, 10) == ((highest == O) & ~np.eye(len(O), dtype=bool))).all()


@given(overlaps, st.integers(1, 12))
def test_collaborators_equal_the_naive_reference(O: np.ndarray, round: int) -> None:  # noqa: E741, N803
    n = len(O)
    pairs = [O[i, j] for i in range(n) for j in range(n) if i != j]
    O_avg, O_max = sum(pairs) / len(pairs), max(pairs)
    threshold = O_max if round == 10 else min(O_max, O_avg + round / 10 * (O_max - O_avg))
    got = collaborators(O, round, 10)
    assert got.dtype == np.bool_ and not np.diag(got).any() and (got == got.T).all()
    for i in range(n):
        for j in range(n):
            if i != j and abs(O[i, j] - threshold) > 1e-12:
                assert got[i, j] == (round <= 10 and O[i, j] > threshold)


@pytest.mark.parametrize(("round", "beta"), [(0, 10), (1, 0), (-1, 5)])
def test_collaborators_refuse_rounds_below_one(round: int, beta: int) -> None:
    with rejected(ValueError, "", "round and beta", "least 1", f"got round {round}", f"beta {beta}"):
        collaborators(np.eye(2), round, beta)


def test_most_alike_breaks_ties_to_the_lower_id() -> None:
    O = np.array([[1, 0.5, 0.5, 0.2], [0.5, 1, 0.9, 0.5], [0.5, 0.9, 1, 0.9], [0.2, 0.5, 0.9, 1]])  # noqa: E741
    assert [np.flatnonzero(row).tolist() for row in top_k_similar(O, 1)] == [[1], [2], [1], [2]]
    assert [np.flatnonzero(row).tolist() for row in top_k_similar(O, 2)] == [[1, 2], [0, 2], [1, 3], [1, 2]]
    assert (top_k_similar(O, 9) == ~np.eye(4, dtype=bool)).all()


def test_most_alike_with_many_ties() -> None:
    # long enough for a sort that is not stable to show it
    n = 60
    O = symmetric(np.random.default_rng(0).choice([0.1, 0.2, 0.4], (n, n)))  # noqa: E741
    for i, row in enumerate(top_k_similar(O, 7)):
        others = sorted((j for j in range(n) if j != i), key=lambda j: (-O[i, j], j))  # noqa: B023
        assert np.flatnonzero(row).tolist() == sorted(others[:7])


def test_most_alike_does_not_choose_oneself_at_zero_overlap() -> None:
    assert top_k_similar(np.eye(3), 1).tolist() == [[False, True, False], [True, False, False], [True, False, False]]


def test_everything_critical_after_beta_is_local_training() -> None:
    bits = np.full((3, 1), 255, np.uint8)
    assert (personalize(W, bits, 3, beta=2, weights=WEIGHTS)[1] == W).all()


def test_one_client_keeps_its_model() -> None:
    mean, personalized = personalize(W[:1], BITS[:1], 1, beta=10)
    assert (mean == W[0]).all() and (personalized == W[:1]).all()


def test_mask_overlap_of_empty_masks() -> None:
    assert (mask_overlap(W, np.zeros((3, 1), np.uint8)) == np.eye(3)).all()


def test_layers_with_vanishing_scores_by_hand() -> None:
    # the largest of 3: 1e-12 is at most 1e-10, so all above 1e-20; nothing above 1e-20, so all; 2, so 2 alone; none
    importance = f32(0, 1e-12, 1e-15, 0, 1e-21, 0, 2, 1, 0, 0)
    critical = masks.top_k(importance, (3, 3, 3, 1), 0.5)
    assert critical.tolist() == bools("010 010 100 0").tolist()
    assert with_vanishing(critical, importance, (3, 3, 3, 1)).tolist() == bools("011 111 100 0").tolist()


def test_overlap_of_masks_of_different_sizes() -> None:
    unequal = np.stack([masks.pack(bools(m)) for m in ("11110000", "11000000", "00000000")])
    # 1 - |M_i - M_j| / 2|M_i|: 2 differ, of 4 and of 2; from the empty mask all 4 and 2 differ
    expected = [[1, 0.75, 0.5], [0.5, 1, 0.5], [-1, 0, 1]]
    assert mask_overlap(W, unequal, sizes_differ=True).tolist() == expected
    assert (mask_overlap(W, BITS, sizes_differ=True) == mask_overlap(W, BITS)).all()


def test_personalize_refuses_what_does_not_fit() -> None:
    unequal = np.stack([masks.pack(bools(m)) for m in ("11110000", "11100000", "00001111")])
    with rejected(ValueError, "", "masks", "equally many ones", "got [3, 4]"):
        personalize(W, unequal, 1, beta=2)
    with rejected(ValueError, "", "masks", "uint8 (3, 1)", "for W (3, 8)", "got uint8 (2, 1)"):
        personalize(W, BITS[:2], 1, beta=2)
    with pytest.raises(ValueError, match="got int64"):
        personalize(W, BITS.astype(np.int64), 1, beta=2)
    with rejected(ValueError, "", "weights", "3 numbers"):
        personalize(W, BITS, 1, beta=2, weights=np.ones(2))
