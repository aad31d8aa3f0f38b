"""A SuperNode whose network is cut in the middle of a round, for 20 and for 80 seconds.

The SuperLink and two SuperNodes live in one network namespace, the third in another one; a cable joins the two, and is pulled.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deploy.node import explain_refusals
from tests.e2e.conftest import BackgroundRun, Cluster, replay, rounds, summary, wait_for
from tests.e2e.faults import COMMON, EVERY_REPLY, causes, failures
from tests.e2e.network import Network, inside

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def apart(network: Network, warm_cluster: Cluster) -> Cluster:
    """Three SuperNodes, the last of which is at the other end of the cable."""
    cluster = warm_cluster
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
