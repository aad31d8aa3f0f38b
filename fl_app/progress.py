"""How far long work on this machine is: whoever does it tells, whoever shows it listens. Nobody has to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[str, int, int], None]
_listeners: list[Listener] = []


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Let a listener hear of everything that is told meanwhile in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(what: str, done: int, total: int) -> None:
    """Tell that `done` of `total` pieces of some work are done; from the thread that listens, for it may draw."""
    for listener in _listeners:
        listener(what, done, total)
