"""This machine's software versions, type of CPU, and memory."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("corolla", "flwr", "numpy", "pillow", "scipy", "torch")
# of Linux
_CPUS = Path("/proc/cpuinfo")
_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_GROUPS_ROOT = Path("/sys/fs/cgroup")
# Files of a control group, version 2 and 1: its limit, its use, and in `memory.stat` the memory that the kernel can free.
_LIMITS = (
    ("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


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
    found = {name: version for name in PACKAGES if (version := _version(name))}
    return {"python": platform.python_version(), **found}


@functools.cache
def _version(name: str) -> str:
    """Return a package's version, "" if it is not installed. A look takes a millisecond, and every client has it sent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def made_with() -> dict[str, str]:
    """Return run.json's entry about the server's machine.

    A simulation's clients share this machine, unless its Ray cluster has others. The bits of results may depend on
    more: on accelerators, and on Corolla's commit, because many commits share a version.
    """
    return {**versions(), "cpu": cpu()}


def available_memory() -> float:
    """Return the bytes of memory that new work can take: the machine's, free swap included, or less where a control
    group limits this process. inf where the system does not tell (other systems than Linux).
    """
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return math.inf
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    free = 1024.0 * (kilobytes.get("MemAvailable", 0) + kilobytes.get("SwapFree", 0)) or math.inf
    return min([free, *map(_left_in, _own_groups())])


def _own_groups() -> list[Path]:
    """Return the directories of the control groups that may limit this process's memory, and of those above them."""
    found = []
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds in ("", "memory"):
                root = _GROUPS_ROOT / kinds
                own = root / name.lstrip("/")
                # in a container the path may be the host's: the root is then the container's group
                found += [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return found


def _left_in(group: Path) -> float:
    """Return the bytes that a control group may still take; inf without a limit."""
    for limit, use, droppable in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # "max", no number, is no limit
            left = int((group / limit).read_text()) - int((group / use).read_text())
            return max(0.0, float(left + sum(int(stat.get(name, 0)) for name in droppable)))
    return math.inf
