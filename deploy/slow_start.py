"""A client's process may take minutes to start where processors are busy.

Flower gives a process 30 s until its first call. Then it starts another one for the same message, and the first one
fails. On a busy machine no process is ready in time, and more and more of them run, until the memory is full. Here a
process has five minutes.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

log = logging.getLogger("corolla")

SECONDS = 300


def allow_slow_starts() -> None:
    """Let Flower's SuperNode wait longer for a process that it started. Warn if Flower has no place for it."""
    try:
        module: Any = importlib.import_module("flwr.supercore.corestate.in_memory_corestate")
        state, now = module.InMemoryCoreState, module.now
        claim: Callable[..., str | None] = state.claim_task
    except (ImportError, AttributeError) as error:
        log.warning("this Flower starts tasks in another way (%s): a busy machine may start clients twice", error)
        return

    @functools.wraps(claim)
    def claim_for_longer(self: Any, task_id: int) -> str | None:
        token = claim(self, task_id)
        if token is not None:
            with self.lock_task_store:
                self.task_token_store[task_id].active_until = now() + timedelta(seconds=SECONDS)
        return token

    state.claim_task = claim_for_longer
