"""A run's log in its folder: the server's lines, clients' output, tracebacks of the user's own code."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import IO, Any, cast

from fl_app import log_format
from fl_app.debugging import trace_to_show
from fl_app.errors import UserError, describe, plain_lines
from fl_app.files import opener
from fl_app.server.progress_protocol import Folder, JsonLines, Progress, Round, read_line, sentence

NAME, JSON_NAME = "log.txt", "log.jsonl"
log = logging.getLogger("corolla")


class RunLog(logging.FileHandler):
    """Appends this process's log to a file in the run's folder, after the lines of earlier starts, until it is closed.

    Progress is left out. A full disk loses log lines without an error: the writers of essential files raise their own.
    """

    file = NAME

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / self.file, encoding="utf-8")
        log.addHandler(self)

    def close(self) -> None:
        """Stop logging."""
        log.removeHandler(self)
        super().close()

    def ended_by(self, error: Exception) -> None:
        """Write the error that ended the run."""
        trace = trace_to_show(error)
        what = str(error) if isinstance(error, UserError) else describe(error)
        for text in filter(None, [f"error: {what}", trace]):
            self.handle(logging.LogRecord(log.name, logging.ERROR, "", 0, text, None, None))

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines as plain text. The first one begins with the time."""
        when = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(record.created))
        return when + plain_lines(_for_people(record.getMessage()))

    def filter(self, record: logging.LogRecord) -> Any:
        """Leave out lines that only displays read."""
        return not isinstance(read_line(record.getMessage()), (Folder, Progress)) and super().filter(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Continue without the line."""

    def _open(self) -> IO[Any]:  # type: ignore[override]
        return cast(IO[Any], open(self.baseFilename, "a", encoding="utf-8", opener=opener))


class JsonRunLog(RunLog):
    """The same as JSON lines, in another file (fl_app/log_format.py)."""

    file = JSON_NAME

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lines = JsonLines(displayed=False, run=folder.name)

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a JSON line."""
        return self._lines.format(record)


def begin(folder: Path) -> list[RunLog]:
    """Begin the logs of a run's folder: as text, and also as JSON if the deployment's log lines are JSON."""
    return [RunLog(folder), *([JsonRunLog(folder)] if log_format.is_json() else [])]


def _for_people(text: str) -> str:
    line = read_line(text)
    return sentence(line) if isinstance(line, Round) else text
