"""Replies as they arrive, each by itself: whom it answers is what the SuperLink says, and nothing in it reaches another one.

Flower's own Grid fetches all replies that are ready in one call, puts their objects together there, and asks each body whom it
answers: one malformed object loses all of them, one that is never completed holds all of them up. Here every reply is asked for
by itself, and its objects are fetched in a thread of its own, before its own deadline. That needs Flower's internals
(`superlink.py`); where these are not as expected Flower's own way is taken, once said in the log.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_app.errors import describe
from fl_app.server import superlink
from fl_app.wire import WireError, one_line

# how many times as long as a look at all expected replies took, none is taken: at most a quarter of the time goes there
_REST = 3
# Seconds that fetching a reply's objects may take, at least.
_FETCH_SECONDS = 10.0

# characters of what Flower says about what it cannot read
_SHORT = 160


@dataclass(frozen=True)
class Answer:
    """What became of a message: its reply's content, or the cause why there is none.

    kind: "error": the node or the SuperLink says so; "malformed": it cannot be read; "late": it is not there in time.
    """

    message_id: str
    content: RecordDict | None
    cause: str = ""
    kind: Literal["content", "error", "malformed", "late"] = "content"

    @property
    def reason(self) -> str:
        """The cause, of an error without its code."""
        return self.cause.partition(": ")[2] if self.kind == "error" else self.cause


class Inbox:
    """The replies that are expected, and those that have come. link: the grid's way to each one by itself, if it has one."""

    def __init__(self, grid: Grid, link: superlink.SuperLink | None = None) -> None:
        self._grid = grid
        self._link = link
        # message id -> timeout, deadline, both in seconds
        self._expected: dict[str, tuple[float, float]] = {}
        self._fetching: set[str] = set()
        self._received: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        # when the next look may be taken
        self._rested = 0.0

    def expect(self, message_id: str, timeout: float) -> None:
        """Wait for the reply to a message for `timeout` seconds from now."""
        self._expected[message_id] = timeout, time.monotonic() + timeout

    def forget(self, message_id: str) -> None:
        """Wait for a reply no more."""
        self._expected.pop(message_id, None)
        self._fetching.discard(message_id)

    @property
    def arriving(self) -> bool:
        """Whether a reply has been announced and is being fetched."""
        return bool(self._fetching)

    def take(self, wait: float) -> list[Answer]:
        """Return the answers that have come, or if there are none those that are late; wait up to `wait` seconds for one."""
        if self._expected:
            self._look()
        answers = self._drain(0)
        if not answers:
            late = [name for name, (_, deadline) in self._expected.items() if time.monotonic() >= deadline]
            answers = [self._late(name) for name in late] or self._drain(wait)
        for answer in answers:
            self.forget(answer.message_id)
        return answers

    def _late(self, message_id: str) -> Answer:
        timeout, _ = self._expected[message_id]
        what = "its reply was not complete" if message_id in self._fetching else "no reply"
        return Answer(message_id, None, f"{what} within {timeout:g} s", "late")

    def _drain(self, wait: float) -> list[Answer]:
        """Take what is in the queue, after up to `wait` seconds; replies that nobody waits for any more are left out."""
        found: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._received.get(timeout=wait) if wait else self._received.get_nowait())
            while True:
                found.append(self._received.get_nowait())
        return [answer for answer in found if answer.message_id in self._expected]

    def _look(self) -> None:
        """Ask for the replies that are expected and not on their way."""
        if self._link is None:
            for message in self._grid.pull_messages(list(self._expected)):
                name = str(message.metadata.reply_to_message_id)
                self._received.put(_answer(name, lambda message=message: message))  # type: ignore[misc]
            return
        started = time.monotonic()
        if started < self._rested:
            return
        for name, (_, deadline) in list(self._expected.items()):
            if name not in self._fetching:
                self._look_for(self._link, name, deadline)
        now = time.monotonic()
        self._rested = now + _REST * (now - started)

    def _look_for(self, link: superlink.SuperLink, name: str, deadline: float) -> None:
        try:
            found = link.find(name)
        except superlink.RUN_ENDED:
            raise
        except Exception as error:  # what the SuperLink says of this reply, and of no other one, cannot be read
            self._received.put(_malformed(name, error))
            return
        if found is not None:
            self._fetching.add(name)
            # what had come before anybody looked still has time to be fetched
            timeout, _ = self._expected[name]
            deadline = max(deadline, time.monotonic() + _FETCH_SECONDS)
            self._expected[name] = timeout, deadline

            def fetch() -> None:
                # After its deadline, `take` reports it as late.
                with contextlib.suppress(TimeoutError):
                    self._received.put(_answer(name, lambda: link.fetch(found, deadline)))

            threading.Thread(target=fetch, name=f"reply {name[:8]}", daemon=True).start()


def _answer(name: str, fetch: Callable[[], Message]) -> Answer:
    """Fetch and read one reply; whatever is wrong with it is its own affair."""
    try:
        message = fetch()
        if message.has_error():
            return Answer(name, None, f"error {int(message.error.code)}: {one_line(message.error.reason)}", "error")
        if not isinstance(message.content, RecordDict):
            raise WireError(f"its content is no RecordDict but a {type(message.content).__name__}")
        return Answer(name, message.content)
    except TimeoutError:
        raise
    except Exception as error:
        return _malformed(name, error)


def _malformed(name: str, error: Exception) -> Answer:
    text = str(error) if isinstance(error, WireError) else describe(error)[:_SHORT]
    return Answer(name, None, str(WireError(f"malformed reply: {text}")), "malformed")
