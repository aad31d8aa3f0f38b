"""What the bits of a run depend on beside its config: versions, and the type of CPU."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("corolla", "flwr", "numpy", "torch")
_CPUS = Path("/proc/cpuinfo")  # Linux


def cpu() -> str:
    """Return the type of this machine's CPU, as it says itself; elsewhere than on Linux what Python knows of it, maybe nothing."""
    try:
        lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES, those that are installed, without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
