"""Deployments that survive what machines do: killed processes, stragglers, late and returning clients, lost servers.

Every test works on real SuperLink and SuperNode processes on loopback.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fl_app.launch import processes_with
from tests.e2e.conftest import COROLLA, Cluster, corolla, rounds, settings, summary

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

# local training takes seconds, so that a process can be caught in the middle of it
COMMON: dict[str, Any] = {"method": "local", "num-server-rounds": 3, "local-epochs": 2500, "checkpoint-every": 1}


def wait_for(condition: Callable[[], Any], seconds: float = 120, every: float = 0.02) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(every)
    raise AssertionError(f"nothing within {seconds} s")


class Run:
    """`corolla run --superlink` in the background."""

    def __init__(self, cluster: Cluster, folder: Path, clients: int, config: dict[str, Any], *more: str) -> None:
        words = [COROLLA, "run", "--superlink", "test", "--clients", str(clients), "--output-dir", str(folder.parent), *more]
        self.folder = folder
        self.log = folder.parent / f"{folder.name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*words, *settings({**COMMON, "run-name": folder.name, **config})], env=cluster.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def recorded(self) -> int:
        """Rounds in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def finish(self) -> None:
        code = self.process.wait(timeout=400)
        assert code == 0, self.log.read_text()


def started_by(process: psutil.Process, word: str) -> list[psutil.Process]:
    """Living descendants with `word` in their command line."""
    found = []
    for child in process.children(recursive=True):
        try:
            if any(word in part for part in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def client_apps(cluster: Cluster, client_id: int) -> list[psutil.Process]:
    """Processes a SuperNode started to handle a message."""
    return started_by(cluster.processes[f"supernode-{client_id}"], "clientapp")


def catch_training(cluster: Cluster, client_id: int) -> psutil.Process:
    """Wait for the next message's client process to be in the middle of training, and return it."""
    earlier = {p.pid for p in client_apps(cluster, client_id)}

    def busy() -> psutil.Process | None:
        for process in client_apps(cluster, client_id):
            try:
                loaded = any("libtorch_cpu" in m.path for m in process.memory_maps())
                if process.pid not in earlier and loaded and process.cpu_times().user > 3:
                    return process
            except psutil.Error:
                continue
        return None

    found: psutil.Process = wait_for(busy)
    return found


def undisturbed(tmp_path: Path, clients: int, config: dict[str, Any]) -> str:
    """Digest of the same config in one process, without faults."""
    sets = settings({**COMMON, "run-name": "undisturbed", "state-dir": str(tmp_path / "calm"), **config})
    done = corolla("run", "--in-process", "--clients", str(clients), "--output-dir", str(tmp_path), *sets)
    assert done.returncode == 0, done.stderr
    return str(summary(tmp_path / "undisturbed")["digest"])


def start(cluster: Cluster, clients: int) -> None:
    cluster.start_superlink()
    for client_id in range(clients):
        cluster.start_supernode(client_id, clients)


def test_stopped_client_is_a_named_straggler_and_its_state_is_right_when_it_returns(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, 3)
    run = Run(cluster, tmp_path / "slow", 3, {"round-timeout": 25.0})
    wait_for(lambda: run.recorded() == 1)
    process = catch_training(cluster, 2)
    process.suspend()
    wait_for(lambda: run.recorded() == 2)
    process.resume()
    run.finish()
    second, third = rounds(run.folder)[1:]
    assert [(f["client"], f["cause"]) for f in second["failures"]] == [(2, "no reply within 25 s")]
    assert sorted(second["clients"]) == ["0", "1"]
    assert third["clients"]["2"]["accuracy-before"] == rounds(run.folder)[0]["clients"]["2"]["accuracy-after"]
    assert summary(run.folder)["digest"]


def test_killed_client_process_is_recorded_and_the_run_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, 3)
    run = Run(cluster, tmp_path / "killed", 3, {})
    wait_for(lambda: run.recorded() == 1)
    catch_training(cluster, 1).kill()
    run.finish()
    failures = [f for record in rounds(run.folder) for f in record["failures"]]
    assert [f["client"] for f in failures] == [1], failures
    assert failures[0]["cause"]
    assert summary(run.folder)["digest"]


def test_killed_and_restarted_supernode_keeps_its_state(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, 3)
    run = Run(cluster, tmp_path / "restarted", 3, {"num-server-rounds": 4})
    wait_for(lambda: run.recorded() == 1)
    catch_training(cluster, 0)
    node = cluster.processes["supernode-0"]
    for process in [*node.children(recursive=True), node]:
        process.kill()
    node.wait()
    cluster.start_supernode(0, 3)
    run.finish()
    records = rounds(run.folder)
    assert {f["client"] for r in records for f in r["failures"]} == {0}
    there = [r["clients"]["0"] for r in records if "0" in r["clients"]]
    assert len(there) >= 2
    for earlier, later in zip(there, there[1:], strict=False):
        assert later["accuracy-before"] == earlier["accuracy-after"]
    assert summary(run.folder)["digest"]


def test_supernode_that_joins_late_takes_part(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, 2)
    cluster.processes["supernode-0"].kill()
    cluster.processes["supernode-0"].wait()
    cluster.start_supernode(0, 3)
    cluster.processes["supernode-1"].kill()
    cluster.processes["supernode-1"].wait()
    cluster.start_supernode(1, 3)
    run = Run(cluster, tmp_path / "late", 3, {"min-available-clients": 2, "num-server-rounds": 6, "method": "fedavg"})
    wait_for(lambda: run.recorded() == 1)
    cluster.start_supernode(2, 3)
    run.finish()
    records = rounds(run.folder)
    assert sorted(records[0]["clients"]) == ["0", "1"]
    assert sorted(records[-1]["clients"]) == ["0", "1", "2"]
    assert summary(run.folder)["digest"]


@pytest.mark.parametrize("victim", ["serverapp", "superlink"])
def test_killed_server_resumes_to_the_same_bits(cluster: Cluster, tmp_path: Path, victim: str) -> None:
    expected = undisturbed(tmp_path, 3, {"num-server-rounds": 4})
    start(cluster, 3)
    run = Run(cluster, tmp_path / "killed", 3, {"num-server-rounds": 4})
    wait_for(lambda: run.recorded() == 2)
    catch_training(cluster, 1)
    superlink = cluster.processes["superlink"]
    servers = started_by(superlink, "serverapp")
    assert servers
    for process in servers if victim == "serverapp" else [superlink, *superlink.children(recursive=True)]:
        process.kill()
    run.process.kill() if victim == "superlink" else None
    assert run.process.wait(timeout=200) != 0
    if victim == "superlink":
        superlink.wait()
        cluster.restart_superlink()
    resumed = corolla("run", "--superlink", "test", "--resume", str(run.folder), environment=cluster.environment)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [r["round"] for r in rounds(run.folder)] == [1, 2, 3, 4]
    assert summary(run.folder)["digest"] == expected


def test_unwritable_state_directory_fails_that_client_by_name(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    cluster.start_superlink()
    for client_id in range(3):
        if client_id == 1:
            cluster.environment["COROLLA_STATE_DIR"] = str(tmp_path / "file" / "state")
        cluster.start_supernode(client_id, 3)
        cluster.environment["COROLLA_STATE_DIR"] = str(tmp_path / "state")
    run = Run(cluster, tmp_path / "unwritable", 3, {})
    run.finish()
    for record in rounds(run.folder):
        assert [f["client"] for f in record["failures"]] == [1]
        assert "cannot write its state" in record["failures"][0]["cause"]
        assert sorted(record["clients"]) == ["0", "2"]


def test_five_supernodes_for_eight_rounds_leak_nothing(cluster: Cluster, tmp_path: Path) -> None:
    clients, total = (int(os.environ.get(f"COROLLA_SOAK_{n}", d)) for n, d in (("CLIENTS", "5"), ("ROUNDS", "8")))
    soak(cluster, tmp_path, clients, total)


def soak(cluster: Cluster, tmp_path: Path, clients: int, total: int) -> None:
    start(cluster, clients)
    run = Run(cluster, tmp_path / "soak", clients, {"num-server-rounds": total, "method": "fedcac", "fedcac.beta": 3})
    memory: dict[int, dict[str, float]] = {}
    superlink = cluster.processes["superlink"]
    while run.process.poll() is None:
        done = run.recorded()
        if done and done not in memory:
            servers = started_by(superlink, "serverapp")
            memory[done] = {
                "superlink": superlink.memory_info().rss / 1e6,
                "serverapp": sum(p.memory_info().rss for p in servers) / 1e6,
            }
        time.sleep(0.1)
    run.finish()
    print("\nmemory (MB) after each round:", {r: {k: round(v) for k, v in m.items()} for r, m in memory.items()})
    reference, last = memory[min(r for r in memory if r >= 3)], memory[max(memory)]
    if last["serverapp"] == 0:
        last = memory[max(r for r in memory if memory[r]["serverapp"])]
    for name in ("superlink", "serverapp"):
        assert last[name] < 1.15 * reference[name] + 20, memory
    cluster.stop()
    assert processes_with(f"COROLLA_LAUNCH={cluster.home}") == []
