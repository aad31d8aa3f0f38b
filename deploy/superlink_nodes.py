"""The SuperNodes that a cluster's SuperLink knows: registered, listed and revoked through its control port."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import serialization

from deploy import certificates
from deploy.certificates import KEY_SUFFIX
from deploy.cluster import Cluster
from fl_app.errors import DeploymentError, UserError, plain
from fl_app.privacy.keyring import PEERS
from fl_app.processes import flower_environment, script

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.proto.run_pb2 import Run


def register_all(cluster: Cluster) -> list[str]:
    """Register every existing public key, also of sites that joined, and end their earlier keys.

    Return the names of the SuperNodes. Raises UserError.
    """
    names = [node.name for node in cluster.inventory.supernodes]
    joined = (f"supernode-{client_id}" for client_id in cluster.inventory.joined)
    names += [name for name in joined if (Path(cluster.inventory.keys) / f"{name}.pub").exists()]
    for name in names:
        register_key(cluster, name)
    return names


def register_key(cluster: Cluster, name: str) -> None:
    """Register a SuperNode's public key with the SuperLink, then end every other key that was registered for it.

    A kept database may have the key already. Raises UserError, also for a key that was revoked.
    """
    public = Path(cluster.inventory.keys) / f"{name}.pub"
    key = public_bytes(public)
    done = flwr(cluster, "supernode", "register", str(public), cluster.inventory.name, "--name", name)
    output = done.stdout + done.stderr
    if done.returncode != 0 and "already in use" not in output:
        raise DeploymentError(key=name, rule=f"its key {public} could not be registered:\n{output.strip()[-1000:]}")
    nodes = list_nodes(cluster)
    if not any(node.public_key == key and _is_accepted(node) for node in nodes):
        raise DeploymentError(
            key=name, rule=f"its key {public} was revoked, for good; `corolla node rotate` makes another at the site"
        )
    _end_keys(cluster, name, [node for node in nodes if node.name == name and node.public_key != key])


def _is_accepted(node: NodeInfo) -> bool:
    return node.status != "unregistered"


def _end_keys(cluster: Cluster, name: str, nodes: Iterable[NodeInfo]) -> None:
    """Let the SuperLink accept these nodes' keys no longer, and note them as revoked. Raises UserError."""
    for node in filter(_is_accepted, nodes):
        done = flwr(cluster, "supernode", "unregister", str(node.node_id), cluster.inventory.name)
        if done.returncode != 0:
            raise DeploymentError(
                key=name, rule=f"its key could not be revoked:\n{(done.stdout + done.stderr).strip()[-1000:]}"
            )
        certificates.note_revoked(Path(cluster.inventory.keys), certificates.fingerprint(node.public_key))


@dataclass(frozen=True)
class Unknown:
    """A key that the SuperLink accepts and that is no entry's. name: under which it was registered, "" for none."""

    node_id: int
    name: str
    fingerprint: str
    status: str


def strangers(cluster: Cluster) -> list[Unknown]:
    """Return the accepted keys that no entry of a secure cluster's inventory has; none if the SuperLink does not answer."""
    if not cluster.inventory.secure:
        return []
    with contextlib.suppress(UserError):
        return unknown_keys(cluster, list_nodes(cluster))
    return []


def unknown_keys(cluster: Cluster, nodes: Iterable[NodeInfo]) -> list[Unknown]:
    """Return the accepted keys that are not the present key of a SuperNode of the inventory."""
    directory, inventory = Path(cluster.inventory.keys), cluster.inventory
    ids = [*(node.client_id for node in inventory.supernodes), *inventory.joined]
    paths = [directory / f"supernode-{client_id}.pub" for client_id in ids]
    known = {public_bytes(path) for path in paths if path.is_file()}
    return [
        Unknown(node.node_id, plain(node.name), certificates.fingerprint(node.public_key), node.status)
        for node in nodes
        if _is_accepted(node) and node.public_key not in known
    ]


def flwr(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of Flower's own commands with the cluster's connection."""
    command = [script("flwr"), *arguments]
    environment = flower_environment(Path(cluster.config).parent)
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")


def status_by_node_id(cluster: Cluster) -> dict[str, str]:
    """Return the SuperLink's status of its nodes, online or offline, by node id; {} if it does not answer."""
    done = flwr(cluster, "supernode", "list", cluster.inventory.name, "--format", "json")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return {str(node["node-id"]): str(node["status"]) for node in json.loads(done.stdout)["nodes"]}
    return {}


def online_by_key(cluster: Cluster) -> list[str]:
    """Return the names of the inventory's SuperNodes with a key that the SuperLink counts as connected.

    Raises UserError if the SuperLink gives no answer.
    """
    keys = {info.public_key for info in list_nodes(cluster) if info.status == "online"}
    directory = Path(cluster.inventory.keys)
    return [n.name for n in cluster.inventory.supernodes if public_bytes(directory / f"{n.name}.pub") in keys]


def list_nodes(cluster: Cluster) -> list[NodeInfo]:
    """Return the SuperLink's nodes with their public keys, which `flwr supernode list` does not show.

    Raises UserError if the SuperLink gives no answer.
    """
    return nodes_and_runs(cluster.inventory.name, cluster.connection, most_runs=1)[0]


def nodes_and_runs(name: str, table: Mapping[str, Any], most_runs: int) -> tuple[list[NodeInfo], list[Run]]:
    """Return a SuperLink's nodes, and its latest runs.

    name, table: of the connection in Flower's config. Raises UserError if the SuperLink gives no answer.
    """
    from flwr.cli.typing import SuperLinkConnection
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest

    connection = SuperLinkConnection(name, table["address"], table.get("root-certificates"), table.get("insecure"))
    try:
        # it prints the address each time
        with contextlib.redirect_stdout(io.StringIO()):
            client = init_http_client_from_connection(connection)
        try:
            nodes = list(client.ListNodes(ListNodesRequest()).nodes_info)
            return nodes, list(client.ListRuns(ListRunsRequest(limit=most_runs)).run_dict.values())
        finally:
            client.close()
    # any error on the way: TLS, HTTP, the SuperLink itself
    except Exception as error:
        raise DeploymentError(key=f"cluster {name}", rule=f"cannot list its SuperLink's nodes: {error}") from None


def status_of_joined(cluster: Cluster) -> dict[int, str]:
    """Return the SuperLink's status of the clients that join by themselves, by client id; "" for one without a key.

    They are found by their keys.
    """
    keys: dict[int, bytes] = {}
    for client_id in cluster.inventory.joined:
        path = Path(cluster.inventory.keys) / f"supernode-{client_id}.pub"
        if path.exists():
            keys[client_id] = public_bytes(path)
    status_by_key: dict[bytes, str] = {}
    if keys:
        with contextlib.suppress(UserError):
            status_by_key = {info.public_key: info.status for info in list_nodes(cluster)}
    return {
        client_id: status_by_key.get(keys[client_id], "unknown") if client_id in keys else ""
        for client_id in cluster.inventory.joined
    }


def public_bytes(path: Path) -> bytes:
    """Read a public key file in the form that the SuperLink keeps."""
    key = serialization.load_ssh_public_key(path.read_bytes())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def revoke(cluster: Cluster, client_id: int) -> list[str]:
    """Revoke all keys that a SuperNode ever had: the SuperLink rejects them, its files are deleted, its process is ended.

    Returns a sentence for each step that failed afterwards. The keys are the registered one, and those that were registered
    for this client, not those of a node that gives itself its name. Raises UserError if there is no key to revoke.
    """
    node = next((n for n in cluster.inventory.supernodes if n.client_id == client_id), None)
    if node is None and client_id not in cluster.inventory.joined:
        clients = sorted([*(n.client_id for n in cluster.inventory.supernodes), *cluster.inventory.joined])
        known = ", ".join(map(str, clients))
        raise DeploymentError(key=f"client {client_id}", rule=f"cluster {cluster.inventory.name} has clients {known}")
    name = f"supernode-{client_id}"
    if not cluster.inventory.secure:
        raise DeploymentError(
            key=f"client {client_id}",
            rule="without authentication there is no key to revoke (`tls: true` in the inventory)",
        )
    public = Path(cluster.inventory.keys) / f"{name}.pub"
    key = public_bytes(public) if public.is_file() else b""
    try:
        nodes = list_nodes(cluster)
    except UserError:
        if key:
            raise
        nodes = []
    accepted = [info for info in nodes if _is_accepted(info) and (info.public_key == key or info.name == name)]
    if not key and not accepted:
        raise DeploymentError(
            key=f"client {client_id}", rule=f"there is no {public}; it was revoked before, or never had a key"
        )
    _end_keys(cluster, name, accepted)
    if key:
        certificates.note_revoked(public.parent, certificates.fingerprint(key))
    # the private half first: `corolla cluster keys` makes a public key of what is left after a crash
    for path in (public.with_suffix(".key"), public, public.with_suffix(KEY_SUFFIX), public.with_name(PEERS)):
        path.unlink(missing_ok=True)
    # a client that joined has a process that only its site can end
    if node is None:
        return []
    try:
        left = cluster.ask(node.host, "stop", names=[node.name])["left"]
    except UserError as error:
        return [f"{error}: its process may still run, but the SuperLink no longer knows it"]
    return [f"{node.host}: {name} could not be ended, but the SuperLink no longer knows it" for name in left]
