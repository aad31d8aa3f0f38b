"""What a run's server says in its log, and how: the contract between the run's process and `corolla run`, which may be far away.

Lines of ours start with LOG_MARK, which tells them from Flower's and Ray's. Imports nothing heavy: both sides use it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

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


def round_line(record: Mapping[str, Any], total: int) -> str:
    """One line per round for the log."""

    def percent(value: float | None) -> str:
        return "  n/a" if value is None else f"{100 * value:5.1f}%"

    def spread(name: str) -> str:
        values = [row[name] for row in record["clients"].values() if row.get(name) is not None]
        return f" ± {100 * np.std(values):.1f}" if len(values) > 1 else ""

    seconds = record["seconds"]
    phases = ", ".join(f"{k} {v:.1f}" for k, v in seconds.items() if k != "round" and v >= 0.05)
    loss = "n/a" if record["loss"] is None else f"{record['loss']:.3f}"
    line = (
        f"round {record['round']}/{total}: "
        f"accuracy {percent(record['accuracy-before'])}{spread('accuracy-before')} before, "
        f"{percent(record['accuracy-after'])}{spread('accuracy-after')} after training, loss {loss}, "
        f"{len(record['clients'])} clients, {record['upload-bytes'] / 1e6:.1f} MB up, "
        f"{record['download-bytes'] / 1e6:.1f} MB down, {seconds['round']:.1f} s" + (f" ({phases})" if phases else "")
    )
    if "evaluation" in record:
        line += f"; all clients {percent(record['evaluation']['accuracy'])}"
    return line + (f"; {len(record['failures'])} failed" if record["failures"] else "")
