"""The cost of a simulation beside its training: the same run with a pool of workers, with Ray, and in one process.

python -m benchmarks.pool [--short] [--clients 1000] [--drawn 0.01] [--rounds 3] [--backends pool,process,ray]

A linear model with 210 parameters learns from 20 samples a client, so nearly all of a run is the processes' own cost.
Seconds of rounds and of the evaluation are those that the run records. `whole` is the seconds of the command, CPU
seconds are those of all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import arguments, finish
from fl_app.processes import flower_environment, script

BACKENDS = {"pool": ["--backend", "pool"], "process": ["--in-process"], "ray": ["--backend", "ray"]}
FEATURES, CLASSES, SAMPLES = 20, 10, 20
MODEL = """
from torch import nn

def build(in_channels, num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels, num_classes))
"""


def write_data(path: Path, clients: int) -> None:
    """Write random samples of this many clients, and their labels."""
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for name, count in (("train", SAMPLES * clients), ("test", 5 * clients)):
        arrays[f"x_{name}"] = draw.standard_normal((count, FEATURES)).astype(np.float32)
        arrays[f"y_{name}"] = np.arange(count) % CLASSES
    np.savez(path, **arrays)


def measure(directory: Path, backend: str, clients: int, drawn: float, rounds: int) -> dict[str, Any]:
    """Run once. Return its seconds and its digest."""
    name = f"{backend}-{drawn:g}"
    values = {
        "method": "fedavg",
        "model": "linear_model:build",
        "dataset": f"npz:{directory / 'data.npz'}",
        "partition": "iid",
        "train-samples": 0,
        "test-samples": 0,
        "fraction-train": drawn,
        "local-epochs": 1,
        "batch-size": SAMPLES,
        "device": "cpu",
        "num-server-rounds": rounds,
        "run-name": name,
        "output-dir": str(directory),
        "data-dir": str(directory / "data"),
        "state-dir": str(directory / "state"),
    }
    words = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [script("corolla"), "run", "--clients", str(clients), *BACKENDS[backend], *words]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=flower_environment()
    )
    whole, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    records = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
    evaluation = records[-1]["seconds"].get("evaluate", 0.0)
    own = [record["seconds"]["round"] - record["seconds"].get("evaluate", 0.0) for record in records]
    return {
        # the first round opens data and does the remaining imports
        "round": statistics.median(own[1:]),
        "evaluation": evaluation,
        "whole": whole,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "digest": json.loads((directory / name / "summary.json").read_text())["digest"],
    }


def main() -> None:
    """Measure, print, check."""
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--drawn", type=float, default=1.0, help="the part of the clients that a round draws")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backends", default="pool,process,ray")
    options: argparse.Namespace = parser.parse_args()
    clients = min(options.clients, 40) if options.short else options.clients
    backends = options.backends.split(",")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    with tempfile.TemporaryDirectory(prefix="corolla-pool-") as directory:
        (Path(directory) / "linear_model.py").write_text(MODEL)
        write_data(Path(directory) / "data.npz", clients)
        found = {b: measure(Path(directory), b, clients, options.drawn, options.rounds) for b in backends}
    if len({one["digest"] for one in found.values()}) > 1:
        sys.exit(f"the digests differ: {found}")
    results: dict[str, Any] = {"clients": clients, "drawn": options.drawn, "seconds": found}
    if "ray" in found:
        for what in ("round", "evaluation", "whole"):
            results[f"{what}, pool / ray"] = found["pool"][what] / found["ray"][what]
    finish(results, {"whole, pool / ray": 0.5} if "ray" in found else {}, options)


if __name__ == "__main__":
    main()
