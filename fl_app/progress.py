"""Progress of long work on this machine: what does the work reports it, what shows it listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[str, int, int], None]
_listeners: list[Listener] = []


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener with all progress that is reported meanwhile in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report(what: str, done: int, total: int) -> None:
    """Report that `done` of `total` pieces of some work are done; from the thread that listens, for it may draw."""
    for listener in _listeners:
        listener(what, done, total)
