from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies.base import companies
from strategies.base.companies import OUTSIDE
from strategies.linkage import ALONE, partition, regroup, summed
from tests.strategies.test_linkage import alike, random_similarity


def draws(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def columns(sums: list[list[int]], n: int) -> np.ndarray:
    """Which clients are in which sum, bool [sums, n]: all that least squares over the sums has to go by."""
    return np.array([np.isin(np.arange(n), own) for own in sums])


@given(st.integers(3, 40), st.integers(0, 3), st.integers(0, 999))
def test_drawn_companies_are_of_three_to_five_and_cover_who_trains(n: int, unseen: int, seed: int) -> None:
    ids = sorted(draws(seed).permutation(n + unseen)[:n].tolist())
    found = companies.drawn(ids, n + unseen, draws(seed))
    own = companies.members(found)
    assert sorted(i for each in own for i in each) == ids and all(3 <= len(each) <= 5 for each in own)
    assert (found == OUTSIDE).sum() == unseen


def test_one_away_takes_two_along_and_only_them_from_then_on() -> None:
    whole = companies.one(range(8), 8)
    left, ids = companies.without(whole, {1})
    assert companies.members(left) == [[0, 1, 2], [3, 4, 5, 6, 7]] and ids == [3, 4, 5, 6, 7]
    assert companies.without(left, set())[1] == list(range(8))  # back: with those that it took along
    again, ids = companies.without(left, {0, 2})
    assert companies.members(again) == companies.members(left) and ids == [3, 4, 5, 6, 7]
    assert companies.without(left, {4})[1] == [0, 1, 2]  # two others would be left, too few for themselves
    assert companies.without(companies.one(range(5), 5), {4})[1] == []


@given(st.integers(3, 20), st.integers(0, 999), st.data())
def test_whoever_is_away_all_of_a_company_are_in_a_sum_or_none(n: int, seed: int, data: st.DataObject) -> None:
    some = companies.drawn(range(n), n, draws(seed)) if data.draw(st.booleans()) else companies.one(range(n), n)
    sums = []
    for _ in range(6):
        absent = data.draw(st.sets(st.integers(0, n - 1), max_size=3))
        some, ids = companies.without(some, absent)
        assert not absent & set(ids)
        sums.append(ids)
    A = columns(sums, n)
    for own in companies.members(some):
        assert len(own) >= 3 and (A[:, own] == A[:, own[:1]]).all()


@given(st.integers(3, 20), st.integers(0, 999), st.lists(st.floats(0.2, 0.9), min_size=1, max_size=5))
def test_over_all_regroupings_nobody_is_in_other_sums_than_two_others(n: int, seed: int, cuts: list[float]) -> None:
    some, groups, similarity = companies.one(range(n), n), np.zeros(n, int), np.eye(n)
    sums = [list(range(n))]
    for k, cut in enumerate(cuts):
        found = regroup(some, np.arange(n), random_similarity(n, seed + k), cut)
        if found:
            some, groups, similarity = found
        sums += summed(range(n), groups, similarity).values()
    A = columns(sums, n)
    for i in range(n):
        assert (A.T == A[:, i]).all(axis=1).sum() >= 3
    for own in companies.members(some):
        assert (A[:, own] == A[:, own[:1]]).all()


def test_who_would_be_alone_of_its_company_in_a_group_goes_with_the_others() -> None:
    some = np.array([0, 0, 0, 0, 1, 1, 1, 1])  # 3 is like 4 to 7 now
    overlap = alike(8, *((i, j, 0.9) for own in ([0, 1, 2], [3, 4, 5, 6, 7]) for i in own for j in own if i < j))
    assert partition(overlap, 0.5).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    found = regroup(some, np.arange(8), overlap, 0.5)
    assert found is not None and found[1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    # of one company three and five may part
    found = regroup(companies.one(range(8), 8), np.arange(8), overlap, 0.5)
    assert found is not None and found[1].tolist() == [0, 0, 0, 1, 1, 1, 1, 1] and len(companies.members(found[0])) == 2
    # nobody shares any more: everyone is in one sum, which splits nothing
    found = regroup(some, np.arange(8), overlap, None)
    assert found is not None and found[1].tolist() == [ALONE] * 8 and companies.members(found[0]) == companies.members(some)


def test_who_was_away_at_a_regrouping_stays_with_its_company() -> None:
    overlap = alike(7, *((i, j, 0.9) for own in ([0, 1, 2], [3, 4, 5, 6]) for i in own for j in own if i < j))
    found = regroup(companies.one(range(8), 8), np.arange(7), overlap, 0.5)  # 7 is away
    assert found is not None and found[1][7] == 1
