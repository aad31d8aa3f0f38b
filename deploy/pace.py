"""The pace at which Flower's processes of a node poll for work: often during a run, ever less often without one.

Flower's SuperNode sleeps 3 s between two polls for a message, and half a second while an application works. A run of
short rounds spends most of its time there. A Pace replaces the module `time` in Flower's loop.
"""

from __future__ import annotations

import time
from typing import Any

# a poll may be late by this fraction of the time since the last work
_LATE = 0.05


class Pace:
    """`time` for a loop of Flower's. Its `sleep` is cut to a fraction of the time since the last work.

    shortest: the least sleep, in seconds.
    """

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._last = time.monotonic()

    def work(self) -> None:
        """Note that there was work."""
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep at most this many seconds."""
        since = time.monotonic() - self._last
        time.sleep(min(seconds, max(self._shortest, _LATE * since)))

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the module `time`."""
        return getattr(time, name)
