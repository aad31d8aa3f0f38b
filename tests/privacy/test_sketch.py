from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_app.privacy import sketch
from strategies.kernels import masks

KEY = b"k" * 32


def random_masks(n: int, d: int, k: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([masks.pack(np.isin(np.arange(d), rng.choice(d, k, replace=False))) for _ in range(n)])


@given(st.integers(2, 6), st.integers(1, 300), st.data())
def test_all_bits_give_the_overlaps_of_the_masks_exactly(n: int, d: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, d))
    bits = random_masks(n, d, k, data.draw(st.integers(0, 999)))
    sketches = np.array([sketch.sketch(row, d, d, KEY) for row in bits])
    found = sketch.overlaps(masks.common_ones(sketches), d, d, k)
    assert (found == masks.overlap(bits, k)).all()  # not approximately
    assert sketches.shape == bits.shape


def test_some_bits_estimate_them() -> None:
    # SD(O) = sqrt(h (1 - h) / m) / (2 tau) * sqrt(1 - m/d) with h = 2 tau (1 - O) = 0.5: 0.0068 for m = 4,096
    d, m = 40_000, 4096
    bits = random_masks(2, d, d // 2, 0)
    exact = masks.overlap(bits, d // 2)[0, 1]
    off = []
    for i in range(40):
        sent = np.array([sketch.sketch(row, d, m, bytes([i]) * 32) for row in bits])
        assert sent.shape == (2, m // 8)
        off.append(sketch.overlaps(masks.common_ones(sent), m, d, d // 2)[0, 1] - exact)
    assert abs(np.mean(off)) < 0.0045 and 0.004 < np.std(off) < 0.011


def test_neither_order_nor_polarity_is_told() -> None:
    d = 8000
    mask = np.zeros(d, bool)
    mask[: d // 2] = True  # all ones in the first half
    seen = np.array([masks.unpack(sketch.sketch(masks.pack(mask), d, d, bytes([i]) * 32), d) for i in range(50)])
    halves = seen[:, : d // 2].mean(axis=1), seen[:, d // 2 :].mean(axis=1)
    for half in halves:
        assert abs(half.mean() - 0.5) < 0.006 and np.abs(half - 0.5).max() < 0.035
    assert len({row.tobytes() for row in seen}) == 50


def test_padding_stays_zero_and_bad_lengths_are_refused() -> None:
    bits = random_masks(1, 13, 5, 0)[0]
    assert sketch.sketch(bits, 13, 13, KEY)[-1] >> 5 == 0
    for m in (0, 14):
        with pytest.raises(ValueError, match="sketch of m"):
            sketch.sketch(bits, 13, m, KEY)
    assert [sketch.length(100, asked) for asked in (0, 1, 100, 101)] == [100, 1, 100, 100]
