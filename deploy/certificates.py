"""Keys of a cluster: a CA, the SuperLink's server certificate, one ECDSA P-384 key pair per SuperNode.

All are in one directory (mode 0700). Public are `ca.crt`, `server.crt`, `supernode-K.pub` and `peers.txt`. Private
(mode 0600) are `ca.key`, `server.key`, `supernode-K.key`, and `supernode-K.x25519` for private runs.
Nodes get `ca.crt`, `peers.txt` and their own keys, nothing else. `ca.key` is needed only to make another server
certificate, and is best kept off the cluster. A .gitignore keeps the whole directory out of Git. Existing files are not
overwritten without `force`.

A public half for private runs is a comment in the node's public key. A line of `.pub` is then `ecdsa-sha2-nistp384 KEY
x25519 PUBLIC SIGNATURE`, signed by the node key. `peers.txt` has one line for every client: its number, then its line of
`.pub`. Every site holds a copy of that list; fl_app/privacy/keyring.py reads it. `revoked.txt` has the fingerprints of
keys that are never admitted again.

Certificates that end are named before: two weeks, two days and an hour ahead, in `status`, log and metrics. A SuperLink
serves the certificate that it read at its start, whatever lies in its file later.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import ipaddress
import logging
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deploy.inventory import LOCAL, Inventory, SuperNode
from fl_app.errors import DeploymentError, UserError
from fl_app.files import publish, publish_text
from fl_app.privacy import keyring
from fl_app.privacy.keyring import PEERS
from fl_app.transport.identity import fingerprint as fingerprint

CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"
IGNORE = ".gitignore"
_CA_DAYS, _SERVER_DAYS = 3650, 825
# days before a certificate's end at which warnings begin
WARNING_DAYS = 30
_MISMADE = "put the right one back, or make all anew with `corolla cluster keys --force CLUSTER.yaml`"
# names of the control API, which listens on loopback only
_ALWAYS = ("localhost", "127.0.0.1", "::1")


class _Locked(UserError):
    """A key has a passphrase."""


def server_names(inventory: Inventory) -> tuple[str, ...]:
    """Return the server certificate's names and addresses: fleet address, SuperLink's host, `names`, loopback."""
    superlink = inventory.superlink
    host = () if superlink.host == LOCAL else (superlink.host.rpartition("@")[2],)
    return tuple(dict.fromkeys((superlink.fleet_address, *host, *superlink.names, *_ALWAYS)))


def make(inventory: Inventory, force: bool = False) -> list[Path]:
    """Make the missing keys and certificates, or with `force` all of them anew. Return the files written.

    Raises UserError if other users can open the directory, or if the existing server certificate does not fit.
    """
    directory = Path(inventory.keys)
    _private_directory(directory)
    written: list[Path] = []
    new_ca = force or not (directory / CA).exists()
    if new_ca and not force and any((directory / name).exists() for name in (CA_KEY, SERVER, SERVER_KEY)):
        raise DeploymentError(
            key=directory, rule=f"{CA} is missing beside files made with it; put it back, or make all anew with --force"
        )
    if new_ca:
        ca_key, ca = _authority(inventory.name)
        _write(directory / CA_KEY, _pem(ca_key), 0o600, written)
        _write(directory / CA, ca.public_bytes(serialization.Encoding.PEM), 0o644, written)
    if new_ca or not all((directory / name).exists() for name in (SERVER, SERVER_KEY)):
        _write_server(inventory, *_load_authority(directory), written)
    for node in inventory.supernodes:
        private, public = directory / f"{node.name}.key", directory / f"{node.name}.pub"
        if force or not private.exists():
            # before the new key: after a crash no old file stays beside it
            for old in (private.with_suffix(KEY_SUFFIX), public):
                old.unlink(missing_ok=True)
            _write(private, _openssh(ec.generate_private_key(ec.SECP384R1())), 0o600, written)
        written += make_peer_key(private, public)
    require_usable(inventory)
    write_list(inventory)
    return written


def renew(inventory: Inventory) -> list[Path]:
    """Make a new server key and certificate by the same CA, for the inventory's present names, and other missing files.

    The nodes need nothing new, unless the CA's own certificate is about to expire. That one is then made anew with the
    CA's key, and every node needs the new ca.crt. Returns the files written. Raises UserError.
    """
    directory = Path(inventory.keys)
    if not (directory / CA).exists():
        raise DeploymentError(
            key="keys", rule=f"{directory} has no {CA}; `corolla cluster keys CLUSTER.yaml` makes everything"
        )
    _private_directory(directory)
    written: list[Path] = []
    ca_key, ca = _load_authority(directory)
    if days_left(ca) < WARNING_DAYS:
        _, ca = _authority(inventory.name, ca_key)
        _write(directory / CA, ca.public_bytes(serialization.Encoding.PEM), 0o644, written)
    _write_server(inventory, ca_key, ca, written)
    return written + make(inventory)


def _write_server(
    inventory: Inventory, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, written: list[Path]
) -> None:
    key, certificate = _server(server_names(inventory), ca_key, ca)
    _write(Path(inventory.keys) / SERVER_KEY, _pem(key), 0o600, written)
    _write(Path(inventory.keys) / SERVER, certificate.public_bytes(serialization.Encoding.PEM), 0o644, written)


def require_usable(inventory: Inventory, nodes: Sequence[SuperNode] | None = None) -> None:
    """Raise UserError for a file that is missing, open to others, expired or does not fit, as a key of another certificate.

    The error names the file, and the command that repairs it. nodes: the SuperNodes that need keys; None means all.
    """
    directory = Path(inventory.keys)
    names = [CA, SERVER, SERVER_KEY]
    for node in inventory.supernodes if nodes is None else nodes:
        names += [f"{node.name}.key", f"{node.name}.pub"]
    if missing := [name for name in names if not (directory / name).is_file()]:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DeploymentError(
            key="keys",
            rule=f"{directory} has no {some}; `corolla cluster keys CLUSTER.yaml` makes them (TLS and "
            "authentication are off with --insecure)",
        )
    private = [directory / name for name in (CA_KEY, SERVER_KEY, *names) if name.endswith(".key")]
    _refuse_open([*private, *sorted(directory.glob(f"*{KEY_SUFFIX}"))])
    again = "`corolla cluster keys --renew CLUSTER.yaml` makes another one"
    ca, certificate = (read_certificate(directory / name) for name in (CA, SERVER))
    for name, each in ((CA, ca), (SERVER, certificate)):
        if days_left(each) < 0:
            raise DeploymentError(
                key="keys", rule=f"{directory / name} expired on {each.not_valid_after_utc:%Y-%m-%d}; {again}"
            )
    held = subject_names(certificate)
    if lacking := [name for name in server_names(inventory) if name not in held]:
        what = f"not for {', '.join(lacking)} but for {', '.join(sorted(held))}"
        raise DeploymentError(key="keys", rule=f"{directory / SERVER} is {what}; {again}")
    try:
        certificate.verify_directly_issued_by(ca)
    # InvalidSignature, ValueError, TypeError: the same for a user
    except Exception:
        raise DeploymentError(
            key="keys", rule=f"{directory / SERVER} was not signed by {directory / CA}; {again}"
        ) from None
    _require_key_of(certificate, directory / SERVER, directory / SERVER_KEY, again)
    # the CA's key may be away, locked or another user's: a cluster starts without it
    with contextlib.suppress(OSError, _Locked):
        _require_key_of(ca, directory / CA, directory / CA_KEY, _MISMADE)
    for node in inventory.supernodes if nodes is None else nodes:
        key, public = directory / f"{node.name}.key", directory / f"{node.name}.pub"
        if public.read_text().split()[:2] != public_words(read_node_key(key)):
            raise DeploymentError(
                key="keys",
                rule=f"{key} does not belong to {public.name}; `corolla cluster keys CLUSTER.yaml` makes that one anew",
            )


def expiry_warnings(inventory: Inventory) -> list[str]:
    """Return a warning for each existing certificate that has expired or is about to."""
    again = "`corolla cluster keys --renew CLUSTER.yaml`, then `down` and `up`"
    found = []
    for path in (Path(inventory.keys) / CA, Path(inventory.keys) / SERVER):
        if path.is_file() and (expires := expiry_warning(read_certificate(path))):
            found.append(f"warning: keys: {path} {expires}; {again}")
    return found


def now() -> datetime.datetime:
    """Return the current time, UTC, to compare with a certificate's end."""
    return datetime.datetime.now(datetime.UTC)


def days_left(certificate: x509.Certificate) -> float:
    """Return the number of days until a certificate expires; negative if it has expired."""
    return (certificate.not_valid_after_utc - now()) / datetime.timedelta(days=1)


def expiry_warning(certificate: x509.Certificate) -> str:
    """Return "expired on DATE", or "expires on DATE, in N days" (or hours, or minutes) if that is soon, or "".

    "is not valid before DATE" if its time has not come.
    """
    if certificate.not_valid_before_utc > now():
        return f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    days, end = days_left(certificate), f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    if days < 0:
        return f"expired on {end}"
    number, unit = next(
        (n, unit)
        for n, unit in ((days, "days"), (days * 24, "hours"), (days * 1440, "minutes"))
        if n >= 2 or unit == "minutes"
    )
    return f"expires on {end}, in {int(number)} {unit}" if days < WARNING_DAYS else ""


def read_certificate(path: Path) -> x509.Certificate:
    """Read a file's first certificate, which a server shows as its own. Raises UserError if the file contains none."""
    return read_certificates(path)[0]


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Read all certificates in a file: a chain, or several authorities. Raises UserError if the file contains none."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DeploymentError(key="keys", rule=f"{path} is not a certificate: {error}") from None


def subject_names(certificate: x509.Certificate) -> set[str]:
    """Return the DNS names and IP addresses that a certificate is for, as text."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(names.get_values_for_type(x509.DNSName)) | {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}


def _private_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        raise DeploymentError(
            key="keys", rule=f"{directory} must be closed to others (mode 700), it is {mode:o}; `chmod 700 {directory}`"
        )
    # `git add .` must not take a key
    if not (directory / IGNORE).exists():
        publish(directory / IGNORE, lambda temporary: temporary.write_text("*\n"))


def _refuse_open(keys: list[Path]) -> None:
    """Raise UserError if a private key, where it exists, has a mode wider than 0600."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in keys if path.exists()}
    if wide := {path: mode for path, mode in modes.items() if mode & ~0o600}:
        lines = [f"keys: {path} must be its owner's alone (mode 600), it is {mode:o}" for path, mode in wide.items()]
        remedy = "others may have read them: `corolla cluster keys --force CLUSTER.yaml` makes new ones, `chmod 600` keeps these"
        raise DeploymentError("\n".join([*lines, remedy]))


def _write(path: Path, content: bytes, mode: int, written: list[Path]) -> None:
    publish(path, lambda temporary: temporary.write_bytes(content), mode)
    written.append(path)


def _authority(
    name: str, key: ec.EllipticCurvePrivateKey | None = None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = key or ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Corolla cluster {name}"[:64])])
    builder = _builder(subject, subject, key.public_key(), _CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(sign_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return key, builder.sign(key, hashes.SHA384())


def _server(
    names: tuple[str, ...], ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    builder = _builder(subject, ca.subject, key.public_key(), min(_SERVER_DAYS, int(days_left(ca))))
    builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(sign_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return key, builder.sign(ca_key, hashes.SHA384())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    issued = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # nodes' clocks may be behind
        .not_valid_before(issued - datetime.timedelta(hours=1))
        .not_valid_after(issued + datetime.timedelta(days=days))
    )


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.rstrip("."))


def _load_authority(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return the CA's key and certificate. Raises UserError if the key is missing, or another certificate's."""
    ca = read_certificate(directory / CA)
    try:
        key = _require_key_of(ca, directory / CA, directory / CA_KEY, _MISMADE)
    except OSError as error:
        raise DeploymentError(
            key="keys", rule=f"{directory / CA_KEY}: {error.strerror}; it is needed to make a server certificate"
        ) from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key, ca


def _require_key_of(certificate: x509.Certificate, at: Path, path: Path, remedy: str) -> PrivateKeyTypes:
    """Return a certificate's private key. Raises UserError for none, another's, or one with a passphrase, and OSError.

    at: the certificate's file. path: the key's.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    # it is encrypted
    except TypeError:
        raise _Locked(f"keys: {path} has a passphrase, and none is asked for; store the key without one") from None
    # UnsupportedAlgorithm: the same for a user
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if key is None or key.public_key() != certificate.public_key():
        raise DeploymentError(key="keys", rule=f"{path} does not belong to {at.name}; {remedy}")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _openssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a SuperNode's private key in the form that Flower reads."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


# Keys for private runs ------------------------------------------------------------------------------------------------


KEY_SUFFIX = ".x25519"
_PUBLIC_WORDS = 5


def make_peer_key(node_key: Path, public: Path) -> list[Path]:
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
    if not public.exists() or public.read_text().split()[: _PUBLIC_WORDS - 1] != line.split()[: _PUBLIC_WORDS - 1]:
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
    return " ".join(words[2:_PUBLIC_WORDS])


def write_list(inventory: Inventory) -> Path | None:
    """Write the list of all clients' keys, beside them. Return its path, or None while a key is missing."""
    directory = Path(inventory.keys)
    publics = [directory / f"supernode-{k}.pub" for k in range(inventory.num_clients)]
    path = directory / PEERS
    if not all(public.is_file() and len(public.read_text().split()) == _PUBLIC_WORDS for public in publics):
        # an existing list has outdated keys
        path.unlink(missing_ok=True)
        return None
    text = "".join(f"{k} {public.read_text().strip()}\n" for k, public in enumerate(publics))
    if not path.is_file() or path.read_text() != text:
        publish_text(path, text, 0o644)
    return path


def hash_of_list(path: Path) -> str:
    """Return the sha256 by which sites compare their lists."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Revoked keys ---------------------------------------------------------------------------------------------------------


REVOKED = "revoked.txt"


def revoked_keys(directory: Path) -> frozenset[str]:
    """Return the fingerprints of the keys that a cluster has revoked. directory: of its keys."""
    path = directory / REVOKED
    return frozenset(path.read_text().split()) if path.is_file() else frozenset()


def note_revoked(directory: Path, found: str) -> None:
    """Add a fingerprint to the list."""
    if found not in (known := revoked_keys(directory)):
        publish_text(directory / REVOKED, "".join(f"{line}\n" for line in sorted({*known, found})), 0o644)


# Certificates that end ------------------------------------------------------------------------------------------------


log = logging.getLogger("corolla")

AHEAD = (datetime.timedelta(weeks=2), datetime.timedelta(days=2), datetime.timedelta(hours=1), datetime.timedelta(0))
"""The times before a certificate's end at which a warning is due; the last one is the end."""
RENEW = "`corolla cluster keys --renew CLUSTER.yaml`, then `down` and `up`"
# most seconds between two looks at the clock, which may jump
_LONGEST = 60.0


def stage(certificate: x509.Certificate) -> int:
    """Return the number of AHEAD that have come: 0 to 4, 4 after the end."""
    left = certificate.not_valid_after_utc - now()
    return sum(left <= ahead for ahead in AHEAD)


def named_by(options: Sequence[str]) -> list[Path]:
    """Return the files of certificates that options of flower-superlink or flower-supernode name."""
    return paths_in(options, "--ssl-ca-certfile", "--ssl-certfile", "--root-certificates")


def paths_in(options: Sequence[str], *names: str) -> list[Path]:
    """Return the paths that options with these names have."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, type=Path)
    return [path for path in vars(parser.parse_known_args(options)[0]).values() if path is not None]


def watch(paths: Iterable[Path], sleep: Callable[[float], object] | None = None) -> None:
    """Log a warning for each certificate when its time has come, in a thread of its own.

    paths: files of certificates, read once, now. A file without one is left to those that use it. One that is not valid
    yet is named at once. sleep: for tests.
    """
    watched: dict[str, x509.Certificate] = {}
    for path in paths:
        try:
            found = read_certificates(path)
        except UserError as error:
            log.warning("%s", error)
            continue
        watched |= {f"{path}, number {k + 1}" if k else str(path): one for k, one in enumerate(found)}
    for name, one in watched.items():
        if one.not_valid_before_utc > now():
            log.warning("certificate %s %s", name, expiry_warning(one))
    if watched:
        run = functools.partial(_watch_ends, watched, sleep or threading.Event().wait)
        threading.Thread(target=run, daemon=True, name="certificates").start()


def _watch_ends(watched: Mapping[str, x509.Certificate], sleep: Callable[[float], object]) -> None:
    told = dict.fromkeys(watched, 0)
    while min(told.values()) < len(AHEAD):
        for name, certificate in watched.items():
            if (now := stage(certificate)) > told[name]:
                told[name] = now
                log.warning("certificate %s %s; %s", name, expiry_warning(certificate), RENEW)
        sleep(_until_next(watched.values()))


def _until_next(watched: Iterable[x509.Certificate]) -> float:
    """Return the seconds until a next warning is due, at most _LONGEST."""
    left = [each.not_valid_after_utc - now() - ahead for each in watched for ahead in AHEAD]
    return min([each.total_seconds() for each in left if each > datetime.timedelta(0)] + [_LONGEST])


def shown_warnings(inventory: Inventory) -> list[str]:
    """Return a warning if the certificate that a running cluster's SuperLink shows has expired or is about to.

    After a renewal it still shows the old one until it is started again. One that is the file's is not named twice.
    """
    shown = served("127.0.0.1", inventory.superlink.control_port)
    file = Path(inventory.keys) / SERVER
    if shown is None or (file.is_file() and read_certificate(file) == shown):
        return []
    expires = expiry_warning(shown)
    again = "`down` and `up` show the renewed one"
    return [f"warning: the SuperLink shows a certificate that {expires}; {again}"] if expires else []


def served(host: str, port: int, seconds: float = 5) -> x509.Certificate | None:
    """Return the certificate that a server shows, trusted or not; None if there is no answer."""
    try:
        return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, port), timeout=seconds).encode())
    except (OSError, ValueError):
        return None
