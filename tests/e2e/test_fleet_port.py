"""What another machine reaches of a SuperLink: its fleet port, and there SuperNodes' calls alone.

The SuperLink lives in one network namespace, with the command line of `corolla cluster up`, TLS and node authentication. The
other machine is another namespace at the end of a cable. Each test takes the Flower of this Python, and that of COROLLA_NEXT.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy import certificates, commands, inventory
from deploy.superlink import MOST_BYTES, serves_grpc
from fl_app.exit_codes import BAD_INPUT
from fl_app.processes import end_processes, flower_environment, free_ports, processes_with
from fl_app.transport.app_bundle import APP_DIRECTORY
from tests.e2e.conftest import wait_for
from tests.e2e.network import Network, inside, listeners

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NEXT = os.environ.get("COROLLA_NEXT", "")
NO_NEXT = pytest.mark.skipif(not NEXT, reason="COROLLA_NEXT names no Python with a newer Flower")
PYTHONS = [pytest.param(sys.executable, id="this"), pytest.param(NEXT, id="next", marks=NO_NEXT)]
PROTOBUF = "Content-Type: application/protobuf"
LIST_RUNS = "/v1/control/list-runs"
SUPERNODES_CALLS = (
    "register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat", "pull-messages",
    "push-messages", "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip

# sends each request of a list in a connection of its own; prints what came back until the other side closed
SEND = """
import json, socket, ssl, sys
address, port, context, answers = sys.argv[1], int(sys.argv[2]), ssl._create_unverified_context(), []
for secure, sent in json.load(sys.stdin):
    got = b""
    try:
        link = socket.create_connection((address, port), timeout=30)
        with context.wrap_socket(link) if secure else link as link:
            link.sendall(sent.encode("latin-1"))
            while more := link.recv(65536):
                got += more
    except OSError as error:
        got = got or type(error).__name__.encode()
    answers.append(got.decode("latin-1"))
print(json.dumps(answers))
"""
# asks for methods of Flower's gRPC services without a credential; prints the names of the status codes
CALL = """
import grpc, json, sys
address, ca, *methods = sys.argv[1:]
channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(open(ca, "rb").read()))
codes = []
for method in methods:
    try:
        channel.unary_unary(method)(b"", timeout=60, wait_for_ready=True)
        codes.append("OK")
    except grpc.RpcError as error:
        codes.append(error.code().name)
print(json.dumps(codes))
"""


def request(method: str, path: str, *headers: str, version: str = "1.1") -> str:
    lines = [f"{method} {path} HTTP/{version}", "Host: lab", PROTOBUF, "Connection: close", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append("Content-Length: 0")
    return "\r\n".join([*lines, "", ""])


def post(path: str, *headers: str) -> str:
    return request("POST", path, *headers)


KEPT = post("/v1/fleet/get-run").replace("Connection: close", "Connection: keep-alive")
# what was tried when the hole was found
FOUND = [
    post(LIST_RUNS), post("/v1/control/start-run"), post("/v1/control/register-node"), post("/v1/control/list-nodes"),
    post("/v1/runtime/acquire-task"), post("/v1/runtime/push-messages"), post("/health"), request("GET", "/health"),
    request("GET", "/docs"), request("GET", "/openapi.json"), post("/v1%2fcontrol/list-runs"),
    post("/v1/fleet/../control/list-runs"), post("/v1/fleet/%2e%2e/control/list-runs"),
    post("/v1/fleet/%2e%2e%2fcontrol/list-runs"), post("//v1/control/list-runs"), post("/v1//control/list-runs"),
    post("/v1/control/list-runs;/v1/fleet/get-run"), post("/v1/fleet/get-run?x=1"), post("https://lab/v1/control/list-runs"),
    request("GET", "/v1/fleet/get-run"), request("PUT", LIST_RUNS), request("OPTIONS", "*"), request("HEAD", "/health"),
    post(LIST_RUNS, "X-Forwarded-For: 127.0.0.1", "X-Forwarded-Port: 8000", "Forwarded: for=127.0.0.1;host=127.0.0.1"),
]  # fmt: skip
# ten kinds more
MORE = [
    # 1. a second request behind a SuperNode's, in the same bytes
    KEPT + post(LIST_RUNS),
    # 2. one hidden in the body of another, by two lengths that differ, or by a length beside chunks
    post("/v1/fleet/get-run", "Content-Length: 0", "Content-Length: 40") + post(LIST_RUNS),
    post("/v1/fleet/get-run", "Content-Length: 4", "Transfer-Encoding: chunked") + "0\r\n\r\n" + post(LIST_RUNS),
    post("/v1/fleet/get-run", "Transfer-Encoding: chunked") + "0\r\n\r\n" + post(LIST_RUNS),
    # 3. another path, method or host in a header
    post(LIST_RUNS, "X-Original-URL: /v1/fleet/get-run", "X-Rewrite-URL: /v1/fleet/get-run"),
    request("GET", LIST_RUNS, "X-HTTP-Method-Override: POST"),
    post(LIST_RUNS).replace("Host: lab", "Host: 127.0.0.1:8000"),
    # 4. another protocol
    request("GET", LIST_RUNS, "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
    request("GET", "/v1/fleet/get-run", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
    post(LIST_RUNS, "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    # 5. a tunnel
    request("CONNECT", "127.0.0.1:8000"), request("CONNECT", "lab:8000/v1/fleet/get-run"),
    # 6. the path decoded twice, or in more bytes than it needs
    post("/v1/fleet/%252e%252e/control/list-runs"), post("/v1/fleet/..%c0%af../control/list-runs"),
    post("/v1/fleet/..\\control\\list-runs"), post("/v1/fleet/get-run%00/../../control/list-runs"),
    # 7. letters that others would fold to these
    post("/V1/Fleet/get-run"), post("/v1/\xeflee\xf4/get-run"),
    # 8. old and broken forms of HTTP
    request("POST", LIST_RUNS, version="1.0"), "POST /v1/control/list-runs\r\n\r\n", f"GET {LIST_RUNS}\r\n\r\n",
    post("/v1/fleet/get-run", " folded: x").replace("HTTP/1.1", "HTTP/9.9"),
    post(LIST_RUNS).replace("\r\n", "\n"), f"\r\n\r\n{post(LIST_RUNS)}",
    # 9. sizes: more than a SuperNode sends, no number, below nothing
    *(post("/v1/fleet/push-object", f"Content-Length: {size}") for size in (MOST_BYTES + 1, "1e3", "-1", "+1", "0x10", "")),
    # 10. routes that Flower's application makes by itself
    request("GET", "/redoc"), request("GET", "/docs/oauth2-redirect"), post("/v1/fleet"), post("/v1/fleet/"),
    post("/v1/fleet/get-run/"), post("/metrics"), post("/"),
]  # fmt: skip


@dataclass
class Link:
    """A SuperLink in the network's server namespace, of a Python's Flower."""

    network: Network
    python: str
    directory: Path
    home: Path = field(init=False)
    environment: dict[str, str] = field(init=False)
    process: psutil.Popen = field(init=False)

    def __post_init__(self) -> None:
        self.home = self.directory / "flwr"
        self.home.mkdir()
        self.environment = flower_environment(self.home) | {"FLEET_PORT": str(self.directory)}
        self.environment["PATH"] = f"{Path(self.python).parent}{os.pathsep}{self.environment['PATH']}"
        self.fleet, self.control = free_ports(2)
        link = {"fleet-address": self.network.address, "fleet-port": self.fleet, "control-port": self.control}
        raw = {"superlink": link, "hosts": [{"host": "local", "supernodes": 1}]}
        self.inventory = inventory.parse(raw, "lab", self.directory)
        certificates.make(self.inventory)
        self.keys = Path(self.inventory.keys)
        # one over loopback, and one from another machine to the fleet's port
        addresses = {"lab": f"127.0.0.1:{self.control}", "far": f"{self.network.address}:{self.fleet}"}
        lines = [f'[superlink.{name}]\naddress = "{address}"' for name, address in addresses.items()]
        ca = f'root-certificates = "{self.keys / certificates.CA}"'
        (self.home / "config.toml").write_text("".join(f"{line}\n{ca}\n" for line in lines))

    @property
    def grpc(self) -> bool:
        code = "from importlib import metadata; print(metadata.version('flwr'))"
        found = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        return serves_grpc(found.stdout.strip())

    def start(self, command: Sequence[str], port: int) -> None:
        """Start it; return when the other machine can connect to a port of it."""
        log = self.directory / "superlink.log"
        with log.open("wb") as file:
            self.process = psutil.Popen(
                [*inside(self.network.server), *command],
                env=self.environment,
                cwd=APP_DIRECTORY,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        code = f"import socket; socket.create_connection(({self.network.address!r}, {port}), timeout=60)"
        words = [*inside(self.network.client), sys.executable, "-c", code]
        wait_for(
            lambda: self.process.poll() is not None or subprocess.run(words, capture_output=True).returncode == 0,
            every=0.5,
        )
        assert self.process.poll() is None, log.read_text()

    def start_as_the_launcher(self) -> None:
        place = commands.HostPlaces(str(self.directory), str(Path(self.python).parent), (), str(self.keys))
        _, *words = commands.superlink(self.inventory, place).command
        self.start([self.python, *words], self.fleet)

    def send(self, requests: Sequence[str], port: int, near: bool = False, secure: bool = True) -> list[str]:
        """Send requests from the other machine (near: over loopback on the SuperLink's). Return what came back."""
        address, place = ("127.0.0.1", self.network.server) if near else (self.network.address, self.network.client)
        words = [*inside(place), sys.executable, "-c", SEND, address, str(port)]
        asked = json.dumps([(secure, text) for text in requests])
        done = subprocess.run(words, input=asked, capture_output=True, text=True, check=True)
        answers: list[str] = json.loads(done.stdout)
        return answers

    def flwr(self, place: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Flower's own command in a namespace."""
        command = [*inside(place), str(Path(self.python).parent / "flwr"), *words]
        return subprocess.run(
            command, env=self.environment, cwd=self.directory, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    def stop(self) -> None:
        end_processes(processes_with(f"FLEET_PORT={self.directory}"))


@pytest.fixture
def link(network: Network, tmp_path: Path, request: Any) -> Iterator[Link]:
    made = Link(network, request.param, tmp_path)
    try:
        yield made
    finally:
        made.stop()


def statuses(answer: str) -> list[int]:
    return [int(text) for text in re.findall(r"^HTTP/1\.[01] (\d{3})", answer, re.MULTILINE)]


@pytest.mark.parametrize("link", PYTHONS, indirect=True)
def test_another_machine_reaches_supernodes_calls_alone(link: Link) -> None:
    link.start_as_the_launcher()
    outside = {port for (address, port) in listeners(f"FLEET_PORT={link.directory}") if not address.is_loopback}
    assert outside == {link.fleet}
    # what listens on loopback cannot be reached over the cable
    own = {port for _, port in listeners(f"FLEET_PORT={link.directory}")} - outside
    assert link.control in own
    assert {port: link.send([post(LIST_RUNS)], port) for port in own} == {
        port: ["ConnectionRefusedError"] for port in own
    }

    answers = link.send(FOUND + MORE, link.fleet)
    seen = [(sent, statuses(answer)) for sent, answer in zip(FOUND + MORE, answers, strict=True)]
    if link.grpc:
        # the port does not speak HTTP/1
        assert [text for text, found in seen if found] == []
    else:
        for sent, found in seen[: len(FOUND)]:
            assert found == [403], (sent, found)
        for sent, found in seen[len(FOUND) + 1 :]:
            assert found and set(found) <= {400, 403, 413}, (sent, found)
        assert seen[len(FOUND)][1] in ([401], [401, 403])
    [plain] = link.send([post(LIST_RUNS)], link.fleet, secure=False)
    assert statuses(plain) == []

    # SuperNodes' calls reach Flower, which asks for a key
    if link.grpc:
        methods = ["/flwr.proto.Control/ListRuns", "/flwr.proto.Control/StartRun", "/flwr.proto.ServerAppIo/GetNodes"]
        methods += ["/flwr.proto.Fleet/RegisterNodeFleet", "/flwr.proto.Fleet/PullMessages"]
        words = [link.python, "-c", CALL, f"{link.network.address}:{link.fleet}", str(link.keys / certificates.CA)]
        done = subprocess.run(
            [*inside(link.network.client), *words, *methods], capture_output=True, text=True, check=True
        )
        codes = json.loads(done.stdout)
        assert codes[:3] == ["UNIMPLEMENTED"] * 3 and "OK" not in codes, codes
    else:
        # what follows # is no part of a path: a server cuts it off
        paths = [post(f"/v1/fleet/{call}") for call in (*SUPERNODES_CALLS, "get-run#/../control/list-runs")]
        for sent, answer in zip(paths, link.send(paths, link.fleet), strict=True):
            [status] = statuses(answer)
            assert status in (400, 401, 404), (sent, answer)
        # the same bytes are a list of runs where they come over loopback
        [answer] = link.send([post(LIST_RUNS)], link.control, near=True)
        assert statuses(answer) == [200]

    # Flower's own commands, with the CA's certificate: from there, and over loopback
    key = str(link.keys / f"{link.inventory.supernodes[0].name}.pub")
    assert link.flwr(link.network.client, "supernode", "register", key, "far").returncode != 0
    assert link.flwr(link.network.client, "list", "far").returncode != 0
    listed = link.flwr(link.network.server, "supernode", "list", "lab", "--format", "json")
    assert listed.returncode == 0 and json.loads(listed.stdout)["nodes"] == [], listed.stdout + listed.stderr


@pytest.mark.parametrize("link", PYTHONS, indirect=True)
def test_a_run_is_not_sent_to_a_superlink_that_others_control(link: Link) -> None:
    if link.grpc:
        pytest.skip("this Flower serves SuperNodes on a port of their own")
    options = ["--ssl-ca-certfile", certificates.CA, "--ssl-certfile", certificates.SERVER, "--ssl-keyfile"]
    options = [str(link.keys / word) if word.endswith(".crt") else word for word in options]
    options += [str(link.keys / certificates.SERVER_KEY), "--enable-supernode-auth"]
    superlink = str(Path(link.python).parent / "flower-superlink")
    link.start([superlink, "--host", "0.0.0.0", "--port", str(link.control), *options], link.control)
    # the hole: a list of runs for anyone
    [answer] = link.send([post(LIST_RUNS)], link.control)
    assert statuses(answer) == [200]
    command = [link.python, "-m", "corolla.cli", "run", "--superlink", "lab", "--clients", "2", "--set", "run-name=r"]
    refused = subprocess.run(
        [*inside(link.network.server), *command, "--output-dir", str(link.directory / "runs")],
        env=link.environment,
        cwd=APP_DIRECTORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    said = " ".join(refused.stderr.split())
    assert refused.returncode == BAD_INPUT, refused.stdout + said
    assert f"control calls at {link.network.address}, port {link.control}" in said
    assert not (link.directory / "runs").exists()
    listed = link.flwr(link.network.server, "list", "lab", "--format", "json")
    assert listed.returncode == 0 and json.loads(listed.stdout)["runs"] == [], listed.stdout + listed.stderr
