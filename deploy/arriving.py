"""All that an application sends to its SuperNode, until the gate has judged it: never more in memory than a bound.

An application sends a reply in parts over Flower's Runtime API. They wait in the SuperNode's memory until the reply is
whole, and only then its size is known. So all bytes are counted as they arrive, and the rest of a request is not read once
they are too many. Requests that Flower has for other kinds of applications are refused. When the next message comes, all
that has arrived for the last one is dropped (deploy/unanswered.py).

A site without `max-upload` has no bound, and Flower's server as it is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.app import Context
from flwr.common.serde import context_to_proto

log = logging.getLogger("corolla")

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Event, Receive, Send], Awaitable[None]]

# beside replies and states of a fair size
_MORE = 1 << 20
# bytes as which a part of a reply, or a request that keeps something, counts at least
_LEAST = 1024
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
        self._most = float("inf") if limit is None else 2 * limit + _MORE
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
        return self._takes(0, number * _LEAST)

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
                kept = max(size - _PIECE * len(events), _LEAST) if name in _KEEPING else 0

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
