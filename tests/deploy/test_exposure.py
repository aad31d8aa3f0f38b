"""A SuperLink whose control API other machines reach is named before a run is sent to it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import connection
from fl_app.errors import DeploymentError, UserError
from tests.facts import rejected


class Answers(http.server.BaseHTTPRequestHandler):
    status = 415
    # of SuperNodes' calls: this port has none, or they need a key
    fleet = 401

    def do_POST(self) -> None:
        assert self.path in ("/v1/control/list-runs", "/v1/fleet/get-run")
        self.send_response(self.fleet if "fleet" in self.path else self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """A SuperLink of a newer Flower at all addresses of this machine, and a connection to it over loopback."""
    monkeypatch.setattr(connection, "serves_grpc", lambda version: False)
    monkeypatch.setattr(Answers, "status", 415)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = server.server_address[1]
        lines = ["[superlink.lab]", f'address = "127.0.0.1:{found}"', "insecure = true", "[superlink.other]"]
        (tmp_path / "config.toml").write_text("\n".join([*lines, f'address = "127.0.0.3:{found}"', ""]))
        yield found
        server.shutdown()


def test_a_superlink_that_others_reach_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "own_addresses", lambda: ["127.0.0.2"])
    with rejected(DeploymentError, "--superlink lab", "at 127.0.0.2", f"port {port}", "run code", "every node"):
        connection.require_closed("lab")
    # one that answers on loopback alone
    monkeypatch.setattr(connection, "own_addresses", list)
    connection.require_closed("lab")
    connection.require_closed("none")


def test_a_connection_past_loopback_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "is_loopback", lambda host: host == "127.0.0.1")
    monkeypatch.setattr(connection, "address_of", lambda name: ("127.0.0.3", port, False))
    with pytest.raises(UserError, match="at 127.0.0.3"):
        connection.require_closed("other")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_guard_or_a_login_is_closed(port: int, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(connection, "own_addresses", lambda: ["127.0.0.2"])
    monkeypatch.setattr(Answers, "status", status)
    connection.require_closed("lab")


def test_a_superlink_with_a_port_for_supernodes_is_left_alone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This Flower is one with two ports, and the SuperLink's may be newer."""
    monkeypatch.setattr(connection, "own_addresses", lambda: ["127.0.0.2"])
    monkeypatch.setattr(connection, "serves_grpc", lambda version: True)
    with pytest.raises(UserError, match="at 127.0.0.2"):
        connection.require_closed("lab")
    monkeypatch.setattr(Answers, "fleet", 404)
    connection.require_closed("lab")


def test_own_addresses_are_addresses_of_others_networks() -> None:
    for text in connection.own_addresses():
        assert not text.startswith("127.") and text != "::1"
    assert connection.answer("/v1/control/list-runs", "127.0.0.1", 1, secure=True, seconds=1) is None
