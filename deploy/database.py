"""The SuperLink's database: its owner's alone, whatever the umask, and without the messages of ended runs.

SQLite leaves deleted bytes in free pages, and in the write-ahead log, until others replace them. A run's uploads would
stay there for as long. Here deleted bytes are overwritten, and the log is emptied when a run ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sqlite3
import stat
import threading
import time
from pathlib import Path
from typing import Any

from deploy.patches import changing
from fl_app.errors import DeploymentError
from fl_app.files import make_directory

log = logging.getLogger("corolla")

# SQLite gives the first file's mode to the others when it makes them
FILES = ("", "-wal", "-shm", "-journal")
_OVERWRITE = ("secure_delete", "ON")
_PAUSES = (0.2, 5.0, 60.0)
"""Seconds before the log is emptied, and emptied again: a reader or an open transaction may have been in the way."""


def make_private(path: Path) -> str:
    """Give a database's files mode 0600 and its directory 0700, and make the missing ones.

    Return a note if the directory is not for the database alone to close, "" otherwise: one of the system, or another
    user's. The files are closed there as well. Raises UserError.
    """
    try:
        make_directory(path.parent)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        for end in FILES:
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{end}").chmod(0o600)
        about = path.parent.stat()
        mode = stat.S_IMODE(about.st_mode)
        if not mode & 0o077:
            return ""
        if about.st_uid == os.geteuid() and not mode & stat.S_ISVTX and not _is_shared(path.parent):
            path.parent.chmod(0o700)
            return ""
    except OSError as error:
        raise DeploymentError(
            key="superlink.database", rule=f"unable to open database file {path}: {error.strerror}"
        ) from None
    return (
        f"superlink.database: others may list {path.parent} (mode {mode:o}); give the database a directory of its own"
    )


def _is_shared(directory: Path) -> bool:
    """Return whether a directory is the user's home, or is as high as the system's own (/srv, /var/lib)."""
    place = directory.resolve()
    return place == Path.home().resolve() or (os.geteuid() == 0 and len(place.parts) <= 3)


def forget_deleted(path: Path) -> None:
    """Let Flower's SuperLink overwrite deleted bytes in its database, and empty the log when a run ends.

    Free pages of earlier runs are overwritten now. A warning gives the reason if they are not.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as database:
            database.execute("PRAGMA secure_delete = ON")
            if database.execute("PRAGMA freelist_count").fetchone()[0]:
                database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # Flower names a file that is no database; a full disk is no reason not to serve
    except sqlite3.Error as error:
        log.warning("superlink.database: deleted bytes of earlier runs in %s could not be overwritten: %s", path, error)
    with changing("keeps its database", "a run's uploads may stay in its free pages"):
        mixin: Any = importlib.import_module("flwr.supercore.sql_mixin")
        module: Any = importlib.import_module("flwr.server.superlink.linkstate.sql_linkstate")
        state, unsigned = module.SqlLinkState, module.int64_to_uint64
        end_tasks, clean, ended = state._finish_run_tasks, state.cleanup_run, threading.Event()

        @functools.wraps(clean)
        def clean_and_empty(self: Any, run_id: int) -> None:
            clean(self, run_id)
            ended.set()

        # every end of a run comes here: finished, stopped, failed, expired. Flower cleans when somebody asks for the run next.
        @functools.wraps(end_tasks)
        def end_and_clean(self: Any, runs: list[tuple[int, int]], **how: Any) -> None:
            end_tasks(self, runs, **how)
            for run_id, _ in runs:
                self.cleanup_run(unsigned(run_id))

        mixin.SQLITE_PRAGMAS = (*mixin.SQLITE_PRAGMAS, _OVERWRITE)
        state._finish_run_tasks, state.cleanup_run = end_and_clean, clean_and_empty
        threading.Thread(target=_keep_empty, args=(path, ended), name="empty-log", daemon=True).start()


def _keep_empty(path: Path, ended: threading.Event) -> None:
    """Empty the log whenever a run has ended: soon, and again after transactions that were open."""
    while ended.wait():
        ended.clear()
        for seconds in _PAUSES:
            time.sleep(seconds)
            with contextlib.suppress(sqlite3.Error):
                empty_log(path)


def empty_log(path: Path) -> bool:
    """Move the write-ahead log's pages into a database and empty the log. Return whether no reader was in the way."""
    with contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
        return not database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]


def copy(path: Path, to: Path) -> None:
    """Copy a database that may be in use, without its free pages. The copy has mode 0600. Raises UserError if it is none."""
    try:
        os.close(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=60)) as source:
            source.execute("VACUUM INTO ?", (str(to),))
    except sqlite3.Error as error:
        raise DeploymentError(key="superlink.database", rule=f"{path} cannot be copied: {error}") from None
