"""A site that joins by itself: its key stays, its public half is taken in, the invitation is what its SuperNode needs."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from deploy import certificates, inventory, joining, node_cli
from deploy.inventory import Inventory
from fl_app.errors import DeploymentError, UserError
from fl_app.privacy import pins
from fl_app.privacy.keyring import PEERS, open_keyring
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
