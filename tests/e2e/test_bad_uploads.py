"""A SuperNode that sends what it must not, over real gRPC: dropped by name on receipt, the others as if it had not answered.

Its process alone gets a `sitecustomize` that spoils what CorollaClient.fit returns, in the rounds that SPOIL names. The ServerApp's
peak memory is read, and set back, after every round.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import BackgroundRun, Cluster, replay, rounds, runs, summary

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"),
]

HOSTILE = 2  # client id
HUGE = int(os.environ.get("COROLLA_HUGE_BYTES", 2**30))
LONG = 20 * 2**20  # characters of a metric
# round: what is sent, and what its record says
ATTACKS = {
    3: ("nan", "array params has 1 non-finite values"),
    4: ("shape", "array params has shape (7,), expected ("),
    5: ("bytes", "array params is not a NumPy array"),
    6: ("range", "metric accuracy-after must be a number in [0, 1], got 7.0"),
    7: ("type", "metric accuracy-after must be a number in [0, 1], got 'lots'"),
    8: ("list", "accuracy-after must be a scalar, got list"),
    9: ("huge", f"array params has shape ({HUGE // 4},), expected ("),
    10: ("long", f"its ConfigRecord has {LONG // 10**6}"),
}
ROUNDS = 11
# of the upload's own bytes, above normal: it and the transport's buffers (1.15 measured)
COPIES = 1.2
SPOILER = f"""
import json, os
import numpy as np
from client_app.client import CorollaClient
from fl_app.transport import outgoing, wire

# an honest client would keep such entries at its site
outgoing.leaving = lambda kind, content, way: content
SPOIL = {{int(k): v for k, v in json.loads(os.environ["SPOIL"]).items()}}
honest = CorollaClient.fit

def fit(self, content):
    round = content["fitins.config"]["round"]
    reply = honest(self, content)
    record, metrics = reply["fitres.parameters"], reply[wire.RESULT]
    params = wire.viewed(record["0"])
    def send(array): record["0"] = wire.named_record({{"0": array}})["0"]
    match SPOIL.get(round):
        case "nan": send(np.where(np.arange(params.size) == 3, np.float32("nan"), params))
        case "shape": send(params[:7])
        case "range": metrics["accuracy-after"] = 7.0
        case "type": metrics["accuracy-after"] = "lots"
        case "list": metrics["accuracy-after"] = [1.0] * 1000
        case "long": metrics["accuracy-after"] = "x" * {LONG}
        case "huge": send(np.random.default_rng(0).integers(2**63, size={HUGE} // 8).view(np.float32))
        case "bytes": record["0"].data = b"\\x93NUMPY\\x01\\x00" + b"((((" * 1000
    return reply

CorollaClient.fit = fit
"""
CONFIG: dict[str, Any] = {"method": "fedavg", "num-server-rounds": ROUNDS, "train-samples": 40, "local-epochs": 1}


def spoiled(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """The environment of the hostile SuperNode."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(SPOILER)
    path = os.pathsep.join([str(directory), environment["PYTHONPATH"]])
    return environment | {
        "PYTHONPATH": path,
        "SPOIL": json.dumps({round: what for round, (what, _) in ATTACKS.items()}),
    }


def server_app(cluster: Cluster) -> psutil.Process | None:
    """The process of the run's ServerApp, once it is there."""
    children = cluster.processes["superlink"].children(recursive=True)
    return next((child for child in children if runs(child, "serverapp")), None)


def take_peak(process: psutil.Process) -> int:
    """Peak resident bytes since the last call; starts a new measurement."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return 0  # it has ended


def test_bad_uploads_are_dropped_by_name_and_cost_no_more_memory_than_they_weigh(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start_superlink()
    cluster.start_supernode(0, 3)
    cluster.start_supernode(1, 3)
    clean, cluster.environment = cluster.environment, spoiled(cluster.environment, tmp_path / "path")
    cluster.start_supernode(HOSTILE, 3)
    cluster.environment = clean

    run = BackgroundRun(cluster, tmp_path / "attacked", 3, CONFIG)
    peaks: dict[int, int] = {}
    started = time.monotonic()
    while run.process.poll() is None:
        server, done = server_app(cluster), run.recorded()
        if server and done > len(peaks):
            peaks[done] = take_peak(server)
            print(
                f"round {done}: ServerApp's peak {peaks[done] / 1e6:.0f} MB, after {time.monotonic() - started:.0f} s"
            )
        time.sleep(0.05)
    run.finish()

    assert replay(run, tmp_path) == summary(run.folder)["digest"]
    for record, undisturbed in zip(rounds(run.folder), rounds(tmp_path / "replay"), strict=True):
        _, cause = ATTACKS.get(record["round"], ("", ""))
        assert [f["client"] for f in record["failures"]] == ([HOSTILE] if cause else []), record["failures"]
        for failure in record["failures"]:
            assert cause in failure["cause"] and len(failure["cause"]) <= 500 and "\n" not in failure["cause"], failure
            assert f"round {record['round']}: client {HOSTILE} dropped: {failure['cause'][:40]}" in " ".join(
                run.log.split()
            )
        assert sorted(record["clients"]) == (["0", "1"] if cause else ["0", "1", "2"])
        for client, row in record["clients"].items():
            assert row | {"seconds": 0} == undisturbed["clients"][client] | {"seconds": 0}

    normal = max(peaks[1], peaks[2])
    for round, (attack, _) in ATTACKS.items():
        # after the huge one what it gave back is still the allocator's
        weight = HUGE if attack in ("huge", "long") else 0
        assert peaks[round] <= normal + COPIES * weight + 20e6, (attack, normal, peaks)
