"""Means and deviations from exact sums: those of parts, added, are the whole's, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_app.data.moments import MomentSums, Scaling, added

DRAWN = np.random.default_rng(0)
SAMPLES: dict[str, NDArray[Any]] = {
    "rows": DRAWN.normal(100, 15, (60, 5)).astype(np.float32),
    "huge": (DRAWN.normal(size=(60, 3)) * 1e30).astype(np.float32),
    "subnormal": (DRAWN.normal(size=(60, 3)) * 1e-39).astype(np.float32),
    "integers": DRAWN.integers(-50, 10**6, (60, 4)),
    "series": DRAWN.normal(size=(60, 4, 6)).astype(np.float32),
    "float images": DRAWN.normal(size=(60, 3, 4, 6)).astype(np.float32),
    "images": DRAWN.integers(0, 256, (60, 3, 5, 5), dtype=np.uint8),
    "constant": np.full((60, 2), 0.1, np.float32),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sums_are_numpys_and_parts_add_up_exactly(name: str) -> None:
    x = SAMPLES[name]
    whole = MomentSums.of(x)
    axes = tuple(axis for axis in range(x.ndim) if axis != (1 if x.ndim == 4 else x.ndim - 1))
    numbers = x.astype(np.float64) / (255 if x.dtype == np.uint8 else 1)
    found = whole.moments
    np.testing.assert_allclose(found.mean, numbers.mean(axes), rtol=1e-12, atol=1e-9 * np.abs(numbers).max())
    spread = np.where(found.still, 0.0, found.std)
    np.testing.assert_allclose(spread, numbers.std(axes), rtol=1e-9, atol=1e-12)
    assert found.still == tuple(np.ptp(numbers, axes) == 0)
    for order in (np.arange(60), DRAWN.permutation(60)):
        parts = [MomentSums.from_json(MomentSums.of(x[rows]).to_json()) for rows in np.split(order, [1, 7, 40])]
        assert added(parts) == added(parts[::-1]) == whole
        assert added(parts).moments == found


def test_far_numbers_are_scaled_as_if_they_were_not_stored_shifted() -> None:
    # seconds since 1970 of two sites, each stored less its own first
    seconds = 1_709_251_200 + np.array([[0.0], [60.0], [30.0], [90.0]])
    sites = [(seconds[:2], 1_709_251_200.0), (seconds[2:], 1_709_251_230.0)]
    stored = [((raw - shift).astype(np.float32), shift) for raw, shift in sites]
    found = added([MomentSums.of(x, (shift,), (1.0,)) for x, shift in stored]).scaling
    assert found.shift == (1_709_251_245.0,) and found.scale == (1.0,)
    assert found.mean == (0.0,) and found.std == pytest.approx(seconds.std(0))
    scaled = []
    for x, shift in stored:
        own = found.stored_with((shift,), (1.0,))
        scaled.append((x - np.float32(own.mean)) / np.float32(own.std))
    np.testing.assert_allclose(np.concatenate(scaled), (seconds - seconds.mean()) / seconds.std(), rtol=1e-6)
    assert found.stored_with(found.shift, found.scale) is found


def test_tiny_numbers_keep_their_spread() -> None:
    raw = np.array([[1e-40], [3e-40], [5e-40]])
    x = (raw / 2.0**-132).astype(np.float32)
    found = MomentSums.of(x, (0.0,), (2.0**-132,)).scaling
    back = ((raw - found.shift) / found.scale - found.mean) / found.std
    np.testing.assert_allclose(back, (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "told",
    [
        "no JSON",
        "[]",
        json.dumps({"count": 2, "unit": 1, "totals": [[1, 0]]}),
        json.dumps({"count": 0, "unit": 1, "totals": [[1, 0]], "squares": [[1, 0]]}),
        json.dumps({"count": 2, "unit": 2, "totals": [[1, 0]], "squares": [[1, 0]]}),
        json.dumps({"count": 2, "unit": 1, "totals": [[1.5, 0]], "squares": [[1, 0]]}),
        json.dumps({"count": 2, "unit": 1, "totals": [[1, 10**6]], "squares": [[1, 0]]}),
        json.dumps({"count": 2, "unit": 1, "totals": [[3, 0]], "squares": [[1, 0]]}),
        json.dumps({"count": 2, "unit": 1, "totals": [], "squares": []}),
        '{"count": 2, "unit": 1, "totals": [[' + "9" * 500 + ', 0]], "squares": [[1, 0]]}',
    ],
)
def test_what_no_samples_have_as_sums_is_refused(told: str) -> None:
    with pytest.raises(ValueError):
        MomentSums.from_json(told)


def test_scaling_as_a_run_keeps_it() -> None:
    kept = {"mean": [1.0], "std": [2.0], "shift": [], "scale": [], "target-shift": []}
    assert Scaling.from_json(kept) == Scaling((1.0,), (2.0,))
