"""`corolla cluster keys`: what the certificates say, who may read the files, and that nothing is overwritten."""

from __future__ import annotations

import dataclasses
import datetime
import http.server
import os
import re
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.cli.supernode.register import try_load_public_key

from corolla.api import one_run
from deploy import certificates, inventory, superlink_nodes
from deploy.cluster import Cluster
from deploy.connection import address_of, bad_certificate
from deploy.inventory import Inventory
from deploy.lifecycle import restart, up
from deploy.prometheus import Exporter, Watched
from deploy.superlink_nodes import public_bytes, revoke
from fl_app.errors import DeploymentError, UserError
from fl_app.processes import free_ports
from tests.facts import mentions, rejected


def cluster(tmp_path: Path, address: str = "lab.example.org", nodes: int = 2, **superlink: Any) -> Inventory:
    raw = {
        "superlink": {"fleet-address": address, "names": ["10.0.0.7", "server"], **superlink},
        "hosts": [{"host": "local", "supernodes": nodes}],
        "keys": str(tmp_path / "keys"),
    }
    return inventory.parse(raw, "lab", tmp_path)


def test_the_certificate_names_every_way_to_the_superlink(tmp_path: Path) -> None:
    certificates.make(cluster(tmp_path, host="user@box", python="/p", **{"fleet-address": "fd00::2"}))
    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"server", "box", "localhost"}
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {"fd00::2", "10.0.0.7", "127.0.0.1", "::1"}
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_ca_signed_it_and_only_it_may_sign(tmp_path: Path) -> None:
    certificates.make(cluster(tmp_path))
    ca, server = (
        x509.load_pem_x509_certificate((tmp_path / "keys" / n).read_bytes()) for n in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(ca)
    ca.verify_directly_issued_by(ca)
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert ca.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_supernode_keys_are_p384_pairs_as_flower_reads_them(tmp_path: Path) -> None:
    certificates.make(cluster(tmp_path))
    publics = set()
    for k in range(2):
        private = serialization.load_ssh_private_key((tmp_path / "keys" / f"supernode-{k}.key").read_bytes(), None)
        public = serialization.load_ssh_public_key((tmp_path / "keys" / f"supernode-{k}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        publics.add((tmp_path / "keys" / f"supernode-{k}.pub").read_bytes())
    assert len(publics) == 2


def test_private_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        certificates.make(cluster(tmp_path))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()}
    private, public = [".gitignore", "ca.key", "server.key"], ["ca.crt", "server.crt"]
    private += ["supernode-0.key", "supernode-1.key", "supernode-0.x25519", "supernode-1.x25519"]
    public += ["supernode-0.pub", "supernode-1.pub", "peers.txt"]
    assert modes == dict.fromkeys(private, 0o600) | dict.fromkeys(public, 0o644)


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    (tmp_path / "keys").chmod(0o755)
    with rejected(DeploymentError, "keys", "closed to others", "mode 700", "it is 755"):
        certificates.make(cluster(tmp_path))
    assert list((tmp_path / "keys").iterdir()) == []


def test_git_takes_none_of_them(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    certificates.make(cluster(tmp_path))
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    listed = subprocess.run(["git", "ls-files"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "key" not in listed


def contents(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tmp_path / "keys").glob("[!.]*")}


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    certificates.make(cluster(tmp_path))
    before = contents(tmp_path)
    assert certificates.make(cluster(tmp_path)) == []
    assert contents(tmp_path) == before
    added = certificates.make(cluster(tmp_path, nodes=3))
    assert sorted(path.name for path in added) == ["supernode-2.key", "supernode-2.pub", "supernode-2.x25519"]
    before.pop("peers.txt")  # has one more
    assert before.items() <= contents(tmp_path).items()
    certificates.make(cluster(tmp_path), force=True)
    assert not any(contents(tmp_path)[name] == content for name, content in before.items())


def test_a_certificate_for_other_names_is_refused_with_the_way_out(tmp_path: Path) -> None:
    certificates.make(cluster(tmp_path))
    other = cluster(tmp_path, address="new.example.org")
    for act in (certificates.make, certificates.require_usable):
        with rejected(
            DeploymentError, "keys", "server.crt is not", "for new.example.org", "`corolla cluster keys", "--renew"
        ):
            act(other)
    before = contents(tmp_path)
    assert {path.name for path in certificates.renew(other)} == {"server.crt", "server.key"}
    certificates.require_usable(other)
    changed = {name for name, content in contents(tmp_path).items() if content != before[name]}
    # the same CA: nodes need nothing new
    assert changed == {"server.crt", "server.key"}


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with rejected(
        DeploymentError, "keys", "has no ca.crt", "server.crt", "server.key", "supernode-0.key", "supernode-0.pub"
    ):
        certificates.require_usable(cluster(tmp_path))
    certificates.make(cluster(tmp_path))
    foreign = inventory.parse(
        {"superlink": {"fleet-address": "lab"}, "hosts": [{"host": "local"}], "keys": str(tmp_path / "other")},
        "x",
        tmp_path,
    )
    certificates.make(foreign)
    (tmp_path / "keys" / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    with rejected(DeploymentError, "keys", "not signed"):
        certificates.require_usable(cluster(tmp_path))
    (tmp_path / "keys" / "ca.crt").unlink()
    with rejected(DeploymentError, "keys", "ca.crt is missing", "files made"):
        certificates.make(cluster(tmp_path))


class Killed(BaseException):
    """The end of a process between two files."""


def test_keys_are_whole_again_after_a_kill_at_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, real = cluster(tmp_path), os.replace
    certificates.make(lab)
    for name in [name for name in sorted(contents(tmp_path)) if name.startswith("supernode")]:
        for path in (tmp_path / "keys").glob("supernode*"):
            path.unlink()

        def replace(old: Path, new: Path, last: str = name) -> None:
            real(old, new)
            if new.name == last:
                raise Killed

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            certificates.make(lab)
        monkeypatch.setattr(os, "replace", real)
        certificates.make(lab)
        for k in range(2):
            assert certificates.statement_in(tmp_path / "keys" / f"supernode-{k}.pub")


def test_keys_and_certificates_of_two_makings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    keys = tmp_path / "keys"
    before = {name: (keys / name).read_bytes() for name in contents(tmp_path)}
    certificates.make(lab, force=True)
    for name, expected in (
        ("server.key", "server.key does not belong to server.crt; .*--renew"),
        ("ca.key", "ca.key does not belong to ca.crt; put the right one back"),
        ("supernode-1.pub", "supernode-1.key does not belong to supernode-1.pub; `corolla cluster keys CLUSTER.yaml`"),
    ):
        now = (keys / name).read_bytes()
        (keys / name).write_bytes(before[name])
        with pytest.raises(UserError, match=expected):
            certificates.require_usable(lab)
        (keys / name).write_bytes(now)
    certificates.require_usable(lab)
    # what the errors tell to do
    (keys / "server.key").write_bytes(before["server.key"])
    certificates.renew(lab)
    (keys / "supernode-1.pub").write_bytes(before["supernode-1.pub"])
    assert [path.name for path in certificates.make(lab)] == ["supernode-1.pub"]
    (keys / "server.key").unlink()
    assert {path.name for path in certificates.make(lab)} == {"server.crt", "server.key"}
    # nothing is signed by the wrong key
    (keys / "ca.key").write_bytes(before["ca.key"])
    server = (keys / "server.crt").read_bytes()
    with rejected(DeploymentError, "keys", "ca.key does not", "belong to ca.crt"):
        certificates.renew(lab)
    assert (keys / "server.crt").read_bytes() == server


def test_a_cluster_starts_without_the_authoritys_key(tmp_path: Path) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    path = tmp_path / "keys" / "ca.key"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(*kinds, serialization.BestAvailableEncryption(b"secret")))
    certificates.require_usable(lab)
    with rejected(UserError, "", "ca.key", "none is asked", "store the key", "without one"):
        certificates.renew(lab)
    path.unlink()
    certificates.require_usable(lab)


def later(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Let certificates be looked at some days from now."""
    then = certificates.now() + datetime.timedelta(days=days)
    monkeypatch.setattr(certificates, "now", lambda: then)


def test_an_expired_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    for days, name in ((826, "server.crt"), (3651, "ca.crt")):
        with monkeypatch.context() as patch:
            later(patch, days)
            with rejected(
                DeploymentError, "keys", f"{name} expired on 20", "`corolla cluster", "--renew CLUSTER.yaml`"
            ):
                certificates.require_usable(lab)
            assert any(f"{name} expired on" in warning for warning in certificates.expiry_warnings(lab))


def test_a_month_before_the_end_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    assert certificates.expiry_warnings(lab) == []
    later(monkeypatch, 825 - 31)
    assert certificates.expiry_warnings(lab) == []
    later(monkeypatch, 2.5)
    certificates.require_usable(lab)
    (warning,) = certificates.expiry_warnings(lab)
    assert re.search(
        "^warning: keys: .*server.crt expires on 20..-..-.., in 28 days; `corolla cluster keys --renew", warning
    )
    certificates.renew(lab)
    monkeypatch.undo()
    assert certificates.expiry_warnings(lab) == []


def test_renewing_near_the_end_of_the_ca_keeps_its_key_and_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = cluster(tmp_path)
    monkeypatch.setattr(certificates, "_CA_DAYS", 20)
    certificates.make(lab)
    ca, server = (certificates.read_certificate(tmp_path / "keys" / name) for name in ("ca.crt", "server.crt"))
    assert server.not_valid_after_utc <= ca.not_valid_after_utc
    assert len(certificates.expiry_warnings(lab)) == 2
    monkeypatch.setattr(certificates, "_CA_DAYS", 3650)
    before = contents(tmp_path)
    assert {path.name for path in certificates.renew(lab)} == {"ca.crt", "server.crt", "server.key"}
    assert certificates.expiry_warnings(lab) == []
    # nodes with the old ca.crt go on until its end
    certificates.read_certificate(tmp_path / "keys" / "server.crt").verify_directly_issued_by(ca)
    assert all(
        contents(tmp_path)[name] == before[name] for name in before if name.startswith("supernode") or name == "ca.key"
    )


def test_renewing_needs_the_ca(tmp_path: Path) -> None:
    lab = cluster(tmp_path)
    with rejected(DeploymentError, "keys", "has no ca.crt", "`corolla cluster", "CLUSTER.yaml` makes everything"):
        certificates.renew(lab)
    certificates.make(lab)
    (tmp_path / "keys" / "ca.key").unlink()
    with rejected(DeploymentError, "keys", "ca.key", "No such file"):
        certificates.renew(lab)
    (tmp_path / "keys" / "ca.crt").write_text("no certificate")
    with rejected(DeploymentError, "keys", "ca.crt", "certificate"):
        certificates.require_usable(lab)


@pytest.mark.parametrize(("name", "mode"), [("server.key", 0o644), ("supernode-1.key", 0o640), ("ca.key", 0o602)])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    certificates.require_usable(lab)
    (tmp_path / "keys" / name).chmod(mode)
    with rejected(DeploymentError, "", name, "owner's alone (mode 600)", f"it is {mode:o}"):
        certificates.require_usable(lab)
    (tmp_path / "keys" / name).chmod(0o400)
    certificates.require_usable(lab)


def test_up_refuses_an_open_key_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    lab = cluster(tmp_path)
    certificates.make(lab)
    (tmp_path / "keys" / "supernode-0.key").chmod(0o604)
    with pytest.raises(UserError, match="it is 604"):
        up(lab, print, 1)
    assert not (tmp_path / "state").exists()


def test_restart_refuses_an_open_key_before_anything_is_ended(tmp_path: Path) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    running = Cluster(lab, "token", str(tmp_path / "config.toml"), "now")
    for name in ("supernode-1.key", "server.key"):
        (tmp_path / "keys" / name).chmod(0o640)
        with rejected(DeploymentError, "", name, "owner's alone", "it is 640"):
            restart(running, "supernode-1", print, 1)
        (tmp_path / "keys" / name).chmod(0o600)


def test_revoking_names_what_there_is(tmp_path: Path) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    running = Cluster(lab, "token", str(tmp_path / "config.toml"), "now")
    with rejected(DeploymentError, "client 2", "cluster lab", "clients 0", "1"):
        revoke(running, 2)
    assert public_bytes(tmp_path / "keys" / "supernode-0.pub") == try_load_public_key(
        tmp_path / "keys" / "supernode-0.pub"
    )
    (tmp_path / "keys" / "supernode-1.pub").unlink()
    with rejected(DeploymentError, "client 1", "there is no", "supernode-1.pub", "revoked before"):
        revoke(running, 1)


@pytest.mark.parametrize("last", [".key", ".pub"])
def test_a_revoked_key_does_not_come_back_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    public = tmp_path / "keys" / "supernode-1.pub"
    revoked, real = public_bytes(public), Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        real(path, missing_ok)
        if path.name == f"supernode-1{last}":
            raise Killed

    monkeypatch.setattr(superlink_nodes, "list_nodes", lambda _: [])
    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(Killed):
        revoke(Cluster(lab, "token", str(tmp_path / "config.toml"), "now"), 1)
    monkeypatch.setattr(Path, "unlink", real)
    certificates.make(lab)
    assert public_bytes(public) != revoked


# An expired certificate is named by `corolla run` too, where Flower speaks of the network -----------------------------


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[inventory.Inventory]:
    """Yield a cluster whose control port is served, with an expired certificate, and is in Flower's config as `lab`."""
    raw = {"hosts": [{"host": "local"}], "tls": True, "keys": str(tmp_path / "keys")}
    lab = inventory.parse(raw, "lab", tmp_path)
    with monkeypatch.context() as patch, rejected(DeploymentError, "keys", "server.crt expired on"):
        patch.setattr(certificates, "_SERVER_DAYS", 0)
        certificates.make(lab)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "keys" / "server.crt", tmp_path / "keys" / "server.key")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    text = (
        f'[superlink.lab]\naddress = "127.0.0.1:{server.server_port}"\nroot-certificates = "{tmp_path}/keys/ca.crt"\n'
    )
    (tmp_path / "config.toml").write_text(text)
    yield lab
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_expired_certificate_is_told_from_a_network_that_does_not_work(
    shown: inventory.Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bad_certificate("lab") == "certificate has expired"
    assert bad_certificate("none") == ""

    def refused(*arguments: object) -> None:
        raise UserError("Flower did not accept the run:\nConnection to the SuperLink is unavailable.")

    monkeypatch.setattr(one_run, "run_one", refused)
    with rejected(UserError, "", "superlink lab", "certificate has expired", "`corolla cluster keys"):
        one_run.run_deployed({}, "lab", False)


def test_nobody_shows_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(f'[superlink.lab]\naddress = "127.0.0.1:{free_ports(1)[0]}"\n')
    assert bad_certificate("lab") == ""


def lasting(directory: Path, seconds: float, patch: pytest.MonkeyPatch) -> inventory.Inventory:
    """Return a cluster whose server certificate ends in so many seconds."""
    lab = inventory.parse(
        {"hosts": [{"host": "local"}], "tls": True, "keys": str(directory / "keys")}, "lab", directory
    )
    with patch.context() as days:
        days.setattr(certificates, "_SERVER_DAYS", seconds / 86400)
        certificates.make(lab)
    return lab


@pytest.mark.parametrize(
    "days, stage, words",
    [
        (15, 0, "in 15 days"),
        (13.5, 1, "in 13 days"),
        (1.9, 2, "in 45 hours"),
        (0.03, 3, "in 43 minutes"),
        (-1, 4, "expired on"),
    ],
)
def test_a_certificates_end_is_near_in_steps(
    days: float, stage: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(tmp_path, 20 * 86400, monkeypatch)
    certificate = certificates.read_certificate(tmp_path / "keys" / "server.crt")
    then = certificate.not_valid_after_utc - datetime.timedelta(days=days)
    monkeypatch.setattr(certificates, "now", lambda: then)
    assert certificates.stage(certificate) == stage and words in certificates.expiry_warning(certificate)
    path = tmp_path / "keys" / "server.crt"
    exporter = Exporter(Watched(tmp_path, {"address": "127.0.0.1:1", "insecure": True}, certificates=[path]))
    assert exporter.samples()["certificate_stage"] == {("server.crt",): stage}


def test_all_certificates_of_a_file_are_watched_also_those_of_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lasting(tmp_path, 20 * 86400, monkeypatch)
    both, short = tmp_path / "both.crt", tmp_path / "keys" / "server.crt"
    both.write_bytes((tmp_path / "keys" / "ca.crt").read_bytes() + short.read_bytes())
    end = certificates.read_certificate(short).not_valid_after_utc
    monkeypatch.setattr(certificates, "now", lambda: end + datetime.timedelta(days=1))
    done = threading.Event()

    def once(seconds: float) -> None:
        done.set()
        threading.Event().wait()

    certificates.watch([both], once)
    assert done.wait(30) and f"{both}, number 2 expired on" in caplog.text
    begin = certificates.read_certificate(short).not_valid_before_utc
    monkeypatch.setattr(certificates, "now", lambda: begin - datetime.timedelta(days=1))
    assert mentions(certificates.expiry_warning(certificates.read_certificate(short)), "not valid before")
    caplog.clear()
    certificates.watch([short], once)
    assert mentions(caplog.text, f"{short} is not valid", "before")


def test_each_step_has_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lasting(tmp_path, 20 * 86400, monkeypatch)
    path = tmp_path / "keys" / "server.crt"
    end = certificates.read_certificate(path).not_valid_after_utc
    left = iter([480.0, 336, 335, 47, 46, 0.9, 0.5, -1])
    clock = [next(left)]
    monkeypatch.setattr(certificates, "now", lambda: end - datetime.timedelta(hours=clock[0]))
    done = threading.Event()

    def sleep(seconds: float) -> None:
        clock[0] = next(left, -1.0)
        if clock[0] < 0:
            done.set()

    options = ["--ssl-certfile", str(path), "--ssl-ca-certfile", str(tmp_path / "none"), "--insecure"]
    others = set(threading.enumerate())  # those of other tests never end
    certificates.watch(certificates.named_by(options), sleep)
    assert done.wait(30)
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
    told = [record.getMessage() for record in caplog.records if "server.crt" in record.getMessage()]
    assert len(told) == 4
    for text, words in zip(told, ("in 14 days", "in 47 hours", "in 54 minutes", "expired on"), strict=True):
        assert words in text


def test_a_renewed_certificate_does_not_hide_the_one_that_is_shown(
    shown: inventory.Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = address_of("lab")[1]  # type: ignore[index]
    running = dataclasses.replace(shown, superlink=dataclasses.replace(shown.superlink, control_port=port))
    assert certificates.shown_warnings(running) == []
    certificates.renew(running)
    assert certificates.expiry_warnings(running) == []
    (warning,) = certificates.shown_warnings(running)
    assert mentions(warning, "SuperLink shows a certificate", "expired")
