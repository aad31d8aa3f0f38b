from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_app.config import LARGEST_PRIVATE_RANGE
from fl_app.layout import Model
from fl_app.privacy import masking
from tests.facts import rejected

# the keys' default
RANGE = 8.0


def pair(i: int, j: int, attempt: str) -> bytes:
    return hashlib.sha256(f"{min(i, j)} {max(i, j)} {attempt}".encode()).digest()


def model(params: object, buffers: object = ()) -> Model:
    return Model(np.asarray(params, np.float32), np.asarray(buffers, np.float32))


def uploads(values: np.ndarray, weights: list[float], attempt: str = "1-0") -> np.ndarray:
    """What the clients of one sum send, uint64 [N, n + 1]."""
    n, sent = len(values), []
    for i in range(n):
        words, _ = masking.encode(model(values[i]), weights[i], n, RANGE)
        masking.mask(words, i, {j: pair(i, j, attempt) for j in range(n) if j != i})
        sent.append(words)
    return np.array(sent)


def test_fixed_point_by_hand() -> None:
    # N = 3, R = 8: 2^s * 24 <= 2^62 for s = 62 - ceil(log2 24) = 57. 1.5 * 2^57 = 3 * 2^56; weight 0.5 halves.
    assert masking.scale(3, 8.0) == 57
    words, clipped = masking.encode(model([1.5, -1.5, 8, 0]), 1.0, 3, 8.0)
    # the weight: 2^s * 3 <= 2^62 for s = 60
    assert words.view(np.int64).tolist() == [3 * 2**56, -3 * 2**56, 2**60, 0, 2**60] and not clipped
    assert masking.encode(model([1.5]), 0.5, 3, 8.0)[0].tolist() == [3 * 2**55, 2**59]
    assert masking.decode(words, 4, 3, 1, 8.0).params.tolist() == [1.5, -1.5, 8, 0]
    # R = 256: s = 62 - ceil(log2 768) = 52; statistics have 64 times the range, so s = 46
    words, _ = masking.encode(model([150, -256], [150]), 1.0, 3, 256.0)
    assert words.view(np.int64).tolist() == [150 * 2**52, -(2**60), 150 * 2**46, 2**60]
    back = masking.decode(words, 2, 3, 1, 256.0)
    assert back.params.tolist() == [150, -256] and back.buffers.tolist() == [150]


@given(st.integers(1, 10**6), st.floats(0, LARGEST_PRIVATE_RANGE * masking.BUFFERS_TIMES, exclude_min=True, width=32))
def test_no_sum_of_values_in_the_range_leaves_the_range(n: int, limit: float) -> None:
    largest = 2.0 ** masking.scale(n, limit) * limit * n
    assert 2**61 * (1 - 1e-12) < largest <= 2**62 * (1 + 1e-12)


@given(st.integers(3, 9), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_masks_cancel_and_the_sum_is_the_mean_by_weights_that_nobody_tells(n: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.clip(rng.normal(0, 3, (n, d)), -RANGE, RANGE).astype(np.float32)
    weights = (rng.integers(1, 1000, n) / 2**24).tolist()
    sent = uploads(values, weights)
    total = np.add.reduce(sent, axis=0, dtype=np.uint64)
    plain = [masking.encode(model(values[i]), weights[i], n, RANGE)[0] for i in range(n)]
    assert (total == np.add.reduce(plain, axis=0, dtype=np.uint64)).all()
    mean = masking.decode(total, d, n, n, RANGE).params
    expected = weights @ values.astype(np.float64) / sum(weights)
    np.testing.assert_allclose(mean, expected, atol=2.0**-26, rtol=2e-7)
    assert (total == np.add.reduce(sent[rng.permutation(n)], axis=0, dtype=np.uint64)).all()


def test_short_of_one_member_what_is_left_is_noise() -> None:
    values = np.ones((5, 20000), np.float32)
    sent = uploads(values, [1.0] * 5)
    for left_out in range(5):
        rest = np.add.reduce(np.delete(sent, left_out, axis=0), axis=0, dtype=np.uint64)
        with pytest.raises(ValueError, match="clients can"):
            masking.decode(rest, 20000, 5, 4, RANGE)
        bits = np.unpackbits(rest.view(np.uint8)).mean()
        # 1,280,000 bits: five standard deviations
        assert abs(bits - 0.5) < 0.0023
        assert abs(np.corrcoef(rest[:-1].astype(float), rest[1:].astype(float))[0, 1]) < 0.04


def test_an_upload_under_another_key_spoils_the_sum() -> None:
    seen = [uploads(np.zeros((3, 1000), np.float32), [1.0] * 3, attempt) for attempt in ("1-0", "1-1")]
    assert (seen[0] == seen[1]).mean() < 0.01
    seen[0][1] = seen[1][1]
    with pytest.raises(ValueError, match="clients can"):
        masking.decode(np.add.reduce(seen[0], axis=0, dtype=np.uint64), 1000, 3, 3, RANGE)


def test_the_stream_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {1: b"a" * 32, 2: b"b" * 32}
    whole, cut = np.zeros(1000, np.uint64), np.zeros(1000, np.uint64)
    masking.mask(whole, 0, keys)
    monkeypatch.setattr(masking, "_CHUNK", 96)
    masking.mask(cut, 0, keys)
    assert (whole == cut).all()
    streams = [np.frombuffer(masking.stream(k, 8000), np.uint64) for k in keys.values()]
    assert (whole == np.add.reduce(streams, axis=0, dtype=np.uint64)).all()


@pytest.mark.parametrize("keys", [{}, {1: b"a" * 32}, {0: b"a" * 32, 1: b"b" * 32}])
def test_groups_that_hide_nothing_are_refused(keys: dict[int, bytes]) -> None:
    with rejected(ValueError, "", "sum needs 3 different", "members"):
        masking.mask(np.zeros(3, np.uint64), 0, keys)


@pytest.mark.parametrize(
    ("value", "sent"), [(8.001, 8), (-9.0, -8), (np.inf, 8), (-np.inf, -8), (np.nan, 0), (8.0, 8), (-0.0, 0)]
)
def test_values_beyond_the_range_are_clipped(value: float, sent: float) -> None:
    words, clipped = masking.encode(model([value], [64 * value]), 1.0, 3, 8.0)
    back = masking.decode(words, 1, 3, 1, 8.0)
    assert back.params.tolist() == [sent] and back.buffers.tolist() == [64 * sent]
    assert clipped is (abs(value) != 8 and value != 0)


@pytest.mark.parametrize("weight", [-0.1, 0.0, 1.1, np.nan])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be"):
        masking.encode(model([0.0]), weight, 3, 8.0)


def test_derived_keys_are_told_apart_by_every_label() -> None:
    labels = [("mask", "x", 1, 0), ("mask", "x", 1, 1), ("mask", "x", 10), ("mask", "x1", 0), ("mask", "x", 10, "")]
    assert len({masking.derived(b"secret", *each) for each in labels}) == len(labels)
    assert masking.derived(b"secret", "a") != masking.derived(b"other", "a")
