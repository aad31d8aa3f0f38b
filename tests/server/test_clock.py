"""Simulated time: when clients answer, and when a round closes, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fl_app.errors import UserError
from fl_app.server.arrivals import COMPUTE, Clock, WorkEnd, closing, read_speeds
from fl_app.server.run_folder import read_metrics
from tests.conftest import Run, config

SPEEDS = "client,compute,down,up\n0,1000,100,50\n1,500,100,50\n2,1000,10,5\n"
HOURS = "client,compute,down,up,from,until\n0,1000,100,50,0,0\n1,500,100,50,90,30\n2,1000,10,5,20,70\n"


def clock(directory: Path, text: str = SPEEDS, **changes: Any) -> Clock:
    path = directory / "speeds.csv"
    path.write_text(text)
    return Clock(config(speeds=f"file:{path}", local_epochs=2, **changes), parameters=10)


def test_the_second_of_an_answer(tmp_path: Path) -> None:
    """300 bytes down, 25 samples x 2 epochs x 10 parameters, 100 bytes up."""
    time = clock(tmp_path)
    assert time.answer(0, 1, 0, 25, 300, 100) == WorkEnd(3 + 0.5 + 2)
    time.now = 7.0
    assert time.answer(1, 1, 0, 25, 300, 100) == WorkEnd(7 + 3 + 1 + 2)


@pytest.mark.parametrize(
    ("ends", "changes", "expected"),
    [
        ([3, 1, 2, 9], {}, 19),
        ([3, 1, 2, 9], {"quorum": 0.75}, 13),
        # three of four: a part of a client is a client
        ([3, 1, 2, 9], {"quorum": 0.7}, 13),
        ([3, 1, 2, 9], {"round_deadline": 4}, 14),
        # a deadline after the last answer
        ([3, 1, 2, 9], {"round_deadline": 40}, 19),
        # only one has answered by then: the round waits for half of its clients
        ([3, 1, 2, 9], {"round_deadline": 1.5}, 12),
        # a client that fails is no answer
        ([3, -1, 2, 9], {"quorum": 0.75}, 19),
        ([-3, -1, -2, 9], {"quorum": 0.75}, 19),
        # it is a part of the clients that have not failed: three of five, and not the silent last one
        ([-1, -1, 2, 3, 4, 90], {"quorum": 0.7}, 14),
        # a later failure ends the wait
        ([1, 2, 3, -5, 90], {"quorum": 0.8, "min_results": 0.4}, 100),
        ([1, 2, 3, -5, 90], {"quorum": 0.75, "min_results": 0.4}, 15),
        # half of all clients must have answered
        ([-1, -2, 3, 90], {"quorum": 0.5}, 100),
        ([-3, -1, -2, -9], {"quorum": 0.75, "round_deadline": 5}, 19),
    ],
)
def test_the_close_of_a_round(ends: list[float], changes: dict[str, Any], expected: float) -> None:
    """ends: seconds after the round's beginning at 10; negative ones failed."""
    found = [WorkEnd(10 + abs(second), "failed" if second < 0 else "") for second in ends]
    assert closing(found, 10.0, config(speeds="lognormal:1", **changes)) == expected


def test_speeds_are_drawn_by_the_seed() -> None:
    one, same, other = (Clock(config(speeds="lognormal:0.5", seed=seed), 10) for seed in (1, 1, 2))
    assert [one.speed(i) for i in range(5)] == [same.speed(i) for i in range(5)]
    assert one.speed(0) != other.speed(0) and one.speed(0) != one.speed(1)
    assert Clock(config(speeds="lognormal:0"), 10).speed(3).compute == COMPUTE


def test_the_hours_of_clients(tmp_path: Path) -> None:
    """Days of 100 seconds: client 0 is always there, client 1 from 90 to 30, client 2 from 20 to 70."""
    time = clock(tmp_path, HOURS, day_length=100)
    assert math.isinf(time.leaves(0, 5))
    assert [time.leaves(1, second) for second in (95, 105, 129)] == [130, 130, 130]
    assert [time.returns(1, second) for second in (29, 30, 89, 90)] == [29, 90, 90, 90]
    assert [time.returns(2, second) for second in (0, 20, 70)] == [20, 20, 120]
    time.now = 75.0
    assert time.waits_for([0, 1, 2]) == [0] and time.now == 75
    assert time.waits_for([1, 2]) == [1] and time.now == 90
    # away before its answer, 3 + 1 + 2 seconds later
    time.now = 127.0
    ended = time.answer(1, 1, 0, 25, 300, 100)
    assert ended.second == 130 and "went away" in ended.cause


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert clock(tmp_path, "\ufeff" + SPEEDS).speed(1) == clock(tmp_path).speed(1)


def test_time_goes_on_to_the_next_return_within_a_day(tmp_path: Path) -> None:
    """Client 0 is always there, 1 from second 90 on, 2 from second 20."""
    time = clock(tmp_path, HOURS, day_length=100.0)
    time.now = 75.0
    assert time.goes_on([0, 1, 2], 75.0) and time.now == 90
    assert time.goes_on([0, 1, 2], 75.0) and time.now == 120
    # all are there
    assert not time.goes_on([0, 1, 2], 75.0) and time.now == 120
    time.now = 72.0
    assert not time.goes_on([2], -30.0) and time.now == 72


def test_a_private_round_waits_for_clients_that_are_away(run: Run, tmp_path: Path) -> None:
    """An aggregation group needs three clients. Two are there at the start, all of them from second 10 on."""
    rows = [f"{i},1e7,4e6,1e6,{0 if i < 2 else 10},50" for i in range(5)]
    (tmp_path / "speeds.csv").write_text("\n".join(["client,compute,down,up,from,until", *rows]) + "\n")
    keys: dict[str, Any] = {"speeds": f"file:{tmp_path / 'speeds.csv'}", "day_length": 100.0, "num_server_rounds": 1}
    folder = run(method="fedavg", private=True, num_clients=5, **keys)
    (record,) = read_metrics(folder.path)
    assert len(record["clients"]) == 5 and record["virtual-seconds"] > 10


def test_clients_fail_at_the_drop_rate() -> None:
    time = Clock(config(speeds="lognormal:0", drop_rate=0.25, num_clients=1), 10**6)
    ends = [time.answer(0, round, 0, 100, 0, 0) for round in range(1, 401)]
    failed = [end for end in ends if end.cause]
    assert 70 < len(failed) < 130 and all(end.second < 0.1 for end in failed)
    # a repetition draws again
    assert [end.cause for end in ends] != [time.answer(0, round, 1, 100, 0, 0).cause for round in range(1, 401)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("client,compute,down\n0,1,1\n", "must have the columns client, compute, down, up"),
        (HOURS.replace(",until", ""), "both or none of from and until"),
        (SPEEDS.replace("500", "fast"), "line 3: numbers in all columns"),
        (SPEEDS.replace("500", "0"), "line 3: speeds must be numbers >= 1e-06"),
        (SPEEDS.replace("500", "1e-320"), "line 3: speeds must be numbers >= 1e-06"),
        (SPEEDS.replace("500", "inf"), "line 3: speeds must be numbers >= 1e-06"),
        (SPEEDS.replace("\n1,", "\n-1,"), "line 3: clients count from 0, got -1"),
        (SPEEDS.replace("\n1,", "\n0,"), "line 3: client 0 has a row already"),
        (SPEEDS.replace("\n2,", "\n5,"), "has no row for client 2 of 3"),
    ],
)
def test_a_wrong_file_of_speeds(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "speeds.csv").write_text(text)
    with pytest.raises(UserError, match=error):
        read_speeds(tmp_path / "speeds.csv", 3, 86400.0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"quorum": 0.3}, "quorum: must be at least min-results"),
        ({"staleness": 2}, "staleness: nobody is late"),
        ({"quorum": 0.8, "private": True}, "quorum: .* every client that was asked, so no round can close early"),
        ({"round_deadline": 1.0, "private": True}, "round-deadline: a private run's sums need every client"),
        ({"quorum": 0.8, "staleness": 1, "private": True}, "staleness: a private run's sums need every client"),
        (
            {"speeds": "file:/speeds.csv", "availability": 0.5},
            "availability: the file of speeds sets the clients' hours .from, until. or none; leave it at 1, got 0.5",
        ),
        ({"speeds": "lognormal:11"}, "speeds: must be none, lognormal:SIGMA .at most 10."),
        ({"drop_rate": 0.1}, "drop-rate: it is about simulated time, which needs speeds"),
        ({"day_length": 100.0}, "day-length: it is about simulated time, which needs speeds, got 100"),
        ({"speeds": "fast"}, "speeds: must be none, lognormal:SIGMA .at most 10. or file:speeds.csv, got 'fast'"),
        ({"speeds": "file:speeds.csv"}, "speeds: must be an absolute path"),
    ],
)
def test_keys_that_do_not_fit_together(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        config(**changes)
