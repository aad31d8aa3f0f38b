"""Supervisor of a simulation's SuperLink.

It runs the SuperLink in a separate network, if the kernel allows that, and ends it when the launcher ends.

`python -m corolla.experiments.superlink_supervisor HOME` starts the SuperLink. It writes one line of JSON to standard
output: `error`, or `shared`. The latter is "" in a separate network, else the reason why there is none. Standard input
ends when the launcher is killed. The supervisor then ends every process with HOME in its environment, and removes HOME.

A second process, started with HOME LAUNCHER, takes over if the supervisor itself is killed. It waits for the end of its
standard input, then for the end of the launcher, and does the same.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from corolla.experiments import namespace
from fl_app.errors import UserError
from fl_app.processes import (
    LAUNCH,
    LAUNCHER,
    end_processes,
    free_ports,
    is_alive,
    processes_with,
    script,
    wait_for_http,
)

# name of the SuperLink's connection in HOME/config.toml
NAME = "simulation"
# environment variable; `host` means no separate network, for clients that need the host's
NETWORK = "COROLLA_SIMULATION_NETWORK"
_LOG = "superlink.log"
# message from the supervisor to its standby: everything has ended
_DONE = b"done"


def main() -> None:
    """Supervise one SuperLink, or stand by for the supervisor."""
    home = Path(sys.argv[1])
    if len(sys.argv) > 2:
        stand_by(home, sys.argv[2])
    else:
        keep(home)


def keep(home: Path) -> None:
    """Start a SuperLink. When standard input ends, end it and all processes that it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    standby = _start_standby(home)
    try:
        shared = f"{NETWORK}=host" if os.environ.get(NETWORK) == "host" else namespace.why_not()
        if not shared:
            namespace.unshare()
        try:
            start(home)
        except UserError as error:
            _say(error=str(error))
            return
        _say(shared=shared)
        sys.stdin.buffer.read()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(home, spared=standby.pid)
        standby.communicate(_DONE)


def stand_by(home: Path, launcher: str) -> None:
    """Wait until supervisor and launcher have ended, and finish the supervisor's work. launcher: its identity."""
    if sys.stdin.buffer.read() != _DONE:
        while is_alive(launcher):
            time.sleep(1)
        end(home)


def _start_standby(home: Path) -> subprocess.Popen[bytes]:
    """Start the standby process, without the environment variables that mark processes to be ended."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "corolla.experiments.superlink_supervisor", str(home), os.environ[LAUNCHER]],
        env={name: value for name, value in os.environ.items() if name not in (LAUNCH, LAUNCHER)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def start(home: Path) -> None:
    """Start the SuperLink and return when it answers. Raises UserError with the end of its log if it does not."""
    port = free_ports(1)[0]
    home.joinpath("config.toml").write_text(
        f'[superlink]\ndefault = "{NAME}"\n[superlink.{NAME}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = [script("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (home / _LOG).open("wb") as log:
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    wait_for_http(f"http://127.0.0.1:{port}/health", process, home / _LOG)


def end(home: Path, spared: int = 0) -> None:
    """End every process of this launch except this one, the SuperLink first, and remove its directory.

    spared: pid of a child to keep.
    """
    end_processes([child for child in psutil.Process().children() if child.pid != spared])
    # repeat: a process may have started another one meanwhile
    for _ in range(3):
        end_processes(processes_with(f"{LAUNCH}={home}"))
    shutil.rmtree(home, ignore_errors=True)


def _say(**what: str) -> None:
    print(json.dumps(what), flush=True)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
