"""Files in a directory that applications may write, for processes that have no walls: the only way to them.

An application can put anything there, and change it at any moment: a link to another file of the account, a pipe that
never ends, a file of a terabyte, a million directories. So every part of a path below the directory is opened from the
open directory above it, and never through a symbolic link. Only regular files are read, up to a number of bytes.
Nothing waits: an open does not wait for a pipe's other end or a lease, and a search ends after a number of entries and
seconds.

What is read is data. A caller must not let it name code, or load it in a form that can (pickle).

root: the directory, which may itself be reached through links. path: of a file or directory below it, with `/` between
its parts; "" is the root. Errors about a path name it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fl_app.errors import UserError
from fl_app.files import DIRECTORY_MODE, FILE_MODE

MOST_BYTES = 1 << 20
"""Most bytes of a file, unless a caller names another number."""
MOST_ENTRIES, MOST_SECONDS, MOST_DEPTH = 1_000_000, 60.0, 32
"""Most entries, seconds and directories below each other of one search."""
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK
_PIECE = 1 << 20


class Refused(UserError):
    """What lies at a path is not what may be read: a link, a pipe, a directory, or too large."""


@dataclass(frozen=True)
class FoundFile:
    """A regular file, or a directory, that a search has found. path: below the root. nbytes, modified: a file's."""

    path: str
    is_directory: bool
    nbytes: int = 0
    modified: float = 0.0


class _Budget:
    """What one search may still use."""

    def __init__(self, root: Path) -> None:
        self._root, self._entries, self._end = root, 0, time.monotonic() + MOST_SECONDS

    def spend(self) -> bool:
        """Count an entry, and return True. Raises Refused."""
        self._entries += 1
        if self._entries > MOST_ENTRIES:
            raise Refused(f"{self._root}: may have {MOST_ENTRIES} entries, it has more")
        if time.monotonic() > self._end:
            raise Refused(f"{self._root}: could not be read in {MOST_SECONDS:g} seconds")
        return True


# Reading --------------------------------------------------------------------------------------------------------------


def read(root: Path, path: str, most: int = MOST_BYTES) -> bytes:
    """Return a file's bytes. Raises FileNotFoundError if there is none, and Refused."""
    return b"".join(pieces(root, path, most))


def pieces(root: Path, path: str, most: int) -> Iterator[bytes]:
    """Yield a file's bytes, in pieces of a MB at most. Raises FileNotFoundError if there is none, and Refused."""
    with open_file(root, path, most) as file:
        rest, end = most, time.monotonic() + MOST_SECONDS
        while piece := file.read(min(_PIECE, rest + 1)):
            rest -= len(piece)
            # it can grow meanwhile
            if rest < 0:
                raise Refused(f"{root / path}: may have {most} bytes, it has more")
            if time.monotonic() > end:
                raise Refused(f"{root / path}: could not be read in {MOST_SECONDS:g} seconds")
            yield piece


def read_text(root: Path, path: str) -> str:
    """Return a file's text in UTF-8. Raises FileNotFoundError if there is none, and Refused, also for other bytes."""
    try:
        return read(root, path).decode()
    except UnicodeDecodeError:
        raise Refused(f"{root / path}: must be text in UTF-8") from None


def open_file(root: Path, path: str, most: int | None = None) -> IO[bytes]:
    """Open a regular file to read it. Raises FileNotFoundError if there is none, and Refused.

    most: its bytes, as far as it is known now; None: any number.
    """
    above, name = _split(root, path)
    with _opened(root, above) as directory:
        descriptor = _open(root, path, name, os.O_RDONLY | _NO_LINK, directory)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{root / path}: must be a regular file")
        if most is not None and found.st_size > most:
            raise Refused(f"{root / path}: may have {most} bytes, it has {found.st_size}")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def walk(root: Path, path: str = "") -> Iterator[FoundFile]:
    """Yield the regular files and directories below a directory, by name, each directory before its content.

    Anything else is left out, as is what disappears or changes its kind meanwhile. A missing directory has nothing
    below it. Raises Refused for too many entries, too many directories below each other, and too much time.
    """
    budget, rest = _Budget(root), [path]
    while rest:
        here = rest.pop()
        if here != path:
            yield FoundFile(here, True)
        found = list(_entries(root, here, budget))
        below = [entry.path for entry in found if entry.is_directory]
        yield from (entry for entry in found if not entry.is_directory)
        rest += reversed(below)


def entries(root: Path, path: str = "") -> list[FoundFile]:
    """Return the regular files and directories in a directory, by name. Raises Refused as `walk` does."""
    return list(_entries(root, path, _Budget(root)))


def _entries(root: Path, path: str, budget: _Budget) -> list[FoundFile]:
    found = []
    with contextlib.ExitStack() as opened:
        try:
            directory = opened.enter_context(_opened(root, path))
        # it was removed, or replaced by a link
        except (FileNotFoundError, NotADirectoryError, Refused):
            if path.count("/") >= MOST_DEPTH:
                raise
            return []
        for each in opened.enter_context(os.scandir(directory)):
            budget.spend()
            with contextlib.suppress(FileNotFoundError):
                about, below = each.stat(follow_symlinks=False), f"{path}/{each.name}".lstrip("/")
                if stat.S_ISDIR(about.st_mode):
                    found.append(FoundFile(below, True))
                elif stat.S_ISREG(about.st_mode):
                    found.append(FoundFile(below, False, about.st_size, about.st_mtime))
    return sorted(found, key=lambda entry: entry.path)


# Changing -------------------------------------------------------------------------------------------------------------


def write(root: Path, path: str, content: bytes | Iterable[bytes]) -> None:
    """Write a file, which appears with all its content, and the missing directories above it. Raises OSError and Refused.

    content: its bytes, or their pieces, one after the other.
    """
    from fl_app.privacy import secure_random

    above, name = _split(root, path)
    for k in range(1, len(parts := above.split("/")) + 1 if above else 1):
        upper, last = _split(root, "/".join(parts[:k]))
        with _opened(root, upper) as directory, contextlib.suppress(FileExistsError):
            os.mkdir(last, DIRECTORY_MODE, dir_fd=directory)
    with _opened(root, above) as directory:
        temporary = f".{name}.{secure_random.secret(8).hex()}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, FILE_MODE, dir_fd=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise


def remove(root: Path, path: str) -> None:
    """Remove what lies at a path, a directory with all its content; of links, the links. Raises OSError and Refused.

    Nothing happens if nothing lies there.
    """
    above, name = _split(root, path)
    with contextlib.suppress(FileNotFoundError), _opened(root, above) as directory:
        _remove(directory, name, _Budget(root), root / path, 0)


def _remove(above: int, name: str, budget: _Budget, shown: Path, depth: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=above)
            return
        # Linux and macOS answer for a directory in different ways
        except (IsADirectoryError, PermissionError):
            directory = _open(shown, "", name, _DIRECTORY, above)
        try:
            if depth > MOST_DEPTH:
                raise _too_deep(shown)
            with os.scandir(directory) as listed:
                names = [each.name for each in listed if budget.spend()]
            for below in names:
                _remove(directory, below, budget, shown, depth + 1)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=above)


# Opening --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(root: Path, path: str) -> Iterator[int]:
    """Yield an open directory. Raises FileNotFoundError, and Refused for a part that is no directory."""
    parts = path.split("/") if path else []
    if len(parts) > MOST_DEPTH:
        raise _too_deep(root)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            above, descriptor = descriptor, _open(root, path, part, _DIRECTORY, descriptor)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def _open(root: Path, path: str, name: str, flags: int, above: int) -> int:
    try:
        return os.open(name, flags, dir_fd=above)
    except FileNotFoundError:
        raise
    # a link, a socket, a leased file, a file that its mode forbids, a name that is too long
    except OSError as error:
        raise Refused(
            f"{root / path}: cannot be opened without following a link or waiting: {error.strerror}"
        ) from None


def _split(root: Path, path: str) -> tuple[str, str]:
    """Return a path's directory and its last part. Raises Refused for a path that leaves the root or is none."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise Refused(f"{root}: must be followed by names of files below it, got {path!r}")
    above, _, name = path.rpartition("/")
    return above, name


def _too_deep(where: Path) -> Refused:
    return Refused(f"{where}: may have {MOST_DEPTH} directories below each other, it has more")
