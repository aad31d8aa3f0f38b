"""Debugger sessions during a live display: the debugger has the terminal to itself, and leaving it ends the run.

`breakpoint()`, `pdb.set_trace()` and debuggers derived from `pdb.Pdb` call `Pdb.interaction` whenever they wait for
input.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from fl_app.debugging import unlabelled

AGAIN = "press Ctrl-C again to end the run"
_sessions = 0


class AtOnce(BaseException):
    """Raised by the Ctrl-C that ends a run from a debugger's prompt, where KeyboardInterrupt only clears the line."""


def is_waiting() -> bool:
    """Return whether a debugger of this process waits for input."""
    return _sessions > 0


@contextlib.contextmanager
def alone(paused: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Context in which a debugger waits for input inside `paused()`, and raises KeyboardInterrupt when it is left.

    Contexts nest: a debugger pauses the displays of all of them.
    """
    # imported here because it loads slowly
    import pdb

    before = pdb.Pdb.interaction

    @functools.wraps(before)
    def interaction(self: Any, *arguments: Any, **keywords: Any) -> None:
        shown = sys.stdout
        try:
            with paused():
                _interact(self, functools.partial(before, self, *arguments, **keywords))
        finally:
            sys.stdout = shown

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
    try:
        yield
    finally:
        pdb.Pdb.interaction = before  # type: ignore[method-assign]


def _interact(debugger: Any, interact: Callable[[], object]) -> None:
    """Let a debugger wait for input, on the terminal itself. Raises KeyboardInterrupt when it is left."""
    global _sessions
    # the debugger's original stream may print lines above a panel
    sys.stdout = unlabelled(sys.stdout)
    if debugger.use_rawinput:
        debugger.stdout = sys.stdout
    # after `continue`, Ctrl-C must reach the run, not the debugger
    debugger.nosigint = True
    _sessions += 1
    try:
        with _second_ctrl_c():
            interact()
    except (AtOnce, SystemExit):
        raise KeyboardInterrupt from None
    finally:
        _sessions -= 1
    if debugger.quitting:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _second_ctrl_c() -> Iterator[None]:
    """Context in which the second Ctrl-C raises AtOnce. A SIGINT handler that is set already stays."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def answer(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise AtOnce
        pressed = True
        print(f"\n{AGAIN}", flush=True)

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
