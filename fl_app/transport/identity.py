"""Identities of nodes: a partition-id belongs for the whole run to the key that carried it first."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cached_property

from fl_app.transport.wire import WireError


@dataclass(frozen=True)
class Identity:
    """A node as the SuperLink knows it.

    key: its public key. An unregistered SuperNode has a new one at every start. name: the name under which the key is
    registered with the SuperLink, "" if it is not.
    """

    key: bytes
    name: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """The key's fingerprint."""
        return fingerprint(self.key)

    @property
    def marks(self) -> tuple[bytes | str, ...]:
        """Its key and, if it has one, its name. Two identities that share one are one node."""
        return (self.key, self.name) if self.name else (self.key,)


def fingerprint(key: bytes) -> str:
    """Return a public key's fingerprint, as `ssh-keygen -lf` prints it. key: PEM or a line of OpenSSH."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        read = serialization.load_ssh_public_key if key.startswith(b"ecdsa-") else serialization.load_pem_public_key
        known = read(key)
        if isinstance(known, ec.EllipticCurvePublicKey):
            line = known.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            key = base64.b64decode(line.split()[1])
    # a key that somebody registered by hand
    except (ValueError, UnsupportedAlgorithm):
        pass
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


class Holders:
    """The identity that holds each client id. Keys and registered names are unique among them."""

    def __init__(self) -> None:
        self._of: dict[int, Identity] = {}
        # client id by key and by name
        self._by_mark: dict[bytes | str, int] = {}

    def claim(self, client_id: int, who: Identity, online: bool) -> None:
        """Give a client id to a node. Raises WireError if the id is another node's, or if the node has another id.

        online: whether the id's holder is connected. A holder that has gone and was never registered is assumed to be
        the returning node, with a new key.
        """
        for mark in who.marks:
            if (other := self._by_mark.get(mark, client_id)) != client_id:
                raise WireError(f"its key is that of client {other}")
        held = self._of.get(client_id)
        if held is not None:
            # `corolla cluster` registers a client's key under this name
            own = f"supernode-{client_id}"
            if not {*held.marks} & {*who.marks} and (who.name != own or held.name == own):
                if online:
                    raise WireError("two SuperNodes carry this partition-id")
                if held.name:
                    raise WireError(f"this partition-id belongs to the key of {held.name}")
            for mark in held.marks:
                del self._by_mark[mark]
        self._of[client_id] = who
        self._by_mark |= dict.fromkeys(who.marks, client_id)
