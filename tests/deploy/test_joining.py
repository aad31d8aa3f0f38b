"""A site that joins by itself: its key stays, its public half is taken in; an old key ends when a new one is in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from client_app.session import session_of
from deploy import certificates, cluster, inventory, joining, lifecycle, node_cli, superlink_nodes
from deploy.cluster import Cluster
from deploy.inventory import Inventory
from deploy.superlink_nodes import public_bytes
from fl_app.errors import DeploymentError, UserError
from fl_app.privacy import pins
from fl_app.privacy.keyring import PEERS, open_keyring
from tests.conftest import Command
from tests.facts import mentions, rejected

TWO_JOIN = "[{host: local}, {host: joins, supernodes: 2}, {host: local}]"


def lab(directory: Path, hosts: str = TWO_JOIN, tls: str = "true") -> Inventory:
    path = directory / "lab.yaml"
    path.write_text(f"tls: {tls}\nsuperlink: {{fleet-address: 127.0.0.1, fleet-port: 9999}}\nhosts: {hosts}\n")
    return inventory.read_inventory(path)


def test_clients_that_join_are_counted_with_the_others(tmp_path: Path) -> None:
    found = lab(tmp_path)
    assert [node.client_id for node in found.supernodes] == [0, 3] and found.joined == (1, 2) and found.num_clients == 4
    certificates.make(found)
    made = {path.name for path in Path(found.keys).glob("supernode-*")}
    assert made == {f"supernode-{k}.{end}" for k in (0, 3) for end in ("key", "pub", "x25519")}


@pytest.mark.parametrize(
    "hosts, tls, expected",
    [
        ("[{host: joins}]", "false", "sites that join need TLS and keys"),
        ("[{host: joins, data-path: /x}]", "true", r"hosts\[0\].data-path: the site that joins decides it"),
    ],
)
def test_what_cannot_join(tmp_path: Path, hosts: str, tls: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        lab(tmp_path, hosts, tls)


def test_the_private_half_stays_and_the_invitation_leads_there(tmp_path: Path) -> None:
    found, here = lab(tmp_path), tmp_path / "site"
    certificates.make(found)
    public = joining.make_key(here)
    assert (here / joining.KEY).stat().st_mode & 0o777 == 0o600 and here.stat().st_mode & 0o777 == 0o700
    assert (
        public.read_text().startswith("ecdsa-sha2-nistp384 ")
        and joining.make_key(here).read_text() == public.read_text()
    )
    invitation = joining.admit(found, 1, public)
    assert joining.admit(found, 1, public) == invitation  # again is no harm
    assert "PRIVATE" not in "".join(path.read_text() for path in (public, invitation))
    assert (Path(found.keys) / "supernode-1.pub").read_text().split()[:2] == public.read_text().split()[:2]
    accepted = joining.accept_invitation(here, invitation)
    assert (accepted.superlink, accepted.client, accepted.clients) == ("127.0.0.1:9999", 1, 4)
    assert (here / joining.CA).read_bytes() == (Path(found.keys) / certificates.CA).read_bytes()
    words = joining.supernode_options(here, joining.accept_invitation(here, None), "/data x")
    assert words[words.index("--auth-supernode-private-key") + 1] == str(here / joining.KEY)
    assert parse_config_args([words[-1]]) == {
        "partition-id": 1,
        "num-partitions": 4,
        "data-path": "/data x",
        "private-keys": str(here / "node.x25519"),
        "name": here.name,
    }
    (here / joining.KEY).chmod(0o644)
    with rejected(DeploymentError, "", "owner's alone"):
        joining.supernode_options(here, accepted, "")


def test_a_client_has_the_name_under_which_it_was_admitted(tmp_path: Path) -> None:
    found, sites = lab(tmp_path), [tmp_path / "b", tmp_path / "c"]
    certificates.make(found)
    publics = [joining.make_key(site) for site in sites]

    def told(site: Path, invitation: Path) -> object:
        words = joining.supernode_options(site, joining.accept_invitation(site, invitation), "")
        return parse_config_args([words[-1]])["name"]

    named = publics[0].rename(tmp_path / "celle.pub")
    assert told(sites[0], joining.admit(found, 1, named)) == joining.name_of(found, 1) == "celle"
    # it stays: `node join` and `node rotate` call all keys alike
    assert told(sites[0], joining.admit(found, 1, named.rename(publics[0]))) == "celle"
    assert told(sites[0], joining.admit(found, 1, joining.rotate_key(sites[0]), replace=True)) == "celle"
    assert told(sites[0], joining.admit(found, 1, publics[0], name="Celle 'Süd'")) == "Celle 'Süd'"
    with rejected(DeploymentError, "client 2", "\"Celle 'Süd'\"", "client 1", "`--name` gives another"):
        joining.admit(found, 2, publics[1], name="Celle 'Süd'")
    # without one it has the site's own
    assert told(sites[1], joining.admit(found, 2, publics[1])) == "c" and joining.name_of(found, 2) == ""
    # as `revoke` does
    (Path(found.keys) / "supernode-1.pub").unlink()
    assert joining.name_of(found, 1) == "" and told(sites[0], joining.admit(found, 1, publics[0])) == "b"


@pytest.mark.parametrize("lost", [("node.pub",), ("node.pub", "node.x25519")])
def test_a_lost_half_is_made_again(tmp_path: Path, lost: tuple[str, ...]) -> None:
    public = joining.make_key(tmp_path)
    before = public.read_text().split()
    for name in lost:
        (tmp_path / name).unlink()
    again = joining.make_key(tmp_path).read_text().split()
    assert again[:2] == before[:2] and certificates.statement_in(public)
    assert (again[3] == before[3]) == (len(lost) == 1)


@pytest.mark.parametrize("field", ["superlink", "flower", "name"])
def test_an_invitation_commands_no_terminal(tmp_path: Path, field: str) -> None:
    fields = {"superlink": "a:1", "flower": "1.42.0", "name": "b"}
    fields[field] += "\\u001b]0;title\\u0007"
    lines = ["client = 0", "clients = 2", 'ca = ""', *(f'{key} = "{value}"' for key, value in fields.items())]
    (tmp_path / "invitation").write_text("\n".join(lines))
    with pytest.raises(UserError) as refused:
        joining.accept_invitation(tmp_path / "site", tmp_path / "invitation")
    assert f"{field}: must be text" in str(refused.value) and str(refused.value).isprintable()
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("here, noted", [("1.39.0", False), ("1.41.2", True)])
def test_an_invitation_names_the_servers_flower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, noted: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "1.39.2")
    found = lab(tmp_path)
    certificates.make(found)
    path = joining.admit(found, 1, joining.make_key(tmp_path / "site"))
    monkeypatch.setattr(metadata, "version", lambda package: here)
    invitation = joining.accept_invitation(tmp_path / "site", path)
    note = joining.transport_note(invitation)
    assert invitation.flower == "1.39.2" and bool(note) is noted
    if noted:
        assert "1.39.2, which speaks gRPC" in note and "1.41.2, which speaks HTTP" in note
    # an invitation of an earlier Corolla
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("flower")))
    assert joining.transport_note(joining.accept_invitation(tmp_path / "site", path)) == ""
    path.write_text("".join(["flower = 'new'\n", *(line for line in lines if not line.startswith("flower"))]))
    with rejected(DeploymentError, "supernode-1.toml", "flower", "version", "for example 1.39.0", value="new"):
        joining.accept_invitation(tmp_path / "site", path)


def test_what_is_not_admitted(tmp_path: Path) -> None:
    found = lab(tmp_path)
    certificates.make(found)
    first, second = (joining.make_key(tmp_path / name) for name in ("a", "b"))
    joining.admit(found, 1, first)
    text = tmp_path / "text.pub"
    text.write_text("no key")
    for client, public, expected in (
        (0, first, r"does not join by itself in lab .clients that do: 1, 2."),
        (1, second, "client 1: has another key"),
        (2, first, "is supernode-1.pub already"),
        (2, text, "is not a public key"),
        (2, tmp_path / "none", "No such file"),
        (2, Path(found.keys) / "ca.crt", "is not a public key"),
    ):
        with pytest.raises(UserError, match=expected):
            joining.admit(found, client, public)
    with rejected(DeploymentError, "a", "no invitation yet"):
        joining.accept_invitation(tmp_path / "a", None)
    with rejected(DeploymentError, "lab.toml", "invitation with superlink"):
        joining.accept_invitation(
            tmp_path / "a", tmp_path / "lab.toml" if (tmp_path / "lab.toml").write_text("x = 1") else None
        )


def test_the_list_of_all_sites_keys(tmp_path: Path) -> None:
    found, here = lab(tmp_path), [tmp_path / "b", tmp_path / "c"]
    certificates.make(found)
    listed = Path(found.keys) / PEERS
    publics = [joining.make_key(site) for site in here]
    joining.admit(found, 1, publics[0])
    assert not listed.exists()  # one is missing
    joining.admit(found, 2, publics[1])
    for site in here:
        assert joining.keep_peers(site, listed) == hashlib.sha256(listed.read_bytes()).hexdigest()
        assert (site / "node.x25519").stat().st_mode & 0o777 == 0o600
    rings = [open_keyring(str(site / "node.x25519"), 0, client, 4) for site, client in zip(here, (1, 2), strict=True)]
    rings.append(open_keyring(str(Path(found.keys) / "supernode-3.x25519"), 0, 3, 4))
    assert len({ring.fingerprint for ring in rings}) == 1
    assert [rings[0].for_each("names", 1)[i] for i in (2, 3)] == [ring.for_each("names", 1)[1] for ring in rings[1:]]
    words = publics[0].read_text().split()
    publics[0].write_text(" ".join([*words[:3], publics[1].read_text().split()[3], words[4]]))
    with rejected(DeploymentError, "private", "key for private", "not signed", "node key"):
        joining.admit(found, 1, publics[0])


def test_a_changed_list_is_refused_until_the_site_accepts_it(tmp_path: Path, site_dir: Path) -> None:
    found = lab(tmp_path)
    certificates.make(found)
    site = tmp_path / "data" / "sites" / "b"
    publics = [joining.make_key(site), joining.make_key(tmp_path / "c")]
    for client, public in enumerate(publics, 1):
        joining.admit(found, client, public)
    listed, private = Path(found.keys) / PEERS, site / "node.x25519"
    joining.keep_peers(site, listed)
    own = open_keyring(str(private), 0, 1, 4).own
    pins.require(site_dir, own, site / PEERS)
    # two clients have changed their numbers
    lines = listed.read_text().splitlines()
    changed = tmp_path / "changed.txt"
    changed.write_text("\n".join([f"3 {lines[0][2:]}", *lines[1:3], f"0 {lines[3][2:]}"]) + "\n")
    with rejected(DeploymentError, "", "has changed", "its sha256", "`corolla node", "b --peers", "changed.txt`"):
        joining.keep_peers(site, changed)
    new, old = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (changed, listed))
    accept = ["peers", "accept", "b", "--peers", str(changed)]
    environment = {"XDG_DATA_HOME": str(tmp_path / "data")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.supernode.sites_directory", lambda: tmp_path / "data" / "sites")
        refused = CliRunner().invoke(node_cli.app, [*accept, "--sha256", old], env=environment)
        assert isinstance(refused.exception, UserError) and "nothing is accepted" in str(refused.exception)
        assert pins.agreed(site_dir, own) == old
        accepted = CliRunner().invoke(node_cli.app, [*accept, "--sha256", new], env=environment)
        assert accepted.exit_code == 0 and new in accepted.output and old in accepted.output
        strangers = tmp_path / "strangers.txt"
        strangers.write_text("\n".join(line for line in lines if not line.startswith("1 ")))
        other = CliRunner().invoke(node_cli.app, ["peers", "accept", "b", "--peers", str(strangers)], env=environment)
        assert mentions(str(other.exception), "no line", "site's key")
    assert (site / PEERS).read_text() == changed.read_text()
    pins.require(site_dir, own, site / PEERS)


# A client's keys: one at a time, an old one ends when the new one is in, and a revoked one never comes back -----------


@dataclasses.dataclass
class Known:
    """A node as Flower's SuperLink lists it."""

    node_id: int
    name: str
    public_key: bytes
    status: str = "registered"


class Link:
    """What Flower's SuperLink knows: a key is registered once, and never again after it was unregistered."""

    def __init__(self) -> None:
        self.nodes: list[Known] = []

    def flwr(self, running: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
        if words[1] == "register":
            key, name = public_bytes(Path(words[2])), words[words.index("--name") + 1]
            if any(found.public_key == key for found in self.nodes):
                return subprocess.CompletedProcess(words, 1, "", "Public key already in use.")
            self.nodes.append(Known(len(self.nodes) + 1, name, key))
        elif words[1] == "unregister":
            next(found for found in self.nodes if str(found.node_id) == words[2]).status = "unregistered"
        else:
            told = [{"node-id": str(found.node_id), "status": found.status} for found in self.nodes]
            return subprocess.CompletedProcess(words, 0, json.dumps({"nodes": told}), "")
        return subprocess.CompletedProcess(words, 0, "", "")

    def accepted(self) -> list[bytes]:
        return [found.public_key for found in self.nodes if found.status != "unregistered"]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link()
    monkeypatch.setattr(superlink_nodes, "flwr", link.flwr)
    monkeypatch.setattr(superlink_nodes, "list_nodes", lambda running: list(link.nodes))
    return link


@pytest.fixture
def running(tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that is up with clients 0 and 3; 1 and 2 join, 1 has joined."""
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    found = lab(tmp_path)
    certificates.make(found)
    joining.admit(found, 1, joining.make_key(tmp_path / "site"))
    running = Cluster(found, "token", str(tmp_path / "config.toml"), "now")
    cluster.save_new(running)
    assert superlink_nodes.register_all(running) == ["supernode-0", "supernode-3", "supernode-1"]
    yield running


def kept(running: Cluster, client: int) -> bytes:
    return public_bytes(Path(running.inventory.keys) / f"supernode-{client}.pub")


def test_the_old_key_ends_when_the_new_one_is_in(
    running: Cluster, link: Link, tmp_path: Path, command: Command
) -> None:
    site, file = tmp_path / "state" / "sites" / "clinic", tmp_path / "lab.yaml"
    joining.make_key(site)
    joining.admit(running.inventory, 2, site / joining.PUBLIC)
    superlink_nodes.register_key(running, "supernode-2")
    old, private = kept(running, 2), (site / joining.KEY).read_bytes()
    code, out, err = command("node", "rotate", "clinic")
    new = public_bytes(site / joining.PUBLIC)
    assert code == 0 and (site / joining.PUBLIC).read_text().strip() in out and new != old, err
    assert (site / joining.KEY).read_bytes() != private and (site / joining.KEY).stat().st_mode & 0o777 == 0o600
    assert old in link.accepted() and (Path(running.inventory.keys) / PEERS).is_file()
    code, _, err = command("cluster", "rotate", file, "2", site / joining.PUBLIC)
    assert code == 0, err
    assert new in link.accepted() and old not in link.accepted() and kept(running, 2) == new
    # the others keep theirs, and no revoked key comes back, whoever has it
    assert len(link.accepted()) == 4
    (tmp_path / "old.pub").write_bytes(as_line(old))
    for words in (("admit", file, "2"), ("rotate", file, "2"), ("admit", file, "1")):
        code, _, err = command("cluster", *words, tmp_path / "old.pub")
        assert code == 2 and "revoked" in err and "registered" not in err
    assert old not in link.accepted() and kept(running, 2) == new


def as_line(pem: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_public_key(pem)
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def test_a_replaced_file_does_not_leave_the_old_key(running: Cluster, link: Link, tmp_path: Path) -> None:
    """As before `rotate`: the file is removed, another key admitted, the cluster started again."""
    old = kept(running, 1)
    (Path(running.inventory.keys) / "supernode-1.pub").unlink()
    joining.admit(running.inventory, 1, joining.make_key(tmp_path / "other"))
    superlink_nodes.register_all(running)
    assert old not in link.accepted() and kept(running, 1) in link.accepted() and len(link.accepted()) == 3


def test_revoking_ends_every_key_that_a_client_ever_had(running: Cluster, link: Link, tmp_path: Path) -> None:
    first = kept(running, 1)
    # a key of an earlier version's rotation, and one that a node registered with a foreign name
    more = [public_bytes(joining.make_key(tmp_path / name)) for name in ("b", "c")]
    link.nodes += [Known(8, "supernode-1", more[0]), Known(9, "supernode-10", more[1])]
    assert superlink_nodes.revoke(running, 1) == []
    assert not {first, more[0]} & set(link.accepted()) and more[1] in link.accepted()
    assert {certificates.fingerprint(key) for key in (first, more[0])} <= certificates.revoked_keys(
        Path(running.inventory.keys)
    )
    with pytest.raises(UserError, match="revoked"):
        joining.admit(running.inventory, 1, tmp_path / "site" / joining.PUBLIC)
    with pytest.raises(UserError, match="revoked before"):
        superlink_nodes.revoke(running, 1)
    # its file is gone, and yet a key is accepted
    link.nodes.append(Known(11, "supernode-1", public_bytes(joining.make_key(tmp_path / "d"))))
    superlink_nodes.revoke(running, 1)
    assert len(link.accepted()) == 3


def test_a_key_that_the_superlink_revoked_is_not_called_registered(
    running: Cluster, link: Link, tmp_path: Path, command: Command
) -> None:
    public = joining.make_key(tmp_path / "other")
    # by an earlier version, which left no note
    link.nodes.append(Known(8, "supernode-2", public_bytes(public), "unregistered"))
    code, out, err = command("cluster", "admit", tmp_path / "lab.yaml", "2", public)
    assert code == 2 and "revoked" in err and "registered" not in out


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, link: Link) -> None:
    """All processes that the launcher started are well."""

    def status(self: Cluster) -> tuple[dict[str, Any], dict[str, UserError]]:
        ids = {found.name: str(found.node_id) for found in link.nodes}
        well = {"pid": 1, "alive": True, "healthy": True}
        return {name: well | {"node-id": ids.get(name, "")} for name in self.names}, {}

    monkeypatch.setattr(Cluster, "status", status)


@pytest.mark.usefixtures("healthy")
def test_status_is_good_only_if_every_admitted_site_is_connected(
    running: Cluster, link: Link, tmp_path: Path, command: Command
) -> None:
    for found in link.nodes:
        found.status = "online"
    joining.admit(running.inventory, 1, tmp_path / "site" / joining.PUBLIC, name="celle")
    # client 2 has not been admitted
    code, out, err = command("cluster", "status", "lab", "--json")
    assert code == 0, err
    rows = {row["node"]: row for row in json.loads(out)}
    assert [rows[f"supernode-{k}"]["name"] for k in (0, 1, 2)] == ["", "celle", ""]
    assert rows["supernode-1"]["key"] == certificates.fingerprint(kept(running, 1)) and not rows["supernode-2"]["key"]
    for away, status in enumerate(("offline", "registered"), 1):
        found = next(found for found in link.nodes if found.status == "online" and found.name != "supernode-0")
        found.status = status
        assert command("cluster", "status", "lab")[0] == 1
        assert command("cluster", "status", "lab", "--allow-offline", away - 1)[0] == 1
        assert command("cluster", "status", "lab", "--allow-offline", away)[0] == 0


@pytest.mark.usefixtures("healthy")
def test_status_tells_a_revoked_site_from_one_that_never_came(
    running: Cluster, link: Link, tmp_path: Path, command: Command
) -> None:
    for found in link.nodes:
        found.status = "online"
    joining.admit(running.inventory, 1, tmp_path / "site" / joining.PUBLIC, name="celle")
    code, out, err = command("cluster", "revoke", "lab", 1)
    assert code == 0 and "1 (celle)" in out and "node rotate" in out, err
    code, out, err = command("cluster", "status", "lab", "--json")
    states = {row["node"]: row["state"] for row in json.loads(out)}
    assert code == 0 and (states["supernode-1"], states["supernode-2"]) == ("revoked", "not admitted yet"), err


@pytest.mark.usefixtures("healthy")
def test_status_names_keys_that_no_entry_has(running: Cluster, link: Link, tmp_path: Path, command: Command) -> None:
    for found in link.nodes:
        found.status = "online"
    key = public_bytes(joining.make_key(tmp_path / "stranger"))
    link.nodes.append(Known(77, "supernode-1", key, "offline"))
    code, out, err = command("cluster", "status", "lab", "--json", "--allow-offline", "9")
    # no option allows that
    link.nodes[0].status = "offline"
    assert "--allow-offline" not in command("cluster", "status", "lab")[2]
    link.nodes[0].status = "online"
    assert code == 1 and "flwr supernode unregister 77 lab" in err and certificates.fingerprint(key) in err
    assert [row["key"] for row in json.loads(out)].count(certificates.fingerprint(key)) == 1
    link.nodes[-1].status = "unregistered"
    assert command("cluster", "status", "lab")[0] == 0


@pytest.mark.usefixtures("healthy")
def test_a_site_of_a_later_entry_is_known_to_the_running_cluster(
    running: Cluster, link: Link, tmp_path: Path, command: Command
) -> None:
    written = yaml.safe_load((tmp_path / "lab.yaml").read_text())
    written["hosts"].append({"host": "joins"})
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump(written))
    public = joining.make_key(tmp_path / "winsen")
    shutil.copy(public, tmp_path / "winsen.pub")
    assert command("cluster", "admit", tmp_path / "lab.yaml", "4", tmp_path / "winsen.pub")[0] == 0
    for found in link.nodes:
        found.status = "online"
    code, out, err = command("cluster", "status", "lab", "--json", "--allow-offline", "2")
    assert code == 0 and ("4", "winsen", "online") in {
        (row["client"], row["name"], row["superlink-says"]) for row in json.loads(out)
    }, err
    assert command("cluster", "revoke", "lab", "4")[0] == 0


def test_up_starts_a_superlink_that_has_ended(running: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = {"superlink": False, "supernode-0": True, "supernode-3": False}
    done: list[str] = []

    def ask(self: Cluster, host: str, action: str, **request: Any) -> Any:
        done.append(action)
        if action == "start":
            alive.update({process["name"]: True for process in request["processes"]})
        if action == "prepare":
            return {"directory": "/d", "scripts": "/s", "ports": [1, 2, 3], "versions": {}, "free": None}
        if action == "stop":
            return {"left": []}
        well = {"pid": 1, "healthy": True, "node-id": "1"}
        return {"processes": {name: well | {"alive": lives, "healthy": lives} for name, lives in alive.items()}}

    monkeypatch.setattr(Cluster, "ask", ask)
    monkeypatch.setattr(lifecycle, "check_clocks", lambda *given: None)
    revived = lifecycle.up(running.inventory, lambda text: None, 5)
    assert all(alive.values()) and revived.token == running.token and done.count("start") == 2
    with pytest.raises(UserError, match="already up"):
        lifecycle.up(running.inventory, lambda text: None, 5)
    alive["superlink"] = False
    # another inventory is another cluster
    with pytest.raises(UserError, match="already up"):
        lifecycle.up(dataclasses.replace(running.inventory, supernodes=()), lambda text: None, 5)


def test_the_number_of_clients_is_the_runs() -> None:
    """A seventh site needs no new invitations for the six."""
    assert session_of(json.dumps({"method": "fedavg", "num-clients": 7}), 6, 1, 0).config.num_clients == 7
    assert session_of(json.dumps({"method": "fedavg"}), 6, 2, 0).config.num_clients == 6
