"""SuperNodes that stand still in a round, as on a laptop whose lid is closed, and client processes that end without a reply."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import BackgroundRun, Cluster, rounds, runs, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

CONFIG = {
    "method": "fedper",
    "num-server-rounds": 1000,
    "round-timeout": 60.0,
    "available-timeout": 300.0,
    "min-results": 0.1,
    "train-samples": 40,
    "test-samples": 20,
    "local-epochs": 1,
}
# longer than Flower waits for a process's heartbeat
STOPPED = 90


def returned(run: BackgroundRun, client: int, after: int) -> bool:
    """Return whether a client's reply counted in a round later than `after`."""
    return any(str(client) in map(str, r["clients"]) for r in rounds(run.folder) if r["round"] > after)


def comes_back(cluster: Cluster, directory: Path, disturb: Callable[[], None]) -> None:
    """Disturb site 1 of two in the second round, and require that it replies again within a minute."""
    cluster.start_superlink()
    for client_id in range(2):
        cluster.start_site(client_id, 2, "")
    cluster.wait_for_nodes()
    run = BackgroundRun(cluster, directory / "r", 2, CONFIG)
    try:
        run.wait_for_round(1)
        disturb()
        now = run.recorded()
        wait_for(lambda: returned(run, 1, now) or run.process.poll() is not None, seconds=60, every=0.2)
        assert run.process.poll() is None, run.log
    finally:
        run.process.kill()
        run.process.wait()


def is_client(process: psutil.Process) -> bool:
    """Return whether a process is one that works on a message."""
    return runs(process, "flwr-clientapp")


def starting(cluster: Cluster) -> psutil.Process:
    """Return a process of site 1 that starts for a message, and has fetched nothing yet."""

    def found() -> list[psutil.Process]:
        return list(filter(is_client, cluster.processes["site-1"].children(recursive=True)))

    old = set(found())
    process: psutil.Process = wait_for(lambda: set(found()) - old, every=0.005).pop()
    return process


def test_a_node_that_was_stopped_while_its_client_started_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    def close_the_lid() -> None:
        node = cluster.processes["site-1"]
        starting(cluster)
        node.suspend()
        time.sleep(STOPPED)
        node.resume()

    comes_back(cluster, tmp_path, close_the_lid)
