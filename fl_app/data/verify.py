"""Reads all prepared data of a data directory against its checksums."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fl_app import checksums

KINDS = ("datasets", "partitions")


def verify(root: Path) -> Iterator[tuple[Path, int, list[str]]]:
    """Yield every prepared data set and partition under a data directory, its bytes, and what is wrong with it, in words."""
    for kind in KINDS:
        for directory in sorted((root / kind).glob("[!.]*/")):
            nbytes = sum(path.stat().st_size for path in directory.iterdir())
            yield directory, nbytes, checksums.compare(directory, whole=True)
