"""A run's log in its folder, for people: the server's lines, clients' output, tracebacks. Its events, for programs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from fl_app import log_format
from fl_app.debugging import trace_to_show
from fl_app.errors import plain_lines
from fl_app.files import opener
from fl_app.server.events import Failed, JsonLines, Note, encode, event_of, is_no_progress, record_of

NAME, JSON_NAME, EVENTS = "log.txt", "log.jsonl", "events.jsonl"
log = logging.getLogger("corolla")


class RunLog(logging.FileHandler):
    """Appends this process's log to a file in the run's folder, after the lines of earlier starts, until it is closed.

    lines: returns a record's lines. Progress is left out. A full disk loses log lines without an error: the writers of essential
    files raise their own.
    """

    def __init__(self, path: Path, lines: Callable[[logging.LogRecord], str]) -> None:
        # an earlier start may have been killed within a line
        with contextlib.suppress(OSError):
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                path.open("a").write("\n")
        super().__init__(path, encoding="utf-8")
        self._lines = lines
        self.addFilter(is_no_progress)
        log.addHandler(self)

    def close(self) -> None:
        """Stop logging."""
        log.removeHandler(self)
        super().close()

    def ended_by(self, error: Exception) -> None:
        """Write the error that ended the run, and its traceback."""
        trace = trace_to_show(error)
        for event in (Failed.of(error), *([Note(message=trace)] if trace else [])):
            self.handle(record_of(event))

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines."""
        return self._lines(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Continue without the line."""

    def _open(self) -> IO[Any]:  # type: ignore[override]
        return cast(IO[Any], open(self.baseFilename, "a", encoding="utf-8", opener=opener))


def _text(record: logging.LogRecord) -> str:
    """Return a record's lines as plain text. The first one begins with the time."""
    when = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(record.created))
    return when + plain_lines(record.getMessage())


def begin(folder: Path) -> list[RunLog]:
    """Begin the logs of a run's folder: text, events, and also JSON lines if the deployment's log lines are JSON."""
    logs = [RunLog(folder / NAME, _text), RunLog(folder / EVENTS, lambda record: encode(event_of(record)))]
    if log_format.is_json():
        logs.append(RunLog(folder / JSON_NAME, JsonLines(run=folder.name).format))
    return logs
