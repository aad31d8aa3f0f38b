"""Identities of nodes: a partition-id belongs for the whole run to the key that carried it first."""

from __future__ import annotations

from dataclasses import dataclass

from fl_app.wire import WireError


@dataclass(frozen=True)
class Identity:
    """A node as the SuperLink knows it.

    key: its public key. An unregistered SuperNode has a new one at every start. name: the name under which the key is
    registered with the SuperLink, "" if it is not.
    """

    key: bytes
    name: str = ""

    def same(self, other: Identity) -> bool:
        """Return whether both are one node: the same key, or a new key under the same registered name."""
        return self.key == other.key or (self.name != "" and self.name == other.name)

    def is_registered_as(self, client_id: int) -> bool:
        """Return whether `corolla cluster` registered the key for this client."""
        return self.name == f"supernode-{client_id}"


class Holders:
    """The identity that holds each client id. Keys and registered names are unique among them."""

    def __init__(self) -> None:
        self._of: dict[int, Identity] = {}
        self._by_key: dict[bytes, int] = {}
        self._by_name: dict[str, int] = {}

    def claim(self, client_id: int, who: Identity, online: bool) -> None:
        """Give a client id to a node. Raises WireError if the id is another node's, or if the node has another id.

        online: whether the id's holder is connected. A holder that has gone and was never registered is assumed to be
        the returning node, with a new key.
        """
        for other in (self._by_key.get(who.key), self._by_name.get(who.name) if who.name else None):
            if other is not None and other != client_id:
                raise WireError(f"its key is that of client {other}")
        held = self._of.get(client_id)
        its_own = who.is_registered_as(client_id) and held is not None and not held.is_registered_as(client_id)
        if held is not None and not held.same(who) and not its_own:
            if online:
                raise WireError("two SuperNodes carry this partition-id")
            if held.name:
                raise WireError(f"this partition-id belongs to the key of {held.name}")
        self._give(client_id, held, who)

    def _give(self, client_id: int, held: Identity | None, who: Identity) -> None:
        if held is not None:
            del self._by_key[held.key]
            if held.name:
                del self._by_name[held.name]
        self._of[client_id] = who
        self._by_key[who.key] = client_id
        if who.name:
            self._by_name[who.name] = client_id
