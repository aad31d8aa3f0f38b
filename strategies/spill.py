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
            offsets = {}
            for name, array in arrays.items():
                offsets[name] = file.seek(-(-file.tell() // 64) * 64)
                array.tofile(file)
            file.flush()
            return {
                name: np.memmap(file, array.dtype, "r", offsets[name], array.shape) if array.size else array.copy()
                for name, array in arrays.items()
            }
    except OSError as error:
        raise UserError(f"server-memory-limit: clients' models cannot be written to {directory}: {error}") from None


def release(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Give back the memory that reading memory-mapped arrays took; they are read from their file again when needed."""
    for array in arrays.values():
        if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
            array.base.madvise(mmap.MADV_DONTNEED)
