"""A deployed round beside a minimal stock Flower app's, and over HTTP beside gRPC: two SuperNodes on loopback.

python -m benchmarks.deployment [--short] [--newer PYTHON]

Both share a model of 1 kB and hardly compute. The stock app is Flower's unchanged FedAvg, which evaluates in a second
message per round. Its client returns the model it got, and unlike ours never imports torch. A round's seconds are the
ServerApp's, from the second round on. Our last evaluation is not part of a round.

PYTHON has a newer Flower, which serves SuperNodes over HTTP (COROLLA_NEXT without the option). A second SuperLink with
warm SuperNodes then runs beside one of this Flower's. They take turns with FedAvg, with the model of 1 kB and with one of
45 MB. A round sends each model to both nodes and back.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.loopback import LARGE_MODEL, NAME, TINY_MODEL, Loopback, tiny
from benchmarks.measure import arguments, finish
from fl_app.keys import Scalar

NODES = 2
MODELS = {"1 kB": TINY_MODEL, "45 MB": LARGE_MODEL}
PYPROJECT = """\
[project]
name = "stock"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stock"
[tool.flwr.app.components]
serverapp = "stock_server:app"
clientapp = "stock_client:app"
[tool.flwr.app.config]
num-server-rounds = 3
output = ""
"""
CLIENT = """\
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    metrics = MetricRecord({"loss": 1.0, "num-examples": 20})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

@app.evaluate()
def evaluate(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "num-examples": 10})}), reply_to=message)
"""
SERVER = """\
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

class Timed(FedAvg):
    times = []

    def configure_train(self, *arguments):
        self.times.append(time.perf_counter())  # a round begins
        return super().configure_train(*arguments)

@app.main()
def main(grid, context):
    strategy = Timed()
    strategy.start(grid, ArrayRecord([np.zeros(250, np.float32)]), num_rounds=context.run_config["num-server-rounds"])
    times = [*strategy.times, time.perf_counter()]
    Path(context.run_config["output"]).write_text(json.dumps([b - a for a, b in zip(times, times[1:])]))
"""


def write_stock_app(directory: Path) -> Path:
    """Write the stock app and return its folder."""
    app = directory / "stock-app"
    app.mkdir()
    for name, text in (("pyproject.toml", PYPROJECT), ("stock_client.py", CLIENT), ("stock_server.py", SERVER)):
        (app / name).write_text(text)
    return app


def stock_rounds(cluster: Loopback, app: Path, rounds: int) -> list[float]:
    """Run the stock app. Return the seconds of its rounds, without the first."""
    output = cluster.directory / "stock.json"
    output.unlink(missing_ok=True)
    overrides = f'num-server-rounds={rounds} output="{output}"'
    log = cluster.run("flwr", "run", str(app), NAME, "--stream", "--run-config", overrides)
    if not output.exists():
        raise SystemExit(f"the stock app failed:\n{log[-3000:]}")
    seconds: list[float] = json.loads(output.read_text())
    return seconds[1:]


def our_rounds(cluster: Loopback, name: str, rounds: int, **config: Scalar) -> tuple[list[float], list[dict[str, Any]]]:
    """Run our app. Return the seconds of its rounds, without the first, and their records."""
    model = MODELS[str(config.pop("model", "1 kB"))]
    records = cluster.corolla(name, {**tiny(cluster.directory, model), **config, "num-server-rounds": rounds})[1:]
    return [r["seconds"]["round"] - r["seconds"].get("evaluate", 0.0) for r in records], records


def transports(newer: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of rounds over gRPC and over HTTP, by the model's size, and the ratios of their medians."""
    seconds: dict[str, list[float]] = {f"{way}, {size}": [] for size in MODELS for way in ("gRPC", "HTTP")}
    with Loopback(NODES, ["--warm"]) as old, Loopback(NODES, ["--warm"], newer) as new:
        for k in range(repeats):
            for size in MODELS:
                for way, cluster in {"gRPC": old, "HTTP": new}.items():
                    name = f"{size.replace(' ', '-')}-{k}"
                    found, _ = our_rounds(cluster, name, rounds, model=size, method="fedavg")
                    seconds[f"{way}, {size}"] += found
    typical = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        f"a round over HTTP / over gRPC, {size}": typical[f"HTTP, {size}"] / typical[f"gRPC, {size}"] for size in MODELS
    }
    return {"seconds of rounds by transport": seconds, **ratios}


def in_client(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of the clients' phases."""
    phases: dict[str, list[float]] = {}
    for row in (row for record in records for row in record["clients"].values()):
        for name, seconds in row["seconds"].items():
            phases.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in phases.items()}


def main() -> None:
    """Measure, print, check."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--newer", metavar="PYTHON", default=os.environ.get("COROLLA_NEXT", ""), help="with a newer Flower"
    )
    options = parser.parse_args()
    rounds, repeats = (2, 1) if options.short else (6, 2)
    ours, stock, records = list[float](), list[float](), list[dict[str, Any]]()
    with Loopback(NODES) as cluster:
        app = write_stock_app(cluster.directory)
        for k in range(repeats):
            seconds, found = our_rounds(cluster, f"ours-{k}", rounds)
            ours += seconds
            records += found
            stock += stock_rounds(cluster, app, rounds)
    results = {
        "seconds of our rounds": ours,
        "seconds of the stock app's rounds": stock,
        "client seconds by phase": in_client(records),
        "our round / stock app's": statistics.median(ours) / statistics.median(stock),
    }
    if options.newer:
        results |= transports(options.newer, rounds, repeats)
    else:
        print("HTTP beside gRPC: not measured, neither --newer nor COROLLA_NEXT names a Python", file=sys.stderr)
    finish(results, {"our round / stock app's": 0.7}, options)


if __name__ == "__main__":
    main()
