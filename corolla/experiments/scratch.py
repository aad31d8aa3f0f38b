"""Space for a simulation's processes: temporary files, and shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from fl_app.errors import UserError, size
from fl_app.files import refuse_unwritable

NEEDED = 50e6
"""Bytes of temporary files of a small simulation: copies of the app, Ray's logs and sockets, the SuperLink's database."""
SHARED = Path("/dev/shm")
IN_PROCESS = "run with --in-process, which needs none"


def temporary_directory() -> Path:
    """Return the directory for temporary files. Raises UserError if it cannot be written, or has too little space."""
    named = Path(os.environ.get("TMPDIR") or "")
    try:
        # tempfile silently skips a full directory
        directory = named if named.is_absolute() and named.is_dir() else Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UserError(key="TMPDIR", rule=f"{error.strerror}; set it to a writable folder, or {IN_PROCESS}") from None
    way_out = f"make room there, set TMPDIR to another folder, or {IN_PROCESS}"
    try:
        refuse_unwritable("TMPDIR", directory)
    except UserError as error:
        raise UserError(f"{error}; {way_out}") from None
    free = shutil.disk_usage(directory).free
    if free < NEEDED:
        raise UserError(
            key="TMPDIR",
            rule=f"{directory} has {size(free)} left, a simulation needs {size(NEEDED)} or more; {way_out}",
        )
    return directory


def refuse_without_shared_memory() -> None:
    """Raise UserError if this machine's shared memory cannot be written. Ray would wait for it without end."""
    if SHARED.is_dir() and not os.access(SHARED, os.W_OK):
        raise UserError(
            key=SHARED,
            rule="cannot be written, but a simulation's processes share memory there; mount it writable "
            f"(in a container: --shm-size), or {IN_PROCESS}",
        )
