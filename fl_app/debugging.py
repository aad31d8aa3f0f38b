"""Debugging help for authors of methods, models and tasks: the place of an error, printed lines, breakpoints."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import CodeType, TracebackType
from typing import NoReturn, TextIO

from fl_app.errors import Diverged, RunFailed, UserError, describe, plain_lines
from fl_app.known_names import PACKAGES

log = logging.getLogger("corolla")

_HERE = Path(__file__).resolve().parent.parent
_OURS = tuple(f"{_HERE / package}/" for package in PACKAGES)
_PYTHONS = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib"))
_INSTALLED_PARTS = ("/site-packages/", "/dist-packages/")
# attribute of log records that are tracebacks
_ASIDE = "corolla_aside"
# characters of printed lines that one message carries at most
MOST_PRINTED = 100_000
_BREAKPOINT = "breakpoint() at "
_NO_TERMINAL = (
    ": this run's processes have no terminal; with --in-process everything runs in one process, where breakpoints work"
)


class Place(Enum):
    """Place where a client runs: in the command's process, in a process beside it, or at a site."""

    IN_PROCESS = "in-process"
    SIMULATION = "simulation"
    DEPLOYMENT = "deployment"


# Where it failed -------------------------------------------------------------------------------------------------------


def is_users(filename: str) -> bool:
    """Return whether a file is the user's own: neither Corolla's, nor Python's, nor an installed package's."""
    installed = any(part in filename for part in _INSTALLED_PARTS)
    return not installed and not filename.startswith((*_OURS, *_PYTHONS, "<"))


def from_users_frame(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback from the first frame in a user's file on; None if no frame is in one."""
    trace = error.__traceback__
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def place_of(error: BaseException) -> str:
    """Return "file.py:12, in train", the innermost line of a user's file in an exception's traceback; "" without one.

    The file is named relative to the config file, without its directory, because the text may leave the machine.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{_short(last.filename)}:{last.lineno}, in {last.name}"


def line_of(code: CodeType) -> str:
    """Return "file.py:12", the first line of a function. The file is named as in `place_of`."""
    return f"{_short(code.co_filename)}:{code.co_firstlineno}"


def at(error: BaseException) -> str:
    """Return "; at" and `place_of`, for the end of a sentence; "" if there is no such place."""
    place = place_of(error)
    return f"; at {place}" if place else ""


def _short(filename: str) -> str:
    """Return a user's file name relative to the config file. An app's copy lies in the app's directory."""
    path = Path(filename)
    return str(path.relative_to(_HERE) if path.is_relative_to(_HERE) else path.name)


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception and its causes, each from the first frame in a user's file on.

    A traceback without such a frame is whole.
    """
    report = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()

    def trim(part: traceback.TracebackException | None) -> None:
        if part is None or id(part) in seen:
            return
        seen.add(id(part))
        first = next((k for k, frame in enumerate(part.stack) if is_users(frame.filename)), 0)
        del part.stack[:first]
        trim(part.__cause__)
        trim(part.__context__)

    trim(report)
    # an app's copies of files are removed after the run: name the files without the app's directory
    return "".join(report.format()).rstrip("\n").replace(f'File "{_HERE}/', 'File "')


def show_trace(trace: str) -> None:
    """Log a traceback, marked as one (see `is_aside`)."""
    log.error("%s", trace, extra={_ASIDE: True})


def is_aside(record: logging.LogRecord) -> bool:
    """Return whether a log record is a traceback. Displays of several processes show it only with --verbose."""
    return bool(getattr(record, _ASIDE, False))


def trace_to_show(error: BaseException) -> str:
    """Return the traceback to show for an exception; "" if its message is enough.

    The message is enough for bad input outside the user's files, for a refused breakpoint, and for diverged training.
    """
    of_input = isinstance(error, UserError)
    if isinstance(error, (Diverged, NoTerminalError)) or (of_input and from_users_frame(error) is None):
        return ""
    return trace_of(error)


def reason(error: BaseException, where: str = "") -> str:
    """Return the reason for an exception to send to the server.

    It is the message of a UserError or RunFailed, advice for a full GPU, else type, message and the user's line. where:
    the log that holds the traceback.
    """
    if isinstance(error, (UserError, RunFailed)):
        return str(error)
    # torch's exception, by its name: torch may not be imported
    if type(error).__name__ == "OutOfMemoryError":
        asked = str(error).partition(". GPU ")[0]
        return (
            f"the GPU's memory is full ({asked}); use a smaller batch-size, fewer clients on the GPU at once, or precision = "
            '"bfloat16"'
        )
    behind = "; ".join(filter(None, [place_of(error), where and f"the traceback is in {where}"]))
    return describe(error) + (f" ({behind})" if behind else "")


# What it printed -------------------------------------------------------------------------------------------------------


class Labelled(io.TextIOBase):
    """Standard output that passes whole lines to `say`, one by one. behind: the standard output that it replaces."""

    def __init__(self, behind: TextIO, say: Callable[[str], object]) -> None:
        self.behind, self._say, self._rest = behind, say, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the replaced output."""
        return self.behind.encoding

    @property
    def rich_proxied_file(self) -> TextIO:
        """The replaced output. rich writes to the attribute of this name instead of to this object."""
        behind: TextIO = getattr(self.behind, "rich_proxied_file", self.behind)
        return behind

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file number of the replaced output."""
        return self.behind.fileno()

    def write(self, text: str) -> int:
        """Pass on the lines that are complete and keep the rest. Returns the number of characters."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        """Flush the replaced output. An incomplete line is kept."""
        self.behind.flush()

    def end(self) -> None:
        """Pass on a last line without a line end."""
        if self._rest:
            self.write("\n")


def unlabelled(out: TextIO) -> TextIO:
    """Return the standard output that a Labelled one replaces, or `out` itself if it is none."""
    while isinstance(out, Labelled):
        out = out.behind
    return out


@contextlib.contextmanager
def printed_lines(say: Callable[[str], object]) -> Iterator[None]:
    """Pass each line that is printed within the context to `say`, without control characters."""
    out = Labelled(unlabelled(sys.stdout), lambda line: say(plain_lines(line)))
    with contextlib.redirect_stdout(out):
        try:
            yield
        finally:
            out.end()


def show_printed(who: str, line: str) -> None:
    """Log a line that was printed in a client or in the server."""
    log.info("%s: %s", who, line)


def cut(lines: list[str]) -> str:
    """Return lines as one text for a message. After MOST_PRINTED characters a note replaces the rest."""
    text = "\n".join(lines)
    left = len(text) - MOST_PRINTED
    return text if left <= 0 else f"{text[:MOST_PRINTED]}\n... {left} more characters"


# Breakpoints -----------------------------------------------------------------------------------------------------------


class NoTerminalError(UserError):
    """A breakpoint in a process without a terminal."""


def refuse_breakpoints() -> None:
    """Let `breakpoint()` raise NoTerminalError in this process: a debugger would wait forever for input."""
    sys.breakpointhook = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    caller = sys._getframe(1)
    raise NoTerminalError(f"{_BREAKPOINT}{_short(caller.f_code.co_filename)}:{caller.f_lineno}{_NO_TERMINAL}")


def is_refused_breakpoint(cause: str) -> bool:
    """Return whether a client's error comes from a refused breakpoint."""
    return cause.startswith(_BREAKPOINT) and cause.endswith(_NO_TERMINAL)
