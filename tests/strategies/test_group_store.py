from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fl_app.config import RunConfig
from fl_app.privacy.aggregation_groups import random_groups
from fl_app.transport.wire import Expected
from strategies.engine import group_store
from strategies.engine.attempt import RoundAttempt, TooFewResults
from strategies.engine.group_store import OUTSIDE, GroupStore
from strategies.engine.private import MaskedSum, PrivateRounds, opened_sums
from strategies.kernels.linkage import ALONE, partition
from tests.strategies.test_linkage import alike, random_similarity


def draws(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.integers(3, 40), st.integers(0, 3), st.integers(0, 999))
def test_drawn_groups_are_of_three_to_five_and_cover_who_trains(n: int, unseen: int, seed: int) -> None:
    ids = sorted(draws(seed).permutation(n + unseen)[:n].tolist())
    found = group_store.numbered(random_groups(ids, draws(seed)), n + unseen)
    own = group_store.members(found)
    assert sorted(i for each in own for i in each) == ids and all(3 <= len(each) <= 5 for each in own)
    assert (found == OUTSIDE).sum() == unseen


def test_one_or_two_of_a_group_are_not_summed_up() -> None:
    found = np.array([0, 0, 0, 1, 1, 1, 1, OUTSIDE])
    assert group_store.present(found, range(7)) == [[0, 1, 2], [3, 4, 5, 6]]
    assert group_store.present(found, {0, 1, 2, 4, 5, 6}) == [[0, 1, 2], [4, 5, 6]]
    assert (
        group_store.present(found, {1, 2, 3, 4, 5, 6}) == [[3, 4, 5, 6]]
        and group_store.present(found, {1, 2, 5, 6}) == []
    )


def test_one_away_takes_two_along_and_only_them_from_then_on() -> None:
    found = group_store.split(group_store.numbered([range(8)], 8), set(range(8)) - {1})
    assert group_store.members(found) == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert (group_store.split(found, set(range(8)) - {0, 2}) == found).all()
    # two others would be left, too few for themselves
    assert (group_store.split(found, set(range(8)) - {4}) == found).all()
    assert (group_store.split(group_store.numbered([range(5)], 5), {0, 1, 2, 3}) == 0).all()
    # a whole aggregation group away splits none
    assert (group_store.split(found, {0, 1, 2}) == found).all()


def test_one_of_a_group_in_a_group_goes_to_the_part_it_is_most_like() -> None:
    some, labels = group_store.numbered([range(8)], 8), np.array([0, 0, 0, 1, 1, 1, 1, ALONE])
    # of the group of three, though the other is larger
    similarity = alike(8, (7, 0, 0.9))
    found, moved = group_store.grouped(some, labels, similarity)
    assert moved.tolist() == [0, 0, 0, 1, 1, 1, 1, 0] and group_store.members(found) == [[0, 1, 2, 7], [3, 4, 5, 6]]
    _, moved = group_store.grouped(np.array([0, 0, 0, 1, 1, 1, 1, 1]), np.array([0, 0, 0, 0, 1, 1, 1, 1]), similarity)
    assert moved.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    # none has three: all with most
    found, moved = group_store.grouped(found, np.array([0, 1, 1, 2, 2, ALONE, ALONE, 2]), similarity)
    assert moved.tolist() == [1, 1, 1, ALONE, ALONE, ALONE, ALONE, 1]
    # nobody shares any more: everyone is in one sum, which splits nothing
    again, moved = group_store.grouped(found, np.full(8, ALONE), similarity)
    assert moved.tolist() == [ALONE] * 8 and group_store.members(again) == group_store.members(found)


@given(st.integers(3, 25), st.integers(0, 999), st.booleans(), st.data())
def test_over_a_whole_run_everybody_is_in_the_same_sums_as_two_others(
    n: int, seed: int, some: bool, data: st.DataObject
) -> None:
    """Groups that change, clients that are away or drop out with their aggregation groups, sums of attempts that do not count."""
    found = group_store.numbered(random_groups(range(n), draws(seed)) if some else [range(n)], n)
    summed, sums = np.zeros(n, int), []
    for k in range(data.draw(st.integers(1, 8))):
        away = data.draw(st.sets(st.integers(0, n - 1), max_size=2))
        late = data.draw(st.sets(st.integers(0, n - 1), max_size=2))
        for here in (set(range(n)) - away, set(range(n)) - away - late):
            found = group_store.split(found, here)
            asked = [i for own in group_store.members(found) if here.issuperset(own) for i in own]
            groups = [[i for i in asked if summed[i] == label] for label in np.unique(summed)]
            sums += [own for own in groups if own and not late.intersection(own)]
            assert all(len(own) >= 3 for own in groups if own)
        labels = partition(random_similarity(n, seed + k), data.draw(st.floats(0.2, 0.9)))
        found, summed = group_store.grouped(found, labels, random_similarity(n, seed + k))
    A = np.array([np.isin(np.arange(n), own) for own in sums])
    if len(A):
        assert all((A.T == column).all(axis=1).sum() >= 3 for column in A.T)


class Asking:
    """A private run's server, as far as it chooses whom to ask; groups change, clients come, go and drop out."""

    def __init__(self, folder: Path, n: int, some: bool, absent: str) -> None:
        self.config = RunConfig(
            private=True,
            private_left_out=absent,
            max_size_weight=0.0,
            num_clients=n,
            fraction_train=0.5 if some else 1.0,
        )
        self.folder = SimpleNamespace(path=folder)
        self.protocol = PrivateRounds(cast(Any, self))
        self.summed = np.zeros(n, int)

    def attempts(self, round: int, connected: Sequence[set[int]], dropping: Sequence[set[int]]) -> list[list[int]]:
        """Whose sums the server has after a round's attempts, in the last of which nobody drops out."""
        earlier: list[RoundAttempt] = []
        for here, gone in zip(connected, dropping, strict=True):
            without = frozenset().union(*(attempt.without for attempt in earlier))
            attempt = RoundAttempt(cast(Any, self.config), round, earlier=[*earlier], without=without)
            try:
                asked = self.protocol.sample(attempt, sorted(here))
            except TooFewResults:
                break
            groups = {
                label: [i for i in asked if self.summed[i] == label] for label in sorted({*self.summed[asked].tolist()})
            }
            metrics: dict[int, Any] = {i: {} for i in asked if i not in gone}
            attempt.buffer = MaskedSum(
                asked,
                Expected(0, 0),
                *[np.empty((0, 0), np.float32)] * 2,
                None,
                {},
                np.zeros(0),
                metrics,
                config=RunConfig(),
                d=0,
                version="",
                groups=groups,
                totals=np.empty((0, 0), np.uint64),
                row_of_sum={},
                sent={},
                keys={},
                transcripts={},
            )
            with contextlib.suppress(TooFewResults):
                attempt.buffer.survivors = self.protocol._survivors(attempt, attempt.buffer)
                attempt.buffer.answers = {i: ([], []) for own in attempt.buffer.survivors.values() for i in own}
                attempt.buffer.seeds = {
                    label: dict.fromkeys(own, b"") for label, own in attempt.buffer.survivors.items()
                }
            attempt.without = without | gone.intersection(asked)
            earlier.append(attempt)
            if not gone.intersection(asked):
                break
        return [own for attempt in earlier for own in opened_sums(attempt.buffer)]


@given(st.integers(3, 16), st.integers(0, 9999), st.booleans(), st.sampled_from(["client", "group"]))
def test_all_sums_of_a_round_with_its_repetitions_tell_of_nobody_alone(
    n: int, seed: int, some: bool, absent: str
) -> None:
    """Whoever comes, goes and drops out between attempts; with `private-left-out = "group"` of all rounds together, too."""
    random, every = draws(seed), []

    def few() -> set[int]:
        return set(random.choice(n, random.integers(0, 3), replace=False).tolist())

    with tempfile.TemporaryDirectory() as folder:
        server = Asking(Path(folder), n, some, absent)
        for round in range(1, 7):
            base = set(range(n)) - few()
            sums = server.attempts(round, [base, base ^ few(), base ^ few()], [few(), few(), set()])
            every += sums
            for of in (sums, every if absent == "group" else []):
                A = np.array([np.isin(np.arange(n), own) for own in of]).reshape(-1, n)
                assert all((A.T == column).all(axis=1).sum() >= 3 for column in A.T if column.any())
            if not some:
                server.summed = server.protocol.keep_together(
                    np.arange(n), random.integers(0, 3, n), random_similarity(n, seed + round)
                )


def test_the_bound_on_counts_stays(tmp_path: Path) -> None:
    store = GroupStore(tmp_path, group_store.numbered([range(4)], 4))
    assert store.most == 0
    store.bound_sizes([10.0, 20.0, 100.0], 2.0)
    store.bound_sizes([500.0, 90.0, 100.0], 2.0)
    assert store.most == 40
    store.replace(np.array([0, 0, 0, OUTSIDE]))
    again = GroupStore(tmp_path, group_store.numbered([range(4)], 4))
    assert again.most == 40 and again.groups.tolist() == [0, 0, 0, OUTSIDE]
