"""What this machine computes with: versions, and the type of CPU."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("corolla", "flwr", "numpy", "pillow", "scipy", "torch")
_CPUS = Path("/proc/cpuinfo")  # Linux


def cpu() -> str:
    """Return the type of this machine's CPU as Linux names it; where it does not (ARM, other systems), what Python knows of it."""
    try:
        lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES, those that are installed, without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def made_with() -> dict[str, str]:
    """Return what run.json says of the server's machine, which a simulation's clients share unless its Ray cluster has others.

    Bits may depend on more that is not here: on accelerators, and on the commit of Corolla, whose version they all share.
    """
    return {**versions(), "cpu": cpu()}
