"""The growth of a run's costs with the number of clients: start, round, record, checkpoint, evaluation, report.

python -m benchmarks.scale            # 100, 1,000 and 10,000 clients
python -m benchmarks.scale --short    # 50, 150 and 450 clients, under a minute
python -m benchmarks.scale --peers    # also rounds a minute beside Flower's stock simulation; see benchmarks/peers.py

Runs use one process, a linear model of 650 parameters on digits, and 20 training samples a client. Seconds are the
processor's, so that other work on the machine matters little. There are two runs per number of clients, N:

    few   FedAvg, 20 clients a round: start, round and evaluation of all clients
    all   FedCAC, all clients in every round, which keeps a model and masks of each: record, checkpoint and report

A cost grows as N^e. The larger of two exponents counts: the one fitted to all N, and the one between the two largest N,
where constant costs hide least. The script fails if an exponent is above TOLERANCE. Sizes beyond the time budget are
not measured, and the output names them.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import peers
from benchmarks.measure import machine
from fl_app.keys import Scalar
from fl_app.server.events import Started, event_of

SIZES, SHORT = (100, 1000, 10_000), (50, 150, 450)
# N log N grows as N^1.13 to N^1.18 between these sizes, N^2 as N^2; the rest is a margin for noise
TOLERANCE = 1.4
# seconds; smaller costs are mostly constant, and are raised to this
FLOOR = 0.03
# processor seconds for one number of clients
BUDGET, SHORT_BUDGET = 900, 60
COSTS = ("start", "round", "evaluation", "record", "checkpoint", "report")
Seconds = Mapping[str, float]


# One number of clients, in a process of its own -----------------------------------------------------------------------


class Begun(logging.Filter):
    """Notes the processor time when the log names the run's folder, which is when the first round begins."""

    seconds = math.nan

    def filter(self, record: logging.LogRecord) -> bool:
        """Inspect a log record. All are kept."""
        if isinstance(event_of(record), Started):
            self.seconds = time.process_time()
        return True


def run(directory: Path, name: str, clients: int, **keys: Scalar) -> tuple[float, list[dict[str, Any]]]:
    """Run an experiment in this process. Return the processor seconds of its start, and its rounds' records."""
    import corolla

    begun, log = Begun(), logging.getLogger("corolla")
    log.addFilter(begun)
    settings: dict[str, Any] = {
        "dataset": "digits",
        "model": "linear_model:build",
        "train-samples": 20,
        "test-samples": 10,
        "batch-size": 20,
        "local-epochs": 1,
        "device": "cpu",
        "available-timeout": 3600.0,
        "data-dir": str(directory / "data"),
        "state-dir": str(directory / "state"),
        "run-name": name,
    }
    started = time.process_time()
    # a round's phases are also measured in processor time
    with patch("time.perf_counter", time.process_time):
        done = corolla.run(
            clients=clients, in_process=True, output_dir=directory, progress=False, **{**settings, **keys}
        )
    log.removeFilter(begun)
    return begun.seconds - started, [json.loads(line) for line in (done.path / "metrics.jsonl").open()]


def costs(clients: int, directory: Path) -> Iterator[dict[str, float]]:
    """Yield the processor seconds of COSTS, by name, as they become known."""
    few: dict[str, Scalar] = {"method": "fedavg", "fraction-train": min(1.0, 20 / clients), "num-server-rounds": 8}
    start, records = run(directory, "few", clients, **few)
    laps = [record["seconds"] for record in records]
    yield {
        "start": start,
        "round": median(lap["round"] - lap["record"] - lap.get("evaluate", 0.0) for lap in laps[1:]),
        "evaluation": laps[-1]["evaluate"],
    }
    # work after a round is recorded with the next: after the first a record alone, after the second also a checkpoint
    every: dict[str, Scalar] = {"method": "fedcac", "num-server-rounds": 3, "checkpoint-every": 2}
    _, (_, second, third) = run(directory, "all", clients, **every)
    record = second["seconds"]["record"]
    yield {"record": record, "checkpoint": max(third["seconds"]["record"] - record, 0.0)}

    from corolla.report.page import write_report

    started = time.process_time()
    write_report([directory / "all"], directory / "page")
    yield {"report": time.process_time() - started}


def measure(clients: int, budget: int) -> None:
    """Print the costs for a number of clients, a line each. The process ends when its budget is used up."""
    resource.setrlimit(resource.RLIMIT_CPU, (budget, budget))
    from corolla.report import page  # noqa: F401 - imports are not part of the costs

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "linear_model.py").write_text(peers.MODEL)
        sys.path.insert(0, name)
        # the data are prepared here, once
        first: dict[str, Scalar] = {"num-server-rounds": 1, "method": "fedcac"}
        run(directory, "first", 2, **first)
        page.write_report([directory / "first"], directory / "first-page")
        for found in costs(clients, directory):
            print(json.dumps(found), flush=True)


# All of them ----------------------------------------------------------------------------------------------------------


def measured(sizes: Sequence[int], budget: int) -> tuple[dict[int, Seconds], list[str]]:
    """Measure one number of clients after the other. Return the costs, and the omitted sizes with reasons."""
    found: dict[int, Seconds] = {}
    left_out: list[str] = []
    for clients in sizes:
        if late := too_long(found, clients, budget):
            left_out.append(f"N = {clients:,}: not tried: {late}")
            continue
        command = [sys.executable, "-m", __spec__.name, "--measure", str(clients), "--budget", str(budget)]
        done = subprocess.run(command, capture_output=True, text=True)
        found[clients] = {name: value for line in done.stdout.splitlines() for name, value in json.loads(line).items()}
        missing = [name for name in COSTS if name not in found[clients]]
        if missing:
            over = done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
            why = f"beyond {budget} processor seconds" if over else f"it failed\n{done.stderr[-2000:]}"
            left_out.append(f"N = {clients:,}: {', '.join(missing)} not measured: {why}")
    return found, left_out


def too_long(found: Mapping[int, Seconds], clients: int, budget: int) -> str:
    """Return, as a text, the first cost that alone would exceed the budget by its growth so far; empty if none."""
    for name in COSTS:
        sizes = [n for n in found if name in found[n]]
        if len(sizes) > 1:
            expected = found[sizes[-1]][name] * (clients / sizes[-1]) ** exponent(found, name)
            if expected > budget:
                return f"its {name} would take about {expected:,.0f} processor seconds, the budget is {budget}"
    return ""


def exponent(found: Mapping[int, Seconds], name: str) -> float:
    """Return e for a cost that grows as N^e: over all N, or between the two largest if that is more.

    NaN means fewer than two N.
    """
    known = [(clients, max(seconds[name], FLOOR)) for clients, seconds in found.items() if name in seconds]
    if len(known) < 2:
        return math.nan
    x, y = np.log(np.array(known)).T
    return max(float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2])))


def table(found: Mapping[int, Seconds]) -> str:
    """Return the costs as a Markdown table, a row each, with the exponents."""
    sizes = list(found)
    lines = [
        f"| processor seconds | {' | '.join(f'N = {n:,}' for n in sizes)} | grows as |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in COSTS:
        cells = [shown(found[n][name]) if name in found[n] else "–" for n in sizes]
        law = exponent(found, name)
        lines.append(f"| {name} | {' | '.join(cells)} | {'–' if math.isnan(law) else f'N^{law:.1f}'} |")
    return "\n".join(lines)


def shown(seconds: float) -> str:
    """Format seconds in two digits."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def main() -> None:
    """Measure, print, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="small sizes (for CI)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="these numbers of clients instead")
    parser.add_argument("--budget", type=int, metavar="SECONDS", help=f"processor seconds per N ({BUDGET})")
    parser.add_argument("--measure", type=int, metavar="N", help=argparse.SUPPRESS)
    peers.add_options(parser)
    options = parser.parse_args()
    budget = options.budget or (SHORT_BUDGET if options.short else BUDGET)
    if options.measure:
        measure(options.measure, budget)
        return
    sizes = sorted(options.sizes or (SHORT if options.short else SIZES))
    found, left_out = measured(sizes, budget)
    laws = {name: exponent(found, name) for name in COSTS}
    results: dict[str, Any] = {"processor seconds": found, "exponents": laws, "left out": left_out}
    if options.peers:
        results["peers"] = peers.measured(options.peers)
    print(json.dumps({**results, "machine": machine()}, indent=2))
    print("\n".join([table(found), *left_out]), file=sys.stderr)
    if options.peers:
        print(peers.table(results["peers"]), file=sys.stderr)
    if above := [f"{name} N^{law:.2f}" for name, law in laws.items() if law > TOLERANCE]:
        sys.exit(f"grows faster than N log N (tolerance N^{TOLERANCE:g}): {', '.join(above)}")
    if unknown := [name for name, law in laws.items() if math.isnan(law)]:
        sys.exit(f"measured for less than two N: {', '.join(unknown)}")


if __name__ == "__main__":
    main()
