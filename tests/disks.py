"""A disk that is full: a small file system in memory, mounted for a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(directory: Path, free: int) -> Iterator[Path]:
    """Yield a directory on a file system with so many bytes free, in whole pages. Skips where nothing can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    there = directory / "small"
    there.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={free},mode=700", "none", str(there)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield there
    finally:
        subprocess.run(["umount", "--lazy", str(there)], check=True)
