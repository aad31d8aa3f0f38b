"""Work cut into blocks, on a few threads, so that results do not depend on how many threads there are."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")

# per block of float32 columns; a multiple of 8, so blocks of packed masks start on a byte
COLUMNS = 32_768


def blocks(start: int, stop: int, width: int = COLUMNS) -> list[tuple[int, int]]:
    """Cut the columns start..stop into consecutive blocks, (start, stop) each."""
    return [(first, min(first + width, stop)) for first in range(start, stop, width)]


def one_thread(library: str = "numpy") -> AbstractContextManager[Any]:
    """BLAS on one thread, so that no result depends on how many there are.

    library: whose BLAS it is, "numpy" or "scipy.linalg", which brings its own.
    """
    limit: AbstractContextManager[Any] = _blas(library).limit(limits=1)
    return limit


@functools.cache
def _blas(library: str) -> ThreadpoolController:
    """What is loaded of BLAS, once the library is; looking for it takes milliseconds."""
    importlib.import_module(library)
    return ThreadpoolController().select(user_api="blas")


def in_order(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield work(item) in the order of the items, computed on a few threads with BLAS on one.

    What is summed over these results does not depend on the number of threads.
    """
    with one_thread():
        if len(items) <= 4:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            yield from pool.map(work, items)


def for_blocks(block: Callable[[int, int], None], d: int) -> None:
    """Call block(start, stop) for consecutive blocks of d columns, on a few threads."""
    for _ in in_order(lambda span: block(*span), blocks(0, d)):
        pass
