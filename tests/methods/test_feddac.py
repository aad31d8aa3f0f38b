"""FedDAC against METHODS.md: a round by hand, the weights' properties, a naive reference, limits, server and client half."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies import fedcac
from strategies.feddac import (
    collaborators,
    important_weights,
    neighbour_weights,
    personalize,
)
from strategies.kernels import aggregate, masks
from tests.conftest import bools, f32, flat_layout
from tests.facts import rejected

LAYOUT = flat_layout([8], [2])


# The golden round: N = 3, d = 8, K = 4. The clients lie on a line, w1 = w0 + 2 and w2 = w0 + 4 everywhere:
# squared distances (0, 1): 8 * 4 = 32, (1, 2): 32, (0, 2): 8 * 16 = 128.
W0 = f32(0, 1, 2, 3, 4, 5, 6, 7)


W = np.stack([W0, W0 + 2, W0 + 4])


B = np.stack([f32(1, 10), f32(3, 20), f32(8, 60)])


# Common bits 3, 0 and 1 of K = 4: S01 = 3/4, S02 = 0, S12 = 1/4; mean 1/3, maximum 3/4.
BITS = np.stack([masks.pack(bools(m)) for m in ("1111 0000", "1110 1000", "0000 1111")])


# t = 1, alpha = 4: r = sqrt(1/4) = 1/2, threshold 1/3 + (3/4 - 1/3)/2 = 0.542: clients 0 and 1 collaborate, 2 is alone.
# gamma = 0.3: u0 = 0.3 w0 + 0.7 (w0 + 0.75 w1)/1.75 = 0.7 w0 + 0.3 w1 = w0 + 0.6; u1 = 0.7 w1 + 0.3 w0 = w0 + 1.4; u2 = w2.
U = [0.6, 1.4, 4.0]


# k = 3, weights 1/distance, a client's own distance being that of its nearest other, 32:
# v0: 32, 32, 128 -> 4 : 4 : 1, w0 + (4*2 + 1*4)/9 = w0 + 4/3; v1: 32, 32, 32 -> w0 + 2; v2: 128, 32, 32 -> w0 + (4*2 + 4*4)/9
V = [4 / 3, 2.0, 8 / 3]


def expected(u: list[float], v: list[float]) -> np.ndarray:
    chosen = np.stack([masks.unpack(b, 8) for b in BITS])
    return np.asarray(W0 + np.where(chosen, np.array(u)[:, None], np.array(v)[:, None]))


def test_threshold_follows_the_root_of_time() -> None:
    O = np.array([[1, 0.8, 0.5], [0.8, 1, 0.2], [0.5, 0.2, 1]])  # noqa: E741
    # mean 0.5, maximum 0.8: at t/alpha = 1/100 threshold 0.53; FedCAC's linear rule would give 0.503
    assert collaborators(O, 1, 100).tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    # mean 0.513, threshold 0.542 by the root, 0.516 linearly
    O[0, 2] = O[2, 0] = 0.54
    assert not collaborators(O, 1, 100)[0, 2]
    O[0, 2] = O[2, 0] = 0.56  # mean 0.52, threshold 0.548
    assert collaborators(O, 1, 100)[0, 2]
    assert collaborators(O, 100, 100).sum() == 2  # the maximum itself
    assert not collaborators(O, 101, 100).any()
    assert not collaborators(np.eye(1), 1, 100).any()


def test_the_linear_time_factor_is_fedcacs_rule() -> None:
    O = np.array([[1, 0.8, 0.54], [0.8, 1, 0.2], [0.54, 0.2, 1]])  # noqa: E741
    # mean 0.513, maximum 0.8: at t/alpha = 1/100 the threshold is 0.516, and the pair (0, 2) with 0.54 reaches it
    assert collaborators(O, 1, 100, "linear").tolist() == fedcac.collaborators(O, 1, 100).tolist()
    assert collaborators(O, 1, 100, "linear")[0, 2] and not collaborators(O, 1, 100, "root")[0, 2]
    # a pair with 0.6: mean 0.533, at t/alpha = 24/100 the thresholds are 0.597 and 0.664
    O[0, 2] = O[2, 0] = 0.6
    assert collaborators(O, 24, 100, "linear")[0, 2] and not collaborators(O, 24, 100, "root")[0, 2]
    assert not collaborators(O, 101, 100, "linear").any()


def test_important_weights_by_hand() -> None:
    overlap = np.array([[1, 0.75, 0.5], [0.75, 1, 0.0], [0.5, 0.0, 1]])
    chosen = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    # row 0: 1, 0.75, 0.5 over 2.25 = 4/9, 3/9, 2/9; gamma 0.5: 0.5 + 2/9, 1/6, 1/9
    got = important_weights(overlap, chosen, 0.5)
    np.testing.assert_allclose(got, [[0.5 + 2 / 9, 1 / 6, 1 / 9], [0.5 * 0.75 / 1.75, 0.5 + 0.5 / 1.75, 0], [0, 0, 1]])


distances = (
    st.integers(1, 8)
    .flatmap(lambda n: hnp.arrays(np.float64, (n, n), elements=st.floats(0, 1e6)))
    .map(lambda a: (a + a.T) * (1 - np.eye(len(a))))
)


@given(distances, st.integers(1, 10), st.booleans())
def test_neighbour_weights_are_a_convex_combination_of_the_nearest(D: np.ndarray, k: int, own: bool) -> None:
    n = len(D)
    got = neighbour_weights(D, k, own_distance=own)
    np.testing.assert_allclose(got.sum(axis=1), 1)
    assert (got >= 0).all() and (np.count_nonzero(got, axis=1) == min(k, n)).all()
    # k counts the client, whose distance is never beaten
    assert (np.diag(got) > 0).all()
    for i in range(n):
        out, inside = D[i][got[i] == 0], np.delete(D[i] * (got[i] > 0), i)
        assert not out.size or inside.max(initial=0) <= out.min()


@given(distances, st.integers(1, 10))
def test_the_own_weight_is_the_largest_others(D: np.ndarray, k: int) -> None:
    got = neighbour_weights(D, k, own_distance=False)
    others = np.where(np.eye(len(D), dtype=bool), 0, got)
    if len(D) > 1 and k > 1:
        np.testing.assert_allclose(np.diag(got), others.max(axis=1))


def reference(
    W: np.ndarray, bits: np.ndarray, t: int, alpha: float, gamma: float, k: int, G: np.ndarray | None
) -> np.ndarray:
    """METHODS.md word by word, one client and one pair at a time, float64."""
    n, d = W.shape
    M = np.unpackbits(bits, axis=1, count=d, bitorder="little").astype(bool)
    W = W.astype(np.float64)
    S = np.array([[(M[i] & M[j]).sum() / M[0].sum() for j in range(n)] for i in range(n)])
    pairs = [S[i, j] for i in range(n) for j in range(n) if i != j]
    bar = min(max(pairs), np.mean(pairs) + np.sqrt(t / alpha) * (max(pairs) - np.mean(pairs)))
    if t == alpha:
        bar = max(pairs)
    out = np.empty_like(W)
    for i in range(n):
        group = [j for j in range(n) if j != i and t <= alpha and S[i, j] >= bar] + [i]
        u = gamma * W[i] + (1 - gamma) * sum(S[i, j] * W[j] for j in group) / sum(S[i, j] for j in group)
        g = W[i] if G is None else G[i].astype(np.float64)
        dist = [((g - W[j]) ** 2).sum() for j in range(n)]
        if G is None:
            dist[i] = min(dist[j] for j in range(n) if j != i)
        nearest = sorted(range(n), key=lambda j: (dist[j], j != i, j))[:k]
        p = np.array([1 / (dist[j] + 1e-12) for j in nearest])
        v = sum(w * W[j] for w, j in zip(p / p.sum(), nearest, strict=True))
        out[i] = np.where(M[i], u, v)
    return out


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("t", [1, 7, 20, 21])
def test_against_the_naive_reference(t: int, guided: bool) -> None:
    rng = np.random.default_rng(t)
    n, sizes = 7, [30_000, 40_001, 3]
    d = sum(sizes)
    W = (100 + rng.standard_normal((n, d)) * rng.uniform(0.01, 2, (n, 1))).astype(np.float32)  # common part: 100
    scores = rng.random((n, d), dtype=np.float32) + np.linspace(1, 0, d, dtype=np.float32)
    bits = np.stack([masks.pack(masks.top_k(s, sizes, 0.3)) for s in scores])
    G = (W + 0.1 * rng.standard_normal((n, d))).astype(np.float32) if guided else None
    got = personalize(W, bits, t, alpha=20, self_weight=0.4, neighbours=4, guidance=G)
    np.testing.assert_allclose(got, reference(W, bits, t, 20, 0.4, 4, G), rtol=3e-6)


def test_one_client_keeps_its_model() -> None:
    for guidance in (None, W[1:2]):
        assert (personalize(W[:1], BITS[:1], 1, alpha=4, guidance=guidance) == W[:1]).all()


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    d = 200_001
    W, G = rng.standard_normal((2, 5, d), dtype=np.float32)
    bits = np.stack([masks.pack(masks.top_k(row, [d], 0.4)) for row in W])
    results = []
    for count in (1, 2, 7):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        results.append([personalize(W, bits, 1, alpha=9, guidance=g).tobytes() for g in (None, G)])
    assert results[0] == results[1] == results[2]


def test_distances_do_not_cancel() -> None:
    rng = np.random.default_rng(0)
    common = 1000 * rng.standard_normal(50_000, dtype=np.float32)
    W = common + rng.standard_normal((4, 50_000)).astype(np.float32) * f32(1, 0.1, 1e-2, 0)[:, None]
    W[3] = W[2]
    W[3, 7] += 0.5
    V = W[::-1] + np.float32(0.25)
    for other in (None, V):
        X = (W if other is None else other).astype(np.float64)
        exact = ((X[:, None] - W.astype(np.float64)[None]) ** 2).sum(axis=2)
        np.testing.assert_allclose(aggregate.squared_distances(W, other), exact, rtol=1e-7)


def test_equal_vectors_far_from_the_first_have_distance_zero() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal(5000, dtype=np.float32)
    W = np.stack([w, w + 1e4, w + 1e4, np.nextafter(w + np.float32(1e4), np.inf, dtype=np.float32)])
    got = aggregate.squared_distances(W)
    assert got[1, 2] == got[2, 1] == 0 and (np.diag(got) == 0).all()
    exact = ((W[3].astype(np.float64) - W[1]) ** 2).sum()
    np.testing.assert_allclose(got[1, 3], exact, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"self_weight": 1.5}, r"self_weight must be in \[0, 1\], got 1.5"),
        ({"neighbours": 0}, "neighbours must be at least 1, got 0"),
        ({"alpha": 0}, "round and alpha must be at least 1, got round 1 and alpha 0"),
        ({"guidance": W[:2]}, r"W has shape \(3, 8\), V \(2, 8\): they must be equal"),
    ],
)
def test_personalize_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        personalize(W, BITS, 1, **({"alpha": 4} | changes))


def test_personalize_refuses_masks_that_do_not_fit() -> None:
    with rejected(ValueError, "", "round and alpha", "least 1", "got round 0"):
        personalize(W, BITS, 0, alpha=4)
    with rejected(ValueError, "", "masks", "uint8 (3, 1)"):
        personalize(W, BITS[:2], 1, alpha=4)
    unequal = np.stack([masks.pack(bools(m)) for m in ("11110000", "11100000", "00001111")])
    with rejected(ValueError, "", "masks", "equally many ones", "got [3, 4]"):
        personalize(W, unequal, 1, alpha=4)
