"""The keys of a private run's sites: an X25519 pair each, and each site's own list of all public keys.

A site's private key is in a file beside its node key. Beside it is `peers.txt`: a line per client with its node key,
its public key, and the node key's signature of it. A relay of messages cannot put its own key in another's place: only
listed and signed keys are used. If all clients are on one machine (a simulation, one process), the keys follow from the
seed. That exercises the protocol and hides nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fl_app.errors import UserError
from fl_app.privacy import secure_random
from fl_app.privacy.masking import derived
from fl_app.wire import SEED_KEYS

PEERS = "peers.txt"
# First word of the statement that a node's public key carries as its comment.
KEY_TYPE = "x25519"
_NONCE = 12
_SIGNED_PREFIX = b"corolla x25519 "


@dataclass(frozen=True)
class Keyring:
    """A client's keys: its private key, all public keys by client id, and 32 bytes for the sketches' key."""

    client_id: int
    num_clients: int
    private: X25519PrivateKey
    public_of: Callable[[int], bytes]
    secret: bytes

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all public keys in client order, equal at all sites with the same list."""
        return hashlib.sha256(b"".join(self.public_of(i) for i in range(self.num_clients))).hexdigest()

    def masks(self, partners: Iterable[int], experiment: str, round: int, attempt: int) -> dict[int, bytes]:
        """Return, by partner, the key shared with it for one attempt at one round, 32 bytes each."""
        return {j: derived(self._shared(j), "mask", experiment, round, attempt) for j in partners}

    def for_each(self, purpose: str) -> list[bytes]:
        """Return the keys that this client shares with each client for a purpose, 32 bytes each.

        They are in client order, and include one for the client itself.
        """
        return [derived(self._shared(j), purpose) for j in range(self.num_clients)]

    def seal(self) -> list[str]:
        """Return the sketches' key as text, encrypted for each client in order, this one included."""
        sealed = []
        for j in range(self.num_clients):
            nonce = secure_random.secret(_NONCE)
            cipher = ChaCha20Poly1305(derived(self._shared(j), "seal"))
            sealed.append(_text(nonce + cipher.encrypt(nonce, self.secret, f"{self.client_id}-{j}".encode())))
        return sealed

    def open(self, sealed: str, sender: int) -> bytes:
        """Return the sketches' key that `sender`, possibly this client, sealed for this one.

        Raises UserError if it did not.
        """
        try:
            raw = base64.b64decode(sealed, validate=True)
            cipher = ChaCha20Poly1305(derived(self._shared(sender), "seal"))
            return cipher.decrypt(raw[:_NONCE], raw[_NONCE:], f"{sender}-{self.client_id}".encode())
        except (InvalidTag, ValueError):
            raise UserError(not_sealed(sender, self.client_id)) from None

    def _shared(self, other: int) -> bytes:
        if not 0 <= other < self.num_clients:
            raise UserError(f"private: there is no client {other} among {self.num_clients}")
        return self.private.exchange(X25519PublicKey.from_public_bytes(self.public_of(other)))


def not_sealed(sender: int, receiver: int) -> str:
    """Return the complaint of a client that cannot open the sketches' key, which `sender` should have sealed for it."""
    return f"private: the sketches' key was not sealed by client {sender} for client {receiver}"


def open_keyring(where: str, seed: int, client_id: int, num_clients: int) -> Keyring:
    """Return a client's keys. Raises UserError naming the missing or wrong part.

    where: the file of its private key, or SEED_KEYS.
    """
    if not where:
        raise UserError(
            "private: this SuperNode has no key for private runs; `corolla node start`, `corolla cluster up` and compose.tls.yaml "
            "set one, other nodes need --node-config private-keys=FILE (docs/privacy.md)"
        )
    if where == SEED_KEYS:
        return _from_seed(seed, client_id, num_clients)
    return _from_file(Path(where), client_id, num_clients)


def _from_seed(seed: int, client_id: int, num_clients: int) -> Keyring:
    def private(i: int) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(derived(str(seed).encode(), "private key", i))

    secret = derived(str(seed).encode(), "sketches")
    return Keyring(client_id, num_clients, private(client_id), lambda i: _raw(private(i)), secret)


def _from_file(path: Path, client_id: int, num_clients: int) -> Keyring:
    private = read_private_key(path)
    peers = path.parent / PEERS
    try:
        entries = dict(map(_entry, peers.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise UserError(f"private: the list of all sites' keys cannot be read: {peers}: {error.strerror}") from None
    except ValueError:
        raise UserError(
            f"private: {peers} must have a line per client: its number, node key, {KEY_TYPE}, key, signature"
        ) from None
    if sorted(entries) != list(range(num_clients)):
        raise UserError(f"private: {peers} must have the clients 0 to {num_clients - 1}, it has {len(entries)}")
    keys = {i: _verified(peers, f"client {i}'s", *fields) for i, fields in entries.items()}
    if keys[client_id] != _raw(private):
        raise UserError(f"private: {path} is not the key that {peers} has for client {client_id}")
    if len(set(keys.values())) < num_clients:
        raise UserError(f"private: {peers} has the same key for two clients")
    return Keyring(client_id, num_clients, private, keys.__getitem__, secure_random.secret())


def read_private_key(path: Path) -> X25519PrivateKey:
    """Return the private key in a file. Raises UserError if it is missing, open to others, or no X25519 key."""
    try:
        mode, content = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    except OSError as error:
        raise UserError(f"private: {path}: {error.strerror}") from None
    if mode & 0o077:
        raise UserError(
            f"private: {path} must be its owner's alone (mode 600), it is {mode:o}; others may have read it"
        )
    try:
        key = serialization.load_pem_private_key(content, password=None)
    # ValueError, TypeError, UnsupportedAlgorithm: all mean the same to a user
    except Exception:
        key = None
    if not isinstance(key, X25519PrivateKey):
        raise UserError(f"private: {path} is no X25519 private key")
    return key


# Keys that a site makes and the server lists -----------------------------------------------------------------------------


def make_private_key() -> bytes:
    """Return the file content of a new private key (PEM)."""
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def statement(private: X25519PrivateKey, node_key: ec.EllipticCurvePrivateKey) -> str:
    """Return a public key and the node key's signature of it, as text."""
    raw = _raw(private)
    return f"{_text(raw)} {_text(node_key.sign(_SIGNED_PREFIX + raw, ec.ECDSA(hashes.SHA384())))}"


def verify_statement(path: Path, public: str) -> None:
    """Raise UserError unless the statement in a node's public key is signed by that key. path: named in the error."""
    try:
        _, fields = _entry(f"0 {public}")
    except ValueError:
        raise UserError(f"private: {path} must be a node key, {KEY_TYPE}, key, signature") from None
    _verified(path, "its", *fields)


def _entry(line: str) -> tuple[int, tuple[str, bytes, bytes]]:
    client_id, kind, node, word, public, signature = line.split()
    if not re.fullmatch(r"\d{1,9}", client_id, re.ASCII) or word != KEY_TYPE:
        raise ValueError(line)
    return int(client_id), (
        f"{kind} {node}",
        base64.b64decode(public, validate=True),
        base64.b64decode(signature, validate=True),
    )


def _verified(path: Path, whose: str, node: str, public: bytes, signature: bytes) -> bytes:
    """Return a client's public key. Raises UserError unless its node key has signed it."""
    try:
        key = serialization.load_ssh_public_key(node.encode())
        assert isinstance(key, ec.EllipticCurvePublicKey) and len(public) == 32
        key.verify(signature, _SIGNED_PREFIX + public, ec.ECDSA(hashes.SHA384()))
    except (ValueError, AssertionError, InvalidSignature):
        raise UserError(f"private: {path}: {whose} key for private runs is not signed by its node key") from None
    return public


def _raw(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
