from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_app.config.privacy import LARGEST_PRIVATE_RANGE
from fl_app.privacy import masking
from fl_app.privacy.keyring import open_keyring
from fl_app.wire import SEED_KEYS

# the keys' default
RANGE = 8.0


def uploads(values: np.ndarray, weights: list[float], round: int = 1, attempt: int = 0) -> np.ndarray:
    """What the clients of one group send, uint32 [N, n]."""
    n = len(values)
    sent = []
    for i in range(n):
        words = masking.encode(values[i], weights[i], n, RANGE)
        keys = open_keyring(SEED_KEYS, 0, i, n).masks((j for j in range(n) if j != i), "experiment", round, attempt)
        masking.mask(words, i, keys)
        sent.append(words)
    return np.array(sent)


def test_fixed_point_by_hand() -> None:
    # N = 3, R = 8: 2^s * 24 <= 2^30 for s = 30 - ceil(log2 24) = 25. 1.5 * 2^25 = 50331648; weight 0.5 halves.
    assert masking.scale(3, 8.0) == 25
    words = masking.encode(np.float32([1.5, -1.5, 8, 0]), 1.0, 3, 8.0)
    assert words.view(np.int32).tolist() == [50331648, -50331648, 2**28, 0]
    assert masking.encode(np.float32([1.5]), 0.5, 3, 8.0).tolist() == [25165824]
    assert masking.decode(words, 1.0, 3, 8.0).tolist() == [1.5, -1.5, 8, 0]
    # R = 256: s = 30 - ceil(log2 768) = 20. 150 * 2^20 = 157286400
    assert masking.scale(3, 256.0) == 20
    words = masking.encode(np.float32([150, -256]), 1.0, 3, 256.0)
    assert words.view(np.int32).tolist() == [157286400, -(2**28)]
    assert masking.decode(words, 1.0, 3, 256.0).tolist() == [150, -256]


@given(st.integers(1, 10**6), st.floats(0, LARGEST_PRIVATE_RANGE * masking.BUFFERS_TIMES, exclude_min=True, width=32))
def test_no_sum_of_values_in_the_range_leaves_the_range(n: int, limit: float) -> None:
    largest = 2.0 ** masking.scale(n, limit) * limit * n
    assert 2**29 * (1 - 1e-12) < largest <= 2**30 * (1 + 1e-12)


@given(st.integers(3, 9), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_masks_cancel_and_the_sum_is_the_weighted_mean(n: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.clip(rng.normal(0, 3, (n, d)), -RANGE, RANGE).astype(np.float32)
    sizes = rng.integers(1, 1000, n).astype(np.float64)
    weights = (n * sizes / sizes.sum()).tolist()
    sent = uploads(values, weights)
    total = np.add.reduce(sent, axis=0, dtype=np.uint32)
    plain = [masking.encode(values[i], weights[i], n, 8.0) for i in range(n)]
    assert (total == np.add.reduce(plain, axis=0, dtype=np.uint32)).all()
    mean = masking.decode(total, sum(weights), n, 8.0)
    expected = sizes @ values.astype(np.float64) / sizes.sum()
    np.testing.assert_allclose(mean, expected, atol=2.0 ** -masking.scale(n, 8.0), rtol=2e-7)
    assert (total == np.add.reduce(sent[rng.permutation(n)], axis=0, dtype=np.uint32)).all()


def test_short_of_one_member_what_is_left_is_noise() -> None:
    values = np.ones((5, 20000), np.float32)
    sent = uploads(values, [1.0] * 5)
    for left_out in range(5):
        rest = np.add.reduce(np.delete(sent, left_out, axis=0), axis=0, dtype=np.uint32)
        with pytest.raises(ValueError, match="beyond what 5 clients can sum up to"):
            masking.decode(rest, 4.0, 5, 8.0)
        bits = np.unpackbits(rest.view(np.uint8)).mean()
        # 640,000 bits: five standard deviations
        assert abs(bits - 0.5) < 0.003
        assert abs(np.corrcoef(rest[:-1], rest[1:])[0, 1]) < 0.04


def test_other_rounds_and_attempts_have_other_masks() -> None:
    values = np.zeros((3, 1000), np.float32)
    seen = [uploads(values, [1.0] * 3, round, attempt) for round, attempt in ((1, 0), (1, 1), (2, 0))]
    for i, a in enumerate(seen):
        for b in seen[i + 1 :]:
            assert (a == b).mean() < 0.01
    mixed = seen[0].copy()
    # one that was sent in another attempt
    mixed[1] = seen[1][1]
    with pytest.raises(ValueError, match="beyond"):
        masking.decode(np.add.reduce(mixed, axis=0, dtype=np.uint32), 3.0, 3, 8.0)


def test_the_stream_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {1: b"a" * 32, 2: b"b" * 32}
    whole, cut = np.zeros(1000, np.uint32), np.zeros(1000, np.uint32)
    masking.mask(whole, 0, keys)
    monkeypatch.setattr(masking, "_CHUNK", 96)
    masking.mask(cut, 0, keys)
    assert (whole == cut).all()
    assert (
        whole == sum(np.frombuffer(masking.stream(k, 4000), np.uint32) for k in keys.values()).astype(np.uint32)
    ).all()


@pytest.mark.parametrize("keys", [{}, {1: b"a" * 32}, {0: b"a" * 32, 1: b"b" * 32}])
def test_groups_that_hide_nothing_are_refused(keys: dict[int, bytes]) -> None:
    with pytest.raises(ValueError, match="a sum needs 3 different members"):
        masking.mask(np.zeros(3, np.uint32), 0, keys)


@pytest.mark.parametrize(
    ("value", "weight"),
    [(np.nan, 1.0), (np.inf, 1.0), (8.001, 1.0), (-9.0, 1.0), (0.0, -0.1), (0.0, 3.1), (0.0, np.nan)],
)
def test_what_cannot_be_encoded_is_refused(value: float, weight: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        masking.encode(np.float32([value]), weight, 3, 8.0)


def test_derived_keys_are_told_apart_by_every_label() -> None:
    labels = [("mask", "x", 1, 0), ("mask", "x", 1, 1), ("mask", "x", 10), ("mask", "x1", 0), ("mask", "x", 10, "")]
    assert len({masking.derived(b"secret", *each) for each in labels}) == len(labels)
    assert masking.derived(b"secret", "a") != masking.derived(b"other", "a")
