"""Locking one SuperNode out of a running cluster, while the others go on."""

from __future__ import annotations

from pathlib import Path

from deploy import superlink_nodes
from deploy.cluster import Cluster
from deploy.peers import END
from fl_app.errors import UserError
from fl_app.privacy.keyring import PEERS


def revoke(cluster: Cluster, client_id: int) -> list[str]:
    """Take a SuperNode's key back: the SuperLink answers it no more, its key files go, and its process is ended.

    Returns what could not be done after the key was taken back, in words. The node is looked up by its key among what the SuperLink
    has registered, whatever it says of itself. Raises UserError if there is nothing to take back.
    """
    node = next((n for n in cluster.inventory.supernodes if n.client_id == client_id), None)
    if node is None and client_id not in cluster.inventory.joined:
        known = ", ".join(
            map(str, sorted([*(n.client_id for n in cluster.inventory.supernodes), *cluster.inventory.joined]))
        )
        raise UserError(f"client {client_id}: cluster {cluster.inventory.name} has clients {known}")
    name = f"supernode-{client_id}"
    if not cluster.inventory.secure:
        raise UserError(
            f"client {client_id}: without authentication there is no key to take back (`tls: true` in the inventory)"
        )
    public = Path(cluster.inventory.keys) / f"{name}.pub"
    if not public.is_file():
        raise UserError(f"client {client_id}: there is no {public}; it was revoked before, or never had a key")
    key = superlink_nodes.public_bytes(public)
    ids = [
        info.node_id
        for info in superlink_nodes.nodes(cluster)
        if info.public_key == key and info.status != "unregistered"
    ]
    for node_id in ids:
        done = superlink_nodes.flwr(cluster, "supernode", "unregister", str(node_id), cluster.inventory.name)
        if done.returncode != 0:
            raise UserError(f"{name}: its key could not be taken back:\n{(done.stdout + done.stderr).strip()[-1000:]}")
    for path in (public, public.with_suffix(".key"), public.with_suffix(END), public.with_name(PEERS)):
        path.unlink(missing_ok=True)
    if node is None:
        return []  # its own site ends its process
    try:
        left = cluster.ask(node.host, "stop", names=[node.name])["left"]
    except UserError as error:
        return [f"{error}: its process may still be there, but the SuperLink does not know it any more"]
    return [f"{node.host}: {name} could not be ended, but the SuperLink does not know it any more" for name in left]
