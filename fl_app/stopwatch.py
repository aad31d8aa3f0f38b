"""Seconds by phase."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds by phase, without gaps between rounds; `round` is their sum."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {"round": 0.0}

    def start_round(self, phase: str) -> None:
        """Begin a round with the time since the last lap, spent in `phase`."""
        self.laps = {"round": 0.0}
        self.lap(phase)

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._last
        self.laps["round"] += now - self._last
        self._last = now
