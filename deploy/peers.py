"""Keys for private runs: one per node, and a list of all public halves.

A public half is a comment in the node's public key. A line of `.pub` is then `ecdsa-sha2-nistp384 KEY x25519 PUBLIC
SIGNATURE`, signed by the node key. `peers.txt` has one line for every client: its number, then its line of `.pub`.
Every site holds a copy of that list; fl_app/privacy/keyring.py reads it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy.inventory import Inventory
from fl_app.errors import DeploymentError
from fl_app.files import publish, publish_text
from fl_app.privacy import keyring
from fl_app.privacy.keyring import PEERS

KEY_SUFFIX = ".x25519"
_WORDS = 5


def make_key(node_key: Path, public: Path) -> list[Path]:
    """Make a node's key for private runs, unless it exists, and the node's public key with both public halves.

    An existing public key stays if it belongs to both private keys. After a crash between two files one may be missing,
    or of an earlier key. Returns the files written. Raises UserError if a private key cannot be read.
    """
    private = node_key.with_suffix(KEY_SUFFIX)
    made: list[Path] = []
    if not private.exists():
        publish(private, lambda path: path.write_bytes(keyring.make_private_key()))
        made.append(private)
    signer = read_node_key(node_key)
    words = [*public_words(signer), keyring.KEY_TYPE, keyring.statement(keyring.read_private_key(private), signer)]
    line = " ".join(words)
    # a signature is another one each time
    if not public.exists() or public.read_text().split()[: _WORDS - 1] != line.split()[: _WORDS - 1]:
        publish_text(public, line + "\n", 0o644)
        made.append(public)
    return made


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node's private key. Raises UserError if the file holds none."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise DeploymentError(key=path, rule=error.strerror) from None
    # UnsupportedAlgorithm: the same for a user
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeploymentError(key=path, rule="is no private key of a node")
    return key


def public_words(key: ec.EllipticCurvePrivateKey) -> list[str]:
    """Return the kind and the public half of a node's key, as the first words of its public key."""
    encoded = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return encoded.decode().split()


def statement_in(public: Path) -> str:
    """Return the verified statement in a node's public key, or "".

    Raises UserError if the node key has not signed it.
    """
    words = public.read_text().split()
    if words[2:3] != [keyring.KEY_TYPE]:
        return ""
    keyring.verify_statement(public, " ".join(words))
    return " ".join(words[2:_WORDS])


def write_list(inventory: Inventory) -> Path | None:
    """Write the list of all clients' keys, beside them. Return its path, or None while a key is missing."""
    directory = Path(inventory.keys)
    publics = [directory / f"supernode-{k}.pub" for k in range(inventory.num_clients)]
    path = directory / PEERS
    if not all(public.is_file() and len(public.read_text().split()) == _WORDS for public in publics):
        # an existing list has outdated keys
        path.unlink(missing_ok=True)
        return None
    text = "".join(f"{k} {public.read_text().strip()}\n" for k, public in enumerate(publics))
    if not path.is_file() or path.read_text() != text:
        publish_text(path, text, 0o644)
    return path


def fingerprint(path: Path) -> str:
    """Return the sha256 by which sites compare their lists."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
