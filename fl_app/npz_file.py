"""Arrays of an .npz file, which somebody else may have made."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import DataError, UserError, size
from fl_app.machine import available_memory


def read(key: str, path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the wanted arrays of an .npz file by name, and the names of all its arrays.

    No pickled object is loaded, and nothing is unpacked that does not fit in memory. key: the key for errors. wanted:
    whether an array of this name is wanted. Raises UserError.
    """
    try:
        npz = np.load(path, allow_pickle=False)
        if not isinstance(npz, np.lib.npyio.NpzFile):
            raise DataError(key=key, rule=f"{path} is a single array, not an npz file")
        with npz:
            names = {name for name in npz.files if wanted(name)}
            if npz.zip:
                _refuse_bomb(key, path, npz.zip, names)
            return {name: np.asarray(npz[name]) for name in names}, list(npz.files)
    except UserError:
        raise
    except MemoryError as error:
        raise DataError(key=key, rule=f"{path} does not fit in this machine's memory ({error})") from None
    # zipfile raises a RuntimeError for a compression or an encryption that it lacks
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(key=key, rule=f"{path} is not a readable npz file of plain arrays ({error})") from error


def names(key: str, path: Path) -> list[str]:
    """Return the names of an .npz file's arrays, and load none. Raises UserError as `read` does."""
    return read(key, path, lambda name: False)[1]


def _refuse_bomb(key: str, path: Path, archive: zipfile.ZipFile, names: Collection[str]) -> None:
    """Raise UserError if the arrays' members need more memory than there is.

    numpy opens a member with or without the suffix .npy as an array. zipfile unpacks no more of a member than it
    declares.
    """
    needed = sum(m.file_size for m in archive.infolist() if m.filename.removesuffix(".npy") in names)
    free = available_memory()
    if needed > free:
        raise DataError(key=key, rule=f"{path} unpacks to {size(needed)}, but {size(free)} of memory are free")
