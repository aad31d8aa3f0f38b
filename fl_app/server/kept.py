"""Arrays on disk instead of in memory: what the server keeps per client beyond its memory limit."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import UserError


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
