"""Failures of an attempt at a round: each is recorded whole; the log has equal ones once."""

from __future__ import annotations

import logging

import pytest

from corolla.testing import federation
from fl_app.known_names import CLIENT_NAME
from fl_app.transport.wire import WireError
from strategies.engine.attempt import RoundAttempt, failure_lines
from tests.facts import each_mentions

DIVERGED = "training diverged: its loss is nan; targets are in {} .. 294: scale them"


def fail_all(attempt: RoundAttempt, clients: int = 3) -> None:
    for i in range(clients):
        attempt.fail(i, "round 1", "dropped", WireError(DIVERGED.format(280 + i)))


def test_equal_failures_are_logged_once_and_recorded_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "corolla")
    config = federation("fedavg").config
    first = RoundAttempt(config, 1, declared={1: {CLIENT_NAME: "Bern"}})
    fail_all(first)
    assert each_mentions(
        caplog.messages,
        (f"round 1: client 0 dropped: {DIVERGED.format(280)}",),
        ("round 1", "client 1 (Bern)", "training diverged", "loss is nan"),
        ("round 1", "client 2 dropped", "training diverged", "loss is nan"),
    )
    assert [failure["cause"] for failure in first.failures] == [DIVERGED.format(280 + i) for i in range(3)]

    caplog.clear()
    second = RoundAttempt(config, 1, declared=first.declared, earlier=[first])
    fail_all(second, clients=2)
    second.fail(2, "round 1", "dropped", WireError("no reply within 5 s"))
    assert each_mentions(caplog.messages, ("round 1", "client 2 dropped", "no reply within 5 s"))
    assert each_mentions(
        failure_lines([first, second]),
        (f"client 0: {DIVERGED.format(280)}",),
        (f"client 1 (Bern): {DIVERGED.format(281)}",),
        (f"client 2: {DIVERGED.format(282)}",),
        ("client 2", "no reply within 5 s"),
    )
