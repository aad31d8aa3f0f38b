"""A log that does not fill the disk: when it is long, the process that writes it moves its lines to FILE.1."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
import time
from pathlib import Path

MOST_BYTES = 10 << 20
"""Size at which the lines move. FILE.1 is replaced, so both files hold at most about twice as much."""
VARIABLE = "COROLLA_LOG_FILE"
_SECONDS = 5.0


def keep_small() -> None:
    """Keep the file small that $COROLLA_LOG_FILE names, if this process's errors go there. No effect otherwise."""
    path = os.environ.pop(VARIABLE, "")
    if path and _is_stderr(Path(path)):
        threading.Thread(target=_watch, args=(Path(path),), name="log-size", daemon=True).start()


def rotate(path: Path, most: int = MOST_BYTES) -> bool:
    """Move a log's lines to FILE.1 if it has more bytes. Return whether it did.

    The file itself stays, because processes have it open for appending. Lines of the moment between may be lost.
    """
    if path.stat().st_size <= most:
        return False
    with path.open("r+b") as log, open(f"{path}.1", "wb", opener=_private) as older:
        shutil.copyfileobj(log, older)
        log.truncate(0)
    return True


def _watch(path: Path) -> None:
    while True:
        with contextlib.suppress(OSError):
            rotate(path)
        time.sleep(_SECONDS)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_stderr(path: Path) -> bool:
    with contextlib.suppress(OSError):
        mine = os.fstat(2)
        return stat.S_ISREG(mine.st_mode) and os.path.samestat(mine, path.stat())
    return False
