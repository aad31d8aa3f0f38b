"""What a run's server says in its log, and how: the contract between the run's process and `corolla run`, which may be far away.

Lines of ours start with LOG_MARK, which tells them from Flower's and Ray's. Imports nothing heavy: both sides use it.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger("corolla")

LOG_MARK = "corolla: "
ERROR_MARK = "error: "
FOLDER_MARK = "run folder: "
PROGRESS_SECONDS = 0.25  # between two lines of progress


class LineProgress:
    """Progress as log lines, `what: done/total`, at most four a second but for the last; a display turns them into bars."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Log one line."""
        now = time.monotonic()
        if done >= total or now - self._last >= PROGRESS_SECONDS:
            self._last = now
            log.info("%s: %d/%d", what, done, total)


def read_progress(text: str) -> tuple[str, int, int] | None:
    """Read a line of LineProgress back; None for any other."""
    what, _, count = text.rpartition(": ")
    done, _, total = count.partition("/")
    return (what, int(done), int(total)) if done.isdigit() and total.isdigit() else None
