"""What studies/privacy.md says of small groups and of proofs: `python -m benchmarks.bounded`, with fewer rounds."""

from __future__ import annotations

import pytest

from benchmarks import bounded


@pytest.fixture(scope="module")
def seen() -> bounded.Recorded:
    return bounded.recorded(rounds=3)


def test_small_groups_show_a_lie_that_larger_ones_hide(seen: bounded.Recorded) -> None:
    small, large = (bounded.detection(seen, size, (3, 10, 100)) for size in (3, 10))
    assert small.alarms == large.alarms == 0
    assert small.found == {3: 0, 10: 1, 100: 1}
    assert large.found == {3: 0, 10: 0, 100: 1}


def test_a_sum_is_the_members_mean(seen: bounded.Recorded) -> None:
    models = [seen.uploads[1][i] for i in range(3)]
    assert bounded.mean_of(models, 30) == pytest.approx(sum(models) / 3, abs=1e-6)


def test_commitments_alone_cost_more_than_the_rounds_work() -> None:
    _, seconds = bounded.multiplication()
    # the table under "Costs": 0.04 s for ten clients
    assert seconds * bounded.D > 100 * 0.04
