"""Progress of long work on this machine: the work reports it, a display listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[str, int, int], None]
_listeners: list[Listener] = []


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener with all progress that is reported in this process within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report(what: str, done: int, total: int) -> None:
    """Report that `done` of `total` pieces of some work are done. what: the work's name.

    Call it from the thread that listens, because a listener may draw.
    """
    for listener in _listeners:
        listener(what, done, total)
