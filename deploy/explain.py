"""What the refusals in Flower's and gRPC's logs mean, in words."""

from __future__ import annotations

import re

# a pattern in the log of the process, and what it means
_MEANINGS = {
    "superlink": (
        ("No SuperNode found with the given public key", "a SuperNode was refused: its key is not registered here"),
        ("WRONG_VERSION_NUMBER", "a connection was refused: it spoke plaintext to the TLS port"),
    ),
    "supernode": (
        (r"\[code: 2004\]", "refused: its key is not registered with the SuperLink (or still counts as connected, for a minute)"),
        (r"\[code: 2001\]", "refused: the SuperLink wants authentication, and this SuperNode was started without a key"),
        ("CERTIFICATE_VERIFY_FAILED", "not connected: its ca.crt did not sign the SuperLink's certificate (wrong CA)"),
        (
            r"Connection attempt failed(?![\s\S]*SuperNode ID)",
            "not connected: nobody answers at the fleet address, or plaintext meets TLS there (the SuperLink's log would say so)",
        ),
    ),
}


def meanings(name: str, log: str) -> list[str]:
    """Return what the refusals in a process's log mean, each once. name: superlink, supernode-K, tunnel."""
    known = _MEANINGS.get(name.partition("-")[0], ())
    found = [meaning for pattern, meaning in known if re.search(pattern, log)]
    # gRPC retries after a failed handshake: the first meaning is the reason, the retries follow from it
    return found[:1] if name != "superlink" else found
