"""Preparation of a client's process: import torch quickly, limit threads, keep freed memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys

# glibc's allocator maps blocks of at least MMAP_THRESHOLD_BYTES separately, and keeps up to TRIM_THRESHOLD_BYTES of
# free memory on the heap.
MMAP_THRESHOLD_BYTES = 64 << 20
TRIM_THRESHOLD_BYTES = 256 << 20
# parameters of mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def import_torch() -> None:
    """Import torch without the garbage collector: its passes take a fifth of the import's time.

    They would free nothing. In a deployment every message pays for the import.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import torch  # noqa: F401

        # later passes of the collector skip the import's objects
        gc.freeze()
    finally:
        gc.enable()


def prepare_training(threads: int) -> None:
    """Set up this process for training: torch, its number of threads, and the allocator. The settings stay."""
    import_torch()
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory, up to 256 MB, for the next batch. Return whether it does.

    By default it returns a batch's activations to the kernel, and faults them in again for the next batch. This costs a
    tenth to a fifth of the training time on a CPU. Without glibc, or where the environment configures the allocator,
    nothing changes.
    """
    by_variable = any(name.startswith("MALLOC_") for name in os.environ)
    by_tunable = "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or by_variable or by_tunable:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
