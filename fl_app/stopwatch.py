"""Seconds by phase."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds by phase, without gaps: a lap ends a phase."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self._last = now
