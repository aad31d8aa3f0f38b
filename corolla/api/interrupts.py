"""Ctrl-C during a run: the first ends it after the current round, the second immediately."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from corolla.api import debugger
from corolla.api.live import Display
from fl_app.server.run_folder import ask_to_stop

AFTER_ROUND = "stopping after this round; press Ctrl-C again to stop at once"
AT_ONCE = "stopping at once"


@contextlib.contextmanager
def answered(display: Display) -> Iterator[None]:
    """Context in which the first Ctrl-C asks the run to end after its round, and the second raises KeyboardInterrupt.

    The first one already raises if no round has started, or if the run's folder is on another machine. An ignored
    SIGINT stays ignored. Threads other than the main one never receive it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    asked = False

    def answer(number: int, frame: object) -> None:
        nonlocal asked
        if not asked and display.folder is not None and ask_to_stop(display.folder):
            asked = display.interrupted = True
            display.note(AFTER_ROUND)
        else:
            display.note(AT_ONCE)
            raise debugger.AtOnce if debugger.is_waiting() else KeyboardInterrupt

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
