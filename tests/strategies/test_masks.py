from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.kernels import masks
from tests.conftest import bools, f32
from tests.facts import rejected

# few distinct values, so that ties are the rule
tied = st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.5])
any_float = st.floats(-(2.0**99), 2.0**99, width=32)
layers = st.lists(st.lists(tied | any_float, min_size=1, max_size=30), min_size=1, max_size=5)
ratios = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]) | st.floats(0, 1)


def naive_top_k(scores: np.ndarray, sizes: list[int], ratio: float) -> np.ndarray:
    mask = np.zeros(len(scores), bool)
    for stop, n in zip(itertools.accumulate(sizes), sizes, strict=True):
        best = np.argsort(-scores[stop - n : stop], kind="stable")[: int(np.floor(ratio * n))]
        mask[stop - n + best] = True
    return mask


def stack_of_masks(n: int, d: int, k: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([np.isin(np.arange(d), rng.choice(d, k, replace=False)) for _ in range(n)])


# top_k


@given(layers, ratios)
def test_top_k_equals_the_naive_reference_and_has_exact_counts(tensors: list[list[float]], ratio: float) -> None:
    scores, sizes = np.array(sum(tensors, []), np.float32), [len(t) for t in tensors]
    mask = masks.top_k(scores, sizes, ratio)
    assert mask.dtype == np.bool_
    assert (mask == naive_top_k(scores, sizes, ratio)).all()
    counts = np.add.reduceat(mask, np.cumsum([0, *sizes[:-1]]), dtype=int)
    assert counts.tolist() == [int(np.floor(ratio * n)) for n in sizes]
    assert mask.sum() == masks.num_selected(sizes, ratio)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_top_k_refuses_non_finite_scores(bad: float) -> None:
    with rejected(ValueError, "", "scores", "finite", "got 2"):
        masks.top_k(f32(1, bad, 2, bad), [4], 0.5)


def test_top_k_refuses_what_does_not_fit() -> None:
    with rejected(ValueError, "", "sizes sum to 5", "scores have 4 elements"):
        masks.top_k(f32(1, 2, 3, 4), [2, 3], 0.5)
    for ratio in (-0.1, 1.1, np.nan):
        with rejected(ValueError, "", "ratio", "[0, 1]"):
            masks.top_k(f32(1, 2), [2], ratio)


def test_top_k_leaves_the_scores_alone() -> None:
    scores = f32(3, 1, 2, 5)
    masks.top_k(scores, [4], 0.5)
    assert scores.tolist() == [3, 1, 2, 5]


# packing


def test_pack_by_hand() -> None:
    # little bit order: parameter 0 is the lowest bit; 1 + 2^3 = 9, then parameter 9 is bit 1 of the second byte: 2.
    assert masks.pack(bools("1001 0000 01")).tolist() == [9, 2]
    assert masks.pack(bools("1001 0000 01")).dtype == np.uint8


@given(hnp.arrays(bool, st.integers(0, 200)))
def test_unpack_undoes_pack(mask: np.ndarray) -> None:
    bits = masks.pack(mask)
    assert bits.shape == (-(-len(mask) // 8),)
    assert (masks.unpack(bits, len(mask)) == mask).all()
    assert masks.popcount(bits) == mask.sum()  # the padding is zero


def test_unpack_of_a_stack() -> None:
    stack = stack_of_masks(3, 13, 5, seed=0)
    bits = np.stack([masks.pack(m) for m in stack])
    assert masks.unpack(bits, 13).dtype == np.bool_
    assert (masks.unpack(bits, 13) == stack).all()


# overlap


@given(st.integers(1, 6), st.integers(1, 300), st.data())
def test_overlap_properties(n: int, d: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, d))
    stack = stack_of_masks(n, d, k, data.draw(st.integers(0, 1000)))
    overlap = masks.overlap(np.stack([masks.pack(m) for m in stack]), k)
    assert overlap.dtype == np.float64
    assert (overlap == overlap.T).all()
    assert (np.diag(overlap) == 1).all()
    for i, j in itertools.product(range(n), repeat=2):
        assert overlap[i, j] == (stack[i] & stack[j]).sum() / k
        distance = np.abs(stack[i].astype(int) - stack[j]).sum()
        assert overlap[i, j] == pytest.approx(1 - distance / (2 * k), abs=1e-12)  # the erratum


def test_overlap_over_more_than_one_block() -> None:
    d = 2 * 64 * masks._WORDS + 13
    stack = stack_of_masks(3, d, d // 3, seed=1)
    expected = [[(a & b).sum() / (d // 3) for b in stack] for a in stack]
    assert masks.overlap(np.stack([masks.pack(m) for m in stack]), d // 3).tolist() == expected


def test_overlap_of_nothing_is_an_error() -> None:
    with rejected(ValueError, "", "num_critical", "least 1", "got 0"):
        masks.overlap(np.zeros((2, 1), np.uint8), 0)
