"""A SuperNode whose network is cut in the middle of a round, for 20 and for 80 seconds.

The SuperLink and two SuperNodes live in one network namespace, the third in another one; a cable joins the two, and is pulled.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.node import explain_refusals
from tests.e2e.conftest import BackgroundRun, Cluster, replay, rounds, summary, wait_for
from tests.e2e.test_faults import COMMON, EVERY_REPLY, causes, failures

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
NUMBERS = itertools.count()


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


@pytest.fixture
def network() -> Iterator[Network]:
    if not IP or os.geteuid() != 0:
        pytest.skip("cutting a network needs the command `ip` (iproute2)" if not IP else "cutting a network needs root")
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


@pytest.fixture
def apart(network: Network, cluster: Cluster) -> Cluster:
    """Three SuperNodes, the last of which is at the other end of the cable."""
    cluster.address, cluster.inside = network.address, inside(network.server)
    cluster.start_superlink()
    for client_id in (0, 1):
        cluster.start_supernode(client_id, 3)
    cluster.start_supernode(2, 3, inside=inside(network.client))
    return cluster


def cut_while_training(network: Network, cluster: Cluster, seconds: float) -> None:
    """Cut the network in round 2, when client 2 has its message, for so long that its reply meets the cut."""
    cluster.training(2, 2)
    replies = cluster.log("supernode-2").count("Sending:")
    network.cut()
    until = time.monotonic() + seconds
    cluster.release(2, training=2)
    wait_for(lambda: cluster.log("supernode-2").count("Sending:") > replies, seconds=seconds)
    assert cluster.log("supernode-2").count("Sent successfully") == replies
    time.sleep(until - time.monotonic())
    assert cluster.log("supernode-2").count("Sent successfully") == replies
    network.heal()


def test_cut_of_20_seconds_loses_nothing(network: Network, apart: Cluster, tmp_path: Path) -> None:
    apart.hold(2, training=2)
    run = BackgroundRun(apart, tmp_path / "cut", 3, COMMON | EVERY_REPLY)
    cut_while_training(network, apart, 20)
    run.finish()
    assert failures(run) == []
    assert all(sorted(r["clients"]) == ["0", "1", "2"] for r in rounds(run.folder))
    assert rounds(run.folder)[1]["seconds"]["round"] > 20
    assert summary(run.folder)["digest"] == replay(run, tmp_path) is not None
    # whether gRPC said anything or waited
    assert explain_refusals("supernode-2", apart.log("supernode-2")) == []


@pytest.mark.nightly
def test_cut_of_80_seconds_repeats_the_round(network: Network, apart: Cluster, tmp_path: Path) -> None:
    apart.hold(2, training=2)
    run = BackgroundRun(apart, tmp_path / "cut", 3, COMMON | EVERY_REPLY)
    cut_while_training(network, apart, 80)
    # longer than a SuperNode may be silent, but not too long for the run to wait
    assert run.recorded() == 1
    run.finish()
    assert failures(run) == [(2, 2, 1)]
    assert "Node Unavailable" in causes(run)
    assert all(sorted(r["clients"]) == ["0", "1", "2"] for r in rounds(run.folder))
    assert summary(run.folder)["digest"] == replay(run, tmp_path) is not None
    assert explain_refusals("supernode-2", apart.log("supernode-2")) == []
