"""FedOBP against METHODS.md: its Table 5, a round by hand, quantiles at any size, every option, the server and client half."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.fedobp import personal_mask, select
from tests.conftest import bools, f32


def cnn(channels: int, side: int, classes: int) -> int:
    """Parameters of the paper's CNN: conv 5x5-32, conv 5x5-64, 512, classifier; `side` after the two pools."""
    return (25 * channels + 1) * 32 + (25 * 32 + 1) * 64 + (64 * side * side + 1) * 512 + 513 * classes


GREY, COLOUR = cnn(1, 4, 10), cnn(3, 5, 10)  # 28 x 28 and 32 x 32 pixels


TABLE_5 = [
    ("CIFAR10", COLOUR, 0.99998, 18),
    ("CIFAR10", COLOUR, 0.99979, 185),
    ("CIFAR100", cnn(3, 5, 100), 0.9998, 185),
    ("CIFAR100", cnn(3, 5, 100), 0.99992, 74),
    ("EMNIST", cnn(1, 4, 62), 0.995, 3044),
    ("EMNIST", cnn(1, 4, 62), 0.9991, 548),
    ("SVHN", COLOUR, 0.99997, 27),
    ("SVHN", COLOUR, 0.9998, 176),
    ("MNIST", GREY, 0.9998, 117),
    ("MNIST", GREY, 0.99993, 41),
    ("FMNIST", GREY, 0.99993, 41),
    ("FMNIST", GREY, 0.9999, 59),
    # printed: q 0.9999 and 53, which no rule gives for one q: 53 belongs to 0.99991, 0.9999 gives 59 as for FMNIST
    ("MEDMNISTA", cnn(1, 4, 11), 0.99991, 53),
    ("MEDMNISTA", cnn(1, 4, 11), 0.99995, 30),
    ("MEDMNISTC", cnn(1, 4, 11), 0.9997, 175),
    ("MEDMNISTC", cnn(1, 4, 11), 0.99995, 30),
]


@pytest.mark.parametrize(("dataset", "d", "q", "number"), TABLE_5)
def test_table_5(dataset: str, d: int, q: float, number: int) -> None:
    local = np.random.default_rng(0).permutation(np.arange(d, dtype=np.float32))  # distinct scores
    got = personal_mask(local, np.zeros(d, np.float32), [d], quantile=q)
    assert np.count_nonzero(got) == number
    assert local[got].min() == d - number  # the largest ones


def test_the_model_of_table_5_is_ours() -> None:
    from fl_app import models, weights

    assert (GREY, COLOUR) == (582_026, 878_538)
    module = models.build("cnn", in_channels=3, num_classes=10, image_size=32, norm="batch", seed=0)
    assert weights.read(module).params.size == COLOUR


# The golden round: d = 5, q = 0.5: rank floor(4 * 0.5) = 2, so two parameters are personal.
# squared differences 0.25, 4, 0, 9, 1
PREVIOUS, RECEIVED = f32(1, 2, 3, 4, 5), f32(1.5, 0, 3, 7, 4)


MASK = [False, True, False, True, False]  # the median is 1


def test_by_hand() -> None:
    assert personal_mask(PREVIOUS, RECEIVED, [5], quantile=0.5).tolist() == MASK
    assert personal_mask(PREVIOUS, RECEIVED, [5], quantile=0.5, normalization="global").tolist() == MASK
    # q = 0.6: rank 2.4, threshold 1 + 0.4 * (4 - 1) = 2.2: the same; 0.75: threshold 4: only 9; 1: nothing; 0: all but 0
    assert personal_mask(PREVIOUS, RECEIVED, [5], quantile=0.6).tolist() == MASK
    assert personal_mask(PREVIOUS, RECEIVED, [5], quantile=0.75).sum() == 1
    assert not personal_mask(PREVIOUS, RECEIVED, [5], quantile=1.0).any()
    assert personal_mask(PREVIOUS, RECEIVED, [5], quantile=0.0).tolist() == [True, True, False, True, True]


def test_normalisation_by_layer() -> None:
    # layers of 2 and 3: scores 0.25, 4 -> 0, 1; 0, 9, 1 -> 0, 1, 1/9: median 1/9, the two ones are personal.
    # Layers of 3 and 2: 0.25, 4, 0 -> 1/16, 1, 0; 9, 1 -> 1, 0: median 1/16.
    assert personal_mask(PREVIOUS, RECEIVED, [2, 3], quantile=0.5, normalization="layer").tolist() == MASK
    # first layer 0.25, 0.01: now its first is the larger one
    received = f32(1.5, 2.1, 3, 7, 4)
    assert (
        personal_mask(PREVIOUS, received, [2, 3], quantile=0.5, normalization="layer").tolist()
        == bools("10010").tolist()
    )
    assert not personal_mask(PREVIOUS, PREVIOUS, [2, 3], quantile=0.5, normalization="layer").any()  # equal scores: 0


def test_one_parameter_and_ties() -> None:
    assert not personal_mask(f32(1), f32(2), [1], quantile=0.0).any()  # d - 1 - 0 = 0
    assert not personal_mask(f32(1, 1, 1), f32(2, 2, 2), [3], quantile=0.0).any()  # none exceeds the others
    # three unchanged parameters tie at 0, q = 0.25 would take 4 - 1 = 3 of 5 if all differed
    assert personal_mask(f32(0, 0, 0, 1, 2), f32(0, 0, 0, 0, 0), [5], quantile=0.25).sum() == 2


def test_scores_that_float32_cannot_tell_apart() -> None:
    # squares underflow, differences round: 1 - 2^-30 and 1 - 2^-31 are both 1 in float32
    small = f32(1e-30, 2e-30, 3e-30, 4e-30)
    assert personal_mask(small, np.zeros(4, np.float32), [4], quantile=0.5).tolist() == [False, False, True, True]
    received = f32(2.0**-30, 2.0**-31, 2.0**-32, 0)
    assert personal_mask(f32(1, 1, 1, 1), received, [4], quantile=0.4).tolist() == [False, False, True, True]
    assert personal_mask(f32(1, 1, 1, 1), received, [4], quantile=0.9).tolist() == [False, False, False, True]


pairs = st.integers(1, 60).flatmap(
    lambda d: st.tuples(*[hnp.arrays(np.float32, d, elements=st.floats(-100, 100, width=32))] * 2)
)


@given(pairs, st.floats(0, 1), st.sampled_from(["none", "global", "layer"]))
def test_against_the_exact_order(pair: tuple[np.ndarray, np.ndarray], q: float, normalization: str) -> None:
    local, received = (a.astype(np.float64) for a in pair)
    d = len(local)
    sizes = [d // 3, d - d // 3]
    scores = np.abs(local - received)
    if normalization == "layer":
        scores = scores**2
        for part in (scores[: sizes[0]], scores[sizes[0] :]):
            if part.size:
                part[:] = (part - part.min()) / (part.max() - part.min()) if part.max() > part.min() else 0
    below = np.sort(scores)[math.floor((d - 1) * q)]
    got = personal_mask(*pair, sizes, quantile=q, normalization=normalization)
    assert (got == (scores > below)).all()
    if len(set(scores.tolist())) == d:
        assert got.sum() == d - 1 - math.floor((d - 1) * q)


def test_the_printed_rule_by_hand() -> None:
    # 0.25, 4, 0, 9, 1 sorted: 0, 0.25, 1, 4, 9. F reaches 0.5 at the third, 1, and 0.6 too; 0.75 at the fourth, 4
    for q, above in ((0.0, 5), (0.2, 4), (0.5, 2), (0.6, 2), (0.75, 1), (0.8, 1), (0.81, 0), (1.0, 0)):
        got = personal_mask(PREVIOUS, RECEIVED, [5], quantile=q, rule="printed")
        assert np.count_nonzero(got) == above, q
    assert personal_mask(PREVIOUS, RECEIVED, [5], quantile=0.5, rule="printed").tolist() == MASK
    # three counts of section 4.2; the first is Table 8's CLS on CIFAR-10
    for d, q, number in ((5130, 0.983, 87), (COLOUR, 0.7, 263_561), (COLOUR, 0.9, 87_853)):
        assert select(np.arange(d, dtype=np.float64), [d], quantile=q, rule="printed").sum() == number


@given(pairs, st.integers(0, 1000))
def test_the_printed_rule_is_its_formula(pair: tuple[np.ndarray, np.ndarray], per_mille: int) -> None:
    scores = np.abs(pair[0].astype(np.float64) - pair[1])
    d = len(scores)
    # inf {x: F(x) >= q}, with F counted in whole numbers
    reached = [x for x in scores if 1000 * np.count_nonzero(scores <= x) >= per_mille * d]
    expected = scores > min(reached) if per_mille else np.full(d, True)
    assert (personal_mask(*pair, [d], quantile=per_mille / 1000, rule="printed") == expected).all()


@given(hnp.arrays(np.int32, st.integers(1, 200), elements=st.integers(0, 10**6), unique=True), st.floats(0, 1))
def test_numpys_quantile_selects_the_same(scores: np.ndarray, q: float) -> None:
    rank = (scores.size - 1) * q
    # where interpolation itself does not round
    if abs(rank - round(rank)) > 1e-6 or rank == round(rank):
        expected = scores > np.quantile(scores.astype(np.float64), q)
        assert (select(scores.astype(np.float64), [scores.size], quantile=q) == expected).all()


@pytest.mark.parametrize("q", [0.5, 0.9999])
def test_twenty_million_parameters(q: float) -> None:
    d = 20_000_000
    # exact up to 2^24, then every second number: ties in pairs
    local = np.arange(d, dtype=np.float32)
    local[1 << 24 :] = np.arange(d - (1 << 24), dtype=np.float32) + 0.5
    # the differences are k and k + 1/2: distinct
    received = np.zeros(d, np.float32)
    local = np.ascontiguousarray(local[::-1])
    started = time.perf_counter()
    got = personal_mask(local, received, [d], quantile=q)
    seconds = time.perf_counter() - started
    assert np.count_nonzero(got) == d - 1 - math.floor((d - 1) * q)
    assert local[got].min() > local[~got].max()
    assert seconds < 20  # about 0.25 on a free core


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": PREVIOUS[:4]}, r"local has shape \(4,\), received \(5,\): both must be \[d\]"),
        ({"sizes": [2, 2]}, "sizes sum to 4, scores have 5 elements"),
        ({"quantile": 1.5}, r"quantile must be in \[0, 1\], got 1.5"),
        ({"quantile": math.nan}, "quantile must be in"),
        ({"normalization": "batch"}, "normalization must be one of none, global, layer, got 'batch'"),
        ({"received": f32(1, np.nan, 2, np.inf, 3)}, "scores must be finite, got 2 that are not"),
    ],
)
def test_personal_mask_refuses(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"local": PREVIOUS, "received": RECEIVED, "sizes": [5], "quantile": 0.5}
    with pytest.raises(ValueError, match=message):
        personal_mask(**(arguments | changes))
