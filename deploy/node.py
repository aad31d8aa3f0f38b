"""What the launcher does on one host: `python -m deploy.node` reads a request (JSON) from standard input and prints a reply.

The same `handle` serves this machine directly and a remote one over ssh (deploy/hosts.py). Requests:

- prepare: check versions, paths and ports; make the cluster's directory; write key files; return directory, ports
- start: start processes
- clock: what this host's clock says
- status: each process's pid, whether it lives, its health, the node id it got from the SuperLink
- logs: the end of a process's log, and what refusals in it mean
- stop: end processes; clear: remove key files
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deploy import clocks, explain, health, processes
from fl_app.errors import UserError
from fl_app.files import publish_text
from fl_app.processes import free_ports

REPLY_MARK = "corolla-node: "
PACKAGES = ("corolla", "flwr", "torch")

Json = dict[str, Any]


def main() -> None:
    """Answer one request; a UserError becomes {"error": message}."""
    try:
        reply = handle(json.load(sys.stdin))
    except UserError as error:
        reply = {"error": str(error)}
    print(REPLY_MARK + json.dumps(reply), flush=True)


def handle(request: Json) -> Json:
    """Do what a request asks for on this machine."""
    directory = processes.cluster_directory(request["cluster"])
    token = request["token"]
    match request["action"]:
        case "prepare":
            return _prepare(directory, token, request)
        case "start":
            for process in request["processes"]:
                processes.start(directory, token, **process)
            return {}
        case "clock":
            return {"clock": clocks.now()}
        case "status":
            return {"processes": _status(directory, token)}
        case "logs":
            name = request["name"]
            means = explain.meanings(name, processes.log_end(directory, name, sys.maxsize))
            record = processes.read_record(directory, name)
            if record and not processes.alive(record):
                means = [explain.ENDED, *(meaning for meaning in means if not meaning.startswith("not connected"))]
            return {"text": processes.log_end(directory, name, request["lines"]), "means": means}
        case "stop":
            names = request["names"]
            with ThreadPoolExecutor(max(1, len(names))) as pool:
                ended = list(pool.map(lambda name: processes.stop(directory, token, name), names))
            return {"left": [name for name, done in zip(names, ended, strict=True) if not done]}
        case "clear":
            shutil.rmtree(directory / "keys", ignore_errors=True)
            shutil.rmtree(directory / "flwr", ignore_errors=True)
            return {}
    raise UserError(f"unknown request {request['action']!r}: is the same Corolla installed on both machines?")


def _prepare(directory: Path, token: str, request: Json) -> Json:
    problems = [f"{path}: there is no such file or directory" for path in request["paths"] if not Path(path).exists()]
    for record in processes.records(directory):
        if record.token != token and processes.alive(record):
            problems.append(f"{record.name} of a cluster {request['cluster']!r} is running already (pid {record.pid})")
    for address, port in request["free"]:
        if why := _taken(address, port):
            problems.append(f"port {port}: {why}")
    if problems:
        raise UserError("\n".join(problems))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    keys = directory / "keys"
    keys.mkdir(mode=0o700, exist_ok=True)
    for name, text in request["files"].items():
        publish_text(keys / name, text)
    (directory / "flwr").mkdir(exist_ok=True)
    return {
        "directory": str(directory),
        "scripts": str(Path(sys.executable).parent),
        "ports": free_ports(request["ports"]),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _taken(address: str, port: int) -> str:
    """Return why a TCP port cannot be listened on, or ""."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except OSError as error:
            return f"cannot listen on {address}: {error.strerror}"
    return ""


def _status(directory: Path, token: str) -> Json:
    mine = [record for record in processes.records(directory) if record.token == token]
    with ThreadPoolExecutor(max(1, min(16, len(mine)))) as pool:
        return dict(pool.map(lambda record: (record.name, _describe(directory, record)), mine))


def _describe(directory: Path, record: processes.Record) -> Json:
    lives = processes.alive(record)
    checks = []
    if lives and record.health:
        checks.append(health.serving(record.health))
    if lives and record.http:
        checks.append(health.answers(record.http, record.ca))
    return {
        "pid": record.pid,
        "alive": lives,
        "healthy": lives and all(checks),
        "node-id": _node_id(directory, record.name),
    }


def _node_id(directory: Path, name: str) -> str:
    """Return the node id a SuperNode logs once it has reached its SuperLink, or ""."""
    try:
        with (directory / f"{name}.log").open(encoding="utf-8", errors="replace") as log:
            for line in log:
                if found := re.search(r"SuperNode ID: (\d+)", line):
                    return found[1]
    except FileNotFoundError:
        pass
    return ""


if __name__ == "__main__":
    main()
