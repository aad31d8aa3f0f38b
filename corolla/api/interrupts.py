"""Ctrl-C while a run goes on: an answer at once, and the run's end after its round; pressed again, its end at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from corolla.api.live import Display
from fl_app.server.run_folder import ask_to_stop

AFTER_ROUND = "stopping after this round; press Ctrl-C again to stop at once"
AT_ONCE = "stopping at once"


@contextlib.contextmanager
def answered(display: Display) -> Iterator[None]:
    """Within it the first Ctrl-C asks the run to end after its round; the second raises KeyboardInterrupt.

    So does the first where there is no round yet, or the run's folder is on another machine. Where Ctrl-C was ignored, it is.
    Other threads than the main one never see it.
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
            raise KeyboardInterrupt

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
