"""Work cut into blocks, on a few threads, so that results do not depend on how many threads there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits

T = TypeVar("T")
R = TypeVar("R")

COLUMNS = 32_768  # per block of float32 columns; a multiple of 8, so blocks of packed masks start on a byte


def blocks(start: int, stop: int, width: int = COLUMNS) -> list[tuple[int, int]]:
    """Cut the columns start..stop into consecutive blocks, (start, stop) each."""
    return [(first, min(first + width, stop)) for first in range(start, stop, width)]


def in_order(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield work(item) in the order of the items, computed on a few threads with BLAS on one.

    What is summed over these results does not depend on the number of threads.
    """
    with threadpool_limits(1, "blas"):
        if len(items) <= 4:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            yield from pool.map(work, items)


def for_blocks(block: Callable[[int, int], None], d: int) -> None:
    """Call block(start, stop) for consecutive blocks of d columns, on a few threads."""
    for _ in in_order(lambda span: block(*span), blocks(0, d)):
        pass
