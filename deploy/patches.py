"""Changes of Flower's code at run time, which another version may have no place for."""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

log = logging.getLogger("corolla")


@contextmanager
def changing(does: str, otherwise: str) -> Iterator[None]:
    """Warn if Flower lacks something that the block looks up in it. Flower is then left as it is.

    does: what Flower does in another way then. otherwise: what may happen without the change.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        log.warning("this Flower %s in another way (%s): %s", does, error, otherwise)


# A message's objects are registered in one step, also in Flower's store in memory -------------------------------------

# Objects with equal content are one object in the store: every reply has the same status. The store registers a message's
# objects one by one. If the last message with such an object is deleted meanwhile, the object is deleted with it, and the
# new message can never be read: "the object could not be found". Here nothing is deleted meanwhile.


_STORE = "flwr.supercore.object_store.in_memory_object_store"


def register_in_one_step() -> None:
    """Let Flower's store hold its lock while it registers a message's objects. Warn if Flower has no place for it."""
    with changing("stores objects", "messages may be lost on a busy machine"):
        store: Any = importlib.import_module(_STORE).InMemoryObjectStore
        register: Callable[..., list[str]] = store.preregister
        with store().lock_store:
            pass

        @functools.wraps(register)
        def register_at_once(self: Any, *given: Any, **named: Any) -> list[str]:
            with self.lock_store:
                return register(self, *given, **named)

        store.preregister = register_at_once


# An application's process may take minutes to start where processors are busy -----------------------------------------

# Flower gives a process 30 s until its first call. Then it starts another one for the same task, and the first one fails.
# On a busy machine no process is ready in time, and more and more of them run, until the memory is full.


START_SECONDS = 300

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
            wait_until(self, token, now() + timedelta(seconds=START_SECONDS))
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


# A SuperNode outlives errors of its SuperLink, as of a full disk under its database -----------------------------------

# Flower's SuperNode retries only while it cannot connect. If the SuperLink answers a call with an internal error, Flower's
# loop ends the process, or the thread of its heartbeats ends and the node counts as gone for good. Here both try again.


T = TypeVar("T")
# names of gRPC's status codes
_FAULTS = ("INTERNAL", "UNKNOWN")
_HTTP_FAULT = 500


def is_fault(error: Exception) -> bool:
    """Return whether an error of a call means that the SuperLink failed, over gRPC or HTTP."""
    code = getattr(error, "code", None)
    if callable(code):
        return getattr(code(), "name", "") in _FAULTS
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(status, int) and status >= _HTTP_FAULT


def patient(call: Callable[..., T], instead: T) -> Callable[..., T]:
    """Return a call that gives `instead` when the SuperLink fails. The first failure of an outage is logged."""
    failing = False

    @functools.wraps(call)
    def try_call(*given: Any, **named: Any) -> T:
        nonlocal failing
        try:
            result = call(*given, **named)
        except Exception as error:
            if not is_fault(error):
                raise
            if not failing:
                log.warning("the SuperLink fails (its log has the reason, for example a full disk); trying again")
            failing = True
            return instead
        failing = False
        return result

    return try_call


def keep_heartbeats() -> None:
    """Let Flower's heartbeats continue after an internal error of the SuperLink. Warn if Flower has no place for it."""
    with changing("sends heartbeats", "a failing SuperLink may lose this node"):
        sender: Any = importlib.import_module("flwr.supercore.heartbeat").HeartbeatSender
        begin = sender.__init__

        def begin_patiently(self: Any, heartbeat_fn: Callable[[], bool]) -> None:
            # after False, Flower tries again
            begin(self, patient(heartbeat_fn, False))

        sender.__init__ = begin_patiently


# The pace at which a node's processes poll: often during a run, ever less often without one ---------------------------

# Flower's SuperNode sleeps 3 s between two polls for a message, and half a second while an application works. A run of
# short rounds spends most of its time there. A Pace replaces the module `time` in Flower's loop.


# a poll may be late by this fraction of the time since the last work
_LATE = 0.05


class Pace:
    """`time` for a loop of Flower's. Its `sleep` is cut to a fraction of the time since the last work.

    shortest: the least sleep, in seconds.
    """

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._last = time.monotonic()

    def work(self) -> None:
        """Note that there was work."""
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep at most this many seconds."""
        since = time.monotonic() - self._last
        time.sleep(min(seconds, max(self._shortest, _LATE * since)))

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the module `time`."""
        return getattr(time, name)
