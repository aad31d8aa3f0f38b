"""FedPake against METHODS.md: a round by hand in all readings, a naive reference, limits, and the server half."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fl_app.rng import generator
from strategies import fedpake
from strategies.fedpake import (
    FedPakeParams,
    LayerSplit,
    aggregate,
    aggregate_layers,
    divide,
    macro_classes,
    most_frequent,
    num_differing,
)
from strategies.kernels import aggregate as reductions
from tests.conftest import f32, flat_layout
from tests.methods import halves

PRINTED: dict[str, Any] = {"threshold": 0.2, "num_micro": 4, "num_macro": 4, "delta": 0.2}


READINGS = [(meaning, divisor) for meaning in ("similarity", "distance") for divisor in ("found", "limit")]


# The golden round: N = 3, one layer of M = 4 with mean 1 everywhere.
#   m        w0   w1   w2   squared deviations   std      normalised cv   Micro-Class (C = 4)
#   0         1    1    1   0     0     0        0        0 (low)         -
#   1         0    0    3   1     1     4        sqrt(2)  1               4 4 4   (4 is beyond the bins: class C)
#   2       0.5  0.5    2   0.25  0.25  1        sqrt(.5) 0.5             1 1 4
#   3       1.5  1.5    0   0.25  0.25  1        sqrt(.5) 0.5             1 1 4
W = np.stack([f32(1, 0, 0.5, 1.5), f32(1, 0, 0.5, 1.5), f32(1, 3, 2, 0)])


# SIM(0, 1) = 1, SIM(0, 2) = SIM(1, 2) = 1 - 2/3 = 1/3.
# delta = 0.2 as a similarity: 1/3 is enough, one Macro-Class; as a distance: 2/3 is too far, {0, 1} and {2}.
#
# One class: Q = (4, 1, 1), shares 1/3, 2/3, 2/3; the mean is 1: found (s = 1): 1/3, 2/3, 2/3; limit S = 4: a quarter of that.
# Two: Q0 = (4, 1, 1), shares 1/3, 2/3, 2/3; Q1 = (4, 4, 4), shares 1, 1, 1.
#   found (s = 2): m=1: 1/6 * 0 + 1/2 * 3 = 3/2;  m=2: 1/3 * 1/2 + 1/2 * 2 = 7/6;  m=3: 1/3 * 3/2 + 1/2 * 0 = 1/2
#   limit (S = 4): half of that.
GOLDEN = {
    ("similarity", "found"): [1, 1 / 3, 2 / 3, 2 / 3],
    ("similarity", "limit"): [1, 1 / 12, 1 / 6, 1 / 6],
    ("distance", "found"): [1, 3 / 2, 7 / 6, 1 / 2],
    ("distance", "limit"): [1, 3 / 4, 7 / 12, 1 / 4],
}


@pytest.mark.parametrize(("meaning", "divisor"), READINGS)
def test_golden_round_in_all_four_readings(meaning: str, divisor: str) -> None:
    got = aggregate(W, [4], delta_meaning=meaning, divisor=divisor, **PRINTED)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, GOLDEN[meaning, divisor], rtol=1e-6)


@pytest.mark.parametrize("divisor", ["found", "limit"])
def test_normalised_weights_sum_to_one(divisor: str) -> None:
    # One Macro-Class: the mean. Two: m=1: 3/2 over 1/6 + 1/2 = 9/4; m=2: 7/6 over 5/6 = 7/5; m=3: 1/2 over 5/6 = 3/5.
    one = aggregate(W, [4], delta_meaning="similarity", divisor=divisor, normalize=True, **PRINTED)
    two = aggregate(W, [4], delta_meaning="distance", divisor=divisor, normalize=True, **PRINTED)
    np.testing.assert_allclose(one, [1, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(two, [1, 9 / 4, 7 / 5, 3 / 5], rtol=1e-6)


def test_delta_at_the_similarity_itself_still_merges() -> None:
    # distances 2/3: 1 - delta = 2/3 up to rounding for delta = 1/3
    for delta, macro in ((1 / 3, 1), (0.34, 2), (0.33, 1)):
        params = FedPakeParams(delta=delta)
        assert aggregate_layers(W, [4], params)[1] == [LayerSplit(3, macro)]


def test_the_limit_cuts_where_delta_would_not() -> None:
    split = aggregate_layers(W, [4], FedPakeParams(num_macro=1, delta_meaning="distance"))[1]
    assert split == [LayerSplit(3, 1)]


def test_signed_and_absolute_coefficient_of_variation() -> None:
    # means -1, -1, 1, 1; std 0, sqrt(.5), sqrt(.5), 0. Signed cv: -0, -0.7, 0.7, 0, normalised 0.5, 0, 1, 0.5: all but the
    # second are high. Absolute: 0, 0.7, 0.7, 0 -> 0, 1, 1, 0.
    stack = np.stack([f32(-1, -0.5, 0.5, 1), f32(-1, -0.5, 0.5, 1), f32(-1, -2, 2, 1)])
    for cv, high in (("signed", 3), ("absolute", 2)):
        assert aggregate_layers(stack, [4], FedPakeParams(cv=cv))[1][0].num_high == high  # type: ignore[arg-type]


def test_a_mean_of_zero_is_a_large_dispersion() -> None:
    stack = np.stack([f32(1, 1, 2), f32(1, -1, 2)])
    _, split = aggregate_layers(stack, [3], FedPakeParams(delta_meaning="distance"))
    assert split == [LayerSplit(1, 1)]  # (1, -1): deviations 1, 1


def test_scaled_deviations_fill_the_bins() -> None:
    # squared deviations over their largest: 1/4, 1/4, 1 in every high parameter, classes 1, 1, 4. SIM(0, 2) = 0: {0, 1} and {2}.
    # All shares are 1, the weights 1/2: m=1: 0/2 + 3/2;  m=2: 1/4 + 1;  m=3: 3/4 + 0.
    got, split = aggregate_layers(W, [4], FedPakeParams(deviations="scaled"))
    assert split == [LayerSplit(3, 2)]
    np.testing.assert_allclose(got, [1, 3 / 2, 5 / 4, 3 / 4], rtol=1e-6)
    # a scale of the weights does not matter
    small = aggregate_layers(W / np.float32(1024), [4], FedPakeParams(deviations="scaled"))[0]
    np.testing.assert_array_equal(small, got / np.float32(1024))


@pytest.mark.parametrize(
    ("over", "delta", "macro"),
    [
        ("high", 0.33, 1),
        ("high", 0.34, 2),
        ("all", 0.4, 1),
        ("all", 0.41, 2),
        ("printed", 0.0, 1),
        ("printed", 0.01, 2),
    ],
)
def test_the_parameters_that_similarity_counts(over: Any, delta: float, macro: int) -> None:
    # a fifth parameter of low dispersion: mean 100, squared deviations 0.16, 0.16, 0.64, classes 1 1 3. Clients 0 and 2 differ in
    # 2 of 3 high parameters, and in 3 of 5: SIM = 1 - 2/3 (high), 1 - 3/5 (all), 1 - 3/3 (printed)
    stack = np.concatenate([W, f32(99.6, 99.6, 100.8)[:, None]], axis=1)
    params = FedPakeParams(delta=delta, similarity_over=over)
    assert aggregate_layers(stack, [5], params)[1] == [LayerSplit(3, macro)]


def test_random_macro_classes_of_weights_of_usual_size() -> None:
    # all in Micro-Class 1: every share is 1, and the high parameters become the sum of the groups' means over s = 2, or over S = 4
    stack = np.stack([f32(1, 0.1), f32(1, 0.2), f32(1, 0.4), f32(1, 0.6)])

    class Drawn:
        def integers(self, high: int, size: tuple[int, int]) -> np.ndarray:
            assert (high, size) == (4, (1, 4))
            return np.array([[3, 0, 3, 3]])

    for divisor, expected in (("found", (1.1 / 3 + 0.2) / 2), ("limit", (1.1 / 3 + 0.2) / 4)):
        params = FedPakeParams(random_macro=True, divisor=divisor)  # type: ignore[arg-type]
        got, split = aggregate_layers(stack, [2], params, lambda purpose: Drawn())  # type: ignore[arg-type, return-value]
        assert split == [LayerSplit(1, 2)]
        np.testing.assert_allclose(got, [1, expected], rtol=1e-6)


def test_layers_are_separate() -> None:
    stack = np.concatenate([W, W[:, :1] * 7, W], axis=1)
    got, splits = aggregate_layers(stack, [4, 1, 0, 4], FedPakeParams(delta_meaning="distance"))
    np.testing.assert_allclose(got, [1, 3 / 2, 7 / 6, 1 / 2, 7, 1, 3 / 2, 7 / 6, 1 / 2], rtol=1e-6)
    assert splits == [LayerSplit(3, 2), LayerSplit(0, 0), LayerSplit(0, 0), LayerSplit(3, 2)]


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 6), st.integers(1, 200)), elements=st.integers(0, 8)))
def test_num_differing(classes: np.ndarray) -> None:
    got = num_differing(classes, 8)
    assert (got == (classes[:, None] != classes[None]).sum(axis=2)).all()


@given(
    hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 30)), elements=st.integers(1, 5)),
    st.integers(1, 3),
)
def test_most_frequent_takes_the_smaller_class_in_a_tie(classes: np.ndarray, groups: int) -> None:
    members = [m for m in np.array_split(np.arange(len(classes)), groups) if m.size]
    got = most_frequent(classes, members, 5)
    for row, rows in zip(got, members, strict=True):
        for m in range(classes.shape[1]):
            counts = Counter(classes[rows, m].tolist())
            assert row[m] == min(c for c in counts if counts[c] == max(counts.values()))


def test_most_frequent_counts_beyond_255_clients() -> None:
    classes = np.array([[1]] * 256 + [[2]] * 300, np.uint8)
    assert most_frequent(classes, [np.arange(556)], 2).tolist() == [[2]]


def test_macro_classes_by_average_linkage() -> None:
    # 0-1 at 0.1, 2-3 at 0.2, between them 0.5, 0.5, 0.7, 0.7 (average 0.6; single linkage would join at 0.5)
    distance = np.array([[0, 0.1, 0.5, 0.7], [0.1, 0, 0.5, 0.7], [0.5, 0.5, 0, 0.2], [0.7, 0.7, 0.2, 0]])

    def groups(**params: Any) -> list[int]:
        return macro_classes(1 - distance, FedPakeParams(**params)).tolist()

    assert groups(delta=0.15, delta_meaning="distance") == [0, 0, 1, 2]
    assert groups(delta=0.55, delta_meaning="distance") == [0, 0, 1, 1]
    assert groups(delta=0.6, delta_meaning="distance") == [0, 0, 0, 0]
    assert groups(delta=0.4) == [0, 0, 0, 0] and groups(delta=0.45) == [0, 0, 1, 1]
    assert groups(delta=1.0, num_macro=4) == [0, 1, 2, 3]
    assert groups(delta=1.0, num_macro=2) == [0, 0, 1, 1]
    assert macro_classes(np.eye(1), FedPakeParams()).tolist() == [0]
    assert groups(delta=0.49, delta_meaning="distance", linkage="single") == [0, 0, 1, 1]
    assert groups(delta=0.5, delta_meaning="distance", linkage="single") == [0, 0, 0, 0]
    assert groups(delta=0.69, delta_meaning="distance", linkage="complete") == [0, 0, 1, 1]
    assert groups(delta=0.7, delta_meaning="distance", linkage="complete") == [0, 0, 0, 0]


def drawn_for(purpose: str) -> np.random.Generator:
    return generator(3, purpose, 9)


def reference(W: np.ndarray, sizes: Sequence[int], p: FedPakeParams) -> np.ndarray:
    """METHODS.md word by word, one element and one pair at a time, float64. Random classes are those of `drawn_for`."""
    out, stop, n = [], 0, len(W)
    drawn_groups = drawn_for("fedpake-macro").integers(p.num_macro, size=(len(sizes), n))
    for layer, size in enumerate(sizes):
        start, stop = stop, stop + size
        X = W[:, start:stop].astype(np.float64)
        mean = X.mean(axis=0)
        std = np.sqrt(((X - mean) ** 2).mean(axis=0))
        low = np.where(mean < 0, np.minimum(mean, -1e-12), np.maximum(mean, 1e-12))
        cv = std / (np.abs(low) if p.cv == "absolute" else low)
        spread = cv.max() - cv.min()
        high = np.flatnonzero((cv - cv.min()) / spread > p.threshold) if spread else np.zeros(0, int)
        E = [
            [min(max(math.ceil(p.num_micro * (X[k, m] - mean[m]) ** 2), 1), p.num_micro) for m in range(size)]
            for k in range(n)
        ]
        if p.random_micro:
            E = drawn_for(f"fedpake-micro-{layer}").integers(1, p.num_micro + 1, (n, size), np.uint8).tolist()
        new = mean.copy()
        if len(high):
            sim = np.array(
                [[1 - sum(E[a][m] != E[b][m] for m in high) / len(high) for b in range(n)] for a in range(n)]
            )
            groups = cluster(sim, p)
            if p.random_macro:
                groups = [np.flatnonzero(drawn_groups[layer] == j).tolist() for j in set(drawn_groups[layer])]
            s = len(groups) if p.divisor == "found" else p.num_macro
            value, total = np.zeros(size), np.zeros(size)
            for G in groups:
                Q = {}
                for m in high:
                    counts = Counter(E[k][m] for k in G)
                    Q[m] = min(c for c in counts if counts[c] == max(counts.values()))
                of_class = Counter(Q.values())
                for m in high:
                    alpha = of_class[Q[m]] / (s * len(high))
                    value[m] += alpha * X[G, m].mean()
                    total[m] += alpha
            new[high] = value[high] / total[high] if p.normalize else value[high]
        out.append(new)
    return np.concatenate(out)


def spread_out(rng: np.random.Generator, n: int, d: int, scale: float) -> np.ndarray:
    """Means of both signs away from 0, so that the coefficient of variation is high in many places."""
    mean = rng.uniform(1, 3, d) * rng.choice([-1, 1], d)
    return np.asarray(mean + scale * rng.standard_normal((n, d)), np.float32)


def cluster(sim: np.ndarray, p: FedPakeParams) -> list[list[int]]:
    """Average linkage, merging the nearest pair of clusters again and again."""
    groups = [[k] for k in range(len(sim))]

    def distance(a: list[int], b: list[int]) -> float:
        return float(np.mean([1 - sim[i, j] for i in a for j in b]))

    largest = 1 - p.delta if p.delta_meaning == "similarity" else p.delta
    while len(groups) > 1:
        d, a, b = min((distance(x, y), i, j) for i, x in enumerate(groups) for j, y in enumerate(groups) if i < j)
        if d > largest + 1e-9 and len(groups) <= p.num_macro:
            break
        groups[a] += groups.pop(b)
    return groups


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cv", ["signed", "absolute"])
@pytest.mark.parametrize(("meaning", "divisor"), READINGS)
@pytest.mark.parametrize("scale", [0.05, 0.6])
def test_against_the_naive_reference(scale: float, meaning: Any, divisor: Any, cv: Any, normalize: bool) -> None:
    rng = np.random.default_rng(5)
    # large enough that no two pairs of clients have the same similarity
    sizes = [311, 151]
    stack = spread_out(rng, 7, 462, scale)
    # a group that resembles each other
    stack[:3] += np.float32(scale) * rng.standard_normal(462).astype(np.float32)
    p = FedPakeParams(0.3, 5, 3, 0.55, meaning, divisor, cv, normalize)
    got = aggregate_layers(stack, sizes, p)[0]
    np.testing.assert_allclose(got, reference(stack, sizes, p), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize(("meaning", "macro"), [("similarity", [0, 0, 0]), ("distance", [0, 0, 1])])
def test_division_of_the_golden_round(meaning: Any, macro: list[int]) -> None:
    found = divide(W, FedPakeParams(delta_meaning=meaning))
    assert found.high.tolist() == [False, True, True, True]
    assert found.micro.tolist() == [[0, 4, 1, 1], [0, 4, 1, 1], [0, 4, 4, 4]]
    assert found.macro.tolist() == macro


def test_a_layer_in_class_1_and_one_without_dispersion_are_divided() -> None:
    # a tenth of the golden deviations: all squares are at most 0.04, and C = 4 has its first bin up to 0.25
    found = divide(1 + (W - 1) / 10, FedPakeParams())
    assert found.micro.tolist() == [[0, 1, 1, 1]] * 3 and found.macro.tolist() == [0, 0, 0]
    # one parameter has no other to be normalised by
    alone = divide(W[:, 1:2], FedPakeParams())
    assert alone.high.tolist() == [False] and not alone.micro.any() and not alone.macro.any()


@pytest.mark.parametrize("divisor", ["found", "limit"])
@pytest.mark.parametrize(("micro", "macro"), [(True, False), (False, True), (True, True)])
def test_random_classes_against_the_naive_reference(micro: bool, macro: bool, divisor: Any) -> None:
    stack = spread_out(np.random.default_rng(8), 7, 462, 0.6)
    p = FedPakeParams(0.3, 5, 3, 0.2, divisor=divisor, random_micro=micro, random_macro=macro)
    got = aggregate_layers(stack, [311, 151], p, drawn_for)[0]
    np.testing.assert_allclose(got, reference(stack, [311, 151], p), rtol=2e-6, atol=1e-9)


def test_blocks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    sizes = [1000, 500]
    stack = spread_out(rng, 6, 1500, 0.7)
    # whole blocks of class 1 in a layer that has others
    stack[:, :600] = stack[0, :600] + 0.1 * stack[:, :600]
    monkeypatch.setattr(fedpake, "_BLOCK", 136)
    monkeypatch.setattr(fedpake, "_CHUNK", 6)
    for meaning in ("similarity", "distance"):
        p = FedPakeParams(threshold=0.3, num_micro=6, delta=0.45, delta_meaning=meaning)  # type: ignore[arg-type]
        got = aggregate_layers(stack, sizes, p)[0]
        np.testing.assert_allclose(got, reference(stack, sizes, p), rtol=2e-6, atol=1e-9)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = np.random.default_rng(1).standard_normal((5, 700_001), dtype=np.float32)
    results = []
    for count in (1, 2, 7):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        found = []
        for changes in ({"delta_meaning": "distance"}, {"random_micro": True}, {"random_macro": True}):
            params = FedPakeParams(**PRINTED, **changes)  # type: ignore[arg-type]
            found.append(aggregate_layers(stack, [500_000, 200_001], params)[0].tobytes())
        results.append(found)
    assert results[0] == results[1] == results[2] and len(set(results[0])) == 3


values = st.floats(-4, 4, width=32)


stacks = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 40)), elements=values)


readings = st.sampled_from(READINGS)


@given(stacks, readings, st.booleans(), st.sampled_from(["signed", "absolute"]))
def test_threshold_one_is_the_uniform_mean(W: np.ndarray, reading: Any, normalize: bool, cv: str) -> None:
    meaning, divisor = reading
    got = aggregate(
        W,
        [W.shape[1]],
        delta_meaning=meaning,
        divisor=divisor,
        cv=cv,
        normalize=normalize,
        **(PRINTED | {"threshold": 1.0}),
    )
    # bit for bit, but for the sign of a zero
    np.testing.assert_array_equal(got, reductions.weighted_mean(W))


@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.integers(1, 7),
    readings,
)
def test_identical_uploads_stay_unchanged_bit_for_bit(w: np.ndarray, n: int, reading: Any) -> None:
    got = aggregate(np.stack([w] * n), [w.size], delta_meaning=reading[0], divisor=reading[1], **PRINTED)
    assert got.tobytes() == w.tobytes()


def test_identical_uploads_of_a_size_that_float32_sums_get_wrong() -> None:
    w = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
    got = aggregate(np.stack([w] * 7), [60_000, 40_000], delta_meaning="distance", divisor="limit", **PRINTED)
    assert got.tobytes() == w.tobytes()


@given(stacks, readings)
def test_one_client_keeps_its_model(W: np.ndarray, reading: Any) -> None:
    got = aggregate(W[:1], [W.shape[1]], delta_meaning=reading[0], divisor=reading[1], **PRINTED)
    assert (got == W[0]).all()


@settings(max_examples=100)
@given(stacks, readings)
def test_weights_sum_to_at_most_one(W: np.ndarray, reading: Any) -> None:
    # so with all weights >= 0 nothing leaves [0, largest]
    W = np.abs(W)
    got = aggregate(W, [W.shape[1]], delta_meaning=reading[0], divisor=reading[1], **PRINTED)
    assert (got >= 0).all() and (got <= W.max(axis=0) * (1 + 1e-6)).all()


def test_weights_of_usual_size_are_all_in_class_one_and_the_readings_decide() -> None:
    # deviations far below 1/C: one Macro-Class, one Micro-Class: `found` is FedAvg, `limit` shrinks to 1/S where high
    rng = np.random.default_rng(0)
    stack = (0.05 * rng.standard_normal(5000) + 0.01 * rng.standard_normal((20, 5000))).astype(np.float32)
    mean = reductions.weighted_mean(stack)
    for meaning in ("similarity", "distance"):
        got, (split,) = aggregate_layers(stack, [5000], FedPakeParams(delta_meaning=meaning))  # type: ignore[arg-type]
        assert split.num_macro == 1 and split.num_high > 0 and got.tobytes() == mean.tobytes()
        shrunk = aggregate(stack, [5000], delta_meaning=meaning, divisor="limit", **PRINTED)
        assert np.count_nonzero(shrunk != mean) == split.num_high
        np.testing.assert_allclose(shrunk[shrunk != mean], mean[shrunk != mean] / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [3]}, "sizes sum to 3, W has 4 columns"),
        ({"W": W[:0]}, r"W must be \[N, d\] with at least one row, got shape \(0, 4\)"),
        ({"threshold": 1.1}, r"threshold must be in \[0, 1\], got 1.1"),
        ({"delta": -0.1}, r"delta must be in \[0, 1\], got -0.1"),
        ({"num_micro": 0}, r"num_micro must be in \[1, 255\], got 0"),
        ({"num_micro": 256}, r"num_micro must be in \[1, 255\], got 256"),
        ({"num_macro": 0}, "num_macro must be at least 1, got 0"),
        ({"delta_meaning": "angle"}, "delta_meaning must be one of similarity, distance, got 'angle'"),
        ({"divisor": "S"}, "divisor must be one of found, limit, got 'S'"),
        ({"cv": "squared"}, "cv must be one of signed, absolute, got 'squared'"),
    ],
)
def test_aggregate_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregate(**({"W": W, "sizes": [4], "delta_meaning": "distance", "divisor": "found"} | PRINTED | changes))


def test_the_golden_round_in_the_strategy() -> None:
    layout = flat_layout([4, 1], [2])
    strategy = halves.server("fedpake", layout, delta_meaning="distance")
    stack = np.concatenate([W, W[:, :1]], axis=1)
    buffers = np.stack([f32(1, 10), f32(3, 20), f32(8, 60)])
    # sample counts play no part
    strategy.personalize(1, halves.uploads([0, 4, 7], stack, buffers, sizes=[1, 1, 98]))
    np.testing.assert_allclose(strategy.global_model.params, [1, 3 / 2, 7 / 6, 1 / 2, 1], rtol=1e-6)
    assert strategy.global_model.buffers.tolist() == [4, 30]
    assert strategy.model_for(4) is strategy.global_model and strategy.exported() is not None
    assert strategy.attempt.round_notes["high-dispersion"] == {"w0": 0.75, "w1": 0.0}
    assert strategy.attempt.round_notes["macro-classes"] == {"w0": 2, "w1": 0}


def test_random_classes_follow_from_seed_and_round() -> None:
    stack = spread_out(np.random.default_rng(2), 6, 400, 0.6)

    def merged(seed: int, round: int, **changes: bool) -> bytes:
        half = halves.server("fedpake", flat_layout([400]), run={"seed": seed}, **changes)
        half.personalize(round, halves.uploads(range(6), stack))
        return half.global_model.params.tobytes()

    for name in ("random_micro", "random_macro"):
        first = merged(1, 1, **{name: True})
        assert first == merged(1, 1, **{name: True})
        assert first != merged(1, 2, **{name: True}) and first != merged(2, 1, **{name: True})
    assert merged(1, 1) == merged(2, 5)
