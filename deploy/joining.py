"""A site joins a cluster by itself: its private key never leaves the site, and nobody needs a login there.

1. The site: `corolla node join NAME` makes a key pair, and names the public half, which goes to the server's operator.
2. The server: `corolla cluster admit CLUSTER.yaml CLIENT FILE.pub` registers it and writes an invitation, which goes
   back. The invitation holds the SuperLink's address, the site's client number and name, the number of clients, the CA's
   certificate, and the server's version of Flower. Nothing in it is secret.
3. The site: `corolla node start NAME --invitation FILE`.

After all sites have been admitted, the server has the list of all sites' keys for private runs (deploy/certificates.py),
`peers.txt`. Every site gets it: `corolla node start NAME --peers peers.txt`. It contains no secrets either, but sites
should compare their copies.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy import certificates, commands, superlink
from deploy.inventory import Inventory
from fl_app.errors import DeploymentError, with_name
from fl_app.files import make_directory, publish
from fl_app.privacy import keyring, pins
from fl_app.privacy.keyring import PEERS
from fl_app.processes import free_ports
from fl_app.site_directory import site_directory
from fl_app.toml import read_toml, value_to_toml

KEY, PUBLIC, INVITATION, CA = "node.key", "node.pub", "invitation.toml", "ca.crt"


@dataclass(frozen=True)
class Invitation:
    """A site's view of a cluster.

    superlink: address and port. client: the site's client id. clients: their number. ca: the CA's certificate.
    flower: the server's version of Flower; "" in an invitation of an earlier Corolla. name: the one under which the site
    was admitted, "" for its own.
    """

    superlink: str
    client: int
    clients: int
    ca: str
    flower: str = ""
    name: str = ""


# At the site ----------------------------------------------------------------------------------------------------------


def make_key(directory: Path) -> Path:
    """Make the missing halves of a site's key pair in its directory. Return the public half's path."""
    private, public = directory / KEY, directory / PUBLIC
    if not private.exists():
        make_directory(directory)
        key = ec.generate_private_key(ec.SECP384R1())
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        publish(private, lambda path: path.write_bytes(text))
    certificates.make_peer_key(private, public)
    return public


def rotate_key(directory: Path) -> Path:
    """Replace a site's key pairs by new ones. Return the public half's path. Raises UserError if it has none."""
    private = directory / KEY
    if not private.exists():
        raise DeploymentError(key=directory.name, rule=f"has no key; `corolla node join {directory.name}` makes it")
    # the public half last: while it is missing, `make_key` goes on where a crash ended
    for path in (private, private.with_suffix(certificates.KEY_SUFFIX), directory / PUBLIC):
        path.unlink(missing_ok=True)
    return make_key(directory)


def keep_peers(directory: Path, given: Path) -> str:
    """Keep a copy of the list of all sites' keys for private runs. Return its sha256, by which sites compare copies.

    Raises UserError if the list cannot be read, or is another than the one kept before.
    """
    try:
        content = given.read_bytes()
    except OSError as error:
        raise DeploymentError(key=given, rule=error.strerror) from None
    kept = directory / PEERS
    if kept.exists() and kept.read_bytes() != content:
        raise DeploymentError(
            pins.refusal(given, pins.hash_of(given), pins.hash_of(kept), f"{directory.name} --peers {given}")
        )
    publish(kept, lambda path: path.write_bytes(content), 0o644)
    return certificates.hash_of_list(kept)


def accept_peers(directory: Path, given: Path | None, expected: str) -> tuple[str, str]:
    """Agree to a list of all sites' keys in place of the one agreed to before. Return the sha256 of both, "" for none.

    given: the list; None: the one that is kept already. expected: its sha256, as the sites have compared it, or "" not to
    check it. Raises UserError for another sha256, and for a list that does not name this site.
    """
    private, listed = directory / f"{Path(KEY).stem}{certificates.KEY_SUFFIX}", given or directory / PEERS
    found, own = pins.hash_of(listed), keyring.own_hash(keyring.read_private_key(private))
    if expected not in ("", found):
        raise DeploymentError(key=listed, rule=f"its sha256 is {found}, not {expected}: nothing is accepted")
    if not keyring.names(listed, own):
        raise DeploymentError(key=listed, rule="has no line with this site's key")
    before = pins.agreed(site_directory(), own)
    if given:
        content = given.read_bytes()
        publish(directory / PEERS, lambda path: path.write_bytes(content), 0o644)
    pins.accept(site_directory(), own, found)
    return before, found


def accept_invitation(directory: Path, given: Path | None) -> Invitation:
    """Keep and return the given invitation, or return the one kept before. Raises UserError if there is none."""
    path = given or directory / INVITATION
    if given is None and not path.exists():
        raise DeploymentError(
            key=directory.name,
            rule="has no invitation yet; `--invitation FILE` takes the file from `corolla cluster admit`",
        )
    raw = read_toml(path)
    forms = {"superlink": str, "client": int, "clients": int, "ca": str, "flower": str, "name": str}
    if set(forms) - set(raw) - {"flower", "name"} or any(type(raw[name]) is not forms.get(name) for name in raw):
        raise DeploymentError(
            key=path, rule=f"must be an invitation with {', '.join(forms)}, got {', '.join(raw) or 'nothing'}"
        )
    # the server's operator wrote it, and a terminal obeys control characters
    if strange := [name for name in raw if name != "ca" and not str(raw[name]).isprintable()]:
        raise DeploymentError(key=path, rule=f"{strange[0]}: must be text that can be printed", value=raw[strange[0]])
    if not re.fullmatch(r"|\d+\.\d+.*", raw.get("flower", "")):
        raise DeploymentError(key=path, rule="flower: must be a version, for example 1.39.0", value=raw["flower"])
    publish(directory / INVITATION, lambda temporary: temporary.write_bytes(path.read_bytes()))
    publish(directory / CA, lambda temporary: temporary.write_text(raw["ca"]), 0o644)
    return Invitation(**raw)


def transport_note(invitation: Invitation) -> str:
    """Return a warning if the server's Flower and this machine's connect in different ways, otherwise ""."""
    here, there = metadata.version("flwr"), invitation.flower
    speaks = {version: "gRPC" if superlink.serves_grpc(version) else "HTTP" for version in (here, there) if version}
    if not there or speaks[here] == speaks[there]:
        return ""
    return (
        f"the invitation is from a server with Flower {there}, which speaks {speaks[there]}; this machine has Flower {here}, "
        f"which speaks {speaks[here]}: it finds no answer unless the server has changed since"
    )


def supernode_options(directory: Path, invitation: Invitation, data_path: str) -> list[str]:
    """Return flower-supernode's options for a site. Raises UserError if its key is missing or open to others."""
    private = directory / KEY
    if not private.exists():
        raise DeploymentError(key=directory.name, rule=f"has no key; `corolla node join {directory.name}` makes it")
    if (mode := stat.S_IMODE(private.stat().st_mode)) & 0o077:
        raise DeploymentError(
            f"{private} must be its owner's alone (mode 600), it is {mode:o}; others may have read it: make another"
        )
    (port,) = free_ports(1)
    words = ["--root-certificates", str(directory / CA), "--auth-supernode-private-key", str(private)]
    words += ["--superlink", invitation.superlink, "--host", "127.0.0.1", "--port", str(port), "--node-config"]
    private_keys, name = str(private.with_suffix(certificates.KEY_SUFFIX)), invitation.name or directory.name
    return [*words, commands.node_config(invitation.client, invitation.clients, data_path, private_keys, name)]


# At the server --------------------------------------------------------------------------------------------------------


def admit(inventory: Inventory, client: int, public: Path, *, name: str = "", replace: bool = False) -> Path:
    """Take in a site's public key as a client's. Return the path of its invitation, beside the key.

    name: the client's in runs. "": the one that it has, or the file's without its suffix, unless it is called as `node join`
    calls all. replace: the client's other key, which is then revoked. Raises UserError if the client does not join by itself,
    if it has another key already (with replace: none, or this one), if the file holds no suitable key, or if the key or the
    name is another client's or the key was revoked.
    """
    if client not in inventory.joined:
        there = ", ".join(map(str, inventory.joined)) or "none; write an entry `{host: joins}`"
        raise DeploymentError(
            key=f"client {client}", rule=f"does not join by itself in {inventory.name} (clients that do: {there})"
        )
    certificates.require_usable(inventory)
    text = _public_key(public)
    directory = Path(inventory.keys)
    kept = directory / f"supernode-{client}.pub"
    for path in sorted(directory.glob("supernode-*.pub")):
        if path != kept and _public_key(path) == text:
            raise DeploymentError(key=public, rule=f"is {path.name} already; every client needs its own key")
    if certificates.fingerprint(text) in certificates.revoked_keys(directory):
        raise DeploymentError(
            key=public, rule="was revoked, for good; `corolla node rotate` makes another key at the site"
        )
    before = _public_key(kept) if kept.exists() else b""
    if before not in (b"", text) and not replace:
        raise DeploymentError(
            key=f"client {client}", rule=f"has another key, {kept}; `corolla cluster rotate` replaces it"
        )
    if replace and before in (b"", text):
        what = "this is its key already" if before else "it has no key to replace; use `corolla cluster admit`"
        raise DeploymentError(key=f"client {client}", rule=what)
    name = name or (name_of(inventory, client) if before else "") or public.stem * (public.name != PUBLIC)
    others = {name_of(inventory, other): other for other in inventory.joined if other != client}
    if name and name in others:
        raise DeploymentError(
            key=f"client {client}", rule=f"{name!r} is the name of client {others[name]}; `--name` gives another"
        )
    line = b" ".join(filter(None, [text, certificates.statement_in(public).encode()]))
    publish(kept, lambda path: path.write_bytes(line + b"\n"), 0o644)
    if replace:
        certificates.note_revoked(directory, certificates.fingerprint(before))
    certificates.write_list(inventory)
    link, ca = inventory.superlink, (directory / certificates.CA).read_text()
    address = commands.host_port(link.fleet_address, link.fleet_port)
    lines = [f"superlink = {value_to_toml(address)}", f"client = {client}", f"clients = {inventory.num_clients}"]
    lines += [
        f"flower = {value_to_toml(metadata.version('flwr'))}",
        *([f"name = {value_to_toml(name)}"] if name else []),
    ]
    invitation = directory / f"supernode-{client}.toml"
    publish(invitation, lambda path: path.write_text("\n".join([*lines, f'ca = """\n{ca}"""\n'])), 0o644)
    return invitation


def name_of(inventory: Inventory, client: int) -> str:
    """Return the name under which a client was admitted, "" if it has none. Raises UserError for a damaged invitation."""
    public = Path(inventory.keys) / f"supernode-{client}.pub"
    invitation = public.with_suffix(".toml")
    return str(read_toml(invitation).get("name", "")) if public.is_file() and invitation.is_file() else ""


def called(inventory: Inventory, client: int) -> str:
    """Return a client's number, with the name under which it was admitted: `3 (bern)`."""
    return with_name(client, name_of(inventory, client))


def was_revoked(inventory: Inventory, client: int) -> bool:
    """Return whether a client that joined has lost its keys: it was admitted, and its public key is gone."""
    public = Path(inventory.keys) / f"supernode-{client}.pub"
    return not public.is_file() and public.with_suffix(".toml").is_file()


def _public_key(path: Path) -> bytes:
    """Read a public key in the form that Corolla writes, without its comment."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise DeploymentError(key=path, rule=error.strerror) from None
    # ValueError, UnsupportedAlgorithm: the same for a user
    except Exception:
        raise DeploymentError(
            key=path, rule="is not a public key (one line that begins with ecdsa-sha2-nistp384)"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise DeploymentError(key=path, rule="must be an ECDSA P-384 key, as `corolla node join` makes it")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
