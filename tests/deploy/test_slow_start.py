"""A process that takes longer than Flower's half minute to start is not started a second time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from deploy import patches
from tests.facts import mentions

States = Callable[[str], Any]


class Clock:
    """Flower's time."""

    def __init__(self) -> None:
        self.time: datetime = vars(in_memory_corestate)["now"]()

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module, kind in ((in_memory_corestate, patches.IN_MEMORY), (sql_corestate, patches.SQL)):
        monkeypatch.setattr(module, "now", clock)
        # other tests start a SuperNode in this process
        monkeypatch.setattr(vars(module)[kind], "claim_task", unwrap(vars(module)[kind].claim_task))
    return clock


@pytest.fixture
def states(tmp_path: Path) -> States:
    """Return a function that makes a new state: a SuperNode's, or that of a SuperLink with a database."""

    def make(kind: str) -> Any:
        if kind == patches.IN_MEMORY:
            return InMemoryNodeState(InMemoryObjectStore())
        managers: Any = type("Federations", (), {})()
        state = SqlLinkState(str(tmp_path / "flower.db"), managers, InMemoryObjectStore())
        state.initialize()
        return state

    return make


def started_again(state: Any, clock: Clock, seconds: float) -> bool:
    """Whether Flower would start a second process for a task so long after the first."""
    task = state.create_task(TaskType.CLIENT_APP, run_id=1)
    assert task is not None and state.claim_task(task) and not state.claim_task(task)
    clock.time += timedelta(seconds=seconds)
    # as a SuperExec does before it starts a process
    state.get_tasks()
    return state.claim_task(task) is not None


@pytest.mark.parametrize("kind", [patches.IN_MEMORY, patches.SQL])
def test_a_process_has_minutes_to_start(kind: str, clock: Clock, states: States) -> None:
    assert started_again(states(kind), clock, 31), "Flower waits longer itself: deploy.patches can go"
    patches.allow_slow_starts(kind)
    assert not started_again(states(kind), clock, patches.START_SECONDS - 1)
    assert started_again(states(kind), clock, patches.START_SECONDS + 1)


@pytest.mark.parametrize(
    "module, kind, part",
    [
        (in_memory_corestate, patches.IN_MEMORY, "InMemoryCoreState"),
        (sql_corestate, patches.SQL, "TaskModel"),
    ],
)
def test_another_flower_is_named(
    module: Any, kind: str, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(module, part)
    with caplog.at_level("WARNING", "corolla"):
        patches.allow_slow_starts(kind)
    assert mentions(caplog.text, "starts tasks", "another way")
