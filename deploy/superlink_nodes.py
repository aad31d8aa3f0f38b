"""The nodes a cluster's SuperLink has registered: asked and told on its control port."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import serialization

from fl_app.errors import UserError
from fl_app.processes import flower_environment, script

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo

    from deploy.cluster import Cluster


def register(cluster: Cluster) -> list[str]:
    """Register every public key that is there, those of sites that joined included; return the names of the SuperNodes."""
    names = [node.name for node in cluster.inventory.supernodes]
    joined = (f"supernode-{client_id}" for client_id in cluster.inventory.joined)
    names += [name for name in joined if (Path(cluster.inventory.keys) / f"{name}.pub").exists()]
    for name in names:
        register_key(cluster, name)
    return names


def register_key(cluster: Cluster, name: str) -> None:
    """Register a SuperNode's public key with the SuperLink; one that a kept database has already is fine."""
    public = Path(cluster.inventory.keys) / f"{name}.pub"
    done = flwr(cluster, "supernode", "register", str(public), cluster.inventory.name, "--name", name)
    said = done.stdout + done.stderr
    if done.returncode != 0 and "already in use" not in said:
        raise UserError(f"{name}: its key {public} could not be registered:\n{said.strip()[-1000:]}")


def flwr(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of Flower's own commands with the cluster's connection."""
    command = [script("flwr"), *arguments]
    environment = flower_environment(Path(cluster.config).parent)
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def seen_by_superlink(cluster: Cluster) -> dict[str, str]:
    """Return what the SuperLink says of its nodes: node id -> online, offline, ...; empty if it does not answer."""
    done = flwr(cluster, "supernode", "list", cluster.inventory.name, "--format", "json")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return {str(node["node-id"]): str(node["status"]) for node in json.loads(done.stdout)["nodes"]}
    return {}


def nodes(cluster: Cluster) -> list[NodeInfo]:
    """Ask the SuperLink for its nodes, with their public keys, which `flwr supernode list` does not show. Raises UserError."""
    from flwr.cli.typing import SuperLinkConnection
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest

    table: dict[str, Any] = cluster.connection
    connection = SuperLinkConnection(
        cluster.inventory.name, table["address"], table.get("root-certificates"), table.get("insecure")
    )
    try:
        client = init_http_client_from_connection(connection)
        try:
            return list(client.ListNodes(ListNodesRequest()).nodes_info)
        finally:
            client.close()
    except Exception as error:  # whatever stands between: TLS, HTTP, the SuperLink itself
        raise UserError(
            f"cluster {cluster.inventory.name}: its SuperLink does not say which nodes it has: {error}"
        ) from None


def joined(cluster: Cluster) -> dict[int, str]:
    """Return what the SuperLink says of the clients whose sites start them, found by their keys; "" for one without a key."""
    paths = {
        client_id: Path(cluster.inventory.keys) / f"supernode-{client_id}.pub" for client_id in cluster.inventory.joined
    }
    held = {client_id: public_bytes(path) for client_id, path in paths.items() if path.exists()}
    known: dict[bytes, str] = {}
    with contextlib.suppress(UserError):
        known = {info.public_key: info.status for info in nodes(cluster)} if held else {}
    return {client_id: known.get(held[client_id], "unknown") if client_id in held else "" for client_id in paths}


def public_bytes(path: Path) -> bytes:
    """Read a public key file as the SuperLink keeps it."""
    key = serialization.load_ssh_public_key(path.read_bytes())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
