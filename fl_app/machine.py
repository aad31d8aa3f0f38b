"""This machine's software versions and type of CPU."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("corolla", "flwr", "numpy", "pillow", "scipy", "torch")
_CPUS = Path("/proc/cpuinfo")  # Linux


def cpu() -> str:
    """Return the type of this machine's CPU: Linux's name of it, or Python's if there is none (ARM, other systems)."""
    try:
        lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed PACKAGES, without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def made_with() -> dict[str, str]:
    """Return run.json's entry about the server's machine.

    A simulation's clients share this machine, unless its Ray cluster has others. The bits of results may depend on
    more: on accelerators, and on Corolla's commit, because many commits share a version.
    """
    return {**versions(), "cpu": cpu()}
