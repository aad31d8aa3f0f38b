"""Keys of sites for private runs, as `corolla node join` and `corolla cluster` make them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_app.privacy import keyring
from fl_app.privacy.keyring import PEERS


def make(directory: Path, count: int) -> list[Path]:
    """So many sites' private keys, each in a directory of its own with the list of all."""
    paths, lines = [], []
    for i in range(count):
        (directory / str(i)).mkdir(parents=True)
        paths.append(directory / str(i) / "node.x25519")
        paths[-1].write_bytes(keyring.make_private_key())
        paths[-1].chmod(0o600)
        node = ec.generate_private_key(ec.SECP384R1())
        public = (
            node.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
        )
        lines.append(f"{i} {public} {keyring.KEY_TYPE} {keyring.statement(keyring.read_private_key(paths[-1]), node)}")
    for path in paths:
        (path.parent / PEERS).write_text("\n".join(lines) + "\n")
    return paths
