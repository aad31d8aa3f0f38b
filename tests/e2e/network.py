"""Network namespaces joined by a cable: another machine, as far as a process inside can tell."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil
import pytest

from fl_app.processes import processes_with

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
NUMBERS = itertools.count()
Listener = tuple[IPv4Address | IPv6Address, int]


def ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True, text=True)


@dataclass
class Network:
    """Two network namespaces and the cable between them: `server`, with a bridge as its switch, and `client`."""

    server: str
    client: str
    # of the server; nobody outside the namespaces sees it
    address: str = "10.213.7.1"

    def build(self) -> None:
        for name in (self.server, self.client):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.server, "link", "add", "switch", "type", "bridge")
        ip("-n", self.server, "address", "add", f"{self.address}/24", "dev", "switch")
        ip("-n", self.server, "link", "set", "switch", "up")
        ip("-n", self.server, "link", "add", "port", "type", "veth", "peer", "name", "eth0", "netns", self.client)
        ip("-n", self.server, "link", "set", "port", "master", "switch", "up")
        ip("-n", self.client, "address", "add", "10.213.7.2/24", "dev", "eth0")
        ip("-n", self.client, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in (self.server, self.client):
            if (Path("/run/netns") / name).exists():
                ip("netns", "delete", name)

    def cut(self) -> None:
        ip("-n", self.server, "link", "set", "port", "down")

    def heal(self) -> None:
        ip("-n", self.server, "link", "set", "port", "up")


def inside(namespace: str) -> list[str]:
    """Words before a command that run it in a namespace."""
    return [IP, "netns", "exec", namespace]


def listeners(mark: str) -> dict[Listener, psutil.Process]:
    """Addresses that processes with a mark listen on (TCP), each with one of them, whatever network they live in."""
    found: dict[Listener, psutil.Process] = {}
    for process in processes_with(mark):
        sockets = set()
        for path in Path(f"/proc/{process.pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(path))
            except OSError:
                continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                    address, port = local.split(":")
                    words = [bytes.fromhex(address[k : k + 8])[::-1] for k in range(0, len(address), 8)]
                    there = ip_address(b"".join(words))
                    found[getattr(there, "ipv4_mapped", None) or there, int(port, 16)] = process
    return found


@pytest.fixture
def network() -> Iterator[Network]:
    if not IP or os.geteuid() != 0:
        pytest.skip("network namespaces need the command `ip` (iproute2)" if not IP else "network namespaces need root")
    name = f"corolla-{os.getpid()}-{next(NUMBERS)}"
    network = Network(f"{name}-server", f"{name}-client")
    try:
        try:
            network.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield network
    finally:
        network.remove()
