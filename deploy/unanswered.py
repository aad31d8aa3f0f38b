"""Every message that a SuperNode has taken gets a reply, also if the process that works on it ends without one.

Flower's SuperNode takes its next message when the last one has a reply. Flower writes an error as the reply only if a
process that had already fetched its message stops sending heartbeats. If a process ends in another way, or before, the
SuperNode waits for ever. One that was stopped for a while, as on a laptop whose lid was closed, finds several old requests
of its process, answers the first one, whose asker has left, and refuses the next one.

Here one rule covers all ways: where no task is left that could still reply, an error is the reply. Flower's SuperExec,
which starts the processes, is started again if it ends.

A SuperExec may stand still: an application may have stopped it, or the process from which it forks. It is ended if it lets a
task lie, and started again. So is one whose application still works when its message has expired: no server waits for the
reply, and other runs wait for the node.

What is no reply to the message is not taken for one. Flower takes any, begins with the next message, and ends with an
error if the reply's parts are not there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.common.serde import context_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import NoObjectInStoreError

log = logging.getLogger("corolla")

REASON = "the client's process ended without a reply"
# Flower's names of the function that returns messages, the newer one first
_GETTERS = ("get_messages_legacy", "get_messages")
# most characters of the reason for which a task ended
_MAX_DETAILS = 2000
# seconds before a SuperExec that has ended is started again, doubled each time up to the most
_FIRST_WAIT, _MOST_WAIT = 1.0, 30.0
# a SuperExec that has run for so many seconds was in order
_IN_ORDER = 60.0
# Seconds after which a SuperExec that takes no task is ended, doubled each time until one is taken. A node that was
# stopped itself sees a long time between two looks, of which few seconds count.
_PATIENCE, _MOST_BETWEEN_LOOKS = 60.0, 5.0


class WaitedProcess(Protocol):
    """A process that can be ended and waited for."""

    def kill(self) -> None:
        """End it."""

    def terminate(self) -> None:
        """Ask it to end."""

    def wait(self) -> int:
        """Return the exit code when it has ended."""


class Answering:
    """Flower's state of a SuperNode, changed so that every message gets a reply.

    state: Flower's. waiting: returns the message that the SuperNode works on. insert: puts a reply into the state. admits:
    returns whether an application's message is a reply to an open one. Raises AttributeError if the state lacks a function.
    """

    def __init__(
        self,
        state: Any,
        waiting: Callable[[], Message | None],
        insert: Callable[[Message], None],
        admits: Callable[[Message, ObjectTree], bool],
    ) -> None:
        self._state, self._waiting, self._insert, self._admits = state, waiting, insert, admits
        self._task: int | None = None
        self._answered: Message | None = None
        self.end_superexec: Callable[[], None] = lambda: None
        self._looked = self._began = time.monotonic()
        self._lain, self._patience = 0.0, _PATIENCE
        getter = next((name for name in _GETTERS if hasattr(state, name)), _GETTERS[-1])
        self._get, self._create, self._store = (
            getattr(state, getter),
            state.create_task,
            state.store_message_and_object_tree,
        )
        self._tree, self._finish = state.object_store.get_object_tree, state.finish_task
        setattr(state, getter, self._get_or_answer)
        state.create_task, state.finish_task = self._create_and_note, self._finish_briefly
        state.store_message_and_object_tree = self._store_replies
        state.object_store.get_object_tree = self._tree_or_none_of_its_parts

    def working(self) -> bool:
        """Return whether the last task may still reply."""
        return self._status() not in (None, Status.FINISHED)

    def give_up(self) -> None:
        """Note that all processes have ended. A task that waits for its process is left: another one will take it."""
        self._lain = 0.0
        if self._status() in (Status.STARTING, Status.RUNNING):
            self._state.finish_task(self._task, SubStatus.FAILED, REASON)

    def _status(self) -> str | None:
        """Return the status of the last task, or None if there is none."""
        found = [] if self._task is None else self._state.get_tasks(task_ids=[self._task])
        return found[0].status.status if found else None

    def _end_what_stands_still(self) -> None:
        """End a SuperExec that has taken no task for a long time, or whose application works on an expired message."""
        now, status, message = time.monotonic(), self._status(), self._waiting()
        since, self._looked = min(now - self._looked, _MOST_BETWEEN_LOOKS), now
        if status == Status.PENDING:
            self._lain += since
            stands, why = self._lain > self._patience, "has taken no task for a long time"
        else:
            self._lain, self._patience = 0.0, _PATIENCE
            lasts = message.metadata.ttl if message and status in (Status.STARTING, Status.RUNNING) else math.inf
            stands, why = now - self._began > lasts, "works on a message that has expired"
        if stands:
            log.warning("the process that starts applications is ended: it %s", why)
            self._lain, self._patience, self._began = 0.0, 2 * self._patience, now
            self.end_superexec()

    def _create_and_note(self, *given: Any, **named: Any) -> int | None:
        # a message begins: all that applications have sent for the last one is no longer needed
        self._state.object_store.clear()
        self._state.delete_sessions_in_run(named["run_id"])
        self._task, self._began = self._create(*given, **named), time.monotonic()
        return self._task

    def _finish_briefly(self, task_id: int, sub_status: str, details: str) -> bool:
        # the state keeps all tasks, and an application's reason can be of any length
        finished: bool = self._finish(task_id, sub_status, details[:_MAX_DETAILS])
        return finished

    def _store_replies(self, message: Message, tree: ObjectTree, *given: Any) -> tuple[bool, list[str]]:
        return self._store(message, tree, *given) if self._admits(message, tree) else (False, [])

    def _tree_or_none_of_its_parts(self, object_id: str) -> ObjectTree:
        # an application may have deleted them: the gate then finds no reply
        try:
            tree: ObjectTree = self._tree(object_id)
        except NoObjectInStoreError:
            return ObjectTree(object_id=object_id)
        return tree

    def _get_or_answer(self, *, is_reply: bool | None = None, **named: Any) -> Sequence[Message]:
        # asked before the replies: a process delivers its reply before its task ends
        if is_reply:
            self._end_what_stands_still()
        unanswered = bool(is_reply) and not self.working()
        found: Sequence[Message] = self._get(is_reply=is_reply, **named)
        message = self._waiting()
        if found or not unanswered or message is None or message is self._answered:
            return found
        self._answered = message
        log.warning("run %d, %s: %s", message.metadata.run_id, message.metadata.message_type, REASON)
        self._insert(Message(Error(ErrorCode.CLIENT_APP_CRASHED, REASON), reply_to=message))
        found = self._get(is_reply=is_reply, **named)
        return found


class Kept:
    """A process that is started again whenever it has ended, by a thread of its own.

    start: starts it; the same thread calls it each time, and lives as long as this process. ended: called at each end.
    """

    def __init__(self, start: Callable[[], WaitedProcess], ended: Callable[[], None] = lambda: None) -> None:
        self._start, self._ended = start, ended
        self._process: WaitedProcess | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, daemon=True, name="superexec")
        self._thread.start()

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()

    def terminate(self) -> None:
        """Ask the process to end, and start no other one."""
        self._over.set()
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended for good. timeout: seconds. Raises subprocess.TimeoutExpired."""
        self._thread.join(timeout)
        if timeout is not None and self._thread.is_alive():
            raise subprocess.TimeoutExpired("superexec", timeout)

    def _keep_running(self) -> None:
        wait = _FIRST_WAIT
        while True:
            began = time.monotonic()
            try:
                self._process = self._start()
                if self._over.is_set():
                    self._process.terminate()
                how = f"has ended with exit code {self._process.wait()}"
            # without this thread no application would start any more
            except Exception as error:
                how = f"cannot be started ({error})"
            self._process = None
            self._ended()
            wait = _FIRST_WAIT if time.monotonic() - began > _IN_ORDER else min(2 * wait, _MOST_WAIT)
            # where this process ends too, it does so before the warning
            if self._over.wait(wait):
                return
            log.warning("the process that starts applications %s: it is started again", how)


# What an application sends, until the gate has judged it: never more in memory than a bound ---------------------------

# An application sends a reply in parts over Flower's Runtime API. They wait in the SuperNode's memory until the reply is
# whole, and only then its size is known. So all bytes are counted as they arrive, and the rest of a request is not read once
# they are too many. Requests that Flower has for other kinds of applications are refused. When the next message comes, all
# that has arrived for the last one is dropped (`Answering`). A site without `max-upload` has no bound, and Flower's server as
# it is.


Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Event, Receive, Send], Awaitable[None]]

# beside replies and states of a fair size
_MORE_BYTES = 1 << 20
# bytes as which a part of a reply, or a request that keeps something, counts at least
_LEAST_BYTES = 1024
# bytes of memory that a piece of a request takes beside its content, until the request is whole
_PIECE = 256
_KEEPING = ("push-object", "push-messages", "push-task-output")
# the calls that a client's process needs; the others keep their requests, or are for other kinds of applications
_CALLS = frozenset(
    (*_KEEPING, "pull-pending-tasks", "acquire-task", "claim-task", "send-task-heartbeat", "pull-task-input")
    + ("pull-object", "confirm-message-received", "pull-messages")
)
_TOO_MUCH, _NOT_HERE = 413, 404
# seconds after which an open request is looked at, and again
_LOOK_SECONDS = 1.0


class Arriving:
    """The count of the bytes that an application has sent for one message.

    limit: the size of a reply in bytes, or None for no bound. An application may send twice as much, and a megabyte:
    its state at its SuperNode counts too.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._most = float("inf") if limit is None else 2 * limit + _MORE_BYTES
        self._passed = False
        self._messages = self._kept = self._here = 0
        self._lock = threading.Lock()

    @property
    def too_much(self) -> str:
        """The broken rule if the application has tried to send more than it may, or ""."""
        return (
            f"max-upload: a reply may have {self._limit} bytes, more than {self._most} arrived" if self._passed else ""
        )

    def begin(self) -> None:
        """Count anew, for the next message. Requests from before it that are still open end soon."""
        with self._lock:
            self._messages, self._kept, self._passed = self._messages + 1, 0, False

    def bound(self, state: Any) -> None:
        """Let Flower's state of a SuperNode keep no more than the bound of all states that applications leave there."""
        keep, sizes = state.set_run_series_context, dict[int, int]()

        def keep_some(run: int, context: Context) -> None:
            # the first is Flower's own
            size = context_to_proto(context).ByteSize() if run in sizes else 0
            if size + sum(sizes.values()) - sizes.get(run, 0) > self._most:
                log.warning("run %d: its application leaves too much: max-upload bounds that too", run)
                return
            sizes[run] = size
            keep(run, context)

        state.set_run_series_context = keep_some

    def takes_parts(self, number: int) -> bool:
        """Return whether a reply may have so many parts, which are listed before any arrives."""
        return self._takes(0, number * _LEAST_BYTES)

    def config(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes the configuration of Flower's HTTP server, whose application is then bounded.

        make: Flower's, with the application as `app`. The server reads requests by h11, which bounds their headers.
        """
        if self._limit is None:
            return make
        return lambda *, app, **more: make(app=self.around(app), http="h11", ws="none", **more)

    def around(self, app: App) -> App:
        """Return an ASGI application that reads requests within the bound, and hands them to another one."""

        async def bounded(scope: Event, receive: Receive, send: Send) -> None:
            name = scope["path"].rpartition("/")[2]
            if name not in _CALLS:
                return await _refuse(send, _NOT_HERE)
            events, size, kept, more = list[Event](), 0, 0, True
            try:
                while more:
                    events.append(event := await receive())
                    if not self._takes(piece := len(event.get("body", b"")) + _PIECE):
                        return await _refuse(send, _TOO_MUCH)
                    size, more = size + piece, event.get("more_body", False)
                kept = max(size - _PIECE * len(events), _LEAST_BYTES) if name in _KEEPING else 0

                async def again() -> Event:
                    return events.pop(0) if events else await receive()

                await app(scope, again, send)
            finally:
                with self._lock:
                    self._here, self._kept = self._here - size, self._kept + kept

        async def ended_with_its_message(scope: Event, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                return await app(scope, receive, send)
            began, request = self._messages, asyncio.ensure_future(bounded(scope, receive, send))
            while not (await asyncio.wait({request}, timeout=_LOOK_SECONDS))[0]:
                if self._messages != began:
                    request.cancel()
                    return None
            return await request

        return ended_with_its_message

    def _takes(self, here: int, kept: int = 0) -> bool:
        with self._lock:
            if self._here + here + self._kept + kept > self._most:
                self._passed = True
                return False
            self._here, self._kept = self._here + here, self._kept + kept
            return True


async def _refuse(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})
