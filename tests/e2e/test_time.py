"""Deployments whose rounds do not wait for a slow SuperNode: the time of a run, and its replay in a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BackgroundRun, Cluster, corolla, rounds, summary, wait_for

pytestmark = [pytest.mark.long, pytest.mark.nightly, pytest.mark.timeout(1800)]

CLIENTS = 4
# part of the model stays with the client: its state must be that of the upload that is used
COMMON: dict[str, Any] = {"method": "fedper", "model": "gated:mlp", "num-server-rounds": 6}
EARLY: dict[str, Any] = {**COMMON, "quorum": 0.7, "staleness": 2, "staleness-decay": 0.5}


def started(cluster: Cluster, folder: Path, config: dict[str, Any]) -> BackgroundRun:
    return BackgroundRun(cluster, folder, CLIENTS, {**config, "keep-state": True})


def seconds(folder: Path) -> float:
    """Wall time of a run's rounds and evaluations."""
    return float(sum(record["seconds"]["round"] for record in rounds(folder)))


def ages(folder: Path) -> list[tuple[int, str, int]]:
    """(round, client, age) of the late uploads that were used."""
    return [
        (record["round"], client, row["age"])
        for record in rounds(folder)
        for client, row in record["clients"].items()
        if "age" in row
    ]


def assert_repeatable(cluster: Cluster, run: BackgroundRun, tmp_path: Path) -> None:
    """A simulation that follows the arrivals of a deployment ends with its digest."""
    words = ["--in-process", "--output-dir", str(tmp_path), "--set", "run-name=again"]
    words += ["--set", f"state-dir={tmp_path / 'replay-state'}"]
    done = corolla("run", "--replay", str(run.folder), *words, environment=cluster.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    digest = summary(run.folder)["digest"]
    assert digest is not None and digest == summary(tmp_path / "again")["digest"]
    assert ages(tmp_path / "again") == ages(run.folder)


@pytest.mark.usefixtures("warm_cluster")
def test_rounds_take_less_time_than_a_sleeping_supernode(cluster: Cluster, tmp_path: Path) -> None:
    """SuperNode 3 sleeps for 1.5 times as long as a round lasts without it: the run takes at most 0.6 of the time."""
    cluster.start(CLIENTS)
    awake = started(cluster, tmp_path / "awake", {**COMMON, "num-server-rounds": 3})
    awake.finish()
    # the first round has the clients' introduction
    sleeps = 1.5 * sum(record["seconds"]["round"] for record in rounds(awake.folder)[1:]) / 2
    (cluster.gate(3) / "sleep").write_text(str(sleeps))
    waiting = started(cluster, tmp_path / "waiting", COMMON)
    waiting.finish()
    early = started(cluster, tmp_path / "early", EARLY)
    early.finish()
    assert rounds(early.folder)[0]["working"] == [3]
    assert all(client == "3" for _, client, _ in ages(early.folder))
    found = [seconds(run.folder) for run in (early, waiting)]
    assert found[0] <= 0.6 * found[1], (sleeps, found, ages(early.folder))
    assert_repeatable(cluster, early, tmp_path)


@pytest.mark.usefixtures("warm_cluster")
def test_the_replay_of_a_run_in_which_a_supernode_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    """Client 3's upload of round 1 is used in round 3. SuperNode 1 is killed in round 4, and comes back for round 5."""
    cluster.start(CLIENTS)
    cluster.hold(3, training=1)
    cluster.hold(0, training=3)
    run = started(cluster, tmp_path / "killed", EARLY)
    run.wait_for_round(2)
    sent = cluster.log("supernode-3").count("Sent successfully")
    cluster.release(3, training=1)
    wait_for(lambda: cluster.log("supernode-3").count("Sent successfully") > sent)
    cluster.hold(1, training=4)
    cluster.hold(2, training=4)
    cluster.release(0, training=3)
    cluster.training(1, 4)
    cluster.kill("supernode-1")
    cluster.release(1, training=4)
    cluster.start_supernode(1, CLIENTS)
    # without client 1, round 4 has its quorum only with client 2
    wait_for(lambda: "round 4: client 1 dropped" in run.log or run.process.poll() is not None)
    cluster.release(2, training=4)
    run.finish()
    # on a slow machine others may be late, too
    assert (3, "3", 2) in ages(run.folder)
    assert [(record["round"], f["client"]) for record in rounds(run.folder) for f in record["failures"]] == [(4, 1)]
    assert any("1" in record["clients"] for record in rounds(run.folder)[4:])
    assert_repeatable(cluster, run, tmp_path)
