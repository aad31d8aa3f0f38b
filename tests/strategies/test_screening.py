"""Who is far from the others (key `max-update-norm`): by hand, and what must hold of any uploads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_app.layout import NOTHING, Model
from fl_app.transport import wire
from strategies.base.state import UploadBuffer
from strategies.engine.screening import USUAL, Screening

Places = Sequence[Any]  # numbers, or vectors


def buffer_of(places: Places, sizes: Sequence[int] | None = None) -> UploadBuffer:
    """Uploads at these places."""
    rows = np.array(places, np.float32).reshape(len(places), -1)
    buffer = UploadBuffer.of(list(range(len(rows))), wire.Expected(rows.shape[1], 0))
    for i, row in enumerate(rows):
        buffer.add(i, wire.Upload(Model(row, NOTHING.buffers), num_examples=sizes[i] if sizes else 1), {})
    return buffer


def found(
    screening: Screening,
    round: int,
    places: Places,
    *,
    sent: Places | None = None,
    sizes: Sequence[int] | None = None,
    limit: float = USUAL,
) -> dict[int, float]:
    """Outliers, and how far they are."""
    buffer = buffer_of(places, sizes)
    stacks = {"parameters": buffer.W, "BatchNorm statistics": buffer.B}
    starts = (
        np.zeros((len(places), 0), np.float32) if sent is None else np.array(sent, np.float32).reshape(len(places), -1)
    )
    outliers = screening.measure(round, buffer, stacks, limit, lambda i: {"parameters": starts[i]})
    return {outlier.client_id: float(f"{outlier.times:.6g}") for outlier in outliers}


# by hand


def test_far_from_the_median_of_all() -> None:
    # median 0, distances 1 1 0 2 7, their median 1
    assert found(Screening(), 1, [-1, 1, 0, -2, 7]) == {4: 7}
    assert found(Screening(), 1, [-1, 1, 0, -2, 3]) == {}
    # with more samples than most it may be farther, tenfold at most
    assert found(Screening(), 1, [-1, 1, 0, -2, 7], sizes=[1, 1, 1, 1, 5]) == {}
    assert found(Screening(), 1, [-1, 1, 0, -2, 40], sizes=[1, 1, 1, 1, 2**40]) == {4: 4}
    # of two nobody can say; where most are equal nothing says what is far
    assert found(Screening(), 1, [0, 1e6]) == found(Screening(), 1, [0, 0, 0, 1]) == {}


def test_of_three_or_four_the_bound_is_wider() -> None:
    # median 0.5, distances 1.5 0.5 0.5 3.5
    assert found(Screening(), 1, [-1, 1, 0, 4]) == {}
    assert found(Screening(), 1, [-1, 1, 0, 40]) == {3: 39.5}


def test_most_have_the_same_data_and_one_has_not() -> None:
    places = [9.5, 10, 10, 10, 10.5, -10]
    # the others lie 0, 0.5 apart
    assert found(Screening(), 1, places) == {5: 80}
    # and have moved by 10, as it has
    assert found(Screening(), 1, places, sent=[0] * 6) == {}
    assert found(Screening(), 1, [*places[:5], -100], sent=[0] * 6) == {5: 10}


def test_what_the_server_made_of_a_client_is_not_held_against_it() -> None:
    assert found(Screening(), 1, [-1, 1, 0, -2, 107], sent=[0, 0, 0, 0, 106]) == {}
    assert found(Screening(), 1, [-1, 1, 0, -2, 107], sent=[0, 0, 0, 0, 0]) == {4: 107}


def test_hardly_any_movement_is_never_far() -> None:
    # a hundredth of 100 is usual
    assert found(Screening(), 1, [100, 100, 100, 100, 103], sent=[100] * 5) == {}
    assert found(Screening(), 1, [100, 100, 100, 100, 104], sent=[100] * 5) == {4: 4}
    screening = Screening()
    assert found(screening, 1, [-10, 10, 0, -20, 20]) == {}
    screening.accept(1, range(4))
    assert found(screening, 2, [0, 0, 0, 0.1, 2.9]) == {}  # a tenth of 10 is usual


def test_one_that_was_absent_may_move_as_far_as_the_others_did() -> None:
    screening = Screening()
    assert found(screening, 1, [-10, 10, 0, -1, 20]) == {}
    screening.accept(1, range(4))
    # 3 was there in round 1, and lay near; 4 is new
    later = [-1, 1, 0, 22, -7]
    assert found(screening, 2, later) == {3: 22}
    again = Screening.restored(screening.saved())
    assert again == screening and found(again, 2, later) == {3: 22}


def test_one_that_was_far_before_may_be_so_again() -> None:
    screening = Screening()
    assert found(screening, 1, [-10, 10, 0, -1, 20]) == {}  # 10 is usual
    screening.accept(1, range(5))
    later = [-1, 1, 0, -2, 25]
    assert found(screening, 2, later) == {}
    # of the most that has been usual
    assert found(screening, 2, [*later[:4], 31]) == {4: 3.1}
    assert found(Screening.restored(screening.saved()), 2, [*later[:4], 31]) == {4: 3.1}
    screening.accept(2, range(5))
    assert found(screening, 3, [-1, 1, 0, 25, -2]) == {3: 12.5}  # each by itself


def test_who_was_refused_is_no_newcomer() -> None:
    places = [-10, 10, 0, -1, 31]
    for refused, then in (([4], {4: 20}), ([], {})):
        screening = Screening()
        assert found(screening, 1, places) == {4: 3.1}
        screening.accept(1, range(4), refused)
        assert found(screening, 2, [-1, 1, 0, -1, 20]) == then


# of any uploads

MOVES = st.lists(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3), min_size=5, max_size=9)


def arrays(moves: list[list[float]]) -> NDArray[np.float64]:
    return np.array(moves)


@given(MOVES, st.lists(st.floats(-1000, 1000, width=16), min_size=27, max_size=27))
def test_nobody_is_far_who_moved_no_farther_than_most(moves: list[list[float]], places: list[float]) -> None:
    """Whatever the server sent to whom."""
    sent = np.array(places).reshape(9, 3)[: len(moves)]
    lengths = np.linalg.norm(arrays(moves), axis=1)
    kept = np.where(lengths[:, None] <= 2.9 * np.median(lengths), arrays(moves), 0)
    assert found(Screening(), 1, sent + kept, sent=sent) == {}


@given(MOVES, st.integers(0, 8), st.sampled_from([-1, 1]))
def test_whoever_lies_beyond_all_is_found_and_nobody_else(moves: list[list[float]], liar: int, sign: int) -> None:
    # all have moved by 4.8 to 5.2
    W = arrays(moves) * 0.1 + [3, 4, 0]
    liar %= len(W)
    W[liar] = sign * 100 * W[liar]
    assert list(found(Screening(), 1, W, sent=np.zeros(W.shape))) == [liar]


@given(MOVES, st.sampled_from([1e-3, 0.5, 8.0, 1e4]), st.permutations(range(9)))
def test_neither_scale_nor_order_matters(moves: list[list[float]], scale: float, order: list[int]) -> None:
    W = np.round(arrays(moves), 3)
    W[0] += 5
    order = [k for k in order if k < len(W)]
    before = found(Screening(), 1, W, sent=np.zeros(W.shape))
    assert set(found(Screening(), 1, W * scale, sent=np.zeros(W.shape))) == set(before)
    assert {order[k] for k in found(Screening(), 1, W[order], sent=np.zeros(W.shape))} == set(before)


@given(st.lists(st.floats(0.1, 20), min_size=2, max_size=12))
def test_no_liar_gets_farther_than_the_most_that_was_ever_allowed(usual: list[float]) -> None:
    """One that always goes as far as it may: three times what has been usual at the most."""
    screening = Screening()
    for round, scale in enumerate(usual, 1):
        honest = [-scale, scale, -scale, scale, 0]
        most = max(usual[:round])
        assert 5 in found(screening, round, [*honest, 1.3 * USUAL * most])
        found(screening, round, [*honest, 0.9 * USUAL * scale])
        screening.accept(round, range(6))
