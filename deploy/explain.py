"""What the refusals in Flower's and gRPC's logs mean, in words."""

from __future__ import annotations

import re

ENDED = "ended: it is not running any more; the lines above are its last"

# a pattern in the log of the process, and what it means
_MEANINGS = {
    "superlink": (
        ("No SuperNode found with the given public key", "a SuperNode was refused: its key is not registered here"),
        ("WRONG_VERSION_NUMBER", "a connection was refused: it spoke plaintext to the TLS port"),
    ),
    "supernode": (
        (
            r"\[code: 2004\]",
            "refused: its key is not registered with the SuperLink (or still counts as connected, for a minute)",
        ),
        (
            r"\[code: 2001\]",
            "refused: the SuperLink wants authentication, and this SuperNode was started without a key",
        ),
        ("CERTIFICATE_VERIFY_FAILED", "not connected: its ca.crt did not sign the SuperLink's certificate (wrong CA)"),
        (
            "Connection attempt failed",
            "not connected: nobody answers at the fleet address, or plaintext meets TLS there (the SuperLink's log would say so)",
        ),
        (
            "SuperNode terminated gracefully",
            "ended: it was told to, or the SuperLink refused it: its clock is more than 5 s ahead of the SuperLink's or 305 s "
            "behind, or its key was taken back (`corolla cluster revoke`)",
        ),
    ),
}
# a SuperNode's log up to here is of no account: it was connected, or connected again after a cut
_CONNECTED = re.compile(r"SuperNode ID: \d+|Connection successful after")


def meanings(name: str, log: str) -> list[str]:
    """Return what the refusals in a process's log mean, each once. name: superlink, supernode-K, tunnel."""
    kind = name.partition("-")[0]
    known = _MEANINGS.get(kind, ())
    if kind == "supernode":
        log = log[max((sign.end() for sign in _CONNECTED.finditer(log)), default=0) :]
    found = [meaning for pattern, meaning in known if re.search(pattern, log)]
    # gRPC retries after a failed handshake: the first meaning is the reason, the retries follow from it
    return found[:1] if name != "superlink" else found
