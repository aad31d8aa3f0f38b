"""A reader of pickled files that runs no code of theirs: it knows lists, dicts, texts, numbers and arrays of bytes.

It stands for the module `pickle` where torchvision reads CIFAR. Others may have written these files: a data directory can be
shared.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


class _Array:
    """What stands for an array, uint8 of any shape, and takes its content as NumPy pickles it."""

    _array: NDArray[np.uint8]

    def __setstate__(self, state: Any) -> None:
        """Take the state that NumPy has written: version, shape, type, order, bytes."""
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _Type) or by_columns:
            raise pickle.UnpicklingError("an array must hold bytes, by rows")
        content = content.encode("latin1") if isinstance(content, str) else content
        self._array = np.frombuffer(content, np.uint8).reshape(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the array, for NumPy."""
        return np.array(self._array, dtype)


class _Type:
    """What stands for the type uint8."""

    def __init__(self, name: str, *_: Any) -> None:
        if name != "u1":
            raise pickle.UnpicklingError(f"an array must hold bytes, got {name!r}")

    def __setstate__(self, state: Any) -> None:
        """Take the type's state, of which nothing is needed."""


_KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    # for bytes that Python 3 has pickled for Python 2
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return one of the few known names. Raises UnpicklingError for any other."""
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not read: it could run code") from None


def load(file: IO[bytes], encoding: str = "ASCII") -> Any:
    """Return the value in a file, as `pickle.load` does. Raises UnpicklingError, and what damaged content raises."""
    return _Reader(file, encoding=encoding).load()
