"""An expired certificate is named by `corolla run` too, where Flower speaks of the network."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from corolla.api import runs
from deploy import certificates, inventory
from deploy.connection import bad_certificate
from fl_app.errors import UserError
from fl_app.processes import free_ports


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[inventory.Inventory]:
    """Yield a cluster whose control port is served, with an expired certificate, and is in Flower's config as `lab`."""
    raw = {"hosts": [{"host": "local"}], "tls": True, "keys": str(tmp_path / "keys")}
    lab = inventory.parse(raw, "lab", tmp_path)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="server.crt expired on"):
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

    monkeypatch.setattr(runs, "run_one", refused)
    with pytest.raises(UserError, match="superlink lab: .* certificate has expired; .*`corolla cluster keys --renew"):
        runs.run_deployed({}, "lab", False)


def test_nobody_shows_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(f'[superlink.lab]\naddress = "127.0.0.1:{free_ports(1)[0]}"\n')
    assert bad_certificate("lab") == ""
