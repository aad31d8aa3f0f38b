"""Work in blocks of columns, on a few threads, with results that do not depend on the number of threads."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")

# float32 columns in a block; a multiple of 8, so that blocks of packed masks start on a byte
COLUMNS = 32_768
# from this many stack rows on, blocks are narrower
_ROWS = 256
# columns in a block of float64 rows that fits the cache: means are taken in these blocks, and other widths are multiples of it
UNIT = 4_096


def blocks(start: int, stop: int, width: int = COLUMNS) -> list[tuple[int, int]]:
    """Cut the columns start..stop into consecutive blocks. Return each as (start, stop)."""
    return [(first, min(first + width, stop)) for first in range(start, stop, width)]


def columns_for(rows: int) -> int:
    """Return the width of a block for a stack with this many rows.

    From 256 rows on blocks are narrower, so that the work on a block needs no more memory. They have at least `UNIT`
    columns.
    """
    return COLUMNS if rows < _ROWS else max(UNIT, COLUMNS * _ROWS // rows // UNIT * UNIT)


def one_thread(library: str = "numpy") -> AbstractContextManager[Any]:
    """Limit BLAS to one thread, so that no result depends on the number of threads.

    library: "numpy", or "scipy.linalg", which brings its own BLAS.
    """
    blas = _blas(library)
    if all(one.num_threads == 1 for one in blas.lib_controllers):
        return nullcontext()
    limit: AbstractContextManager[Any] = blas.limit(limits=1)
    return limit


@functools.cache
def _blas(library: str) -> ThreadpoolController:
    """Load a library and return the controller of its BLAS. The search for it takes milliseconds, so it is done once."""
    importlib.import_module(library)
    return ThreadpoolController().select(user_api="blas")


def in_order(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield work(item) in the order of the items, computed on a few threads with BLAS on one.

    A sum over these results does not depend on the number of threads.
    """
    with one_thread():
        if len(items) <= 4:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            yield from pool.map(work, items)


def for_blocks(block: Callable[[int, int], None], d: int, rows: int = 0) -> None:
    """Call block(start, stop) for consecutive blocks of d columns, on a few threads. rows: the stack's rows (`columns_for`)."""
    for _ in in_order(lambda span: block(*span), blocks(0, d, columns_for(rows))):
        pass
