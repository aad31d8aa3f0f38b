"""Who may speak for which client: a partition-id belongs to the key that carried it first, for the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from fl_app.wire import WireError


@dataclass(frozen=True)
class Identity:
    """A node as the SuperLink knows it.

    key: its public key; a SuperNode that nobody registered has a new one at every start. name: under which the key was
    registered with the SuperLink, "" if it was not.
    """

    key: bytes
    name: str = ""

    def same(self, other: Identity) -> bool:
        """Tell whether both are one node: the same key, or a new key under the same registered name."""
        return self.key == other.key or (self.name != "" and self.name == other.name)

    def is_registered_as(self, client_id: int) -> bool:
        """Tell whether `corolla cluster` registered the key for this client."""
        return self.name == f"supernode-{client_id}"


class Holders:
    """The identity that holds each client id."""

    def __init__(self) -> None:
        self._of: dict[int, Identity] = {}

    def claim(self, client_id: int, who: Identity, online: bool) -> None:
        """Give a client id to a node. Raises WireError if it is another one's, or the node another client.

        online: whether the id's holder is connected. A holder that is gone and was never registered is assumed to be the one
        that comes back: its key is new.
        """
        for other, holder in self._of.items():
            if other != client_id and holder.same(who):
                raise WireError(f"its key is that of client {other}")
        held = self._of.get(client_id)
        its_own = who.is_registered_as(client_id) and held is not None and not held.is_registered_as(client_id)
        if held is not None and not held.same(who) and not its_own:
            if online:
                raise WireError("two SuperNodes carry this partition-id")
            if held.name:
                raise WireError(f"this partition-id belongs to the key of {held.name}")
        self._of[client_id] = who
