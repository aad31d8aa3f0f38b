"""The cost of SuperNodes on one machine, by their number: memory while idle, seconds and CPU seconds of a round.

python -m benchmarks.nodes [--short] [--nodes 2,10,20] [--ways warm shared cold] [--rounds 5]

All run on loopback with a model of 1 kB, as `corolla cluster` starts them. Applications are forked from a warm process
of their node (`--warm`), forked from one that all nodes share (`--warm shared`), or started as a new Python for every
message, which is Flower's way (cold). Memory per SuperNode is the proportional set size of its processes, with its part
of the warm ones. The most memory is the largest loss of free memory on the machine, from before the SuperLink's start
until the end of the second run. A round's seconds are the ServerApp's, from the second round on, without the last
evaluation.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.loopback import Loopback, tiny
from benchmarks.measure import arguments, finish

WAYS = {"warm": ["--warm"], "shared": ["--warm", "shared"], "cold": []}
# seconds until a started SuperNode is idle
_IDLE_SECONDS = 8.0
_WATCH_SECONDS = 0.5


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


@contextlib.contextmanager
def most_memory() -> Iterator[list[int]]:
    """Yield a list with one number: by how many bytes the machine's available memory has fallen at most, until now."""
    taken, ended = [0], threading.Event()
    before = psutil.virtual_memory().available

    def watch() -> None:
        while not ended.wait(_WATCH_SECONDS):
            taken[0] = max(taken[0], before - psutil.virtual_memory().available)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield taken
    finally:
        ended.set()
        watcher.join()


def measure(nodes: int, way: str, rounds: int) -> dict[str, float]:
    """Start SuperNodes, let them idle, run, and return their costs."""
    with most_memory() as taken, Loopback(nodes, WAYS[way]) as cluster:
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
        "GB at most": taken[0] / 1e9,
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
    if options.rounds < 2:
        parser.error(f"--rounds: must be at least 2, got {options.rounds}")
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
