"""A cluster's life: up, restart, down. Started processes are recorded, so that `down` ends exactly those."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from deploy import certificates, commands, connection, superlink_nodes
from deploy.cluster import Cluster, attempt_each, each, find, held, is_ready, record_path, save_new
from deploy.commands import METRICS, SUPERLINK, TUNNEL, HostPlaces, Process
from deploy.inventory import LOCAL, Inventory
from deploy.node import Json
from fl_app import log_format
from fl_app.errors import DeploymentError, UserError, size
from fl_app.privacy import secure_random
from fl_app.privacy.keyring import PEERS

Say = Callable[[str], None]
_LOG_LINES = 15

# Up -------------------------------------------------------------------------------------------------------------------


def up(
    inventory: Inventory,
    say: Say,
    seconds: float,
    metrics: str = "",
    runs: str = "runs",
) -> Cluster:
    """Start all processes, and return when they answer and are connected. After a failure none is left.

    If the cluster is up and its SuperLink has ended, start the processes that have ended, and leave the others as they are.

    seconds: time limit for the SuperLink, and again for the SuperNodes. metrics: [HOST:]PORT of the
    metrics, or none. runs: see Cluster. Raises UserError with the end of the failing logs.
    """
    if inventory.secure:
        certificates.require_usable(inventory)
        for warning in certificates.expiry_warnings(inventory):
            say(warning)
    listen = commands.host_port(*commands.listen_address(metrics)) if metrics else ""
    cluster = Cluster(
        inventory,
        secure_random.secret(16).hex(),
        str(connection.config_path()),
        time.strftime("%Y-%m-%d %H:%M:%S"),
        listen,
        str(Path(runs).absolute()),
        log_format.JSON if log_format.is_json() else log_format.TEXT,
    )
    if before := find(inventory.name):
        if before.inventory == inventory and _superlink_ended(before):
            return _revive(before, say, seconds)
    else:
        connection.require_free(Path(cluster.config), inventory.name, cluster.connection)
    save_new(cluster)
    places: dict[str, HostPlaces] = {}
    try:
        _prepare(cluster, places, say)
        _start_superlink(cluster, places, seconds)
        connection.add(Path(cluster.config), inventory.name, cluster.connection)
        say(f"SuperLink on {inventory.superlink.host}: serving, connection {inventory.name} is in {cluster.config}")
        if inventory.secure:
            say(f"{len(superlink_nodes.register_all(cluster))} SuperNode keys registered")
            _wait_until_gone(functools.partial(superlink_nodes.online_by_key, cluster), say, seconds)
        _start_metrics(cluster, places, seconds)
        _start_supernodes(cluster, places, seconds)
    except BaseException as error:
        # hosts that were not prepared have no processes
        problems = down(cluster, set(places))
        if problems and isinstance(error, UserError):
            raise DeploymentError(f"{error}\nand while cleaning up:\n" + "\n".join(problems)) from None
        raise
    return cluster


def _superlink_ended(cluster: Cluster) -> bool:
    """Return whether the SuperLink's host says that its process has ended."""
    state = cluster.ask(cluster.inventory.superlink.host, "status")["processes"].get(SUPERLINK)
    return not state or not state["alive"]


def _revive(cluster: Cluster, say: Say, seconds: float) -> Cluster:
    """Start a cluster's SuperLink again, and its other processes that have ended. SuperNodes that live connect by themselves."""
    link = cluster.inventory.superlink
    say(f"the SuperLink on {link.host} has ended; starting it again")
    # its children may outlive it
    cluster.ask(link.host, "stop", names=[SUPERLINK])
    free = [(commands.bind_address(link), link.fleet_port), ("127.0.0.1", link.control_port)]
    here = _place(_prepare_host(cluster, link.host, free))
    _start(cluster, link.host, [commands.superlink(cluster.inventory, here)])
    _wait(cluster, [SUPERLINK], seconds)
    found, failures = cluster.status()
    if failures:
        raise DeploymentError("\n".join(str(error) for error in failures.values()))
    ended = [name for name, state in found.items() if not state["alive"]]
    if TUNNEL in ended:
        ca = str(Path(cluster.inventory.keys) / certificates.CA) if cluster.inventory.secure else ""
        _start(cluster, LOCAL, [commands.tunnel(cluster.inventory, ca)])
        _wait(cluster, [TUNNEL], seconds)
    if cluster.inventory.secure:
        superlink_nodes.register_all(cluster)
    if METRICS in ended:
        _start_metrics(cluster, {link.host: here}, seconds)
    for node in cluster.inventory.supernodes:
        if node.name in ended:
            restart(cluster, node.name, say, seconds)
    return cluster


def _prepare(cluster: Cluster, places: dict[str, HostPlaces], say: Say) -> None:
    """Check all hosts, copy each one its key files, and get its directories and ports.

    Fills `places`, for as many hosts as succeed.
    """
    link = cluster.inventory.superlink

    def prepare(host: str) -> Json:
        free: list[tuple[str, int]] = []
        if host == link.host:
            free += [(commands.bind_address(link), link.fleet_port), ("127.0.0.1", link.control_port)]
            free += [commands.listen_address(cluster.metrics)] if cluster.metrics else []
        elif host == LOCAL:
            # the tunnel listens here
            free += [("127.0.0.1", link.control_port)]
        return _prepare_host(cluster, host, free)

    replies, failures = attempt_each(prepare, cluster.placement)
    places |= {host: _place(reply) for host, reply in replies.items()}
    if failures:
        raise DeploymentError("\n".join(str(error) for error in failures.values()))
    compare_versions({host: reply["versions"] for host, reply in replies.items()}, say)
    if note := note_on_space(link.host, link.database, replies[link.host].get("free")):
        say(note)
    check_clocks(cluster, (node.host for node in cluster.inventory.supernodes), say)


def _prepare_host(cluster: Cluster, host: str, free: list[tuple[str, int]]) -> Json:
    """Check a host's paths and the ports that must be free, copy its key files, and get its directories and ports."""
    inventory = cluster.inventory
    paths = [node.data_path for node in inventory.supernodes if node.host == host and node.data_path]
    if host == inventory.superlink.host and inventory.superlink.database:
        paths += [str(Path(inventory.superlink.database).parent)]
    files = key_files(inventory, host) if inventory.secure else {}
    ports = commands.num_ports(inventory, host)
    database = inventory.superlink.database if host == inventory.superlink.host else ""
    return cluster.ask(
        host, "prepare", paths=sorted(set(paths)), free=free, files=files, ports=ports, database=database
    )


def _place(reply: Json) -> HostPlaces:
    return HostPlaces(reply["directory"], reply["scripts"], tuple(reply["ports"]))


def key_files(inventory: Inventory, host: str) -> dict[str, str]:
    """Return the contents of the key files that a host needs.

    These are the CA's certificate, its SuperNodes' keys, the list of all clients' keys, and on the SuperLink's host the
    server's keys.
    """
    here = [node.name for node in inventory.supernodes if node.host == host]
    names = [certificates.CA] + [f"{name}.key" for name in here]
    private = [PEERS, *(f"{name}{certificates.KEY_SUFFIX}" for name in here)] if here else []
    names += [name for name in private if (Path(inventory.keys) / name).is_file()]
    if host == inventory.superlink.host:
        names += [certificates.SERVER, certificates.SERVER_KEY]
    return {name: (Path(inventory.keys) / name).read_text() for name in names}


def check_clocks(cluster: Cluster, others: Iterable[str], say: Say) -> None:
    """Compare hosts' clocks with the SuperLink's. Raises UserError if SuperNodes would be refused for theirs."""

    def ahead(host: str) -> float:
        reading: float = cluster.ask(host, "clock")["clock"]
        # over ssh the command starts late, so its reading is closest to the time the answer arrives
        return reading - time.time()

    link = cluster.inventory.superlink.host
    there = dict.fromkeys([link, *others])
    if len(there) > 1:
        for note in compare_clocks(each(ahead, there), link, cluster.inventory.secure):
            say(note)


def _start_superlink(cluster: Cluster, places: dict[str, HostPlaces], seconds: float) -> None:
    inventory = cluster.inventory
    host = inventory.superlink.host
    _start(cluster, host, [commands.superlink(inventory, places[host])])
    _wait(cluster, [SUPERLINK], seconds)
    if host != LOCAL:
        ca = str(Path(inventory.keys) / certificates.CA) if inventory.secure else ""
        _start(cluster, LOCAL, [commands.tunnel(inventory, ca)])
        _wait(cluster, [TUNNEL], seconds)


def _start_metrics(cluster: Cluster, places: dict[str, HostPlaces], seconds: float) -> None:
    if cluster.metrics:
        host = cluster.inventory.superlink.host
        _start(cluster, host, [commands.metrics(cluster.inventory, places[host], cluster.metrics, cluster.runs)])
        _wait(cluster, [METRICS], seconds)


def _start_supernodes(cluster: Cluster, places: dict[str, HostPlaces], seconds: float) -> None:
    inventory = cluster.inventory

    def start(host: str) -> None:
        nodes = [node for node in inventory.supernodes if node.host == host]
        _start(cluster, host, [commands.supernode(inventory, node, places[host], k) for k, node in enumerate(nodes)])

    each(start, {node.host: None for node in inventory.supernodes})
    _wait(cluster, [node.name for node in inventory.supernodes], seconds)


def _start(cluster: Cluster, host: str, processes: Iterable[Process]) -> None:
    """Start processes on a host, each with the cluster's log format in its environment."""
    given = [dataclasses.asdict(process) for process in processes]
    for process in given:
        process["environment"] = {log_format.VARIABLE: cluster.log_format, **process["environment"]}
    cluster.ask(host, "start", processes=given)


def _wait(cluster: Cluster, names: list[str], seconds: float) -> None:
    """Return when all named processes are ready.

    Raises UserError with the end of their logs if one ends, or at the time limit.
    """
    deadline = time.monotonic() + seconds
    while True:
        found, failures = cluster.status()
        if failures:
            raise DeploymentError("\n".join(str(error) for error in failures.values()))
        waiting = [name for name in names if not is_ready(name, found[name])]
        ended = [name for name in waiting if not found[name]["alive"]]
        if not waiting:
            return
        if ended or time.monotonic() > deadline:
            failing = ended or waiting
            what = "ended" if ended else f"not ready after {seconds:g} s"
            logs = [f"{name}: the end of its log:\n{cluster.log_end(name, _LOG_LINES)}" for name in failing[:3]]
            raise DeploymentError("\n".join([f"{', '.join(failing)}: {what}", *logs]))
        time.sleep(0.5)


def _wait_until_gone(online: Callable[[], list[str]], say: Say, seconds: float) -> None:
    """Return when the SuperLink counts none of the SuperNodes that must be started as connected.

    A SuperNode that was killed counts as connected until its heartbeats are missed, and its key is refused until then.
    online: returns those that still count. Raises UserError at the time limit.
    """
    deadline = time.monotonic() + seconds
    waiting = False
    while names := ", ".join(online()):
        if time.monotonic() > deadline:
            raise DeploymentError(
                key=names,
                rule=f"the SuperLink still counts the last connection as alive after {seconds:g} s; try again",
            )
        if not waiting:
            say(
                f"{names}: ended without a word to the SuperLink; waiting until it counts them as gone, at most a minute"
            )
        waiting = True
        time.sleep(2)


def restart(cluster: Cluster, name: str, say: Say, seconds: float) -> None:
    """End a SuperNode of a running cluster if it is still there, start it again, and return when it is connected.

    Checks keys and clocks as `up` does, before anything is ended. Raises UserError.
    """
    nodes = {node.name: node for node in cluster.inventory.supernodes}
    if name not in nodes:
        raise DeploymentError(key=name, rule=f"cannot be restarted; the SuperNodes are {', '.join(nodes)}")
    node = nodes[name]
    if cluster.inventory.secure:
        certificates.require_usable(cluster.inventory, [node])
    check_clocks(cluster, [node.host], say)
    before = cluster.ask(node.host, "status")["processes"].get(name, {}).get("node-id", "")
    if cluster.ask(node.host, "stop", names=[name])["left"]:
        raise DeploymentError(key=node.host, rule=f"{name} could not be ended")

    def online() -> list[str]:
        return [name] if superlink_nodes.status_by_node_id(cluster).get(before) == "online" else []

    _wait_until_gone(online, say, seconds)
    place = _place(_prepare_host(cluster, node.host, []))
    index = [n.name for n in nodes.values() if n.host == node.host].index(name)
    _start(cluster, node.host, [commands.supernode(cluster.inventory, node, place, index)])
    _wait(cluster, [name], seconds)


# Down -----------------------------------------------------------------------------------------------------------------


def down(cluster: Cluster, only: set[str] | None = None, forget: bool = False) -> list[str]:
    """End everything that `up` started: metrics, SuperNodes, the SuperLink, the tunnel, in order. Return the problems.

    The record stays while a process is left, so that `down` can be repeated. If another `down` has removed it, this one
    removes nothing more: the files and the connection may belong to a cluster of the same name that was started since.
    only: hosts to ask; default all. forget: treat hosts that cannot be reached as ended.
    """
    inventory = cluster.inventory
    problems: list[str] = []
    there = [host for host in cluster.placement if only is None or host in only]
    stages = [[METRICS], [node.name for node in inventory.supernodes], [SUPERLINK], [TUNNEL]]
    for stage in stages:
        asked = [host for host in there if set(stage) & set(cluster.placement[host])]
        replies, failures = attempt_each(functools.partial(_stop, cluster, stage), asked)
        problems += [str(error) for error in failures.values() if not forget]
        problems += [f"{host}: {name} could not be ended" for host, reply in replies.items() for name in reply["left"]]
    with held(inventory.name):
        recorded = find(inventory.name)
        if recorded is None or recorded.token != cluster.token:
            return list(dict.fromkeys(problems))
        if not problems:
            _, failures = attempt_each(lambda host: cluster.ask(host, "clear"), there)
            problems += [str(error) for error in failures.values() if not forget]
        try:
            connection.remove(Path(cluster.config), inventory.name, cluster.connection)
        except UserError as error:
            problems.append(str(error))
        if not problems:
            record_path(inventory.name).unlink(missing_ok=True)
    return list(dict.fromkeys(problems))


def _stop(cluster: Cluster, stage: list[str], host: str) -> Json:
    """End those of a host's processes that a stage names."""
    return cluster.ask(host, "stop", names=[name for name in cluster.placement[host] if name in stage])


# Versions, clocks and free space --------------------------------------------------------------------------------------

# All hosts must have the same Corolla and Flower, and a Flower that does not open the control API to the nodes. A SuperNode
# signs every request with its time. If that is too far from the SuperLink's time, the SuperNode is refused and ends.


# The newest Flower that may run; docs/deployment.md gives the reason, and the way to a newer one.
NEWEST = (1, 42)
# seconds that a SuperNode's clock may be off: Flower's SYSTEM_TIME_TOLERANCE, and behind also TIMESTAMP_TOLERANCE
MAX_AHEAD, MAX_BEHIND = 5.0, 305.0
_NOTED_SECONDS = 2.0
# Bytes free under the SuperLink's database: SQLite's own files need the least, most runs' rounds need less than the ample.
LEAST, AMPLE = 16e6, 1e9


def compare_versions(versions: Mapping[str, Mapping[str, str]], say: Callable[[str], None]) -> None:
    """Compare the packages' versions by host; `say` gets a note for each torch that differs.

    Raises UserError unless Corolla and Flower are the same everywhere, and Flower is no newer than NEWEST.
    """
    reference_host, reference = next(iter(versions.items()))
    for host, installed in versions.items():
        for package, version in installed.items():
            if version == reference[package]:
                continue
            what = f"{package} is {version} on {host} and {reference[package]} on {reference_host}"
            if package != "torch":
                raise DeploymentError(f"{what}; install the same version on all hosts")
            say(f"note: {what}; bits may differ from one client to the next")
    refuse_newer_flower(reference_host, reference["flwr"])


def refuse_newer_flower(host: str, flwr: str) -> None:
    """Raise UserError for a Flower whose SuperLink may take runs from anyone that reaches the fleet port."""
    found = re.match(r"(\d+)\.(\d+)", flwr)
    if found and (int(found[1]), int(found[2])) > NEWEST:
        newest = ".".join(map(str, NEWEST))
        raise DeploymentError(
            key=host,
            rule=f"flwr {flwr} is newer than {newest}, the newest whose fleet port deploy.superlink was "
            "tried to guard: without the guard anyone that reaches the port can run code on every "
            f"node; `pip install 'flwr[simulation]=={newest}.*'` there (docs/deployment.md, \"Newer "
            'Flower")',
        )


def note_on_space(host: str, database: str, free: float | None) -> str:
    """Return a note if little space is free under the SuperLink's database, "" if there is ample space.

    free: bytes; None: unknown, or no database on a disk. A run compares the space with the bytes of its rounds. Raises
    UserError if not even an empty database fits.
    """
    if free is None or free >= AMPLE:
        return ""
    found = f"{host}: superlink.database: {database}: {size(free)} are free"
    if free < LEAST:
        raise DeploymentError(f"{found}, and the database needs at least {size(LEAST)}; free space there")
    return f"note: {found}; a round needs the bytes of all its downloads and uploads there"


def compare_clocks(ahead: Mapping[str, float], superlink: str, authenticated: bool) -> list[str]:
    """Return a note for every host with a clock noticeably different from the SuperLink's.

    ahead: by host, seconds that its clock is ahead of one common clock; the answer's travel time may lower it, not
    raise it. superlink: the SuperLink's host. authenticated: SuperNodes sign their requests, and the SuperLink checks
    the time. Raises UserError that names the hosts with SuperNodes it would refuse.
    """
    notes, problems = [], []
    for host, seconds in ahead.items():
        off = seconds - ahead[superlink]
        side = "ahead of" if off > 0 else "behind"
        difference = f"{host}: its clock is {abs(off):.1f} s {side} that of the SuperLink's host ({superlink})"
        if authenticated and not -MAX_BEHIND < off < MAX_AHEAD:
            problems.append(difference)
        elif abs(off) > _NOTED_SECONDS:
            notes.append(f"note: {difference}")
    if problems:
        rule = (
            f"the SuperLink refuses a SuperNode more than {MAX_AHEAD:g} s ahead or {MAX_BEHIND:g} s behind, and it ends"
        )
        raise DeploymentError("\n".join([*problems, f"{rule}; synchronize both clocks (`timedatectl set-ntp true`)"]))
    return notes
