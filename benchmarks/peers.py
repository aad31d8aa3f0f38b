"""Rounds a minute beside other simulators: 1,000 clients, 10 a round, a linear model of 650 parameters.

python -m benchmarks.scale --peers [PYTHON]

Flower's stock simulation is always included. pfl-research is included if PYTHON, the interpreter of a separate
environment, can import it (`pip install pfl torch scikit-learn`). A round's client trains one step on 20 samples. Our
clients test the model on 10 other samples, before and after. pfl-research tests it on the 20, before and after.
Flower's stock FedAvg has 10 clients test it in a second message. All take turns, and the first rounds do not count.
Wall time decides. The processor time of all processes is shown too, because other work on the machine lengthens it
less.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil

from fl_app.processes import end_processes, flower_environment, processes_with

CLIENTS, PER_ROUND = 1000, 10
# number of rounds that do not count, then of rounds that count
FIRST, COUNTED = 5, 20
TURNS = 3
# environment variable of all processes of a contender
MARK = "COROLLA_PEER"

Command = Callable[[int], list[str]]

MODEL = """\
from torch import nn

def build(in_channels, num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""
DATA = """\
import sys
import numpy as np
import torch
from torch import nn
from sklearn.datasets import load_digits

CLIENTS, PER_ROUND, ROUNDS = map(int, sys.argv[1:])
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X, dtype=torch.float32) / 16, torch.tensor(y)

def data_of(client):
    rows = torch.from_numpy(np.random.default_rng(client).permutation(len(X))[:30])
    return X[rows[:20]], y[rows[:20]], X[rows[20:]], y[rows[20:]]
"""
FLOWER = """\
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()
torch.set_num_threads(1)

def received(message):
    module = nn.Linear(64, 10)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return module

@client_app.train()
def train(message, context):
    module, (x, labels, _, _) = received(message), data_of(context.node_config["partition-id"])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loss = nn.functional.cross_entropy(module(x), labels)
    loss.backward()
    optimizer.step()
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"loss": loss.item(), "num-examples": 20})}
    return Message(RecordDict(content), reply_to=message)

@client_app.evaluate()
def evaluate(message, context):
    module, (_, _, x, labels) = received(message), data_of(context.node_config["partition-id"])
    with torch.no_grad():
        accuracy = (module(x).argmax(1) == labels).float().mean().item()
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": accuracy, "num-examples": 10})}), reply_to=message)

class Told(FedAvg):
    def configure_train(self, server_round, *arguments):
        print("round", flush=True)
        return super().configure_train(server_round, *arguments)

@server_app.main()
def main(grid, context):
    part = PER_ROUND / CLIENTS
    strategy = Told(fraction_train=part, fraction_evaluate=part, min_available_nodes=CLIENTS)
    strategy.start(grid, ArrayRecord(nn.Linear(64, 10).state_dict()), num_rounds=ROUNDS)

run_simulation(server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1}})
"""
PFL = """\
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel

torch.set_num_threads(1)

class Linear(nn.Linear):
    def loss(self, x, labels, eval=False):
        return nn.functional.cross_entropy(self(x), labels)

    def metrics(self, x, labels, eval=True):
        with torch.no_grad():
            return {"accuracy": Weighted((self(x).argmax(1) == labels).sum().item(), len(labels))}

class Told(TrainingProcessCallback):
    def after_central_iteration(self, *arguments, **named):
        print("round", flush=True)
        return super().after_central_iteration(*arguments, **named)

def make(client):
    x, labels, _, _ = data_of(client)
    return Dataset((x, labels), user_id=str(client))

users = FederatedDataset(make, get_user_sampler("minimize_reuse", list(range(CLIENTS))))
model = Linear(64, 10)
FederatedAveraging().run(
    NNAlgorithmParams(central_num_iterations=ROUNDS, evaluation_frequency=1, train_cohort_size=PER_ROUND, val_cohort_size=None),
    SimulatedBackend(users, users),
    PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), 1.0)),
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=20),
    NNEvalHyperParams(local_batch_size=None),
    [Told()],
)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this comparison's options to those of `benchmarks.scale`."""
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="compare rounds a minute with others; PYTHON: an interpreter that can import pfl, if there is one",
    )


def measured(python: str) -> dict[str, dict[str, float]]:
    """Return `rounds a minute` and `processor seconds a round` of each contender, medians over the turns."""
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        commands = contenders(directory, python)
        for turn in range(TURNS):
            for contender, command in commands.items():
                found.setdefault(contender, []).append(pace(command(turn), directory))
    return {who: {what: median(one[what] for one in times) for what in times[0]} for who, times in found.items()}


def contenders(directory: Path, python: str) -> dict[str, Command]:
    """Write the contenders' files. Return by name a function from the turn to the command."""
    (directory / "linear_model.py").write_text(MODEL)
    numbers = [str(CLIENTS), str(PER_ROUND), str(FIRST + COUNTED + 1)]
    for script, text in (("flower.py", FLOWER), ("pfl_research.py", PFL)):
        (directory / script).write_text(DATA + text)
    settings = {
        "method": "fedavg",
        "dataset": "digits",
        "model": "linear_model:build",
        "fraction-train": PER_ROUND / CLIENTS,
        "num-server-rounds": FIRST + COUNTED + 1,
        "train-samples": 20,
        "test-samples": 10,
        "batch-size": 20,
        "local-epochs": 1,
        "device": "cpu",
        "available-timeout": 3600,
        "output-dir": directory / "runs",
        "data-dir": directory / "data",
        "state-dir": directory / "state",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    ours = [str(Path(sys.executable).parent / "corolla"), "run", "--clients", str(CLIENTS), *words]
    found: dict[str, Command] = {
        "Corolla, in process": lambda turn: [*ours, "--in-process", "--set", f"run-name=here-{turn}"],
        "Corolla, simulation": lambda turn: [*ours, "--set", f"run-name=simulation-{turn}"],
        "Flower's stock simulation": lambda turn: [sys.executable, "flower.py", *numbers],
    }
    if subprocess.run([python, "-c", "import pfl"], capture_output=True).returncode:
        print(f"pfl-research is left out: {python} cannot import pfl", file=sys.stderr)
    else:
        found["pfl-research"] = lambda turn: [python, "pfl_research.py", *numbers]
    return found


def pace(command: Sequence[str], directory: Path) -> dict[str, float]:
    """Run a contender and return the pace of the rounds that count.

    Each output line that begins with `round` marks a round. If there are too few, exit with the end of the output.
    """
    marked = f"{MARK}={uuid.uuid4().hex}"
    environment = (
        flower_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(directory)} | dict([marked.split("=")])
    )
    process = subprocess.Popen(
        command, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    stamps: list[tuple[float, float]] = []
    lines: list[str] = []
    told = 0
    for line in process.stdout:
        lines.append(line)
        told += line.startswith("round")
        if len(stamps) < (told >= FIRST) + (told >= FIRST + COUNTED):
            stamps.append((time.perf_counter(), processor_seconds(marked)))
    process.wait()
    end_processes(processes_with(marked))
    if len(stamps) < 2:
        sys.exit(f"{' '.join(command[:2])} printed {told} rounds:\n{''.join(lines[-30:])}")
    (began, before), (ended, after) = stamps
    return {
        "rounds a minute": 60 * COUNTED / (ended - began),
        "processor seconds a round": (after - before) / COUNTED,
    }


def processor_seconds(marked: str) -> float:
    """Return the processor time that processes with this environment variable have used so far."""
    total = 0.0
    for process in processes_with(marked):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the comparison as a Markdown table."""
    lines = ["| | rounds a minute | processor ms a round |", "|---|---|---|"]
    for name, one in found.items():
        lines.append(f"| {name} | {one['rounds a minute']:.0f} | {1000 * one['processor seconds a round']:.0f} |")
    return "\n".join(lines)
