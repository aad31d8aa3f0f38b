"""A simulated round beside the bare training of its clients on the same cores, and the use of the remaining time.

python -m benchmarks.simulation [--short]

The simulation is FedCAC with resnet8 on generated 32x32x3 images, by `corolla run` with its default workers: one per
core, each with one thread. The bare training is LocalTrainer.train for the same clients, in as many plain processes,
before and after the simulation. The first round (workers start) and the last (all clients are evaluated) do not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import arguments, finish
from fl_app.keys import Scalar
from fl_app.processes import flower_environment

Config = dict[str, Scalar]


@dataclass(frozen=True)
class Size:
    """The size of a measurement."""

    clients: int
    rounds: int
    epochs: int
    repeats: int


FULL = Size(clients=40, rounds=4, epochs=5, repeats=2)
SHORT = Size(clients=8, rounds=4, epochs=2, repeats=1)


def write_images(path: Path, train: int, test: int) -> None:
    """Write a data set of random images. Training takes as long on noise as on real images."""
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for name, count in (("train", train), ("test", test)):
        arrays[f"x_{name}"] = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{name}"] = np.arange(count) % 10
    np.savez(path, **arrays)


def run_config(size: Size, directory: Path) -> Config:
    """Return the setting of FedCAC's Table 1, for this many clients."""
    return {
        "method": "fedcac",
        "model": "resnet8",
        "dataset": f"npz:{directory / 'images.npz'}",
        "partition": "iid",
        "train-samples": 500,
        "test-samples": 100,
        "batch-size": 100,
        "local-epochs": size.epochs,
        "device": "cpu",
        "num-server-rounds": size.rounds,
        "data-dir": str(directory / "data"),
        "state-dir": str(directory / "state"),
    }


# The bare training


def bare_seconds(config: Mapping[str, Scalar], clients: int, processes: int) -> float:
    """Train every client once in plain processes. Return the seconds of training per process."""
    context = multiprocessing.get_context("spawn")
    ids, seconds, ready = context.Queue(), context.Queue(), context.Barrier(processes)
    for client_id in [*range(clients), *[None] * processes]:
        ids.put(client_id)
    workers = [
        context.Process(target=_train, args=(dict(config), clients, ids, seconds, ready)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    total = sum(seconds.get(timeout=3600) for _ in range(clients))
    for worker in workers:
        worker.join()
    return float(total) / processes


def _train(config: Config, clients: int, ids: Any, seconds: Any, ready: Any) -> None:
    from client_app.session import prepare_training
    from client_app.trainer import LocalTrainer
    from fl_app import models, weights
    from fl_app.config import parse
    from fl_app.data import open_client
    from strategies import METHOD_PARAMS

    parsed = parse({**config, "num-clients": clients}, METHOD_PARAMS)
    prepare_training(parsed.client_threads)
    ready.wait(timeout=120)
    while (client_id := ids.get()) is not None:
        module = models.build(parsed.model, in_channels=3, num_classes=10, image_size=32)
        start = weights.read(module)
        trainer = LocalTrainer(module, parsed, open_client(parsed, client_id), 1, client_id)
        started = time.perf_counter()
        trainer.train(start)
        seconds.put(time.perf_counter() - started)


# The simulation


@dataclass(frozen=True)
class Round:
    """One line of metrics.jsonl, and the wall clock since the line before."""

    wall: float
    record: dict[str, Any]

    @property
    def phases(self) -> float:
        """The seconds of all server phases."""
        return float(sum(seconds for name, seconds in self.record["seconds"].items() if name != "round"))

    def client_phases(self, processes: int) -> dict[str, float]:
        """Return the seconds of the clients' phases, summed over clients, per process."""
        total: dict[str, float] = {}
        for row in self.record["clients"].values():
            for name, seconds in row["seconds"].items():
                total[name] = total.get(name, 0.0) + seconds / processes
        return total


def simulate(config: Config, clients: int, directory: Path, name: str) -> list[Round]:
    """Run `corolla run` and return the counted rounds. A line of metrics.jsonl is timed when it appears."""
    values = {**config, "run-name": name, "output-dir": str(directory)}
    words = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [str(Path(sys.executable).parent / "corolla"), "run", "--clients", str(clients), *words]
    metrics, times = directory / name / "metrics.jsonl", list[float]()
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=flower_environment())
        while process.poll() is None:
            time.sleep(0.02)
            if metrics.exists() and metrics.read_bytes().count(b"\n") > len(times):
                times.append(time.perf_counter())
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if process.returncode or len(records) != config["num-server-rounds"]:
        sys.exit(f"the simulation failed:\n{(directory / f'{name}.log').read_text(errors='replace')[-3000:]}")
    walls = (after - before for before, after in itertools.pairwise(times))
    return [Round(wall, record) for wall, record in zip(walls, records[1:-1], strict=False)]


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median per name."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure(size: Size, directory: Path) -> dict[str, Any]:
    """Alternate bare training and simulations. Return the results."""
    actors = os.cpu_count() or 1
    write_images(directory / "images.npz", 500 * size.clients, 100 * size.clients)
    config = run_config(size, directory)
    bare, rounds, ratios = [bare_seconds(config, size.clients, actors)], list[Round](), list[float]()
    for k in range(size.repeats):
        found = simulate(config, size.clients, directory, f"run-{k}")
        bare.append(bare_seconds(config, size.clients, actors))
        # compare with the bare training just before and just after
        ratios += [r.wall / statistics.mean(bare[-2:]) for r in found]
        rounds += found
    clients = [r.client_phases(actors) for r in rounds]
    within = [(r.wall, phases) for r, phases in zip(rounds, clients, strict=True)]
    return {
        "actors": actors,
        "bare training seconds": bare,
        "wall seconds of the rounds": [r.wall for r in rounds],
        "client seconds by phase / actors": medians(clients),
        "server seconds by phase": medians([r.record["seconds"] for r in rounds]),
        "part of a round outside the clients' phases": statistics.median(
            1 - sum(p.values()) / wall for wall, p in within
        ),
        "round / its own training phase": statistics.median(wall / p["train"] for wall, p in within),
        "round / bare training": statistics.median(ratios),
        # over all rounds together: a checkpoint counts as a phase of the next round, which has no line yet
        "wall of the rounds missing from their phases": abs(
            1 - sum(r.phases for r in rounds) / sum(r.wall for r in rounds)
        ),
    }


def main() -> None:
    """Measure, print, check."""
    options: argparse.Namespace = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="corolla-simulation-") as directory:
        results = measure(SHORT if options.short else FULL, Path(directory))
    targets = {"round / bare training": 1.15, "wall of the rounds missing from their phases": 0.05}
    finish(results, targets, options)


if __name__ == "__main__":
    main()
