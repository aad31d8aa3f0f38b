"""Replies as they arrive, each fetched by itself, so that a malformed reply affects no other one.

Flower's own Grid fetches all replies that are ready in one call, assembles their objects there, and reads from each
body which message it answers. One malformed object loses all replies; an incomplete one holds all of them up. Here each
reply is requested by itself, and its objects are fetched in a separate thread, before its own deadline. The SuperLink,
not the reply's body, states which message the reply answers.

This needs Flower's internals (`superlink.py`). If they are not as expected, Flower's own way is used, and the log
reports it once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_app import reasons
from fl_app.errors import describe
from fl_app.transport import fetched_reply
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import WireError, one_line

# After scanning all expected replies, pause three times as long as the scan took: scans take at most a quarter of the time.
_REST = 3
# Least time to fetch a reply's objects, in seconds.
_FETCH_SECONDS = 10.0

# Most characters of Flower's error about a malformed reply.
_SHORT = 160


@dataclass(frozen=True)
class Answer:
    """The outcome of a message: its reply's content, or the cause if there is none.

    kind: "error": the node or the SuperLink reports one. "malformed": the reply cannot be read. "late": it did not
    arrive in time. reply_id: Flower's id of the reply, "" if none has arrived.
    """

    message_id: str
    content: RecordDict | None
    cause: str = ""
    kind: Literal["content", "error", "malformed", "late"] = "content"
    reply_id: str = ""

    @property
    def reason(self) -> str:
        """The cause, without the code of an error."""
        return self.cause.partition(": ")[2] if self.kind == "error" else self.cause


class Inbox:
    """Expected and received replies. link: the grid's access to single replies, None if it has none."""

    def __init__(self, grid: Grid, link: fetched_reply.SuperLinkCalls | None = None) -> None:
        self._grid = grid
        self._link = link
        # Whether to pause between scans. In one process a scan makes the replies, so there is no pause.
        self._rests = not isinstance(grid, InProcessGrid)
        # message id -> timeout, deadline, both in seconds; the first is found at once, even after many removals
        self._expected: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._fetching: set[str] = set()
        self._received: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        # earliest time of the next scan
        self._rested = 0.0
        # why the SuperLink can no longer be reached
        self._lost: Exception | None = None

    def expect(self, message_id: str, timeout: float) -> None:
        """Expect the reply to a message for `timeout` seconds from now."""
        self._expected[message_id] = timeout, time.monotonic() + timeout

    def forget(self, message_id: str) -> None:
        """Stop expecting a reply."""
        self._expected.pop(message_id, None)
        self._fetching.discard(message_id)

    @property
    def arriving(self) -> bool:
        """Whether a reply has been announced and is being fetched."""
        return bool(self._fetching)

    def take(self, wait: float) -> list[Answer]:
        """Return the answers that have arrived, or else the late ones; wait up to `wait` seconds for one.

        Answers that are not expected any more are left out. Raises an error if the SuperLink can no longer be reached.
        """
        if self._expected:
            self._look()
        answers: list[Answer] = []
        if self._received.empty():
            now = time.monotonic()
            for name, (timeout, deadline) in self._expected.items():
                if now >= deadline:
                    what = "its reply was not complete" if name in self._fetching else "no reply"
                    answers.append(Answer(name, None, f"{what} within {timeout:g} s", "late"))
            # without a link, replies come only by a scan
            if self._link is None and now < self._rested:
                wait = min(wait, self._rested - now)
        if not answers:
            with contextlib.suppress(queue.Empty):
                answers.append(self._received.get(timeout=wait) if wait else self._received.get_nowait())
                while True:
                    answers.append(self._received.get_nowait())
        answers = [answer for answer in answers if answer.message_id in self._expected]
        for answer in answers:
            self.forget(answer.message_id)
        return answers

    def _look(self) -> None:
        """Ask for expected replies that are not being fetched, unless the last scan was too recent.

        Raises UserError if the SuperLink's certificate cannot be trusted, or another error of the connection.
        """
        if self._lost is not None:
            raise self._lost
        started = time.monotonic()
        if started < self._rested:
            return
        if self._link is None:
            found = list(self._grid.pull_messages(self._expected.keys()))
            for message in found:
                about = message.metadata
                self._received.put(_answer(str(about.reply_to_message_id), message, str(about.message_id)))
            # after a scan that found nothing, `take` waits
            if not found or not self._rests:
                return
        else:
            for name, (_, deadline) in list(self._expected.items()):
                if name not in self._fetching:
                    self._look_for(self._link, name, deadline)
        now = time.monotonic()
        self._rested = now + _REST * (now - started)

    def _look_for(self, link: fetched_reply.SuperLinkCalls, name: str, deadline: float) -> None:
        try:
            found = link.find(name)
        except fetched_reply.RUN_ENDED:
            raise
        except fetched_reply.LOST as error:
            raise fetched_reply.lost(error) from error
        except Exception as error:  # the SuperLink's announcement of this reply cannot be read
            self._received.put(_malformed(name, error))
            return
        if found is not None:
            self._fetching.add(name)
            # a reply that arrived before this scan still has time to be fetched
            timeout, _ = self._expected[name]
            deadline = max(deadline, time.monotonic() + _FETCH_SECONDS)
            self._expected[name] = timeout, deadline

            def fetch() -> None:
                try:
                    answer = _answer(name, link.fetch(found, deadline), found.object_id)
                # after its deadline, `take` reports it as late
                except TimeoutError:
                    return
                except fetched_reply.LOST as error:
                    self._lost = fetched_reply.lost(error)
                    return
                except Exception as error:
                    answer = _malformed(name, error)
                self._received.put(answer)

            threading.Thread(target=fetch, name=f"reply {name[:8]}", daemon=True).start()


def _answer(name: str, message: Message, reply_id: str) -> Answer:
    """Read one reply. Any error of it makes this reply malformed, and affects no other one."""
    try:
        if message.has_error():
            reason = reasons.read(message.error.reason)
            why = reason.sentence if reason else one_line(message.error.reason)
            return Answer(name, None, f"error {int(message.error.code)}: {why}", "error", reply_id)
        if not isinstance(message.content, RecordDict):
            raise WireError(f"its content is no RecordDict but a {type(message.content).__name__}")
        return Answer(name, message.content, reply_id=reply_id)
    except Exception as error:
        return _malformed(name, error)


def _malformed(name: str, error: Exception) -> Answer:
    text = str(error) if isinstance(error, WireError) else describe(error)[:_SHORT]
    return Answer(name, None, str(WireError(f"malformed reply: {text}")), "malformed")
