"""An application's process may take minutes to start where processors are busy.

Flower gives a process 30 s until its first call. Then it starts another one for the same task, and the first one fails.
On a busy machine no process is ready in time, and more and more of them run, until the memory is full. Here a process
has five minutes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from deploy.patches import changing

SECONDS = 300

# where Flower keeps its tasks: a SuperNode in memory, a SuperLink there or in a database
IN_MEMORY, SQL = "InMemoryCoreState", "SqlCoreState"
# sets how long Flower's state waits for the process with a token
WaitUntil = Callable[[Any, str, datetime], None]


def allow_slow_starts(*kinds: str) -> None:
    """Let Flower wait longer for a process that it started. Warn if Flower has no place for it.

    kinds: IN_MEMORY, SQL or both. SQL imports a library for databases.
    """
    for kind in kinds:
        with changing("starts tasks", "a busy machine may start a task twice"):
            name, waiting_in = _STATES[kind]
            module = importlib.import_module(f"flwr.supercore.corestate.{name}")
            _wait_longer(getattr(module, kind), module.now, waiting_in(module))


def _wait_longer(state: Any, now: Callable[[], datetime], wait_until: WaitUntil) -> None:
    claim: Callable[..., str | None] = state.claim_task

    @functools.wraps(claim)
    def claim_for_longer(self: Any, task_id: int) -> str | None:
        token = claim(self, task_id)
        if token is not None:
            wait_until(self, token, now() + timedelta(seconds=SECONDS))
        return token

    state.claim_task = claim_for_longer


def _in_memory(module: Any) -> WaitUntil:
    def wait_until(state: Any, token: str, time: datetime) -> None:
        with state.lock_task_store:
            state.task_token_store[state.task_token_to_task_id[token]].active_until = time

    return wait_until


def _in_database(module: Any) -> WaitUntil:
    update, task = module.update, module.TaskModel

    def wait_until(state: Any, token: str, time: datetime) -> None:
        with state.session() as session:
            session.execute(update(task).where(task.token == token).values(active_until=time))

    return wait_until


# by kind: its module, and the function that returns its WaitUntil
_STATES = {IN_MEMORY: ("in_memory_corestate", _in_memory), SQL: ("sql_corestate", _in_database)}
