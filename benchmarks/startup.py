"""The time from a client process's start to its first training step, beside `python -c 'import torch'`.

python -m benchmarks.startup [--short]

The processes are real: `flwr-clientapp`, as a SuperNode starts it for every message. A sitecustomize.py records their
age and processor time when a module is first looked up. The model records them after the first step. `import torch` is
timed between two rounds, while the SuperNode sleeps. Processor time is the more robust measure on a busy machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loopback import Loopback, tiny
from benchmarks.measure import arguments, finish

WATCH = '''\
import json, os, sys, time

_times = {}

def mark(name):
    """Note this process's age, exact to a tick of the kernel's clock (10 ms), and its processor time, once."""
    if name not in _times:
        started = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        _times[name] = [time.clock_gettime(time.CLOCK_BOOTTIME) - started, time.process_time()]

def tell():
    with open(os.environ["COROLLA_STARTUP"], "a") as file:
        file.write(json.dumps(_times) + "\\n")

class Finder:
    def find_spec(name, path=None, target=None):
        if name in ("client_app.client_app", "torch", "fl_app.models"):
            mark(name)

if "flwr-clientapp" in " ".join(sys.orig_argv):
    mark("interpreter")
    sys.meta_path.insert(0, Finder)
'''
MODEL = """\
import sitecustomize
import torch
from torch import nn

class Watched(nn.Sequential):
    steps = 0

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            if self.steps == 1:  # the second batch: one step is done
                sitecustomize.mark("first step")
                sitecustomize.tell()
            self.steps += 1
        return super().forward(x)

def build(in_channels, num_classes, image_size):
    return Watched(nn.AdaptiveAvgPool2d((4, 6)), nn.Flatten(), nn.Linear(24 * in_channels, num_classes))
"""
Times = Sequence[float]  # seconds, processor seconds
FLOWER = "Flower: its imports, message, app files"
# by mark, the work that a process has done since the mark before
PARTS = {
    "interpreter": "Python",
    "client_app.client_app": FLOWER,
    "torch": "our imports, config and data",
    "fl_app.models": "torch's import",
    "first step": "model, state, evaluation, first step",
}


def import_torch() -> Times:
    """Return the seconds and processor seconds of `python -c 'import torch'`."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", "import torch"])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit("import torch failed")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def watched_cluster() -> Loopback:
    """Return a cluster of one SuperNode, not yet started, with client processes that record their times."""
    cluster = Loopback(1)
    cluster.environment["COROLLA_STARTUP"] = str(cluster.directory / "startup.jsonl")
    (cluster.directory / "sitecustomize.py").write_text(WATCH)
    (cluster.directory / "watchedmodel.py").write_text(MODEL)
    return cluster


def lines(path: Path) -> list[dict[str, Times]]:
    """Return the records of the client processes so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alternate(cluster: Loopback, rounds: int) -> tuple[list[dict[str, Times]], list[Times]]:
    """Run our app, and import torch after every round. Return the processes' records and the times of the imports."""
    log = Path(cluster.environment["COROLLA_STARTUP"])
    settings = {**tiny(cluster.directory), "model": "watchedmodel:build", "batch-size": 10, "num-server-rounds": rounds}
    run = threading.Thread(target=cluster.corolla, args=("run", settings))
    run.start()
    imports: list[Times] = []
    while run.is_alive():
        if len(lines(log)) > len(imports):
            time.sleep(0.5)  # the client process ends
            imports.append(import_torch())
        time.sleep(0.05)
    return lines(log), imports


def parts(told: dict[str, Times], which: int) -> dict[str, float]:
    """Return the seconds (which = 0) or processor seconds (which = 1) between marks."""
    spent, before = {}, 0.0
    for name, label in PARTS.items():
        spent[label] = told[name][which] - before
        before = told[name][which]
    return spent


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    import_torch()
    with watched_cluster() as cluster:
        processes, imports = alternate(cluster, 4 if options.short else 12)
    if len(processes) < 2:
        sys.exit("no client process reached its second step")
    # the first compiles our modules and the model's
    processes = processes[1:]
    results: dict[str, Any] = {
        "seconds to the first step": [p["first step"][0] for p in processes],
        "seconds of import torch": [t[0] for t in imports],
    }
    for which, clock in enumerate(("seconds", "processor seconds")):
        torch = statistics.median(t[which] for t in imports)
        split = {label: statistics.median(parts(p, which)[label] for p in processes) for label in PARTS.values()}
        start = statistics.median(p["first step"][which] for p in processes)
        results[f"{clock} by part"] = {**split, "all": start, "import torch": torch}
        results[f"first step / import torch, {clock}"] = start / torch
        results[f"without Flower's part / import torch, {clock}"] = (start - split[FLOWER]) / torch
    finish(results, {"first step / import torch, seconds": 1.3}, options)


if __name__ == "__main__":
    main()
