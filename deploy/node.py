"""One host's side of `corolla cluster`: `python -m deploy.node` answers one request.

It reads the request as JSON from standard input and prints the reply. The same `handle` serves this machine directly
and a remote one over ssh (deploy/cluster.py). Requests:

- prepare: check versions, paths and ports; make the cluster's directory; write key files; return directory, ports,
  versions, and the free bytes under the SuperLink's database
- start: start processes
- clock: return the time on this host
- status: return each process's pid, whether it is alive, its health, the node id it got from the SuperLink
- logs: return the end of a process's log, and the meaning of refusals in it
- stop: end processes; clear: remove key files
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deploy import detached, health
from fl_app.errors import DeploymentError, UserError
from fl_app.files import explain_full_disk, publish_text
from fl_app.processes import free_ports
from fl_app.server import disk

REPLY_MARK = "corolla-node: "
PACKAGES = ("corolla", "flwr", "torch")

Json = dict[str, Any]


def main() -> None:
    """Answer one request. A UserError becomes {"error": message}."""
    try:
        reply = handle(json.load(sys.stdin))
    except UserError as error:
        reply = {"error": str(error)}
    print(REPLY_MARK + json.dumps(reply), flush=True)


def handle(request: Json) -> Json:
    """Execute a request on this machine, and return the reply. Raises UserError, also on a full disk."""
    directory = detached.cluster_directory(request["cluster"])
    with explain_full_disk(f"cluster {request['cluster']}", directory):
        return _execute(directory, request)


def _execute(directory: Path, request: Json) -> Json:
    token = request["token"]
    match request["action"]:
        case "prepare":
            return _prepare(directory, token, request)
        case "start":
            for process in request["processes"]:
                detached.start(directory, token, **process)
            return {}
        case "clock":
            return {"clock": now()}
        case "status":
            return {"processes": _status(directory, token)}
        case "logs":
            name = request["name"]
            means = explain_refusals(name, detached.log_end(directory, name, sys.maxsize))
            record = detached.read_record(directory, name)
            if record and not detached.alive(record):
                means = [ENDED, *(meaning for meaning in means if not meaning.startswith("not connected"))]
            return {"text": detached.log_end(directory, name, request["lines"]), "means": means}
        case "stop":
            names = request["names"]
            with ThreadPoolExecutor(max(1, len(names))) as pool:
                ended = list(pool.map(lambda name: detached.stop(directory, token, name), names))
            return {"left": [name for name, done in zip(names, ended, strict=True) if not done]}
        case "clear":
            shutil.rmtree(directory / "keys", ignore_errors=True)
            shutil.rmtree(directory / "flwr", ignore_errors=True)
            return {}
    raise DeploymentError(f"unknown request {request['action']!r}: is the same Corolla installed on both machines?")


def _prepare(directory: Path, token: str, request: Json) -> Json:
    problems = [f"{path}: there is no such file or directory" for path in request["paths"] if not Path(path).exists()]
    for record in detached.records(directory):
        if record.token != token and detached.alive(record):
            problems.append(f"{record.name} of a cluster {request['cluster']!r} is running already (pid {record.pid})")
    for address, port in request["free"]:
        if why := _port_problem(address, port):
            problems.append(f"port {port}: {why}")
    if problems:
        raise DeploymentError("\n".join(problems))
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
        "free": disk.free(Path(request["database"])) if request.get("database") else None,
    }


def now() -> float:
    """Return this host's time: seconds since 1970."""
    return time.time()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _port_problem(address: str, port: int) -> str:
    """Return why this host cannot listen on a TCP port, or ""."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except OSError as error:
            return f"cannot listen on {address}: {error.strerror}"
    return ""


def _status(directory: Path, token: str) -> Json:
    mine = [record for record in detached.records(directory) if record.token == token]
    with ThreadPoolExecutor(max(1, min(16, len(mine)))) as pool:
        return dict(pool.map(lambda record: (record.name, _describe(directory, record)), mine))


def _describe(directory: Path, record: detached.Record) -> Json:
    lives = detached.alive(record)
    return {
        "pid": record.pid,
        "alive": lives,
        "healthy": lives and (not record.health or health.answers(record.health, record.ca)),
        "node-id": _node_id(directory, record.name),
    }


def _node_id(directory: Path, name: str) -> str:
    """Return the node id that a SuperNode noted after it reached its SuperLink, or "".

    Not the one in its log: the log has an application's words too, and its lines move.
    """
    try:
        found = detached.node_id_file(directory, name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    return found if found.isascii() and found.isdecimal() else ""


# The meaning of refusals in Flower's and gRPC's logs
# -------------------------------------------------------------------

ENDED = "ended: it is no longer running; the lines above are its last"

_TERMINATED = "SuperNode terminated gracefully"
# patterns in a process's log, and their meanings
_MEANINGS = {
    "superlink": (
        ("No SuperNode found with the given public key", "a SuperNode was refused: its key is not registered here"),
        ("WRONG_VERSION_NUMBER", "a connection was refused: it spoke plaintext to the TLS port"),
    ),
    "supernode": (
        (
            r"\[code: 2004\]",
            "refused: its key is not registered with the SuperLink (or still counts as connected, for a minute)",
        ),
        (
            r"\[code: 2001\]",
            "refused: the SuperLink wants authentication, and this SuperNode was started without a key",
        ),
        ("CERTIFICATE_VERIFY_FAILED", "not connected: its ca.crt did not sign the SuperLink's certificate (wrong CA)"),
        (
            "Connection attempt failed",
            "not connected: no answer at the fleet address, plaintext to a TLS port there (a SuperLink of Flower 1.39 logs it), "
            "or a SuperLink with another Flower",
        ),
        (
            _TERMINATED,
            "ended: on request, or the SuperLink refused it: its clock is more than 5 s ahead of the SuperLink's or 305 s "
            "behind, or its key was revoked (`corolla cluster revoke`)",
        ),
    ),
}
# earlier lines of a SuperNode's log do not count: here it started, connected, or connected again after a cut
_BEGUN = re.compile(r"Starting Flower SuperNode|SuperNode ID: \d+|Connection successful after")


def explain_refusals(name: str, log: str) -> list[str]:
    """Return the meanings of the refusals in a process's log, each once. name: superlink, supernode-K, tunnel."""
    kind = name.partition("-")[0]
    known = _MEANINGS.get(kind, ())
    if kind == "supernode":
        log = log[max((sign.end() for sign in _BEGUN.finditer(log)), default=0) :]
        # later lines are those of its SuperExec, which cannot reach it any more
        before, end, _ = log.partition(_TERMINATED)
        log = before + end
    found = [meaning for pattern, meaning in known if re.search(pattern, log)]
    # gRPC retries after a failed handshake, so only the first meaning is the reason
    return found[:1] if name != "superlink" else found


if __name__ == "__main__":
    main()
