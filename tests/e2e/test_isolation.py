"""What others on the machine and on the network reach of a simulation: nothing."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from client_app.client_app import RAY
from corolla.experiments import namespace
from corolla.experiments.superlink_supervisor import NETWORK
from fl_app.processes import end_processes, flower_environment, processes_with, script
from fl_app.transport.app_bundle import APP_DIRECTORY
from tests.e2e.conftest import COROLLA, settings, wait_for
from tests.e2e.network import IP, NUMBERS, inside, ip, listeners
from tests.experiments.test_namespace import ended_well, fork

pytestmark = [pytest.mark.timeout(900)]

NOBODY = 65534
RAY_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
FOREVER = {"num-server-rounds": 5000, "train-samples": 30, "test-samples": 10, "local-epochs": 1}


@contextmanager
def running(command: list[str], directory: Path, network: str = "") -> Iterator[str]:
    """Run a simulation until it has finished a round; yields the variable its processes carry. Everything is ended."""
    mark = f"ISOLATION={directory}"
    environment = flower_environment(directory / "flwr") | {
        "ISOLATION": str(directory),
        "TMPDIR": str(directory),
        NETWORK: network,
    }
    for name in RAY:
        # this process has imported the ClientApp, which sets them
        environment.pop(name, None)
    (directory / "flwr").mkdir()
    log = directory / "run.log"
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        wait_for(lambda: "round 2/" in log.read_text(errors="replace") or process.poll() is not None, every=0.2)
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        yield mark
        process.terminate()
        process.wait(90)
    finally:
        # of `flwr run`, the SuperLink that it started
        end_processes(processes_with(mark))


@pytest.fixture
def short() -> Iterator[Path]:
    # Ray's sockets need a short path
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        yield Path(directory)


def corolla_run(directory: Path, backend: str = "ray") -> list[str]:
    values = FOREVER | {"output-dir": str(directory / "runs"), "state-dir": str(directory / "state")}
    return [COROLLA, "run", "--clients", "2", "--backend", backend, *settings(values)]


def flwr_run(directory: Path) -> list[str]:
    values = FOREVER | {"output-dir": str(directory / "runs"), "state-dir": str(directory / "state")}
    config = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in values.items())
    return [script("flwr"), "run", str(APP_DIRECTORY), "--stream", "--run-config", config]


def reachable(port: int, uid: int) -> bool:
    """Tell whether an account of this machine can connect (as root; else whether we can)."""
    child = os.fork()
    if child == 0:
        answer = 255
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            with socket.socket() as sock:
                sock.settimeout(5)
                answer = sock.connect_ex(("127.0.0.1", port))
        finally:
            os._exit(answer)
    answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert answer in (0, errno.ECONNREFUSED), answer
    return answer == 0


@pytest.mark.e2e
def test_a_pool_listens_nowhere(short: Path) -> None:
    with running(corolla_run(short, "pool"), short) as mark:
        # the command, the warm process, and at least one worker
        assert len(processes_with(mark)) >= 3 and listeners(mark) == {}
    assert processes_with(mark) == []


def test_nobody_outside_reaches_a_simulation(short: Path) -> None:
    if why := namespace.why_not():
        pytest.skip(f"no network of one's own here: {why}")
    with running(corolla_run(short), short) as mark:
        found = listeners(mark)
        # the SuperLink, and several of Ray's
        assert len(found) > 3
        assert all(address.is_loopback for address, _ in found)
        ours = os.readlink("/proc/self/ns/net")
        assert not [(a, p.name()) for a, p in found.items() if os.readlink(f"/proc/{p.pid}/ns/net") == ours]
        assert not [port for _, port in found if reachable(port, os.geteuid())]
        assert not [port for _, port in found if reachable(port, NOBODY)]
        # Ray lets everybody write where its sockets are
        assert not list(short.glob("ray/*"))
        homes = {path.relative_to(short).parts[0] for path in short.glob("*/ray/session_*")}
        assert homes and all((short / home).stat().st_mode & 0o077 == 0 for home in homes)
        supervisor = next(p for p in processes_with(mark) if "corolla.experiments.superlink_supervisor" in p.cmdline())
        if os.geteuid() == 0:
            enter = [
                "setpriv",
                f"--reuid={NOBODY}",
                f"--regid={NOBODY}",
                "--clear-groups",
                "nsenter",
                "-n",
                f"-t{supervisor.pid}",
            ]
            assert subprocess.run([*enter, "true"], capture_output=True).returncode != 0


@pytest.mark.long
@pytest.mark.parametrize("command", [pytest.param(flwr_run, marks=pytest.mark.nightly), corolla_run])
def test_without_a_network_of_its_own_no_other_machine_joins(command: Callable[[Path], list[str]], short: Path) -> None:
    with running(command(short), short, network="host") as mark:
        found = listeners(mark)
        assert len(found) > 3 and all(address.is_loopback for address, _ in found)
        clients = [process for process in found.values() if process.name().startswith("ray::")]
        # not starved by what runs beside them
        assert {client.nice() for client in clients} == {psutil.Process().nice()}
        assert all(reachable(port, NOBODY) for _, port in found)
        assert ("no network of its own" in (short / "run.log").read_text()) == (command is corolla_run)
        with neighbour() as (other, here):
            for _, port in found:
                code = f"import socket; socket.create_connection(('{here}', {port}), timeout=5)"
                done = subprocess.run([*inside(other), sys.executable, "-c", code], capture_output=True, text=True)
                assert "Connection refused" in done.stderr
            gcs = next(port for (_, port), process in found.items() if "gcs_server" in process.name())
            join = [*inside(other), script("ray"), "start", f"--address={here}:{gcs}"]
            assert says("Failed to connect to GCS", join, short, mark)


@pytest.mark.e2e
@pytest.mark.parametrize("tool", ["nft", "iptables"])
def test_the_documented_rules_close_a_port_to_other_accounts(tool: str) -> None:
    if os.geteuid() != 0 or not shutil.which(tool):
        pytest.skip(f"a firewall takes root and the command `{tool}`")
    text = (APP_DIRECTORY / "docs" / "security.md").read_text()
    rules = [
        line.replace("alice", "games").replace("8000", "PORT") for line in text.splitlines() if line.startswith(tool)
    ]

    def look() -> None:
        namespace.unshare()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert reachable(port, NOBODY)
            for rule in rules:
                subprocess.run(["bash", "-c", rule.replace("PORT", str(port))], check=True)
            assert reachable(port, pwd.getpwnam("games").pw_uid) and not reachable(port, NOBODY)

    assert rules and ended_well(fork(look))


@contextmanager
def neighbour() -> Iterator[tuple[str, str]]:
    """Yield the name of a network namespace, a machine next to this one, and this one's address as it sees it."""
    if not IP or os.geteuid() != 0:
        pytest.skip("another machine on the network needs root and the command `ip` (iproute2)")
    name, here = f"corolla-{os.getpid()}-{next(NUMBERS)}", "10.213.8.1"
    ip("netns", "add", name)
    try:
        cable = f"c{os.getpid()}"
        try:
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        ip("address", "add", f"{here}/24", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "address", "add", "10.213.8.2/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        yield name, here
    finally:
        ip("netns", "delete", name)


def says(text: str, command: list[str], directory: Path, mark: str) -> bool:
    """Tell whether a command that would go on for minutes says something, and end it then."""
    name, value = mark.split("=", 1)
    environment = os.environ | {"TMPDIR": str(directory), RAY_CLUSTER: "1", name: value}
    said = directory / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        wait_for(lambda: text in said.read_text(errors="replace") or process.poll() is not None, seconds=120, every=0.2)
    finally:
        process.kill()
        process.wait()
    return text in said.read_text(errors="replace")
