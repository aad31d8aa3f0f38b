"""A client's keys: one at a time, an old one ends when the new one is in, and a revoked one never comes back."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from client_app.session import session_of
from deploy import certificates, cluster, joining, lifecycle, superlink_nodes
from deploy.cluster import Cluster
from deploy.superlink_nodes import public_bytes
from fl_app.errors import UserError
from fl_app.privacy.keyring import PEERS
from tests.conftest import Command
from tests.deploy.test_joining import lab


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
