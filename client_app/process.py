"""What a client does to its own process before it computes: import torch quickly, limit threads, keep freed memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys

# glibc's allocator: blocks of this size or more are mapped on their own; so much free memory stays on the heap.
MMAP_THRESHOLD_BYTES = 64 << 20
TRIM_THRESHOLD_BYTES = 256 << 20
# parameters of mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def import_torch() -> None:
    """Import torch without the garbage collector, whose passes over what stays anyway are a fifth of the import's time.

    In a deployment every message pays for the import.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import torch  # noqa: F401

        # later passes of the collector leave out what the import made
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
    """Let glibc's allocator keep freed memory, up to 256 MB, for the next batch. Returns whether it does.

    By default it gives a batch's activations back to the kernel and faults them in again with the next batch: a tenth to a fifth of
    the time of training on a CPU. Elsewhere than on glibc, and where the environment configures the allocator, nothing changes.
    """
    by_variable = any(name.startswith("MALLOC_") for name in os.environ)
    by_tunable = "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or by_variable or by_tunable:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # another C library has none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
