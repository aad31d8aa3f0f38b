"""Files that exist completely or not at all, readable only by their owner: writing, locking, building once.

A run's files (prepared data, partitions, client state, run folders, models) may hold or reveal a site's private data.
Therefore directories are created with mode 0700 and files with mode 0600, for any umask. Existing files and directories
keep their mode.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from fl_app import checksums
from fl_app.errors import UserError
from fl_app.keys import closest

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
FORMAT = 1  # of directories that are built once
_names_shown: ContextVar[bool] = ContextVar("names_shown", default=True)


def opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`, with mode 0600 if it is new."""
    return os.open(path, flags, FILE_MODE)


def no_such(path: Path, shown: Path | None = None) -> str:
    """Return the error about a missing file or directory, with the closest name in its directory.

    shown: the path as the user typed it, if it is another.
    """
    near = nearest_path(path)
    typed = shown or path
    return f"{typed}: no such file or directory" + (f"; did you mean {typed.parent / near.name}?" if near else "")


def nearest_path(path: Path) -> Path | None:
    """Return the path of the closest name in a missing file's directory.

    Return None if none is close, and in code that `without_near_names` runs.
    """
    if not names_are_shown():
        return None
    try:
        names = sorted(found.name for found in path.parent.iterdir() if not found.name.startswith("."))
    except OSError:
        return None
    close = closest(path.name, names)
    return path.parent / close if close else None


def names_are_shown() -> bool:
    """Return whether errors may name files that exist beside a missing one."""
    return _names_shown.get()


@contextmanager
def without_near_names() -> Iterator[None]:
    """Keep the names of files out of errors about others: a site's errors go to the server, its file names do not."""
    before = _names_shown.set(False)
    try:
        yield
    finally:
        _names_shown.reset(before)


def expanded(path: str) -> Path:
    """Return a path with the home directory for ~."""
    return _expanded(path, os.environ.get("HOME"))


@functools.lru_cache(maxsize=8)
def _expanded(path: str, home: str | None) -> Path:
    """Return `expanded` for a value of HOME: clients ask with every message."""
    return Path(path).expanduser()


def make_directory(path: Path, *, exist_ok: bool = True) -> None:
    """Create a directory and its missing parents with mode 0700. Raises OSError."""
    if not path.parent.exists():
        make_directory(path.parent)
    path.mkdir(DIRECTORY_MODE, exist_ok=exist_ok)


def refuse_unreadable(key: str, path: Path) -> None:
    """Raise UserError unless a file exists and can be opened. key: the key to name."""
    try:
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise UserError(key=key, rule=no_such(path)) from None
    except OSError as error:
        raise UserError(key=key, rule=f"cannot read {path}: {error.strerror}") from None


def refuse_unwritable(key: str, directory: Path) -> None:
    """Raise UserError if nothing can be written under a directory, which need not exist. key: the key to name."""
    above = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".corolla-", dir=above):
            pass
    except OSError as error:
        raise UserError(key=key, rule=f"cannot write under {directory}: {error.strerror}") from None


def publish(path: Path, write: Callable[[Path], object], mode: int = FILE_MODE) -> None:
    """Let `write` fill a temporary file, sync it, rename it to `path` and sync the directory.

    After a crash `path` holds either its old content or all of the new content. The new content is durable when this
    returns. The temporary file, `.<name>.<pid>-<thread>.tmp`, exists with mode 0600 when `write` is called, and finally
    gets `mode`. Raises the errors of `write`, and OSError; no temporary file is left then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        # left by a killed process of this number, or put here by another account to lead elsewhere
        temporary.unlink(missing_ok=True)
        os.close(opener(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        write(temporary)
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish_text(path: Path, text: str, mode: int = FILE_MODE) -> None:
    """Write a text file as `publish` does, in UTF-8."""
    publish(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), mode)


def sync(path: Path) -> None:
    """Force a file's content or a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path, *, wait: bool, shared: bool = False) -> IO[bytes]:
    """Create a file if it is missing, lock it and return it. The lock ends when it is closed or this process ends.

    shared: other processes may hold a shared lock too, but no exclusive one. Raises OSError, also for a symbolic link,
    and BlockingIOError if another process holds the lock and `wait` is false.
    """
    # a network file system allows a shared lock only on a file that is open for reading
    file = open(path, "ab+", opener=lambda name, flags: opener(name, flags | os.O_NOFOLLOW))
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def explain_full_disk(key: str, directory: Path) -> Iterator[None]:
    """Turn a full disk's OSError into a UserError of one line. key: the key to name; directory: the one written to."""
    try:
        yield
    except OSError as error:
        # numpy's error has no number, only a text with the size written
        of_numpy = error.errno is None and "requested and" in str(error)
        if of_numpy or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                key=key, rule=f"cannot write under {directory}: {os.strerror(error.errno or errno.ENOSPC)}"
            ) from None
        raise


def cache_key(prefix: str, parts: Sequence[Any]) -> str:
    """Return a directory name: a readable prefix and 16 hex digits of the sha256 of `parts` (as JSON)."""
    digest = hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', prefix)}-{digest[:16]}"


def build_once(
    target: Path,
    build: Callable[[Path], None],
    *,
    key: str,
    force: bool = False,
    stale: Callable[[Path], bool] | None = None,
) -> None:
    """Let `build` fill a fresh directory with files and rename it to `target`, once over all processes.

    Other processes on this file system wait on a lock file beside it. An unfinished directory never has the name
    `target`. The next build removes the rest of an interrupted one. key: the configuration's key for errors. force:
    build again and replace.
    stale(target): whether `target` must be built again; it is called again under the lock. Raises the errors of
    `build`, and UserError if nothing can be written there, or if the checksums of `target` do not match (see
    fl_app.checksums).
    """

    def is_there() -> bool:
        return target.is_dir() and not force and not (stale and stale(target))

    try:
        if is_there():
            checksums.refuse_damage(key, target, checksums.compare(target, whole=False))
            return
        make_directory(target.parent)
        held = lock(target.parent / f".{target.name}.lock", wait=True)
    except OSError as error:
        raise UserError(key=key, rule=f"cannot write under {target.parent} ({error.strerror})") from error
    with held:
        for left in target.parent.glob(f".{target.name}.tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
        if is_there():
            return
        fresh = target.parent / f".{target.name}.tmp-{os.getpid()}"
        make_directory(fresh, exist_ok=False)
        try:
            with explain_full_disk(key, target.parent):
                build(fresh)
                checksums.write(fresh)
                for file in fresh.iterdir():
                    # until here the mode of the directory kept other users out
                    file.chmod(FILE_MODE)
                    sync(file)
                sync(fresh)
            if target.is_dir():
                os.rename(target, f"{fresh}.old")
            os.rename(fresh, target)
            sync(target.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(f"{fresh}.old", ignore_errors=True)


def numbered(directory: Path, suffix: str) -> list[int]:
    """Return the numbers t of a directory's files `round-<t><suffix>`, ascending. Other files are left out."""
    stems = (path.name.removeprefix("round-").removesuffix(suffix) for path in directory.glob(f"round-*{suffix}"))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal())
