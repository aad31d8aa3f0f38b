"""Keeps a simulation's SuperLink: in a network of its own where the kernel allows it, and no longer than its launcher lives.

`python -m fl_app.experiments.keeper HOME` starts the SuperLink and writes one line of JSON to standard output: `error`, or
`shared`, which is "" in a network of its own and else why there is none. When standard input ends, as it does when the launcher
is killed, it ends everything that carries HOME in its environment, and removes HOME.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from fl_app.errors import UserError
from fl_app.experiments import namespace
from fl_app.processes import LAUNCH, end_processes, free_ports, processes_with, script, wait_for_http

NAME = "simulation"  # of the SuperLink's connection in HOME/config.toml
NETWORK = "COROLLA_SIMULATION_NETWORK"  # `host`: no network of its own, for clients that need the network
_LOG = "superlink.log"


def main() -> None:
    """Keep one SuperLink."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    home = Path(sys.argv[1])
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
        end(home)


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


def end(home: Path) -> None:
    """End every process of this launch, the SuperLink first, but for this one, and remove its directory."""
    end_processes(psutil.Process().children())
    for _ in range(3):  # one may have started another meanwhile
        end_processes(processes_with(f"{LAUNCH}={home}"))
    shutil.rmtree(home, ignore_errors=True)


def _say(**what: str) -> None:
    print(json.dumps(what), flush=True)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
