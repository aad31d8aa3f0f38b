from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.kernels.scores import sensitivity
from tests.conftest import f32
from tests.facts import rejected

vectors = hnp.arrays(np.float32, 20, elements=st.floats(-1e6, 1e6, width=32))


@given(vectors, vectors)
def test_sensitivity_properties(before: np.ndarray, after: np.ndarray) -> None:
    scores = sensitivity(before, after)
    assert (scores >= 0).all()
    assert (scores[(before == after) | (after == 0)] == 0).all()
    assert (scores == sensitivity(-before, -after)).all()
    exact = np.abs((after.astype(np.float64) - before) * after)
    np.testing.assert_allclose(scores, exact, rtol=1e-6, atol=1e-37)


def test_sensitivity_refuses_different_shapes() -> None:
    with rejected(ValueError, "", "before has shape (3,)", "after (2,)", "they", "equal"):
        sensitivity(f32(1, 2, 3), f32(1, 2))
