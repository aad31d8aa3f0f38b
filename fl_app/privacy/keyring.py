"""The keys of a private run's sites: permanent ones, and those of one run.

A site's private key is in a file beside its node key. An Ed25519 key for signatures follows from it. Beside it is
`peers.txt`: a line per client with its node key, its public halves, and the node key's signature of them. For each run a
site draws new X25519 keys, one for masks and one for sealed messages, and signs them. A relay of messages cannot put its
own key in another's place: only listed and signed keys are used. If all clients are on one machine (a simulation, one
process), the keys follow from the seed. That exercises the protocol and hides nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fl_app.errors import DeploymentError, UserError
from fl_app.privacy import secure_random
from fl_app.privacy.aggregation_groups import Parts
from fl_app.privacy.masking import derived
from fl_app.transport.wire import SEED_KEYS

PEERS = "peers.txt"
# First word of the statement that a node's public key carries as its comment.
KEY_TYPE = "x25519"
_NONCE = 12
_SIGNED_PREFIX = b"corolla x25519 "
# bytes of a public key
_LENGTH = 32


@dataclass(frozen=True)
class KeyList:
    """The public halves of all clients' permanent keys. public_of: returns both of a client, 64 bytes."""

    num_clients: int
    public_of: Callable[[int], bytes]

    @classmethod
    def read(cls, text: str) -> KeyList:
        """Return the list that a client has sent (`text`). Raises ValueError for other texts."""
        whole = base64.b64decode(text, validate=True)
        found = [whole[start : start + 2 * _LENGTH] for start in range(0, len(whole), 2 * _LENGTH)]
        return cls(len(found), found.__getitem__)

    @cached_property
    def text(self) -> str:
        """All public halves in client order, as text."""
        return text_of(self._whole)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all public halves in client order, equal at all sites with the same list."""
        return hashlib.sha256(self._whole).hexdigest()

    @property
    def _whole(self) -> bytes:
        return b"".join(self.public_of(i) for i in range(self.num_clients))

    def verify(self, client_id: int, statement: bytes, signature: bytes) -> None:
        """Raise UserError unless a client has signed a statement."""
        if not _signed(self._of(client_id)[_LENGTH:], statement, signature):
            raise DeploymentError(
                key="private", rule=f"client {client_id} has not signed the keys that it is said to use"
            )

    def _of(self, client_id: int) -> bytes:
        """Return a client's public halves. Raises UserError if there is none."""
        if not 0 <= client_id < self.num_clients:
            raise DeploymentError(key="private", rule=f"there is no client {client_id} among {self.num_clients}")
        return self.public_of(client_id)


@dataclass(frozen=True)
class Keyring(KeyList):
    """A client's permanent keys, and the list of all clients' public halves.

    private: X25519. signer: Ed25519.
    """

    client_id: int
    private: X25519PrivateKey

    @cached_property
    def signer(self) -> Ed25519PrivateKey:
        """The key that signs this client's keys for a run. It follows from the private key."""
        return _signer(self.private)

    @cached_property
    def own(self) -> str:
        """The hash of this client's own public half, whatever its number is."""
        return own_hash(self.private)

    def for_each(self, purpose: str, run: int) -> list[bytes]:
        """Return the keys that this client shares with each client for a purpose in a run, 32 bytes each.

        They are in client order, and include one for the client itself.
        """
        everybody = (self._of(j)[:_LENGTH] for j in range(self.num_clients))
        return [derived(exchange(self.private, public), purpose, run) for public in everybody]


@dataclass(frozen=True)
class Statements:
    """What the clients of a run sign, and whether they have: for each other, and for the server, which names who has not.

    ring: the list of their keys. run: Flower's number of the run. config: the configuration's hash.
    """

    ring: KeyList
    run: int
    config: str

    def verified(self, client_id: int, announced: str) -> tuple[bytes, bytes]:
        """Return a client's public keys for masks and for sealed messages, 32 bytes each.

        Raises UserError unless the client has signed them for this run, configuration and list of keys.
        """
        masks, seals, signature = halves(announced)
        self.ring.verify(client_id, self._statement(client_id, masks + seals), signature)
        return masks, seals

    def has_signed_split(self, experiment: str, client_id: int, parts: Parts, signature: str) -> bool:
        """Return whether a client has signed an aggregation group's split in an experiment."""
        return self._has_signed(client_id, self._split(experiment, parts), signature)

    def agrees(self, client_id: int, label: str, survivors: Sequence[int], signature: str) -> bool:
        """Return whether a client has signed these survivors. label: the transcript's digest."""
        return self._has_signed(client_id, _agreement(label, survivors), signature)

    def _statement(self, client_id: int, public: bytes) -> bytes:
        facts = [self.run, client_id, self.ring.num_clients, self.config, self.ring.fingerprint]
        return b"corolla run keys " + json.dumps(facts).encode() + public

    def _split(self, experiment: str, parts: Parts) -> bytes:
        return b"corolla split " + json.dumps([experiment, self.ring.fingerprint, parts]).encode()

    def _has_signed(self, client_id: int, statement: bytes, signature: str) -> bool:
        try:
            self.ring.verify(client_id, statement, base64.b64decode(signature, validate=True))
        except (UserError, ValueError):
            return False
        return True


@dataclass(frozen=True)
class RunKeys(Statements):
    """A client's keys for one run, and the means to read those of others.

    ring: its permanent keys. masks, seals: X25519 keys, for masks and for sealed messages. secret: 32 bytes for the
    sketches' key.
    """

    ring: Keyring
    masks: X25519PrivateKey
    seals: X25519PrivateKey
    secret: bytes

    @cached_property
    def announced(self) -> str:
        """The public halves, signed for this run, client, configuration and list of keys, as text."""
        public = raw(self.masks) + raw(self.seals)
        return text_of(public + self.ring.signer.sign(self._statement(self.ring.client_id, public)))

    def seal(self, announced: Mapping[int, str]) -> list[str]:
        """Return the sketches' key as text, encrypted for each of these clients, which may include this one.

        announced: their keys. Raises UserError if they have not signed them.
        """
        me = self.ring.client_id
        return [sealed(self._sketch_key(j, text, me, j), self.secret) for j, text in announced.items()]

    def open(self, sealed: str, sender: int, announced: str) -> bytes:
        """Return the sketches' key that `sender`, possibly this client, sealed for this one.

        announced: the sender's keys. Raises UserError if it did not.
        """
        me = self.ring.client_id
        if (found := opened(self._sketch_key(sender, announced, sender, me), sealed)) is None:
            raise not_sealed(sender, me)
        return found

    def share_key(self, other: str, label: str, sender: int, receiver: int) -> bytes:
        """Return the key under which a share goes from one client to another, of which this client is one.

        other: the other's signed keys; this client's own for itself. label: the transcript's digest.
        """
        return derived(exchange(self.seals, halves(other)[1]), "share", label, sender, receiver)

    def sign_split(self, experiment: str, parts: Parts) -> str:
        """Return the signature of an aggregation group's split in an experiment, as text."""
        return text_of(self.ring.signer.sign(self._split(experiment, parts)))

    def agree(self, label: str, survivors: Sequence[int]) -> str:
        """Return the signature of the clients whose sum this client helps to open, as text. label: the transcript's digest."""
        return text_of(self.ring.signer.sign(_agreement(label, survivors)))

    def _sketch_key(self, other: int, announced: str, sender: int, receiver: int) -> bytes:
        """Return the key that seals the sketches' key between this client and another one, from their keys of this run."""
        _, public = self.verified(other, announced)
        facts = self.run, self.config, self.ring.fingerprint, sender, receiver
        return derived(exchange(self.seals, public), "sketch", *facts)


def halves(announced: str) -> tuple[bytes, bytes, bytes]:
    """Return announced keys for masks and for sealed messages, and their signature, which is not verified here."""
    try:
        whole = base64.b64decode(announced, validate=True)
    except ValueError:
        whole = b""
    return whole[:_LENGTH], whole[_LENGTH : 2 * _LENGTH], whole[2 * _LENGTH :]


def _agreement(label: str, survivors: Sequence[int]) -> bytes:
    return b"corolla survivors " + json.dumps([label, *survivors]).encode()


# a client verifies the same keys in each round of a run
@lru_cache(4096)
def _signed(public: bytes, statement: bytes, signature: bytes) -> bool:
    """Return whether a key has signed a statement."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret that two keys share. Raises UserError for a public key that shares none."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise DeploymentError(key="private", rule="a client's key is no X25519 key") from None


def sealed(key: bytes, content: bytes) -> str:
    """Return content encrypted with a key that is used only for this, as text (ChaCha20-Poly1305)."""
    nonce = secure_random.secret(_NONCE)
    return text_of(nonce + ChaCha20Poly1305(key).encrypt(nonce, content, None))


def opened(key: bytes, text: str) -> bytes | None:
    """Return the content that `sealed` encrypted, or None if this key did not encrypt it."""
    try:
        whole = base64.b64decode(text, validate=True)
        return ChaCha20Poly1305(key).decrypt(whole[:_NONCE], whole[_NONCE:], None)
    except (InvalidTag, ValueError):
        return None


def not_sealed(sender: int, receiver: int) -> UserError:
    """Return the complaint of a client that cannot open the sketches' key, which `sender` should have sealed for it."""
    why = f"private: the sketches' key was not sealed by client {sender} for client {receiver}"
    return UserError(why, code="protocol", key="private", rule="sealed")


def open_keyring(where: str, seed: int, client_id: int, num_clients: int) -> Keyring:
    """Return a client's keys. Raises UserError naming the missing or wrong part.

    where: the file of its private key, or SEED_KEYS.
    """
    if not where:
        raise DeploymentError(
            key="private",
            rule="this SuperNode has no key for private runs; `corolla node start`, `corolla cluster up` "
            "and compose.tls.yaml set one, other nodes need --node-config private-keys=FILE "
            "(docs/privacy.md)",
        )
    if where == SEED_KEYS:
        return _from_seed(seed, client_id, num_clients)
    return _from_file(Path(where), client_id, num_clients)


def _from_seed(seed: int, client_id: int, num_clients: int) -> Keyring:
    return Keyring(num_clients, partial(_seeded_public, seed), client_id, _seeded(seed, client_id))


def _seeded(seed: int, i: int) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(str(seed).encode(), "private key", i))


@lru_cache(4096)
def _seeded_public(seed: int, i: int) -> bytes:
    return _public(_seeded(seed, i))


def run_keys_from_seed(ring: Keyring, seed: int, run: int, config: str) -> RunKeys:
    """Return the keys for a run whose clients are all on one machine."""

    def drawn(purpose: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(derived(str(seed).encode(), purpose, ring.client_id))

    secret = derived(str(seed).encode(), "sketches")
    return RunKeys(ring, run, config, drawn("masks"), drawn("seals"), secret)


def drawn_run_keys(ring: Keyring, run: int, config: str) -> RunKeys:
    """Return new keys for a run."""
    return RunKeys(ring, run, config, X25519PrivateKey.generate(), X25519PrivateKey.generate(), secure_random.secret())


def _from_file(path: Path, client_id: int, num_clients: int) -> Keyring:
    private = read_private_key(path)
    peers = path.parent / PEERS
    try:
        entries = dict(map(_entry, peers.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise DeploymentError(
            key="private", rule=f"the list of all sites' keys cannot be read: {peers}: {error.strerror}"
        ) from None
    except ValueError:
        raise DeploymentError(
            key="private", rule=f"{peers} must have a line per client: its number, node key, {KEY_TYPE}, key, signature"
        ) from None
    if sorted(entries) != list(range(num_clients)):
        raise DeploymentError(
            key="private", rule=f"{peers} must have the clients 0 to {num_clients - 1}, it has {len(entries)}"
        )
    keys = {i: _verified(peers, f"client {i}'s", *fields) for i, fields in entries.items()}
    if keys[client_id] != _public(private):
        raise DeploymentError(key="private", rule=f"{path} is not the key that {peers} has for client {client_id}")
    if len(set(keys.values())) < num_clients:
        raise DeploymentError(key="private", rule=f"{peers} has the same key for two clients")
    return Keyring(num_clients, keys.__getitem__, client_id, private)


def own_hash(private: X25519PrivateKey) -> str:
    """Return the hash of the public halves that follow from a site's private key."""
    return hashlib.sha256(_public(private)).hexdigest()


def names(peers: Path, own: str) -> bool:
    """Return whether a list of all sites' keys has a line with this hash (`own_hash`). Raises UserError if it is no list."""
    try:
        entries = [_entry(line)[1] for line in peers.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise DeploymentError(key="private", rule=f"{peers} must have a line per client") from None
    return own in (hashlib.sha256(public).hexdigest() for _, public, _ in entries)


def read_private_key(path: Path) -> X25519PrivateKey:
    """Return the private key in a file. Raises UserError if it is missing, open to others, or no X25519 key."""
    try:
        mode, content = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    except OSError as error:
        raise DeploymentError(key="private", rule=f"{path}: {error.strerror}") from None
    if mode & 0o077:
        raise DeploymentError(
            key="private", rule=f"{path} must be its owner's alone (mode 600), it is {mode:o}; others may have read it"
        )
    try:
        key = serialization.load_pem_private_key(content, password=None)
    # ValueError, TypeError, UnsupportedAlgorithm: all mean the same to a user
    except Exception:
        key = None
    if not isinstance(key, X25519PrivateKey):
        raise DeploymentError(key="private", rule=f"{path} is no X25519 private key")
    return key


# Keys that a site makes and the server lists -----------------------------------------------------------------------------


def make_private_key() -> bytes:
    """Return the file content of a new private key (PEM)."""
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def statement(private: X25519PrivateKey, node_key: ec.EllipticCurvePrivateKey) -> str:
    """Return a public key and the node key's signature of it, as text."""
    public = _public(private)
    return f"{text_of(public)} {text_of(node_key.sign(_SIGNED_PREFIX + public, ec.ECDSA(hashes.SHA384())))}"


def verify_statement(path: Path, public: str) -> None:
    """Raise UserError unless the statement in a node's public key is signed by that key. path: named in the error."""
    try:
        _, fields = _entry(f"0 {public}")
    except ValueError:
        raise DeploymentError(key="private", rule=f"{path} must be a node key, {KEY_TYPE}, key, signature") from None
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


# a process that answers several messages reads the same list each time
@lru_cache(4096)
def _verified(path: Path, whose: str, node: str, public: bytes, signature: bytes) -> bytes:
    """Return a client's public key. Raises UserError unless its node key has signed it."""
    try:
        key = serialization.load_ssh_public_key(node.encode())
        if len(public) == _LENGTH:
            raise DeploymentError(
                key="private",
                rule=f"{path}: {whose} key for private runs was made by an earlier version: `corolla node "
                "join` or `corolla cluster keys` makes its new public half",
            )
        assert isinstance(key, ec.EllipticCurvePublicKey) and len(public) == 2 * _LENGTH
        key.verify(signature, _SIGNED_PREFIX + public, ec.ECDSA(hashes.SHA384()))
    except (ValueError, AssertionError, InvalidSignature):
        raise DeploymentError(
            key="private", rule=f"{path}: {whose} key for private runs is not signed by its node key"
        ) from None
    return public


def raw(private: X25519PrivateKey | Ed25519PrivateKey) -> bytes:
    """Return the public half of a key, 32 bytes."""
    return private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _public(private: X25519PrivateKey) -> bytes:
    """Return the public halves of a site's permanent keys, for secrets and for signatures, 64 bytes."""
    return raw(private) + raw(_signer(private))


def _signer(private: X25519PrivateKey) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derived(private.private_bytes_raw(), "signer"))


def text_of(content: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(content).decode()
