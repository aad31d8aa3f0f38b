"""Checks of an existing Ray cluster before a simulation uses it: reachable, equal versions, shared directories.

`python -m corolla.experiments.ray_cluster ADDRESS PATH...` joins the cluster as a driver, reads the files PATH on each
of its machines, and prints the results as JSON. It is a separate process because Ray can be joined only once, and
leaves threads and signal handlers behind.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_app.errors import UserError
from fl_app.files import make_directory, publish_text

# environment of a process that joins a cluster; without it, our apps bind Ray to the loopback
ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
PACKAGES = ("corolla", "flwr", "torch", "ray")
_SECONDS = 90
_CONNECT_SECONDS = 5
_MARK = "ray-cluster: "


def environment(address: str) -> dict[str, str]:
    """Return the environment variables that let a process's `ray.init()` join the cluster at an address."""
    return ENVIRONMENT | {"RAY_ADDRESS": address}


def check(address: str, shared: Mapping[str, Path], cpus_per_client: float, gpus_per_client: float) -> None:
    """Raise UserError unless a cluster answers and has this Corolla, these directories, and room for a client.

    address: HOST:PORT of the head. shared: directories by the key that names them, created if needed. A file is written
    into each, and read on every machine.
    """
    _connect(address)
    tokens = {key: directory / f".shared-{uuid.uuid4().hex}" for key, directory in shared.items()}
    try:
        for key, path in tokens.items():
            try:
                make_directory(path.parent)
                publish_text(path, path.name)
            except OSError as error:
                raise UserError(key=key, rule=f"cannot write under {path.parent}: {error.strerror}") from None
        found = _ask(address, tokens.values())
    finally:
        for path in tokens.values():
            path.unlink(missing_ok=True)
    problems = [problem for node in found for problem in _problems(node, tokens, shared)]
    room = [node for node in found if node["cpus"] >= cpus_per_client and node["gpus"] >= gpus_per_client]
    if not room:
        most = ", ".join(f"{node['name']}: {node['cpus']:g} CPUs, {node['gpus']:g} GPUs" for node in found)
        problems.append(
            f"no machine has room for a client of {cpus_per_client:g} CPUs and {gpus_per_client:g} GPUs ({most})"
        )
    if problems:
        raise UserError("\n".join(f"--ray-address {address}: {problem}" for problem in problems))


def _connect(address: str) -> None:
    """Raise UserError unless a server listens at an address. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[^\s/]+:\d{1,5}", address) or int(port) >= 2**16:
        raise UserError(key="--ray-address", rule="must be HOST:PORT, as `ray start --head` prints it", value=address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(key="--ray-address", rule=f"no Ray cluster's head listens at {address}: {why}") from None


def _problems(node: Mapping[str, Any], tokens: Mapping[str, Path], shared: Mapping[str, Path]) -> list[str]:
    """Return the problems of one machine of the cluster."""
    here, there = _versions(), node["versions"]
    differing = [
        f"{name} {there[name]} where this one has {here[name]}" for name in PACKAGES if there[name] != here[name]
    ]
    problems = [f"{node['name']} has {', '.join(differing)}"] if differing else []
    for key, path in tokens.items():
        if (read := node["read"][str(path)]) != path.name:
            problems.append(
                f"{key}: {shared[key]} is not shared: {node['name']} cannot read a file that was just written there ({read})"
            )
    return problems


def _ask(address: str, paths: Any) -> list[dict[str, Any]]:
    """Return the answers of all machines of the cluster."""
    command = [sys.executable, "-P", "-m", __name__, address, *map(str, paths)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(key="--ray-address", rule=f"no Ray cluster answers at {address} within {_SECONDS} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found: list[dict[str, Any]] = json.loads(line.removeprefix(_MARK))
            return found
    reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise UserError(key="--ray-address", rule=f"cannot use the Ray cluster at {address}: {reason}")


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def main() -> None:
    """Join a cluster, and print the report of each of its machines."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    address, *paths = sys.argv[1:]
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)

    def look() -> dict[str, Any]:
        read = {}
        for path in paths:
            try:
                read[path] = Path(path).read_text(encoding="utf-8")
            except OSError as error:
                read[path] = str(error.strerror)
        return {"read": read, "versions": _versions()}

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    asked = [ray.remote(look).options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
    answers = [
        {
            "name": f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            "cpus": node["Resources"].get("CPU", 0),
            "gpus": node["Resources"].get("GPU", 0),
            **answer,
        }
        for node, answer in zip(nodes, ray.get(asked, timeout=_SECONDS), strict=True)
    ]
    print(_MARK + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
