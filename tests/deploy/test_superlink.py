"""The fleet port of a newer Flower's SuperLink: what may pass, probed over real sockets, and what ends the start."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from deploy import superlink
from fl_app.errors import DeploymentError
from fl_app.processes import free_ports
from tests.conftest import wait_for
from tests.facts import rejected

PATH = "/v1/fleet/get-run"


async def flower(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with 200 and its path, as Flower's application would answer some."""
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"].removeprefix("lifespan.")
            await send({"type": f"lifespan.{kind}.complete"})
            if kind == "shutdown":
                return
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    body = scope["path"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Serve the application as a guarded Flower would. Return the ports of the fleet and of Flower's own server."""
    fleet, own = free_ports(2)
    servers: list[uvicorn.Server] = []

    class Server(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    module = SimpleNamespace(uvicorn=SimpleNamespace(run=uvicorn.run, Config=uvicorn.Config, Server=Server))
    superlink.guard(module, ("127.0.0.1", fleet))
    run = {"app": flower, "host": "127.0.0.1", "port": own, "workers": 1, "reload": False, "log_level": "warning"}
    thread = threading.Thread(target=lambda: module.uvicorn.run(**run))
    thread.start()
    wait_for(lambda: servers and servers[0].started, 20)
    yield fleet, own
    servers[0].should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def answer(port: int, request: bytes) -> int:
    """Send bytes to a port. Return the status of the answer, 0 if there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(request)
        got = b""
        with contextlib.suppress(OSError):
            while b"\r\n" not in got and (more := sock.recv(4096)):
                got += more
    return int(got.split()[1]) if got else 0


def request(method: str, path: str, *headers: str, length: str | None = "0") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: lab", *headers, *([f"Content-Length: {length}"] if length else [])]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_supernodes_pass(ports: tuple[int, int]) -> None:
    for call in ("activate-node", "send-node-heartbeat", "pull-messages", "get-run", "push-object"):
        assert answer(ports[0], request("POST", f"/v1/fleet/{call}")) == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-runs", "/v1%2fcontrol/list-runs", "/v1/fleet/../control/list-runs", "//v1/fleet/get-run",
        "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/%2e%2e%2fcontrol/list-runs", "/v1/fleet/get-run/",
        "/v1/fleet/get-run;x", "/v1/fleet/get-run?x=1", "/v1/fleet/get-run%00", "/v1/fleet/get-run%0d%0a", "/v1/fleet/",
        "/V1/fleet/get-run", "/v1/fleet/get_run", "/v1/runtime/acquire-task", "/health", "/docs", "/openapi.json", "/",
        "http://lab/v1/control/list-runs", "/./v1/fleet/get-run", "\\v1\\fleet\\get-run",
    ],
)  # fmt: skip
def test_other_paths_are_forbidden_at_the_fleet_port_alone(ports: tuple[int, int], path: str) -> None:
    assert answer(ports[0], request("POST", path)) in (400, 403)
    if not path.startswith(("http", "\\")):
        assert answer(ports[1], request("POST", path)) == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_forbidden(ports: tuple[int, int], method: str) -> None:
    assert answer(ports[0], request(method, PATH)) == 403


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("POST", PATH, length=None), {403}),
        (request("POST", PATH, "Transfer-Encoding: chunked", length=None) + b"0\r\n\r\n", {403}),
        (request("POST", PATH, "Transfer-Encoding: chunked") + b"0\r\n\r\n", {400, 403}),
        (request("POST", PATH, length=str(superlink.MOST_BYTES + 1)), {413}),
        (request("POST", PATH, length="-1"), {400, 403}),
        (request("POST", PATH, length="1e3"), {400, 403}),
        (request("POST", PATH, "Content-Length: 3"), {400, 403}),
        (request("POST", "/v1/control/list-runs", "X-Forwarded-Port: 8000", "X-Forwarded-Host: 127.0.0.1"), {403}),
        (request("POST", "/v1/control/list-runs", "X-Original-URL: /v1/fleet/get-run"), {403}),
        (b"POST /v1/control/list-runs HTTP/1.0\r\nContent-Length: 0\r\n\r\n", {403}),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {0, 400, 403}),
    ],
)
def test_odd_requests_are_refused(ports: tuple[int, int], sent: bytes, status: set[int]) -> None:
    assert answer(ports[0], sent) in status


def test_a_request_after_another_is_judged_by_itself(ports: tuple[int, int]) -> None:
    both = request("POST", PATH) + request("POST", "/v1/control/list-runs")
    with socket.create_connection(("127.0.0.1", ports[0]), timeout=10) as sock:
        sock.sendall(both)
        got = b""
        with contextlib.suppress(OSError):
            while got.count(b"HTTP/1.1 ") < 2 and (more := sock.recv(4096)):
                got += more
    assert got.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 403" in got and b"list-runs" not in got


@given(st.binary(max_size=60))
def test_nothing_but_fleet_paths_passes(path: bytes) -> None:
    scope = {"method": "POST", "raw_path": path, "query_string": b"", "headers": [(b"content-length", b"0")]}
    parts = path.split(b"/")
    fleet = parts[:3] == [b"", b"v1", b"fleet"] and len(parts) == 4 and parts[3].replace(b"-", b"a").isalpha()
    assert (superlink.refused(scope) == 0) == (fleet and parts[3] == parts[3].lower())


def test_a_connection_without_a_port_is_the_fleets() -> None:
    async def never(*_: Any) -> None:
        raise AssertionError

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    guarded = superlink.FleetOnly(never, 9092)
    for server in (None, ("/run/socket", None), ("10.0.0.1", 9092)):
        for scope in (
            {"type": "http", "method": "GET", "raw_path": b"/health", "query_string": b"", "headers": []},
            {"type": "websocket"},
        ):
            with contextlib.suppress(StopIteration):
                guarded({**scope, "server": server}, never, send).send(None)
    assert [message.get("status", message.get("code")) for message in sent] == [403, None, 1008] * 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "server.example.org", "None"])
def test_flowers_own_server_stays_on_loopback(host: str) -> None:
    (port,) = free_ports(1)
    module = SimpleNamespace(uvicorn=uvicorn)
    superlink.guard(module, ("127.0.0.1", port))
    with rejected(DeploymentError, "--host", "Flower's control", "stay on loopback"):
        module.uvicorn.run(app=flower, host=host, port=0)
    with pytest.raises(OSError):  # nothing listens
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.parametrize(
    "module", [SimpleNamespace(), SimpleNamespace(uvicorn=None), SimpleNamespace(uvicorn=object())]
)
def test_a_flower_without_the_place_does_not_start(module: Any) -> None:
    with rejected(DeploymentError, "flwr 1.39.0", "SuperLink cannot be", "guarded", "uvicorn.run"):
        superlink.guard(module, ("127.0.0.1", 1))


@pytest.mark.parametrize("options", [{"workers": 4}, {"reload": True}, {"uds": "/run/s"}, {"fd": 3}])
def test_an_unknown_way_to_start_is_refused(options: dict[str, Any]) -> None:
    module = SimpleNamespace(uvicorn=uvicorn)
    superlink.guard(module, ("127.0.0.1", free_ports(1)[0]))
    with rejected(DeploymentError, "flwr 1.39.0", "not known here"):
        module.uvicorn.run(app=flower, host="127.0.0.1", **options)


def test_addresses() -> None:
    assert superlink.address("0.0.0.0:9092") == ("0.0.0.0", 9092)
    assert superlink.address("[::]:9092") == ("::", 9092) and superlink.address("lab:1") == ("lab", 1)
    for wrong in ("9092", "lab:", "lab:0", "lab:65536", ":9092", "lab:x", "[::", "[:9092"):
        with rejected(DeploymentError, "--fleet", "must be HOST:PORT"):
            superlink.address(wrong)
    with rejected(DeploymentError, "--fleet-api-address", "--fleet names", "address of SuperNodes"):
        superlink.run("lab:9092", ["--fleet-api-address=0.0.0.0:9092"])


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with rejected(DeploymentError, "--fleet", "cannot listen on 127.0.0.1", f"port {port}", "in use"):
            superlink.listening("127.0.0.1", port)


def test_which_versions_serve_grpc() -> None:
    found = [superlink.serves_grpc(version) for version in ("1.39.0", "1.39.2", "1.40.0", "1.42.0", "2.0")]
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize("variable", ["FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"])
def test_variables_that_open_ports_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    with rejected(DeploymentError, variable, "opens a port", "not guarded", "unset it"):
        superlink.run("127.0.0.1:9092", [])


def test_requests_are_no_lines_of_the_log() -> None:
    from flwr.supercore.http_logging import get_uvicorn_log_config

    settings = superlink.without_access(get_uvicorn_log_config(20))
    assert settings["loggers"]["uvicorn.access"]["level"] == "WARNING" and settings["loggers"]["uvicorn"]["level"] == 20
