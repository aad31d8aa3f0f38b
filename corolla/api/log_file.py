"""Output that never ends a run, and the file of `--log-file`, with all of it and the run's further log lines."""

from __future__ import annotations

import codecs
import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import Control
from rich.segment import Segment

from fl_app.errors import UserError, plain_lines
from fl_app.files import make_directory, opener

WIDTH = 200
HANDLER = "corolla-replace"
# signs in Corolla's own lines, in ASCII
_SIGNS = {"±": "+-", "–": "-", "—": "-", "…": "...", "×": "x", "→": "->", "≤": "<=", "≥": ">=", "▸": ">"}
_open: list[IO[str]] = []


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_SIGNS.get(sign, "?") for sign in text), error.end


codecs.register_error(HANDLER, _replaced)


def begin(path: Path | None) -> Path | None:
    """Append to a file from this call on; None: log to no file. Return `path`. Raises UserError if it cannot be written."""
    while _open:
        _open.pop().close()
    if path is not None:
        try:
            make_directory(path.expanduser().absolute().parent)
            _open.append(open(path.expanduser(), "a", encoding="utf-8", buffering=1, opener=opener))
        except OSError as error:
            raise UserError(key="--log-file", rule=f"cannot write {path}: {error.strerror}") from None
    return path


def write(text: str) -> None:
    """Write a text, every line with the time."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    for file in _open:
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
        if _open and not any(isinstance(one, Control) for one in objects):
            plain = io.StringIO()
            told = Console(file=plain, width=WIDTH, highlight=False, emoji=False, color_system=None)
            told.print(*objects, **options)
            write(plain_lines(plain.getvalue()))
