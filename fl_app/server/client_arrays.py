"""The server's arrays per client: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import UserError, size

# of mmap(2)
_PROT_READ, _MAP_SHARED = 1, 1
# argument types of libc's functions on a part of memory: where it begins, its size
_ADDRESS = (ctypes.c_void_p, ctypes.c_size_t)

Moved = Callable[[int, Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]], None]


def spill(
    personal: dict[int, dict[str, NDArray[Any]]],
    ids: list[int],
    limit: float,
    directory: Path,
    moved: Moved = lambda client_id, before, after: None,
) -> None:
    """Keep at most `limit` bytes (0: no limit) of the clients' arrays in memory, and no stack but the last round's.

    personal: arrays by client id, changed in place. ids: the clients of the last round. A row keeps its whole stack in
    memory. So rows of clients outside the last round are copied out of their stacks. moved: called for each client with
    moved arrays: client id, arrays before, arrays after. Raises UserError if the arrays beyond the limit cannot be
    written.
    """
    taking_part = set(ids)

    def replace(client_id: int, after: dict[str, NDArray[Any]]) -> None:
        moved(client_id, personal[client_id], after)
        personal[client_id] = after

    for client_id in personal.keys() - taking_part:
        if _in_a_stack(personal[client_id]):
            replace(client_id, to_disk(personal[client_id], directory))
    used = 0
    for client_id, own in sorted(personal.items()):
        used += sum(a.nbytes for a in own.values())
        if used > limit > 0 and not any(map(on_disk, own.values())):
            replace(client_id, to_disk(own, directory))
    for client_id, own in personal.items():
        if client_id not in taking_part or used > limit > 0:
            bound = [name for name, a in own.items() if a.base is not None and not on_disk(a)]
            if bound:
                replace(client_id, own | {name: own[name].copy() for name in bound})


class _Map:
    """A read-only map of a file, as an array's base. Python's `mmap` keeps a file descriptor open; a thousand clients'
    maps would exceed a process's usual limit.
    """

    def __init__(self, file: int, size: int) -> None:
        """file: a descriptor. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (*_ADDRESS, *(3 * [ctypes.c_int]), ctypes.c_long)
        address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, file, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._size, self._address = size, address
        # not at exit: arrays may still be read then, and the process's end frees the map
        weakref.finalize(self, _call, "munmap", address, size).atexit = False
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._size

    def madvise(self, advice: int) -> None:
        """Tell the kernel how the map is used, as `mmap.mmap.madvise`."""
        _call("madvise", self._address, self._size, advice)


def _call(function: str, address: int, size: int, *more: int) -> None:
    called = getattr(ctypes.CDLL(None), function)
    called.argtypes = (*_ADDRESS, *(len(more) * [ctypes.c_int]))
    called(address, size, *more)


def to_disk(arrays: Mapping[str, NDArray[Any]], directory: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays as read-only memory maps of an unnamed file. The file vanishes with them, even after a crash.

    Raises UserError if the file cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            starts = {}
            for name, array in arrays.items():
                starts[name] = file.seek(-(-file.tell() // 64) * 64)
                array.tofile(file)
            file.flush()
            whole = np.asarray(_Map(file.fileno(), file.tell())) if file.tell() else np.empty(0, np.uint8)
            return {
                name: whole[starts[name] : starts[name] + array.nbytes].view(array.dtype).reshape(array.shape)
                for name, array in arrays.items()
            }
    except OSError as error:
        raise UserError(
            key="server-memory-limit", rule=f"clients' models cannot be written to {directory}: {error}"
        ) from None


def stack(shape: tuple[int, ...], dtype: np.dtype[Any], directory: Path | None) -> NDArray[Any]:
    """Return an array to be filled: in memory, or as a memory map of an unnamed file in `directory`.

    The file vanishes with the array. Raises UserError if the directory has no room for it.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if directory is None or not nbytes:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            # reserve the space: a write to a map that the disk has no room for kills the process
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        what = f"a round's uploads, {size(nbytes)}"
        raise UserError(key="server-memory-limit", rule=f"{directory} has no room for {what}: {error}") from None


def stack_like(stack_of: NDArray[Any], directory: Path) -> NDArray[Any]:
    """Return an array to be filled, on disk if `stack_of` is there. Raises UserError as `stack`."""
    return stack(stack_of.shape, stack_of.dtype, None if _map_of(stack_of) is None else directory)


def release(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Free the memory that reading memory-mapped arrays took. They are read from their file again when needed."""
    for array in arrays.values():
        found = _map_of(array)
        if found is not None:
            found.madvise(mmap.MADV_DONTNEED)


def _map_of(array: NDArray[Any]) -> mmap.mmap | _Map | None:
    """Return the memory map that holds an array, None if none does."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, (mmap.mmap, _Map)) else None


def on_disk(array: NDArray[Any]) -> bool:
    """Return whether an array lies in a memory-mapped file."""
    return _map_of(array) is not None


def _in_a_stack(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a client's arrays are rows of a memory-mapped stack. Keeping them would keep the stack on disk."""
    own = sum(-(-array.nbytes // 64) * 64 for array in arrays.values())
    return any(len(found) > own for found in map(_map_of, arrays.values()) if found is not None)
