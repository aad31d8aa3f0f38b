"""Log lines as JSON: one schema for every process of a deployment. docs/operations.md lists the fields."""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from fl_app.debugging import is_aside
from fl_app.errors import UserError, plain_lines

# environment variable that a process passes on to those that it starts
VARIABLE = "COROLLA_LOG_FORMAT"
TEXT, JSON = "text", "json"
_ABOUT = "corolla_about"
# other packages' loggers in a SuperLink or SuperNode
_OTHERS = ("flwr", "uvicorn")


def choose(wanted: str) -> None:
    """Set the format for this process and those that it starts. "" leaves it as it is. Raises UserError."""
    if wanted not in ("", TEXT, JSON):
        raise UserError(key="--log-format", rule=f"must be {TEXT} or {JSON}", value=wanted)
    if wanted:
        os.environ[VARIABLE] = wanted


def is_json() -> bool:
    """Return whether this process's log lines are JSON."""
    return os.environ.get(VARIABLE) == JSON


def about(**fields: Any) -> dict[str, Any]:
    """Return `extra` for a call of a logger: fields of the JSON line, such as run, round and client."""
    return {_ABOUT: fields}


def utc(when: float) -> str:
    """Return a time as text: UTC, with milliseconds. when: seconds since 1970."""
    at = datetime.datetime.fromtimestamp(when, datetime.UTC).isoformat(timespec="milliseconds")
    return at.replace("+00:00", "Z")


def line(component: str, level: str, message: str, when: float, fields: Mapping[str, Any]) -> str:
    """Return one JSON line, in ASCII. when: seconds since 1970."""
    found = {"time": utc(when), "level": level, "component": component, "message": message, **fields}
    return json.dumps(found, separators=(",", ":"), default=str)


def now(component: str, level: str, message: str) -> str:
    """Return a JSON line with the time of now."""
    return line(component, level, message, time.time(), {})


class TextFormatter(logging.Formatter):
    """Marks a record, removes control characters and indents its further lines: strangers wrote some of the text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines. Only the first begins with the mark."""
        return "corolla: " + _indented(super().format(record))


def _indented(text: str) -> str:
    """Return a text without control characters, whose further lines do not look like lines of the log."""
    return plain_lines(text).replace("\n", "\n  ")


def _cleaned(record: logging.LogRecord) -> bool:
    """Remove control characters from a record's text: Flower logs names that a server has chosen. Return True."""
    record.msg, record.args = _indented(record.getMessage()), ()
    return True


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON line. component: the kind of process. always: fields of every line."""

    def __init__(self, component: str, **always: Any) -> None:
        super().__init__()
        self.component = component
        self.always: dict[str, Any] = always

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        fields = {**self.always, **getattr(record, _ABOUT, {}), **self.more(record)}
        message = record.getMessage().strip()
        if is_aside(record):
            message, fields["trace"] = "traceback", message
        elif record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if record.name != "corolla":
            fields["logger"] = record.name
        return line(self.component, record.levelname.lower(), message, record.created, fields)

    def more(self, record: logging.LogRecord) -> Mapping[str, Any]:
        """Return further fields of a record's line."""
        return {}


def configure(component: str, **always: Any) -> None:
    """Log Corolla's messages to standard error, marked, beside Flower's. In JSON, Flower's become lines of the schema."""
    log = logging.getLogger("corolla")
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    for name in _OTHERS:
        for other in logging.getLogger(name).handlers:
            other.addFilter(_cleaned)
    if is_json():
        handler.setFormatter(JsonFormatter(component, **always))
        for name in _OTHERS:
            reformat(logging.getLogger(name), JsonFormatter(component, **always))
        # a line for each request would be most of the log
        logging.getLogger("uvicorn.access").setLevel(logging.WARNING)


def reformat(log: logging.Logger, formatter: logging.Formatter) -> None:
    """Let a logger write to standard error in this format alone, at the levels of the handlers that it had."""
    level = min((handler.level for handler in log.handlers), default=logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    handler.setLevel(level)
    log.handlers = [handler]
    log.propagate = False
