"""A running cluster: its record on this machine, and its hosts' answers about their processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deploy import certificates
from deploy.commands import METRICS, SSH_OPTIONS, SUPERLINK, TUNNEL
from deploy.detached import cluster_directory
from deploy.inventory import LOCAL, Inventory, SuperLink, SuperNode, warm_process
from deploy.node import REPLY_MARK, Json, handle
from fl_app.errors import MALFORMED, DeploymentError, UserError
from fl_app.files import explain_full_disk, lock, publish_text
from fl_app.log_format import TEXT


@dataclass(frozen=True)
class Cluster:
    """A running cluster, as recorded: the inventory at its start, its token and its Flower connection.

    config: Flower's config file on this machine. metrics: HOST:PORT where they are served, or "". runs: the directory of
    the run folders on the SuperLink's host, for them. log_format: of all its processes.
    """

    inventory: Inventory
    token: str
    config: str
    started: str
    metrics: str = ""
    runs: str = ""
    log_format: str = TEXT

    @property
    def connection(self) -> dict[str, Any]:
        """The connection's table in Flower's config."""
        table: dict[str, Any] = {"address": f"127.0.0.1:{self.inventory.superlink.control_port}"}
        if self.inventory.secure:
            return table | {"root-certificates": str(Path(self.inventory.keys) / certificates.CA)}
        return table | {"insecure": True}

    @property
    def placement(self) -> dict[str, list[str]]:
        """The names of the processes on each host."""
        found: dict[str, list[str]] = {host: [] for host in self.inventory.hosts}
        found[self.inventory.superlink.host].append(SUPERLINK)
        for node in self.inventory.supernodes:
            found[node.host].append(node.name)
        if self.inventory.superlink.host != LOCAL:
            found.setdefault(LOCAL, []).append(TUNNEL)
        if self.metrics:
            found[self.inventory.superlink.host].append(METRICS)
        return found

    def ask(self, host: str, action: str, **request: Any) -> Json:
        """Send a request to one of the hosts."""
        request |= {"action": action, "cluster": self.inventory.name, "token": self.token}
        return ask(host, self.inventory.hosts.get(host, sys.executable), request)

    def status(self) -> tuple[dict[str, Json], dict[str, UserError]]:
        """Return every process's status by name, and the hosts that gave no answer, with their errors."""
        replies, failures = attempt_each(lambda host: self.ask(host, "status"), self.placement)
        found: dict[str, Json] = {}
        for host, names in self.placement.items():
            for name in names:
                ended = {"pid": 0, "alive": False, "healthy": False, "node-id": ""}
                found[name] = replies[host]["processes"].get(name, ended) if host in replies else {}
        return found, failures

    def log_end(self, name: str, lines: int) -> str:
        """Return a log's end, and the meaning of refusals in it. Raises UserError for an unknown name."""
        for host, names in self.placement.items():
            if name in names:
                reply = self.ask(host, "logs", name=name, lines=lines)
                return "\n".join([reply["text"], *(f"=> {meaning}" for meaning in reply.get("means", []))])
        raise DeploymentError(key=name, rule=f"cluster {self.inventory.name} has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        """The names of all processes."""
        return [name for names in self.placement.values() for name in names]


def is_ready(name: str, status: Json) -> bool:
    """Return whether a process answers. A SuperNode must also have reached the SuperLink."""
    return bool(status.get("healthy") and (name in (SUPERLINK, TUNNEL, METRICS) or status["node-id"]))


# The record -----------------------------------------------------------------------------------------------------------


def record_path(name: str) -> Path:
    """Return the file in which this machine records a cluster that it started."""
    return cluster_directory(name) / "cluster.json"


@contextlib.contextmanager
def held(name: str) -> Iterator[None]:
    """Let no other command on this machine record or forget a cluster of this name. Raises UserError on a full disk."""
    directory = cluster_directory(name)
    with explain_full_disk(f"cluster {name}", directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock(directory / ".lock", wait=True):
            yield


def find(name: str) -> Cluster | None:
    """Return a cluster's record, or None if the cluster is not up."""
    try:
        return load(name)
    except UserError:
        return None


def load(name: str) -> Cluster:
    """Read a cluster's record. Raises UserError if the cluster is not up."""
    try:
        return _read(json.loads(record_path(name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DeploymentError(f"cluster {name} is not up: there is no {record_path(name)}") from None
    # an earlier Corolla left half a record on a full disk, before it started anything
    except MALFORMED:
        raise DeploymentError(f"cluster {name} is not up: {record_path(name)} is not a record") from None


def _read(record: dict[str, Any]) -> Cluster:
    inventory = record["inventory"]
    superlink = SuperLink(**{**inventory["superlink"], "names": tuple(inventory["superlink"]["names"])})
    # older records have true or false for `warm`, and no `joined`
    nodes = tuple(SuperNode(**{**node, "warm": warm_process(node.get("warm"))}) for node in inventory["supernodes"])
    joined = tuple(inventory.get("joined", ()))
    whole = Inventory(**{**inventory, "superlink": superlink, "supernodes": nodes, "joined": joined})
    return Cluster(**{**record, "inventory": whole})


def note_joined(name: str, joined: tuple[int, ...]) -> None:
    """Record the clients that join by themselves by now, if the cluster is up: its inventory may have grown since."""
    with held(name):
        if running := find(name):
            inventory = dataclasses.replace(running.inventory, joined=joined)
            cluster = dataclasses.replace(running, inventory=inventory)
            publish_text(record_path(name), json.dumps(dataclasses.asdict(cluster)))


def database_here(name: str) -> Path | None:
    """Return the path of a running cluster's database, None if it is in memory, on another host, or not known here."""
    if (running := find(name)) is None:
        return None
    link = running.inventory.superlink
    return Path(link.database) if link.database and link.host == LOCAL else None


def save_new(cluster: Cluster) -> None:
    """Record a cluster that is about to start. Raises UserError if a cluster of this name is up, or on a full disk."""
    name = cluster.inventory.name
    with held(name):
        if old := find(name):
            raise DeploymentError(
                f"cluster {name} is already up (since {old.started}); `corolla cluster down {name}` ends it"
            )
        publish_text(record_path(name), json.dumps(dataclasses.asdict(cluster)))


# Requests to hosts: a function call on this machine, `python -m deploy.node` over ssh elsewhere -----------------------


T = TypeVar("T")
_SECONDS = 120


def ask(host: str, python: str, request: Json) -> Json:
    """Send a request and return the reply. Raises UserError with the host and the fault, there or on the way."""
    if host == LOCAL:
        try:
            return handle(request)
        except UserError as error:
            raise DeploymentError(_prefixed(host, str(error))) from None
    # -P: a directory named deploy in the home directory must not shadow this package
    command = ["ssh", *SSH_OPTIONS, "--", host, shlex.join([python, "-P", "-m", "deploy.node"])]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=_SECONDS)
    except FileNotFoundError:
        raise DeploymentError(key=host, rule="there is no ssh command on this machine") from None
    except subprocess.TimeoutExpired:
        raise DeploymentError(key=host, rule=f"no reply over ssh within {_SECONDS} s") from None
    # a login shell may print lines before the reply
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(REPLY_MARK):
            reply: Json = json.loads(line.removeprefix(REPLY_MARK))
            if "error" in reply:
                raise DeploymentError(_prefixed(host, reply["error"]))
            return reply
    raise DeploymentError(key=host, rule=_failure(done, python))


def _prefixed(host: str, message: str) -> str:
    return "\n".join(f"{host}: {line}" for line in message.splitlines())


def _failure(done: subprocess.CompletedProcess[str], python: str) -> str:
    """Return the reason why an ssh command returned no reply."""
    output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
    if done.returncode == 255:
        return f"ssh failed: {output}"
    if done.returncode in (126, 127):
        return f"cannot run {python} there; is `python` right? {output}"
    if "No module named" in output:
        return f"{python} has no Corolla of this version (`make install` there): {output}"
    return f"{python} -m deploy.node ended with code {done.returncode}: {output}"


def each(work: Callable[[str], T], hosts: Iterable[str]) -> dict[str, T]:
    """Run `work` for all hosts at once and return the results. Raises one UserError with every host's problem."""
    results, failures = attempt_each(work, hosts)
    if failures:
        raise DeploymentError("\n".join(str(error) for error in failures.values()))
    return results


def attempt_each(work: Callable[[str], T], hosts: Iterable[str]) -> tuple[dict[str, T], dict[str, UserError]]:
    """Run `work` for all hosts at once. Return results and failures by host."""

    def attempt(host: str) -> tuple[str, T | UserError]:
        try:
            return host, work(host)
        except UserError as error:
            return host, error

    names = list(hosts)
    with ThreadPoolExecutor(max(1, min(16, len(names)))) as pool:
        done = list(pool.map(attempt, names))
    return (
        {host: result for host, result in done if not isinstance(result, UserError)},
        {host: result for host, result in done if isinstance(result, UserError)},
    )
