"""What the server keeps per client: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import UserError


def settle(personal: dict[int, dict[str, NDArray[Any]]], ids: list[int], limit: float, directory: Path) -> None:
    """Hold at most `limit` bytes (0: any number) of the clients' arrays in memory, and no stack but the last round's.

    personal: arrays by client id, changed in place. A row that is kept holds its whole stack: rows of clients that were not in
    the last round (`ids`) are copied out of theirs. Raises UserError if what is beyond the limit cannot be written.
    """
    used = 0
    for client_id, own in sorted(personal.items()):
        used += sum(a.nbytes for a in own.values())
        if used > limit > 0 and not any(isinstance(a, np.memmap) for a in own.values()):
            personal[client_id] = to_disk(own, directory)
    for client_id, own in personal.items():
        if client_id not in ids or used > limit > 0:
            personal[client_id] = {
                name: a if a.base is None or isinstance(a, np.memmap) else a.copy() for name, a in own.items()
            }


def to_disk(arrays: Mapping[str, NDArray[Any]], directory: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays as read-only memory maps of a file without a name, which ends with them, even after a crash.

    Raises UserError if the file cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            starts = {}
            for name, array in arrays.items():
                starts[name] = file.seek(-(-file.tell() // 64) * 64)
                array.tofile(file)
            file.flush()
            # one map for all arrays: each holds a file descriptor
            whole = np.memmap(file, np.uint8, "r") if file.tell() else np.empty(0, np.uint8)
            return {
                name: whole[starts[name] : starts[name] + array.nbytes].view(array.dtype).reshape(array.shape)
                for name, array in arrays.items()
            }
    except OSError as error:
        raise UserError(f"server-memory-limit: clients' models cannot be written to {directory}: {error}") from None


def release(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Give back the memory that reading memory-mapped arrays took; they are read from their file again when needed."""
    for array in arrays.values():
        base: object = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            base.madvise(mmap.MADV_DONTNEED)
