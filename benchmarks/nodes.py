"""The cost of SuperNodes on one machine, by their number: memory while idle, seconds and CPU seconds of a round.

python -m benchmarks.nodes [--short] [--nodes 2,10,20] [--ways warm cold] [--rounds 5]

All run on loopback with a model of 1 kB, as `corolla cluster` starts them. Applications are once forked from a warm
process (`--warm`), and once started as a new Python for every message, which is Flower's way. Memory is the
proportional set size of all processes of the SuperNodes, each with its SuperExec and, if warm, its warm process. A
round's seconds are the ServerApp's, from the second round on, without the last evaluation.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from typing import Any

import psutil

from benchmarks.loopback import Loopback, tiny
from benchmarks.measure import arguments, finish

WAYS = {"warm": ["--warm"], "cold": []}
# seconds until a started SuperNode is idle
_IDLE_SECONDS = 8.0


def proportional_bytes(processes: list[psutil.Process]) -> int:
    """Return the memory of processes; shared pages count once."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU seconds that processes, and their ended children, have used so far."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(nodes: int, way: str, rounds: int) -> dict[str, float]:
    """Start SuperNodes, let them idle, run, and return their costs."""
    with Loopback(nodes, WAYS[way]) as cluster:
        # the first run waits until all are connected
        config = {**tiny(cluster.directory), "num-server-rounds": rounds}
        cluster.corolla(f"first-{way}", {**config, "num-server-rounds": 1})
        time.sleep(_IDLE_SECONDS)
        idle = cluster.supernodes()
        memory, before = proportional_bytes(idle), cpu_seconds(idle)
        started = time.monotonic()
        time.sleep(_IDLE_SECONDS)
        waiting = (cpu_seconds(idle) - before) / (time.monotonic() - started)
        records = cluster.corolla(f"second-{way}", config)[1:]
    seconds = [r["seconds"]["round"] - r["seconds"].get("evaluate", 0.0) for r in records]
    return {
        "MB a SuperNode, idle": memory / nodes / 1e6,
        "processes a SuperNode, idle": len(idle) / nodes,
        "cores a SuperNode, idle": waiting / nodes,
        "seconds a round": statistics.median(seconds),
        "wait": statistics.median(r["seconds"]["wait"] for r in records),
    }


def main() -> None:
    """Measure, print, check."""
    parser = arguments(__doc__)
    parser.add_argument("--nodes", default="2,10,20")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how applications are started")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2: the first does not count")
    options = parser.parse_args()
    sizes, rounds = ([2], 3) if options.short else ([int(n) for n in options.nodes.split(",")], options.rounds)
    found: dict[str, Any] = {}
    targets = {}
    for nodes in sizes:
        for way in options.ways:
            found[f"{nodes} nodes, {way}"] = measured = measure(nodes, way, rounds)
            # before the next one, which takes minutes
            print(nodes, way, measured, file=sys.stderr, flush=True)
    if set(options.ways) == set(WAYS):
        warm, cold = (found[f"{sizes[0]} nodes, {way}"]["seconds a round"] for way in ("warm", "cold"))
        found["a warm round / a cold one"] = warm / cold
        targets["a warm round / a cold one"] = 0.5
    finish(found, targets, options)


if __name__ == "__main__":
    main()
