"""The strategy and the mod of `corolla.flower` beside Flower's own FedAvg, in Flower's simulation: seconds of a round, memory.

python -m benchmarks.flower_app [--rounds 3] [--samples 100] [--clients 10]

The app is one file with ResNet-18 (11.2 million parameters). A client trains one epoch on random images. The same app runs with
Flower's FedAvg, whose messages pass the mod unchanged, and with two methods. The first round, in which workers start, does not
count. Of the others the middle one does. On a machine that others use too, compare the seconds of processors: those
of all processes of the simulation.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

from corolla.experiments.launch import SimulationSuperLink
from fl_app.processes import script

UNITS = ("s", "s", "MB")
STRATEGIES = ("stock", "FedAvg", "FedCAC")

PROJECT = """
[project]
name = "overhead"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "corolla"
fab-include = ["*.py"]
[tool.flwr.app.components]
serverapp = "overhead:server"
clientapp = "overhead:client"
[tool.flwr.app.config]
strategy = "stock"
rounds = 3
samples = 100
"""

APP = """
import os
import resource
import time

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torchvision.models import resnet18

import corolla.flower
from fl_app.processes import LAUNCH, processes_with

server = ServerApp()
client = ClientApp(mods=[corolla.flower.personalize])


def used():
    return sum(sum(process.cpu_times()[:2]) for process in processes_with(f"{LAUNCH}={os.environ[LAUNCH]}"))


@server.main()
def main(grid, context):
    config = context.run_config
    cls = FedAvg if config["strategy"] == "stock" else getattr(corolla.flower, config["strategy"])
    began = []

    class Timed(cls):
        def configure_train(self, *arguments):
            began.append((time.time(), used()))
            return super().configure_train(*arguments)

    Timed(fraction_evaluate=0.0).start(grid, ArrayRecord(resnet18(num_classes=10).state_dict()), config["rounds"])
    began.append((time.time(), used()))
    wall, cpu = ([f"{after - before:.2f}" for before, after in zip(of, of[1:])] for of in zip(*began))
    print("SECONDS", *wall, "CPU", *cpu, "PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, flush=True)


@client.train()
def train(message, context):
    torch.set_num_threads(1)
    net = resnet18(num_classes=10)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    samples = context.run_config["samples"]
    for _ in range(max(1, samples // 20)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(torch.randn(20, 3, 32, 32)), torch.randint(10, (20,))).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": samples})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
"""


def write_app(directory: Path) -> Path:
    """Write the app into a directory, and return it."""
    (directory / "pyproject.toml").write_text(PROJECT)
    (directory / "overhead.py").write_text(APP)
    return directory


def measured(
    link: SimulationSuperLink, app: Path, strategy: str, arguments: argparse.Namespace
) -> tuple[float, float, float]:
    """Return the seconds of the middle round after the first, those of processors, and the ServerApp's peak memory in MB."""
    config = f"strategy='{strategy}' rounds={arguments.rounds + 1} samples={arguments.samples}"
    federation = f"num-supernodes={arguments.clients} client-resources-num-cpus=1 client-resources-num-gpus=0.0"
    words = ["run", str(app), link.name, "--stream", "--run-config", config, "--federation-config", federation]
    done = subprocess.run(
        [*link.inside, script("flwr"), *words],
        env=link.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    found = re.search(r"SECONDS ([\d. ]+) CPU ([\d. ]+) PEAK ([\d.]+)", done.stdout)
    if found is None:
        raise SystemExit(done.stdout + done.stderr)
    wall, cpu = (statistics.median([float(word) for word in part.split()[1:]]) for part in found.groups()[:2])
    return wall, cpu, float(found[3])


def main() -> None:
    """Measure, and print a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("samples", 100), ("clients", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, SimulationSuperLink() as link:
        app = write_app(Path(directory))
        stock: tuple[float, ...] = ()
        for strategy in STRATEGIES:
            found = measured(link, app, strategy, arguments)
            stock = stock or found
            wall, cpu, peak = (
                f"{mine:.1f} {unit} ({mine / its:.2f})" for mine, its, unit in zip(found, stock, UNITS, strict=True)
            )
            print(f"{strategy}: a round takes {wall}, {cpu} of processors; ServerApp's peak {peak}", flush=True)


if __name__ == "__main__":
    main()
