"""`corolla cluster keys`: what the certificates say, who may read the files, and that nothing is overwritten."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from deploy import certificates, inventory
from deploy.cluster import up
from deploy.inventory import Inventory
from fl_app.errors import UserError


def cluster(tmp_path: Path, address: str = "lab.example.org", nodes: int = 2, **superlink: Any) -> Inventory:
    raw = {
        "superlink": {"fleet-address": address, "names": ["10.0.0.7", "server"], **superlink},
        "hosts": [{"host": "local", "supernodes": nodes}], "keys": str(tmp_path / "keys"),
    }  # fmt: skip
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
    ca, server = (x509.load_pem_x509_certificate((tmp_path / "keys" / n).read_bytes()) for n in ("ca.crt", "server.crt"))
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
    private, public = ["ca.key", "server.key"], ["ca.crt", "server.crt"]
    private += ["supernode-0.key", "supernode-1.key"]
    public += ["supernode-0.pub", "supernode-1.pub"]
    assert modes == dict.fromkeys(private, 0o600) | dict.fromkeys(public, 0o644)


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(UserError, match="closed to others .mode 700., it is 755"):
        certificates.make(cluster(tmp_path))
    assert list((tmp_path / "keys").iterdir()) == []


def contents(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    certificates.make(cluster(tmp_path))
    before = contents(tmp_path)
    assert certificates.make(cluster(tmp_path)) == []
    assert contents(tmp_path) == before
    added = certificates.make(cluster(tmp_path, nodes=3))
    assert sorted(path.name for path in added) == ["supernode-2.key", "supernode-2.pub"]
    assert before.items() <= contents(tmp_path).items()
    certificates.make(cluster(tmp_path), force=True)
    assert not any(contents(tmp_path)[name] == content for name, content in before.items())


def test_a_certificate_for_other_names_is_refused_with_the_way_out(tmp_path: Path) -> None:
    certificates.make(cluster(tmp_path))
    other = cluster(tmp_path, address="new.example.org")
    for act in (certificates.make, certificates.check):
        with pytest.raises(UserError, match="server.crt is not for new.example.org but for .*make it anew: remove server.crt"):
            act(other)
    for name in ("server.crt", "server.key"):
        (tmp_path / "keys" / name).unlink()
    certificates.make(other)  # the same CA: nodes need nothing new
    certificates.check(other)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no ca.crt, server.crt, server.key, supernode-0.key, supernode-0.pub, ..."):
        certificates.check(cluster(tmp_path))
    certificates.make(cluster(tmp_path))
    foreign = inventory.parse(
        {"superlink": {"fleet-address": "lab"}, "hosts": [{"host": "local"}], "keys": str(tmp_path / "other")}, "x", tmp_path
    )
    certificates.make(foreign)
    (tmp_path / "keys" / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    with pytest.raises(UserError, match="was not signed by"):
        certificates.check(cluster(tmp_path))
    (tmp_path / "keys" / "ca.crt").unlink()
    with pytest.raises(UserError, match="ca.crt is missing beside files made with it"):
        certificates.make(cluster(tmp_path))


def test_an_expired_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_SERVER_DAYS", 0)
    with pytest.raises(UserError, match="server.crt expired on"):
        certificates.make(cluster(tmp_path))


@pytest.mark.parametrize(("name", "mode"), [("server.key", 0o644), ("supernode-1.key", 0o640), ("ca.key", 0o602)])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    lab = cluster(tmp_path)
    certificates.make(lab)
    certificates.check(lab)
    (tmp_path / "keys" / name).chmod(mode)
    with pytest.raises(UserError, match=f"{name} must be its owner's alone \\(mode 600\\), it is {mode:o}"):
        certificates.check(lab)
    (tmp_path / "keys" / name).chmod(0o400)
    certificates.check(lab)


def test_up_refuses_an_open_key_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    lab = cluster(tmp_path)
    certificates.make(lab)
    (tmp_path / "keys" / "supernode-0.key").chmod(0o604)
    with pytest.raises(UserError, match="it is 604"):
        up(lab, print, 1)
    assert not (tmp_path / "state").exists()
