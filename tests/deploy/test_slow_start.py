"""A client's process that takes longer than Flower's half minute to start is not started a second time."""

from __future__ import annotations

from datetime import datetime, timedelta
from inspect import unwrap

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate as module
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from deploy import slow_start


class Clock:
    """Flower's time."""

    def __init__(self) -> None:
        self.time: datetime = vars(module)["now"]()

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "now", clock)
    # other tests start a SuperNode in this process
    monkeypatch.setattr(module.InMemoryCoreState, "claim_task", unwrap(module.InMemoryCoreState.claim_task))
    return clock


def started_again(clock: Clock, seconds: float) -> bool:
    """Whether Flower would start a second process for a message so long after the first."""
    state = InMemoryNodeState(InMemoryObjectStore())
    task = state.create_task(TaskType.CLIENT_APP, run_id=1)
    assert task is not None and state.claim_task(task) and not state.claim_task(task)
    clock.time += timedelta(seconds=seconds)
    # as a SuperExec does before it starts a process
    state.get_tasks()
    return state.claim_task(task) is not None


def test_a_process_has_minutes_to_start(clock: Clock) -> None:
    assert started_again(clock, 31), "Flower waits longer itself: deploy.slow_start can go"
    slow_start.allow_slow_starts()
    assert not started_again(clock, slow_start.SECONDS - 1)
    assert started_again(clock, slow_start.SECONDS + 1)


def test_another_flower_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(module, "InMemoryCoreState")
    with caplog.at_level("WARNING", "corolla"):
        slow_start.allow_slow_starts()
    assert "starts tasks in another way" in caplog.text
