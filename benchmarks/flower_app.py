"""The strategy and the mod of `corolla.flower` beside Flower's own FedAvg, in Flower's simulation: seconds of a round, memory.

python -m benchmarks.flower_app [--rounds 3] [--samples 100] [--clients 10]

The app is one file with ResNet-18 (11.2 million parameters). A client trains one epoch on random images. The same app runs with
Flower's FedAvg, whose messages pass the mod unchanged, and with two methods. They take turns, a round each, so that other work on
the machine slows all of them. The first round of each, in which workers start, does not count. Of the others the middle one does.
The seconds of processors are those of all processes of the simulation. The rise is from a round's start to its peak.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.measure import write_app
from corolla.experiments.launch import SimulationSuperLink
from fl_app.processes import script

UNITS = ("s", "s", "MB")
STRATEGIES = ("stock", "FedAvg", "FedCAC")

CONFIG = """
strategies = "stock"
rounds = 3
samples = 100
"""

APP = """
import json
import os
import time
from pathlib import Path

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


def memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1e3


@server.main()
def main(grid, context):
    config, told = context.run_config, {}
    names = config["strategies"].split(",")

    def timed(name):
        cls = FedAvg if name == "stock" else getattr(corolla.flower, name)

        class Timed(cls):
            def configure_train(self, *arguments):
                self.began = time.time(), used(), memory("VmRSS")
                # from here on the peak is this round's
                Path("/proc/self/clear_refs").write_text("5")
                return super().configure_train(*arguments)

            def aggregate_train(self, *arguments):
                made = super().aggregate_train(*arguments)
                ended = time.time(), used(), memory("VmHWM")
                told.setdefault(name, []).append([after - before for before, after in zip(self.began, ended)])
                return made

        return Timed(fraction_evaluate=0.0)

    strategies = {name: timed(name) for name in names}
    arrays = dict.fromkeys(names, ArrayRecord(resnet18(num_classes=10).state_dict()))
    for _ in range(config["rounds"]):
        for name, strategy in strategies.items():
            arrays[name] = strategy.start(grid, arrays[name], 1).arrays
    print("FOUND", json.dumps(told), flush=True)


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


def measured(link: SimulationSuperLink, app: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return by strategy the middle round's seconds, seconds of processors, and rise of the ServerApp's memory in MB."""
    config = f"strategies='{','.join(STRATEGIES)}' rounds={arguments.rounds + 1} samples={arguments.samples}"
    federation = f"num-supernodes={arguments.clients} client-resources-num-cpus=1 client-resources-num-gpus=0.0"
    words = ["run", str(app), link.name, "--stream", "--run-config", config, "--federation-config", federation]
    done = subprocess.run(
        [*link.inside, script("flwr"), *words],
        env=link.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    found = re.search(r"FOUND (.*)", done.stdout)
    if found is None:
        raise SystemExit(done.stdout + done.stderr)
    rounds = json.loads(found[1])
    return {name: [statistics.median(of) for of in zip(*rounds[name][1:], strict=True)] for name in STRATEGIES}


def main() -> None:
    """Measure, and print a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("samples", 100), ("clients", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, SimulationSuperLink() as link:
        write_app(Path(directory), "overhead", APP, CONFIG)
        found = measured(link, Path(directory), arguments)
    for name, own in found.items():
        wall, cpu, rise = (
            f"{mine:.1f} {unit} ({mine / its:.2f})" for mine, its, unit in zip(own, found["stock"], UNITS, strict=True)
        )
        print(f"{name}: a round takes {wall}, {cpu} of processors; the ServerApp's memory rises by {rise}", flush=True)


if __name__ == "__main__":
    main()
