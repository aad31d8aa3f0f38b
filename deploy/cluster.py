"""A cluster's life: up, status, logs, down. What was started is recorded, so `down` ends exactly that."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import certificates, clocks, commands, connection, hosts, peers, superlink_nodes, versions
from deploy.commands import SUPERLINK, TUNNEL, Place, Process
from deploy.inventory import LOCAL, Inventory, SuperLink, SuperNode
from deploy.node import Json
from deploy.processes import cluster_directory
from fl_app.errors import UserError
from fl_app.privacy.keyring import PEERS

Say = Callable[[str], None]
_LOG_LINES = 15


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up, as recorded: the inventory at that time, its token and Flower connection."""

    inventory: Inventory
    token: str
    config: str  # Flower's config file on this machine
    started: str

    @property
    def connection(self) -> dict[str, Any]:
        """The table in Flower's config."""
        table: dict[str, Any] = {"address": f"127.0.0.1:{self.inventory.superlink.control_port}"}
        if self.inventory.secure:
            return table | {"root-certificates": str(Path(self.inventory.keys) / certificates.CA)}
        return table | {"insecure": True}

    @property
    def placement(self) -> dict[str, list[str]]:
        """Names of the processes on each host."""
        found: dict[str, list[str]] = {host: [] for host in self.inventory.hosts}
        found[self.inventory.superlink.host].append(SUPERLINK)
        for node in self.inventory.supernodes:
            found[node.host].append(node.name)
        if self.inventory.superlink.host != LOCAL:
            found.setdefault(LOCAL, []).append(TUNNEL)
        return found

    def ask(self, host: str, action: str, **request: Any) -> Json:
        """Send one of the hosts a request."""
        request |= {"action": action, "cluster": self.inventory.name, "token": self.token}
        return hosts.ask(host, self.inventory.hosts.get(host, sys.executable), request)

    def status(self) -> tuple[dict[str, Json], dict[str, UserError]]:
        """Return every process's status by name, and the hosts that could not be asked."""
        replies, failures = hosts.attempt_each(lambda host: self.ask(host, "status"), self.placement)
        found: dict[str, Json] = {}
        for host, names in self.placement.items():
            for name in names:
                ended = {"pid": 0, "alive": False, "healthy": False, "node-id": ""}
                found[name] = replies[host]["processes"].get(name, ended) if host in replies else {}
        return found, failures

    def log_end(self, name: str, lines: int) -> str:
        """Return the end of a process's log, and what refusals in it mean. Raises UserError for an unknown name."""
        for host, names in self.placement.items():
            if name in names:
                reply = self.ask(host, "logs", name=name, lines=lines)
                return "\n".join([reply["text"], *(f"=> {meaning}" for meaning in reply.get("means", []))])
        raise UserError(f"{name}: cluster {self.inventory.name} has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        """Names of all processes."""
        return [name for names in self.placement.values() for name in names]


# The record -----------------------------------------------------------------------------------------------------------


def record_path(name: str) -> Path:
    """Return the file in which this machine records a cluster it started."""
    return cluster_directory(name) / "cluster.json"


def load(name: str) -> Cluster:
    """Read a cluster's record. Raises UserError if it is not up."""
    try:
        raw = json.loads(record_path(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"cluster {name} is not up: there is no {record_path(name)}") from None
    inventory = raw["inventory"]
    superlink = SuperLink(**{**inventory["superlink"], "names": tuple(inventory["superlink"]["names"])})
    nodes = tuple(SuperNode(**node) for node in inventory["supernodes"])
    joined = tuple(inventory.get("joined", ()))  # older records have none
    raw["inventory"] = Inventory(**{**inventory, "superlink": superlink, "supernodes": nodes, "joined": joined})
    return Cluster(**raw)


def _save_new(cluster: Cluster) -> None:
    path = record_path(cluster.inventory.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(dataclasses.asdict(cluster), file)
    except FileExistsError:
        old = load(cluster.inventory.name)
        raise UserError(
            f"cluster {old.inventory.name} is already up (since {old.started}); "
            f"`corolla cluster down {old.inventory.name}` ends it"
        ) from None


# Up -------------------------------------------------------------------------------------------------------------------


def up(inventory: Inventory, say: Say, seconds: float) -> Cluster:
    """Start everything and return when all of it answers and is connected; after a failure nothing is left.

    seconds: how long the SuperLink, and then the SuperNodes, may take. Raises UserError with the end of the failing logs.
    """
    if inventory.secure:
        certificates.check(inventory)
        for warning in certificates.warnings(inventory):
            say(warning)
    cluster = Cluster(
        inventory, secrets.token_hex(16), str(connection.config_path()), time.strftime("%Y-%m-%d %H:%M:%S")
    )
    if not record_path(inventory.name).exists():
        connection.check(Path(cluster.config), inventory.name, cluster.connection)
    _save_new(cluster)
    places: dict[str, Place] = {}
    try:
        _prepare(cluster, places, say)
        _start_superlink(cluster, places, seconds)
        connection.add(Path(cluster.config), inventory.name, cluster.connection)
        say(f"SuperLink on {inventory.superlink.host}: serving, connection {inventory.name} is in {cluster.config}")
        if inventory.secure:
            say(f"{len(superlink_nodes.register(cluster))} SuperNode keys registered")
        _start_supernodes(cluster, places, seconds)
    except BaseException as error:
        problems = down(cluster, set(places))  # nothing was started on hosts that were not prepared
        if problems and isinstance(error, UserError):
            raise UserError(f"{error}\nand while cleaning up:\n" + "\n".join(problems)) from None
        raise
    return cluster


def _prepare(cluster: Cluster, places: dict[str, Place], say: Say) -> None:
    """Check all hosts, copy each one its key files, and learn where things are there; fills `places` as far as it gets."""
    link = cluster.inventory.superlink

    def prepare(host: str) -> Json:
        free: list[tuple[str, int]] = []
        if host == link.host:
            free += [(commands.bind_address(link), link.fleet_port), ("127.0.0.1", link.control_port)]
        elif host == LOCAL:
            free += [("127.0.0.1", link.control_port)]  # the tunnel's end
        return _prepare_host(cluster, host, free)

    replies, failures = hosts.attempt_each(prepare, cluster.placement)
    places |= {host: _place(reply) for host, reply in replies.items()}
    if failures:
        raise UserError("\n".join(str(error) for error in failures.values()))
    versions.compare({host: reply["versions"] for host, reply in replies.items()}, say)
    _compare_clocks(cluster, (node.host for node in cluster.inventory.supernodes), say)


def _prepare_host(cluster: Cluster, host: str, free: list[tuple[str, int]]) -> Json:
    """Check a host's paths and the ports that must be free, copy its key files, and ask where things are there."""
    inventory = cluster.inventory
    paths = [node.data_path for node in inventory.supernodes if node.host == host and node.data_path]
    if host == inventory.superlink.host and inventory.superlink.database:
        paths += [str(Path(inventory.superlink.database).parent)]
    files = _key_files(inventory, host) if inventory.secure else {}
    ports = commands.num_ports(inventory, host)
    return cluster.ask(host, "prepare", paths=sorted(set(paths)), free=free, files=files, ports=ports)


def _place(reply: Json) -> Place:
    return Place(reply["directory"], reply["scripts"], tuple(reply["ports"]))


def _key_files(inventory: Inventory, host: str) -> dict[str, str]:
    """Return the key files a host needs: the CA's certificate, its SuperNodes' keys and all clients' list, the server's keys."""
    here = [node.name for node in inventory.supernodes if node.host == host]
    names = [certificates.CA] + [f"{name}.key" for name in here]
    private = [PEERS, *(f"{name}{peers.END}" for name in here)] if here else []
    names += [name for name in private if (Path(inventory.keys) / name).is_file()]
    if host == inventory.superlink.host:
        names += [certificates.SERVER, certificates.SERVER_KEY]
    return {name: (Path(inventory.keys) / name).read_text() for name in names}


def _compare_clocks(cluster: Cluster, others: Iterable[str], say: Say) -> None:
    """Compare hosts' clocks with the SuperLink's. Raises UserError if SuperNodes would be refused for it."""

    def ahead(host: str) -> float:
        reading: float = cluster.ask(host, "clock")["clock"]
        return (
            reading - time.time()
        )  # asked over ssh, the command starts late: its reading is nearest to the answer's arrival

    link = cluster.inventory.superlink.host
    there = dict.fromkeys([link, *others])
    if len(there) > 1:
        for note in clocks.compare(hosts.each(ahead, there), link, cluster.inventory.secure):
            say(note)


def _start_superlink(cluster: Cluster, places: dict[str, Place], seconds: float) -> None:
    inventory = cluster.inventory
    host = inventory.superlink.host
    _start(cluster, host, [commands.superlink(inventory, places[host])])
    _wait(cluster, [SUPERLINK], seconds)
    if host != LOCAL:
        ca = str(Path(inventory.keys) / certificates.CA) if inventory.secure else ""
        _start(cluster, LOCAL, [commands.tunnel(inventory, ca)])
        _wait(cluster, [TUNNEL], seconds)


def _start_supernodes(cluster: Cluster, places: dict[str, Place], seconds: float) -> None:
    inventory = cluster.inventory

    def start(host: str) -> None:
        nodes = [node for node in inventory.supernodes if node.host == host]
        _start(cluster, host, [commands.supernode(inventory, node, places[host], k) for k, node in enumerate(nodes)])

    hosts.each(start, {node.host: None for node in inventory.supernodes})
    _wait(cluster, [node.name for node in inventory.supernodes], seconds)


def _start(cluster: Cluster, host: str, processes: Iterable[Process]) -> None:
    cluster.ask(host, "start", processes=[dataclasses.asdict(process) for process in processes])


def _wait(cluster: Cluster, names: list[str], seconds: float) -> None:
    """Return when all named processes are ready. Raises UserError with their logs' ends if one ends or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        found, failures = cluster.status()
        if failures:
            raise UserError("\n".join(str(error) for error in failures.values()))
        waiting = [name for name in names if not is_ready(name, found[name])]
        ended = [name for name in waiting if not found[name]["alive"]]
        if not waiting:
            return
        if ended or time.monotonic() > deadline:
            failing = ended or waiting
            what = "ended" if ended else f"not ready after {seconds:g} s"
            shown = "".join(f"\n{n}: the end of its log:\n{cluster.log_end(n, _LOG_LINES)}" for n in failing[:3])
            raise UserError(f"{', '.join(failing)}: {what}{shown}")
        time.sleep(0.5)


def restart(cluster: Cluster, name: str, say: Say, seconds: float) -> None:
    """End a SuperNode of a running cluster if it is still there, start it again, and return when it is connected.

    Checks keys and clocks as `up` does, before anything is ended. Raises UserError.
    """
    nodes = {node.name: node for node in cluster.inventory.supernodes}
    if name not in nodes:
        raise UserError(f"{name}: one of {', '.join(nodes)} can be restarted")
    node = nodes[name]
    if cluster.inventory.secure:
        certificates.check(cluster.inventory, [node])
    _compare_clocks(cluster, [node.host], say)
    before = cluster.ask(node.host, "status")["processes"].get(name, {}).get("node-id", "")
    if cluster.ask(node.host, "stop", names=[name])["left"]:
        raise UserError(f"{node.host}: {name} could not be ended")
    # a SuperNode that was killed counts as connected until its heartbeats are missed, and its key is refused until then
    deadline = time.monotonic() + seconds
    while superlink_nodes.seen_by_superlink(cluster).get(before) == "online":
        if time.monotonic() > deadline:
            raise UserError(
                f"{name}: the SuperLink still takes its last connection for alive after {seconds:g} s; try again"
            )
        time.sleep(2)
    place = _place(_prepare_host(cluster, node.host, []))
    index = [n.name for n in nodes.values() if n.host == node.host].index(name)
    _start(cluster, node.host, [commands.supernode(cluster.inventory, node, place, index)])
    _wait(cluster, [name], seconds)


def is_ready(name: str, status: Json) -> bool:
    """Tell whether a process answers, and for a SuperNode whether it has reached the SuperLink."""
    return bool(status.get("healthy") and (name in (SUPERLINK, TUNNEL) or status["node-id"]))


# Status and down ------------------------------------------------------------------------------------------------------


def _stop(cluster: Cluster, names: dict[str, list[str]], host: str) -> Json:
    return cluster.ask(host, "stop", names=names[host])


def down(cluster: Cluster, only: set[str] | None = None, forget: bool = False) -> list[str]:
    """End everything `up` started: SuperNodes, then the SuperLink, then the tunnel. Returns what could not be ended.

    The record stays while something is left, so that `down` can be tried again. only: hosts to ask (all). forget: take hosts
    that cannot be reached as ended.
    """
    inventory = cluster.inventory
    problems: list[str] = []
    stages = [[node.name for node in inventory.supernodes], [SUPERLINK], [TUNNEL]]
    for stage in stages:
        here = {host: [n for n in names if n in stage] for host, names in cluster.placement.items()}
        here = {host: names for host, names in here.items() if names and (only is None or host in only)}
        replies, failures = hosts.attempt_each(functools.partial(_stop, cluster, here), here)
        problems += [str(error) for error in failures.values() if not forget]
        problems += [f"{host}: {name} could not be ended" for host, reply in replies.items() for name in reply["left"]]
    if not problems:
        there = [host for host in cluster.placement if only is None or host in only]
        _, failures = hosts.attempt_each(lambda host: cluster.ask(host, "clear"), there)
        problems += [str(error) for error in failures.values() if not forget]
    try:
        connection.remove(Path(cluster.config), inventory.name, cluster.connection)
    except UserError as error:
        problems.append(str(error))
    if not problems:
        record_path(inventory.name).unlink(missing_ok=True)
    return list(dict.fromkeys(problems))
