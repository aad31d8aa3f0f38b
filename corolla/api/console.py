"""Consoles of runs and commands, whose output never ends a run; their warnings; and the file of `--log-file`.

That file has all terminal output and the run's further log lines, each with its time.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import Control
from rich.markup import escape
from rich.segment import Segment

from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError, plain_lines
from fl_app.files import make_directory, opener

_LOG_WIDTH = 200
HANDLER = "corolla-replace"
# signs in Corolla's own lines, in ASCII
_SIGNS = {"±": "+-", "–": "-", "—": "-", "…": "...", "×": "x", "→": "->", "≤": "<=", "≥": ">=", "▸": ">"}
_log: list[IO[str]] = []


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_SIGNS.get(sign, "?") for sign in text), error.end


codecs.register_error(HANDLER, _replaced)


def open_log(path: Path | None) -> Path | None:
    """Append to a file from this call on; None: log to no file. Return `path`. Raises UserError if it cannot be written."""
    while _log:
        _log.pop().close()
    if path is not None:
        try:
            make_directory(path.expanduser().absolute().parent)
            _log.append(open(path.expanduser(), "a", encoding="utf-8", buffering=1, opener=opener))
        except OSError as error:
            raise UserError(key="--log-file", rule=f"cannot write {path}: {error.strerror}") from None
    return path


def write_log(text: str) -> None:
    """Write a text, every line with the time."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    for file in _log:
        file.writelines(f"{now} {line.rstrip()}\n" for line in text.splitlines())


class Lenient:
    """A text stream that stands before another one. Writing to it raises neither UnicodeError nor OSError."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        """Return the stream's own attribute."""
        return getattr(self._behind, name)

    def write(self, text: str) -> int:
        """Write a text, with what the stream's encoding cannot show replaced. Return its length."""
        encoding = self._behind.encoding or "utf-8"
        # a reader that has ended, a full disk
        with contextlib.suppress(OSError):
            self._behind.write(text.encode(encoding, HANDLER).decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with contextlib.suppress(OSError):
            self._behind.flush()


class LoggedConsole(Console):
    """A console that also writes its output to the log file, as plain text, even if it is quiet.

    A line that its stream cannot take ends nothing.
    """

    @property
    def file(self) -> IO[str]:
        """The stream that it writes to."""
        behind = Console.file.fget(self)  # type: ignore[attr-defined]
        return behind if isinstance(behind, Lenient) else Lenient(behind)  # type: ignore[return-value]

    @file.setter
    def file(self, new: IO[str]) -> None:
        Console.file.fset(self, new)  # type: ignore[attr-defined]

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the pieces of what is printed, without control characters: a table's cells hold texts of others, too."""
        for piece in super().render(renderable, options):
            if piece.control or piece.text == "\n" or piece.text.isprintable():
                yield piece
            else:
                yield Segment(plain_lines(piece.text), piece.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print without control characters, and write to the log file: clients and files wrote some of the text."""
        objects = tuple(plain_lines(one) if isinstance(one, str) else one for one in objects)
        super().print(*objects, **options)
        if _log and not any(isinstance(one, Control) for one in objects):
            plain = io.StringIO()
            told = Console(file=plain, width=_LOG_WIDTH, highlight=False, emoji=False, color_system=None)
            told.print(*objects, **options)
            write_log(plain_lines(plain.getvalue()))


# force_jupyter=False: lines stay text in a notebook
console = LoggedConsole(highlight=False, emoji=False, force_jupyter=False)
# whether a command also prints tracebacks of errors
verbose = False
# whether it writes the events of a run, and nothing else, to standard output
events = False
# whether it opens the page of a run in a browser
opens = False
errors = LoggedConsole(stderr=True, highlight=False, emoji=False, force_jupyter=False)


def show_tracebacks(wanted: bool) -> None:
    """Set whether the command prints tracebacks of the errors that end it."""
    global verbose
    verbose = wanted


def write_events(wanted: bool) -> bool:
    """Set whether the command writes a run's events, and nothing else, to standard output."""
    global events
    events, console.quiet = wanted, wanted or console.quiet
    return wanted


def open_page(wanted: bool) -> bool:
    """Set whether the command opens the page of a run in a browser."""
    global opens
    opens = wanted
    return wanted


# warnings that the command has printed
_warned: set[str] = set()


def begin_warnings() -> None:
    """Forget the printed warnings, at the start of a command."""
    _warned.clear()


def warn(text: str) -> None:
    """Print a warning in one line, once per command: the runs of a sweep share most warnings."""
    if text in _warned:
        return
    _warned.add(text)
    errors.print(f"[bold yellow]warning:[/] {escape(text)}", soft_wrap=True)


def say_unfinished(folders: Iterable[Path]) -> None:
    """List on standard error the runs that a comparison skips."""
    for folder in folders:
        errors.print(f"skipped, not finished: {escape(str(folder))}", soft_wrap=True)


def say_partial(runs: Iterable[RecordedRun]) -> None:
    """Warn of runs with clients missing from their final figures."""
    for run in runs:
        if run.coverage_note:
            warn(
                f"{run.path}: its final figures cover {run.coverage_note}; do not compare them with figures of all clients"
            )


def command() -> str:
    """Return the command as its user would type it."""
    called = Path(sys.argv[0])
    found = shutil.which("corolla")
    if called.name == "corolla" and called.is_file() and not (found and Path(found).samefile(called)):
        return shlex.quote(nearby(called))
    return "corolla"


def same_without(option: str) -> str:
    """Return the command line that runs now, as its user would type it, without this option."""
    return " ".join([command(), *(shlex.quote(word) for word in sys.argv[1:] if word != option)])


def nearby(path: Path) -> str:
    """Return a path as a user would type it: relative if it lies under the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
