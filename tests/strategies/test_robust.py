"""Means that bear with liars, and distances from the median: by hand, against NumPy, and what must hold for any input."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from corolla.api.checks import warn_of_settings
from fl_app.config import parse
from fl_app.known_names import Average
from strategies import METHOD_PARAMS, fedcac
from strategies.kernels import aggregate, averages, blocks, masks, robust, trimming
from strategies.kernels.averages import RULES
from strategies.kernels.robust import Averaging
from tests.conftest import SMALL, bools, f32
from tests.facts import mentions, rejected

rules = st.sampled_from(sorted(RULES))


@st.composite
def stacks(draw: st.DrawFn, lowest: int = 1) -> np.ndarray:
    shape = (draw(st.integers(lowest, 9)), draw(st.integers(1, 30)))
    return draw(hnp.arrays(np.float32, shape, elements=st.floats(-1e3, 1e3, width=32)))


def honest_and(byzantine: int, honest: int = 7, d: int = 50, value: float = 1e30) -> np.ndarray:
    """Honest vectors around (5, 5, ...), and liars far away."""
    W = np.random.default_rng(0).normal(5, 1, (honest + byzantine, d)).astype(np.float32)
    W[honest:] = value
    return W


# sorting


@pytest.mark.parametrize("n", range(1, 12))
def test_comparators_sort_whatever_zeros_and_ones(n: int) -> None:
    """Which by the zero-one principle means that they sort everything."""
    columns = np.array(list(itertools.product((0, 1), repeat=n)), np.float32).T.copy()
    assert (np.stack(trimming.ascending(columns.copy())) == np.sort(columns, axis=0)).all()


# means


def test_rules_by_hand() -> None:
    W = np.stack([f32(1, 0), f32(2, 0), f32(3, 0), f32(4, 0), f32(1000, 0)])
    assert Averaging("median").mean(W).tolist() == [3, 0]
    assert Averaging("trimmed-mean", 0.2).mean(W).tolist() == [3, 0]  # without 1 and 1000
    # krum, one liar: the 5 - 1 - 2 = 2 nearest of 2 are at 1 and 1, of 3 too: the lower index
    assert Averaging("krum", 0.2).mean(W).tolist() == [2, 0]
    np.testing.assert_allclose(Averaging("geometric-median").mean(W), [3, 0], atol=1e-3)  # on a line it is the median
    assert Averaging("none").mean(W).tolist() == [202, 0]


@given(stacks(), st.data())
def test_none_is_the_plain_mean_bit_for_bit(W: np.ndarray, data: st.DataObject) -> None:
    weights = data.draw(hnp.arrays(np.float64, len(W), elements=st.floats(0.5, 1e4)))
    members = data.draw(hnp.arrays(bool, (3, len(W))))
    members[:, 0] = True
    assert (Averaging().mean(W, weights) == aggregate.weighted_mean(W, weights)).all()
    assert (Averaging().group_means(W, members) == aggregate.group_means(W, members)).all()


@given(stacks())
def test_median_equals_numpy(W: np.ndarray) -> None:
    smallest = np.finfo(np.float32).smallest_subnormal
    expected = np.median(W.astype(np.float64), axis=0)
    np.testing.assert_allclose(Averaging("median").mean(W), expected, rtol=1e-6, atol=smallest)


@given(stacks(), st.floats(0, 0.49))
def test_trimmed_mean_equals_numpy(W: np.ndarray, ratio: float) -> None:
    cut = Averaging("trimmed-mean", ratio).assumed(len(W))
    kept = np.sort(W.astype(np.float64), axis=0)[cut : len(W) - cut]
    np.testing.assert_allclose(Averaging("trimmed-mean", ratio).mean(W), kept.mean(axis=0), rtol=1e-5, atol=1e-4)


@given(stacks(lowest=3))
def test_krum_chooses_a_client(W: np.ndarray) -> None:
    assert (Averaging("krum").mean(W) == W).all(axis=1).any()


@given(stacks(lowest=3))
def test_no_point_near_the_geometric_median_is_better(W: np.ndarray) -> None:
    def total(point: np.ndarray) -> float:
        return float(np.linalg.norm(W.astype(np.float64) - point, axis=1).sum())

    found = Averaging("geometric-median").mean(W).astype(np.float64)
    best = min(
        total(point) for point in [*W.astype(np.float64), W.mean(axis=0, dtype=np.float64), np.median(W, axis=0)]
    )
    assert total(found) <= best * (1 + 1e-3) + 1e-3


@given(stacks(), rules)
def test_the_order_of_the_clients_does_not_matter(W: np.ndarray, rule: str) -> None:
    if rule == "krum":
        return  # ties go to the lower index
    averaging = Averaging(rule)  # type: ignore[arg-type]
    np.testing.assert_allclose(averaging.mean(W[::-1].copy()), averaging.mean(W), rtol=1e-3, atol=1e-2)


@given(hnp.arrays(np.float32, 20, elements=st.floats(-(2.0**99), 2.0**99, width=32)), st.integers(1, 9), rules)
def test_identical_uploads_are_unchanged(row: np.ndarray, n: int, rule: str) -> None:
    averaging = Averaging(rule)  # type: ignore[arg-type]
    np.testing.assert_allclose(averaging.mean(np.tile(row, (n, 1))), row, rtol=1e-6)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("value", [1e6, -1e30, float(np.finfo(np.float32).max)])
def test_three_liars_of_ten_do_not_carry_the_mean_away(rule: str, value: float) -> None:
    W = honest_and(3, value=value)
    for order in (W, W[::-1].copy()):
        mean = Averaging(rule).mean(order)  # type: ignore[arg-type]
        assert np.isfinite(mean).all() and np.linalg.norm(mean - 5) < 2 * np.linalg.norm(W[0] - 5)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_of_two_nobody_is_outvoted(rule: str) -> None:
    W = np.stack([f32(1, 2), f32(3, 6)])
    assert Averaging(rule).mean(W).tolist() == [2, 4]  # type: ignore[arg-type]
    assert Averaging(rule).mean(W[:1]).tolist() == [1, 2]  # type: ignore[arg-type]


def test_assumed_liars_by_hand() -> None:
    assert [Averaging("krum", 0.3).assumed(n) for n in (1, 2, 3, 4, 5, 10, 20)] == [0, 0, 1, 1, 1, 3, 6]
    assert Averaging("krum", 0.49).assumed(4) == 1


def test_no_rows_and_no_columns() -> None:
    for rule in sorted(RULES):
        assert Averaging(rule).mean(np.ones((3, 0), np.float32)).shape == (0,)  # type: ignore[arg-type]
        with rejected(ValueError, "", "least one row"):
            Averaging(rule).mean(np.ones((0, 3), np.float32))  # type: ignore[arg-type]


# groups, and FedCAC's server step


@given(stacks(lowest=2), rules, st.data())
def test_group_means_are_means_of_groups(W: np.ndarray, rule: str, data: st.DataObject) -> None:
    members = data.draw(hnp.arrays(bool, (3, len(W))))
    members[:, 0] = True
    averaging = Averaging(rule)  # type: ignore[arg-type]
    for got, group in zip(averaging.group_means(W, members), members, strict=True):
        np.testing.assert_allclose(got, averaging.mean(W[group]), rtol=1e-5, atol=1e-3)
    in_place = W.copy()
    square = np.eye(len(W), dtype=bool) | members[0]
    expected = averaging.group_means(W, square)
    assert (averaging.group_means(in_place, square, out=in_place) == expected).all() and (in_place == expected).all()


@pytest.mark.parametrize("rule", sorted(RULES))
def test_fedcac_averages_groups_and_all_by_the_rule(rule: str) -> None:
    W = honest_and(1, honest=4, d=40, value=1e6)
    bits = np.stack([masks.pack(np.arange(40) < 20)] * 5)
    members = np.stack([bools(m) for m in ("11101", "11101", "11100", "00010", "00001")])
    averaging = Averaging(rule)  # type: ignore[arg-type]
    mean, personalized = fedcac.collaborate(W, bits, members, np.ones(5), averaging=averaging)
    assert (mean == averaging.mean(W)).all()
    for own, group in zip(personalized, averaging.group_means(W, members), strict=True):
        assert (own[:20] == group[:20]).all() and (own[20:] == mean[20:]).all()
    assert (personalized[3, :20] == W[3, :20]).all() and np.abs(personalized[0]).max() < 100


# distances from the median


def test_distances_to_median_by_hand() -> None:
    W = np.stack([f32(0, 0), f32(9, 9), f32(3, 0), f32(3, 4)])
    # median of rows 0, 2, 3: (3, 0)
    assert robust.distances_to_median(W, [0, 2, 3]).tolist() == [3, 0, 4]
    # of rows 0 and 3: (1.5, 2)
    assert robust.distances_to_median(W, [0, 3]).tolist() == [2.5, 2.5]
    assert robust.distances_to_median(W, []).tolist() == []


@given(stacks())
def test_distances_to_median_equal_numpy(W: np.ndarray) -> None:
    exact = np.linalg.norm(W.astype(np.float64) - np.median(W.astype(np.float64), axis=0), axis=1)
    np.testing.assert_allclose(robust.distances_to_median(W, range(len(W))), exact, rtol=1e-6, atol=1e-6)


def test_a_liar_is_far_however_large_it_is() -> None:
    for value in (50, 1e6, float(np.finfo(np.float32).max)):
        distances = robust.distances_to_median(honest_and(3, value=value), range(10))
        assert distances[:7].max() < 2 * np.median(distances) < 3 * np.median(distances) < distances[7:].min()


def test_capped_by_hand() -> None:
    assert robust.capped(np.array([10.0, 20, 30, 1000, 5]), 3).tolist() == [10, 20, 30, 60, 5]


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # several blocks, the last one shorter
    d = 200_000
    W = np.random.default_rng(0).standard_normal((7, d), dtype=np.float32)
    members = np.random.default_rng(1).random((7, 7)) < 0.4
    members |= np.eye(7, dtype=bool)

    def reductions() -> list[bytes]:
        out = [robust.distances_to_median(W, range(7)).tobytes()]
        for rule in sorted(RULES):
            averaging = Averaging(rule)  # type: ignore[arg-type]
            out += [averaging.mean(W).tobytes(), averaging.group_means(W, members).tobytes()]
        return out

    assert d / blocks.COLUMNS > 4, "too few columns for threads"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    alone = reductions()
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert reductions() == alone


def test_every_rule_has_a_file_and_a_name() -> None:
    files = {path.stem.replace("_", "-") for path in Path(averages.__file__).parent.glob("[!_]*.py")}
    assert files == RULES == {*get_args(Average)} - {"none"}, (
        "a rule is a file of strategies/kernels/averages/ and a name in `Average` of fl_app/known_names.py"
    )
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    assert f"`robust = {' | '.join(get_args(Average)[1:])}`" in page, "docs/security.md describes every rule"


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_number_of_liars_has_an_effect_with_the_rules_that_count_them(
    rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = {**SMALL, "method": "fedavg", "num-clients": 5, "robust": rule, "byzantine-ratio": 0.4}
    warn_of_settings([], [(parse(raw, METHOD_PARAMS), {"robust", "byzantine-ratio"})])
    W = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    has_effect = not np.array_equal(*(Averaging(rule, ratio).mean(W) for ratio in (0.2, 0.4)))
    assert averages.rule_of(rule).counts_byzantine or not has_effect
    assert (mentions(capsys.readouterr().err, "byzantine-ratio has no", "effect")) != averages.rule_of(
        rule
    ).counts_byzantine
