"""Named NumPy arrays in safetensors files. The system's errors are raised as OSError."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_tensors(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by name. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: np.asarray(a, order="C") for name, a in arrays.items()}, file)
    except SafetensorError as error:  # which has the system's error only in its text
        if found := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from error
        raise


def read_tensors(file: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return some of a file's arrays by name. Raises ValueError if it lacks one, or is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file.name}: {error}") from None
