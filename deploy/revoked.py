"""The keys that a cluster has revoked: a list beside its keys, so that none of them is admitted again."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_app.files import publish_text

FILE = "revoked.txt"


def fingerprint(key: bytes) -> str:
    """Return a public key's fingerprint, as `ssh-keygen -lf` prints it. key: PEM or a line of OpenSSH."""
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


def noted(directory: Path) -> frozenset[str]:
    """Return the fingerprints of the keys that a cluster has revoked. directory: of its keys."""
    path = directory / FILE
    return frozenset(path.read_text().split()) if path.is_file() else frozenset()


def note(directory: Path, found: str) -> None:
    """Add a fingerprint to the list."""
    if found not in (known := noted(directory)):
        publish_text(directory / FILE, "".join(f"{line}\n" for line in sorted({*known, found})), 0o644)
