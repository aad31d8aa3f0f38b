"""Flower's processes on this machine: environment, free ports, waiting, finding, ending.

A process is found by a variable in its environment, which its children inherit. It is identified by its pid and its
start mark: a later process with the same pid has another mark.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from fl_app.errors import UserError

# The launch that a process belongs to.
LAUNCH = "COROLLA_LAUNCH"
# Identity of the command that must end the process.
LAUNCHER = "COROLLA_LAUNCHER"
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONUNBUFFERED": "1",
    # what they print is read as that, whatever the terminal shows
    "PYTHONIOENCODING": "utf-8",
}
_START_SECONDS = 60


def flower_environment(flwr_home: Path | None = None) -> dict[str, str]:
    """Return the environment for Flower's processes.

    No telemetry, no installation of dependencies at run time, and Python keeps what it has compiled.
    """
    env = dict(os.environ)
    # a client's process starts for every message: without compiled files it would compile the application each time
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    places = dict.fromkeys((str(Path(sys.executable).parent), str(Path(script("flwr")).parent), env.get("PATH", "")))
    env["PATH"] = os.pathsep.join(places)
    env |= FLOWER
    if flwr_home is not None:
        env["FLWR_HOME"] = str(flwr_home)
    return env


def script(name: str) -> str:
    """Return the path of a command of Flower: the one beside this Python, or where Flower's installation has put it.

    Raises UserError if there is none.
    """
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        return str(beside)
    for file in importlib.metadata.files("flwr") or ():
        if file.name == name and Path(file.locate()).is_file():
            return str(Path(file.locate()).resolve())
    if found := shutil.which(name):
        return found
    raise UserError(key=name, rule=f"this command of the package flwr must be installed beside {sys.executable}")


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports that were free on loopback a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def wait_for_http(url: str, process: psutil.Popen, log: Path) -> None:
    """Wait until `url` answers.

    Raises UserError with the end of the log if the process ends first or takes too long.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.05)
    raise UserError(f"the SuperLink did not start; the end of its log:\n{log.read_text(errors='replace')[-2000:]}")


# Identities -----------------------------------------------------------------------------------------------------------


def start_mark(pid: int) -> str | None:
    """Return a mark of a live process's start, unaffected by changes of the clock. None for no process or a zombie."""
    with contextlib.suppress(psutil.Error, OSError, IndexError):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if Path("/proc/sys/kernel/random/boot_id").exists():
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # field 22, starttime in clock ticks since boot
            return f"{boot}/{fields[19]}"
        return f"{process.create_time():.2f}"
    return None


def identity(pid: int) -> str:
    """Return a live process's pid and start mark as one word."""
    return f"{pid}:{start_mark(pid)}"


def is_alive(identity: str) -> bool:
    """Return whether exactly this process is still running."""
    pid, _, mark = identity.partition(":")
    return pid.isdigit() and start_mark(int(pid)) == mark


def processes_with(variable: str) -> list[psutil.Process]:
    """Return this user's processes with NAME=value in their environment.

    Processes that Corolla launched have it, and so do their children.
    """
    name, value = variable.split("=", 1)
    return [process for process, found in _carrying(name) if found == value]


def orphans() -> list[psutil.Process]:
    """Return the processes that a command left behind when it ended."""
    return [process for process, launcher in _carrying(LAUNCHER) if not is_alive(launcher)]


def _carrying(name: str) -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            value = process.environ().get(name) if process.pid != os.getpid() else None
            if value is not None:
                found.append((process, value))
    return found


def end_processes(processes: Sequence[psutil.Process], seconds: float = 10) -> None:
    """Send SIGTERM to processes, then SIGKILL to those that remain after `seconds`."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)
