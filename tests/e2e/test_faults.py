"""Deployments that survive what machines do: killed processes, stragglers, late and returning clients, lost servers.

Every test works on real SuperLink and SuperNode processes on loopback. Its clients train a model that stops in the middle of
training for as long as the test needs (gated.py). At the end the digest is compared with an undisturbed run in one process
that aggregates the same replies (conftest.replay): whoever missed rounds has the right model and its own state. Where the
fixture is `warm_cluster`, SuperNodes fork their clients from a warm process, which saves most of a round's time.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import BackgroundRun, Cluster, Lab, corolla, rounds, runs, wait_for
from tests.e2e.faults import COMMON, EVERY_REPLY, assert_nothing_is_lost, causes, failures

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.nightly
def test_client_slower_than_the_timeout_is_named_and_has_the_right_model_when_it_returns(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start(3)
    cluster.hold(2, training=2)
    run = BackgroundRun(cluster, tmp_path / "slow", 3, COMMON | {"round-timeout": 40.0})
    run.wait_for_round(2)
    cluster.release(2, training=2)
    run.finish()
    assert failures(run) == [(2, 2, 0)]
    assert causes(run) == "no reply within 40 s"
    assert [sorted(r["clients"]) for r in rounds(run.folder)] == [["0", "1", "2"], ["0", "1"], ["0", "1", "2"]]
    assert_nothing_is_lost(run, tmp_path)


@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.nightly
@pytest.mark.parametrize("repeated", [False, True], ids=["round-goes-on", "round-is-repeated"])
def test_killed_client_process(cluster: Cluster, tmp_path: Path, repeated: bool) -> None:
    cluster.start(3)
    cluster.hold(1, training=2)
    run = BackgroundRun(cluster, tmp_path / "killed", 3, COMMON | (EVERY_REPLY if repeated else {}))
    cluster.training(1, 2).kill()
    run.finish()
    assert failures(run) == [(2, 1, 1 if repeated else 0)]
    assert causes(run).startswith("error 8: ")
    assert sorted(rounds(run.folder)[1]["clients"]) == (["0", "1", "2"] if repeated else ["0", "2"])
    assert_nothing_is_lost(run, tmp_path)


@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.nightly
def test_killed_and_restarted_supernode(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(3)
    cluster.hold(0, training=2)
    run = BackgroundRun(cluster, tmp_path / "restarted", 3, COMMON | EVERY_REPLY)
    cluster.training(0, 2)
    cluster.kill("supernode-0")
    cluster.start_supernode(0, 3)
    run.finish()
    assert failures(run) == [(2, 0, 1)]
    assert "Node Unavailable" in causes(run)
    assert all(sorted(r["clients"]) == ["0", "1", "2"] for r in rounds(run.folder))
    assert_nothing_is_lost(run, tmp_path)


@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.nightly
def test_supernode_that_joins_late_takes_part(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_superlink()
    for client_id in (0, 1):
        cluster.start_supernode(client_id, 3)
    cluster.hold(0, training=2)
    cluster.hold(0, training=3)
    run = BackgroundRun(cluster, tmp_path / "late", 3, COMMON | {"min-available-clients": 2, "num-server-rounds": 4})
    cluster.training(0, 2)
    cluster.start_supernode(2, 3)
    wait_for(lambda: "SuperNode ID" in cluster.log("supernode-2"))
    cluster.release(0, training=2)
    # it was asked who it is, in round 3
    wait_for(lambda: "Sent successfully" in cluster.log("supernode-2"))
    cluster.release(0, training=3)
    run.finish()
    assert failures(run) == []
    assert [sorted(r["clients"]) for r in rounds(run.folder)] == [["0", "1"]] * 3 + [["0", "1", "2"]]
    assert_nothing_is_lost(run, tmp_path)


@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.parametrize("victim", [pytest.param("serverapp", marks=pytest.mark.nightly), "superlink"])
def test_killed_server_resumes_to_the_same_bits(cluster: Cluster, tmp_path: Path, victim: str) -> None:
    cluster.database = cluster.home / "superlink.db"
    cluster.start(3)
    cluster.hold(1, training=3)
    run = BackgroundRun(cluster, tmp_path / "killed", 3, COMMON)
    cluster.training(1, 3)
    if victim == "serverapp":
        servers = started_by(cluster.processes["superlink"], "serverapp")
        assert servers
        for process in servers:
            process.kill()
    else:
        cluster.kill("superlink")
        run.process.kill()
    assert run.process.wait(timeout=200) != 0
    assert run.recorded() == 2
    if victim == "superlink":
        cluster.restart_superlink()
    cluster.release(1, training=3)
    resumed = corolla("run", "--superlink", "test", "--resume", str(run.folder), environment=cluster.environment)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed after round 2" in resumed.stdout
    assert [r["round"] for r in rounds(run.folder)] == [1, 2, 3] and failures(run) == []
    assert_nothing_is_lost(run, tmp_path)


def started_by(process: psutil.Process, word: str) -> list[psutil.Process]:
    """Living descendants with `word` in their command line, and everything these started."""
    found: dict[int, psutil.Process] = {}
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if runs(child, word):
                found |= {p.pid: p for p in [child, *child.children(recursive=True)]}
    return list(found.values())


# Soak


@pytest.mark.nightly
# 20 SuperNodes for 20 rounds start 400 client processes
@pytest.mark.timeout(3600)
def test_five_supernodes_for_eight_rounds_leak_nothing(lab: Lab, tmp_path: Path) -> None:
    clients, total = (int(os.environ.get(f"COROLLA_SOAK_{n}", d)) for n, d in (("CLIENTS", "5"), ("ROUNDS", "8")))
    lab.write(hosts=[{"host": "local", "supernodes": clients, "gpus": []}])
    up = lab.cluster("up")
    assert up.returncode == 0, up.stdout + up.stderr
    superlink = psutil.Process(lab.process("superlink")["pid"])
    config = {"method": "fedcac", "model": "gated:wide", "fedcac.beta": 3, "num-server-rounds": total}
    config["state-dir"] = str(tmp_path / "client-state")
    run = BackgroundRun(lab, tmp_path / "soak", clients, config, superlink="lab")
    memory = memory_by_round(run, superlink)
    run.finish()
    assert [len(r["clients"]) for r in rounds(run.folder)] == [clients] * total and failures(run) == []
    assert list(memory) == list(range(1, total + 1))
    held = {name: [min(sizes[name]) for sizes in memory.values()] for name in ("superlink", "serverapp")}
    for name, sizes in held.items():
        print(f"\n{name}, least MB in each round:", " ".join(f"{size:.1f}" for size in sizes))
        print(f"{name}, most MB in each round:", " ".join(f"{max(sizes[name]):.1f}" for sizes in memory.values()))
    down = lab.cluster("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert lab.started() == []
    # flat after round 3: between two halves of the rounds less than half of what a server that keeps its uploads would add
    half = (total - 3) // 2
    kept = sum(r["upload-bytes"] for r in rounds(run.folder)[3 + half :]) / 1e6
    for name, sizes in held.items():
        early, late = statistics.median(sizes[3 : 3 + half]), statistics.median(sizes[-half:])
        print(f"{name}, median MB: {early:.1f}, then {late:.1f}")
        assert early > 10 and late - early < min(kept / 2, 0.05 * early), held


def memory_by_round(run: BackgroundRun, superlink: psutil.Process) -> dict[int, dict[str, list[float]]]:
    """Watch a run until it ends; return its server processes' memory (resident, MB) at all moments of each round."""
    memory: dict[int, dict[str, list[float]]] = {}
    while run.process.poll() is None:
        server = started_by(superlink, "serverapp")
        if server and run.recorded() < int(run.config["num-server-rounds"]):
            sizes = memory.setdefault(run.recorded() + 1, {"superlink": [], "serverapp": []})
            sizes["superlink"].append(resident([superlink]))
            sizes["serverapp"].append(resident(server))
        time.sleep(0.1)
    return memory


def resident(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss / 1e6
    return total
