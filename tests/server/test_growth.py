"""What a start, and messages to all, cost as there are more clients: counted in calls, which do not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fl_app.errors import UserError
from fl_app.transport import client_registry as registry_module
from fl_app.transport.client_registry import ClientRegistry
from fl_app.transport.exchange import Exchange
from fl_app.transport.identity import Holders
from tests.conftest import config
from tests.facts import rejected
from tests.server.fake_grid import FakeGrid, properties

FEW, MANY = 100, 1000
# Ten times as many clients may cost so many times as much: a law of N log N would give 15, one of N squared 100.
MOST = 12.0


@pytest.fixture(autouse=True)
def look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are looked at again after some time, and how often must not depend on how busy the machine is."""
    monkeypatch.setattr(registry_module, "POLL_SECONDS", 1000.0)


class OneAtATime(FakeGrid):
    """Answers a message per pull, as one process does, and counts the ids of others that it had to look at."""

    looked_at = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for name in message_ids:
            self.looked_at += 1
            if name in self._pending:
                return super().pull_messages([name])
        return []


def exchange(nodes: dict[int, Any], **changes: Any) -> Exchange:
    fields = {"num_clients": len(nodes), "available_timeout": 100.0, "round_timeout": 100.0} | changes
    return Exchange(OneAtATime(nodes), config(**fields), lambda *told: None, in_flight=1e9)


def calls(work: Callable[[], object]) -> int:
    """Return how many functions of Python and of C are called, and how often generators go on."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def growth(measure: Callable[[int], int]) -> float:
    return measure(MANY) / measure(FEW)


def counted(monkeypatch: pytest.MonkeyPatch, where: type, name: str) -> list[int]:
    """Count the calls of a method."""
    count, original = [0], getattr(where, name)

    def noted(*arguments: Any) -> Any:
        count[0] += 1
        return original(*arguments)

    monkeypatch.setattr(where, name, noted)
    return count


def test_a_start_costs_the_same_for_each_client() -> None:
    def started(n: int) -> int:
        e = exchange({k + 1: properties(k, n) for k in range(n)})
        cost = calls(e.registry.wait)
        assert e.registry.client_ids == list(range(n))
        return cost

    assert growth(started) < MOST


@pytest.mark.parametrize("n", [FEW, MANY])
def test_who_is_settled_is_not_looked_at_again(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seated, claimed = counted(monkeypatch, ClientRegistry, "_assign_client_id"), counted(monkeypatch, Holders, "claim")
    e = exchange({k + 1: properties(k, n) for k in range(n)})
    e.registry.wait()
    assert seated == claimed == [n]
    assert e.grid.looked_at == n  # type: ignore[attr-defined]
    for _ in range(3):
        e.registry.refresh()
    assert seated == [n]


@pytest.mark.parametrize("n", [FEW, MANY])
def test_a_majority_that_changes_with_each_answer_costs_little_more(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seated = counted(monkeypatch, ClientRegistry, "_assign_client_id")
    # 0, then twice 1, then twice 0, ...: the lead changes with every second answer
    sizes = [8 + (k + 1) // 2 % 2 for k in range(n)]
    e = exchange({k + 1: properties(k, n, **{"image-size": size}) for k, size in enumerate(sizes)})
    with rejected(UserError, "", "same channels"):
        e.registry.config = config(num_clients=n, available_timeout=0.01, round_timeout=0.01)
        e.registry.wait()
    assert seated[0] <= 4 * n


def test_messages_to_all_cost_the_same_for_each_client() -> None:
    def asked(n: int) -> int:
        e = exchange({k + 1: properties(k, n) for k in range(n)})
        e.registry.wait()
        messages = (e.message(i, RecordDict(), "get_properties", 1) for i in e.registry.client_ids)
        return calls(lambda: [reply.client_id for reply in e.ask("round", messages, 100.0, n)])

    assert growth(asked) < MOST


def test_meeting_those_who_are_drawn_costs_the_same_for_each_client() -> None:
    def met(n: int) -> int:
        e = exchange({k + 1: properties(k, n) for k in range(n)})
        e.registry.expect({k: k + 1 for k in range(n)})
        e.registry.wait()
        return calls(lambda: [e.registry.query([k, k + 1]) for k in range(0, n, 2)])

    assert growth(met) < MOST
