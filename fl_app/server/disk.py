"""Free space on the disks that a run writes: under its folder, and under the SuperLink's database.

The SuperLink stores every message in its database until the message is answered and fetched. So before a run and before
each round the free space is compared with the bytes that a round needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fl_app.errors import UserError, size

log = logging.getLogger("corolla")

DATABASE = "COROLLA_DATABASE"
"""Environment variable with the path of the SuperLink's database (deploy/superlink.py sets it for its ServerApps)."""
PARTS = 100
"""Clients whose parts of the model are counted for an estimate of bytes, at most."""
# Less free space than this is a full disk: SQLite and file systems write in pages.
_FULL = 1 << 20
# A line warns below this many times the bytes that a round needs.
_AMPLE = 2


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes that a round writes.

    messages: all downloads and uploads of its clients. uploads: the uploads alone, which may all be stored at the same
    time. checkpoint: the checkpoint after the round, and kept uploads. first: the first checkpoint.
    """

    messages: float
    uploads: float
    checkpoint: float
    first: float


def database(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the SuperLink's database, None if it is in memory or unknown."""
    return Path(environment[DATABASE]) if environment.get(DATABASE) else None


def free(path: Path) -> int:
    """Return the free bytes of the file system on which a path is or would be. One that states no size has room."""
    usage = shutil.disk_usage(next(above for above in (path, *path.parents) if above.exists()))
    return usage.free if usage.total else sys.maxsize


def room_in(path: Path) -> int:
    """Return the bytes that can still be stored in an SQLite database: free space, and pages that it reuses."""
    room = free(path)
    with contextlib.suppress(OSError):
        # is written again from its beginning
        room += path.with_name(f"{path.name}-wal").stat().st_size
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_opened(path)) as connection:
        size, unused = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "freelist_count"))
        room += size * unused
    return room


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1)


def full_database(path: Path | None = None) -> str:
    """Return the line about a full disk under the SuperLink's database, "" if there is none. path: default `database`."""
    path = path or database()
    if path is None or free(path) >= _FULL:
        return ""
    return f"superlink.database: the disk of {path} is full; free space there, and continue the run with --resume"


class Disks:
    """The disks of a run, compared with its needs. folder: the run's folder, which need not exist."""

    def __init__(self, folder: Path, needed: DiskEstimate) -> None:
        self._folder, self._needed, self._database = folder, needed, database()
        self._is_short = False

    def refuse(self) -> None:
        """Raise UserError if the run clearly cannot fit: not even its first checkpoint, or its first uploads."""
        if (room := free(self._folder)) < self._needed.first:
            what = f"a checkpoint takes about {size(self._needed.first)}"
            raise UserError(key="output-dir", rule=f"{self._folder}: {size(room)} are free, and {what}")
        self._short()

    def check(self) -> None:
        """Log one line if a disk gets short, and again only after it had ample space in between.

        Raises UserError if the SuperLink's database has no room for a round's uploads.
        """
        short = self._short()
        if short and not self._is_short:
            log.warning("%s", short)
        self._is_short = bool(short)

    def _short(self) -> str:
        """Return the line about the first disk that is short, "" if none is. Raises UserError as `check`.

        A disk under both places counts for each: with `_AMPLE` times the larger need it has room for both.
        """
        needed = self._needed
        if self._database is not None and (room := room_in(self._database)) < _AMPLE * needed.messages:
            what = f"superlink.database: {self._database} has room for {size(room)}"
            if room < needed.uploads:
                raise UserError(
                    f"{what}, and a round needs about {size(needed.messages)}, {size(needed.uploads)} of it for uploads "
                    "alone: free space there"
                )
            return f"{what}, a round needs about {size(needed.messages)}"
        if (room := free(self._folder)) < _AMPLE * needed.checkpoint:
            what = f"a round's checkpoint takes about {size(needed.checkpoint)}"
            return f"output-dir: {self._folder}: {size(room)} are free, {what}"
        return ""
