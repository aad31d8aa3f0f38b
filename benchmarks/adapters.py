"""Adapters of a frozen network: memory and processor seconds of a run beside the number of clients.

python -m benchmarks.adapters            # a frozen network of 66 million parameters, 2, 8 and 16 clients
python -m benchmarks.adapters --short    # 8 million parameters, 2 and 8 clients
python -m benchmarks.adapters --large    # 1.1 billion parameters as bfloat16 (`frozen-dtype`), 20 clients of 2 samples

A text encoder of the size of DistilBERT with random weights; a matrix of rank 8 beside each projection of its attention
trains, and the classifier. Every run is a process of its own, and has one round of FedCAC with 20 samples a client. The
memory is the process's peak (resident). Its base is PyTorch alone: a process that builds the network and passes the 20
samples through it as a client does, once to train, and to test before it, after it and at the run's end. What a run adds
to it must be at most half a network, what trains per client, and 100 MB. Beyond its passes a client may take 30 ms. Those
are measured with a tiny network, whose passes hide nothing: of a large one, seconds of two runs differ by more.

In a pool of two workers, it is the peak of the sum over all processes, each page counted once (PSS), with two samples a
step. The frozen tensors must be there once: at most 1.5 networks, what trains per client, and 100 MB for all else.

Beside it is an app of Flower with peft, as its users write one, in Flower's simulation with one actor of Ray: a client
builds the network for every message, with adapters of the same rank. Its memory and processor seconds are those of all
processes, for FedAvg with the same samples. It is left out where peft is not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import arguments, finish, interleaved, resource_peak, write_app
from corolla.experiments.launch import SimulationSuperLink
from fl_app.processes import LAUNCH, processes_with, script

SAMPLES, LENGTH, CLASSES = 20, 32, 4
WORKERS, POOL_BATCH = 2, 2
# bytes for messages and other libraries, and for a pool's activations
BESIDE = 100e6
PASSES, TESTS = 5, 3
SMALL_CLIENTS = (8, 64)
SAMPLED_EVERY = 0.02
IDS, LAYERS = 30522, 6
LARGE_WIDTH, LARGE_LAYERS, LARGE_CLIENTS, LARGE_SAMPLES, LARGE_PEAK = 2040, 21, 20, 2, 8e9
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, IDS = @SIZES@


class Adapted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.lora_a = nn.Parameter(torch.randn(8, width) * 0.02)
        self.lora_b = nn.Parameter(torch.zeros(width, 8))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.value = Adapted(width), Adapted(width)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (12, -1)).transpose(1, 2)

        y = F.scaled_dot_product_attention(heads(self.query(x)), heads(self.key(x)), heads(self.value(x)))
        x = self.first(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.tokens = nn.Embedding(IDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.classifier = nn.Linear(WIDTH, outputs)

    def forward(self, ids):
        x = self.tokens((ids.abs() * 10000).long() % IDS)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.mean(1))


def make(in_channels, num_classes, image_size):
    return Encoder(num_classes)
"""
PEERS_CONFIG = """
data = ""
samples = 20
classes = 4
"""
PEERS = """
import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn.functional import cross_entropy

import frozen

server = ServerApp()
client = ClientApp()


def network(config):
    plain = frozen.make(1, config["classes"], 1)
    for block in plain.blocks:
        block.query, block.value = block.query.base, block.value.base
    lora = LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])
    torch.manual_seed(0)
    return get_peft_model(plain, lora)


def received(message, context, part):
    torch.set_num_threads(1)
    config, samples = context.run_config, context.run_config["samples"]
    net = network(config)
    set_peft_model_state_dict(net, message.content["arrays"].to_torch_state_dict())
    rows = slice(samples * context.node_config["partition-id"], samples * (context.node_config["partition-id"] + 1))
    with np.load(config["data"]) as data:
        return net, torch.from_numpy(data[f"x_{part}"][rows]), torch.from_numpy(data[f"y_{part}"][rows])


@server.main()
def main(grid, context):
    arrays = ArrayRecord(get_peft_model_state_dict(network(context.run_config)))
    done = FedAvg().start(grid, arrays, num_rounds=1)
    print("FOUND", len(done.evaluate_metrics_clientapp), flush=True)


@client.train()
def train(message, context):
    net, x, y = received(message, context, "train")
    optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.01)
    loss = cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": len(y), "loss": float(loss)})
    return Message(
        RecordDict({"arrays": ArrayRecord(get_peft_model_state_dict(net)), "metrics": metrics}), reply_to=message
    )


@client.evaluate()
def evaluate(message, context):
    net, x, y = received(message, context, "test")
    with torch.no_grad():
        right = float((net.eval()(x).argmax(1) == y).float().mean())
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": len(y), "accuracy": right})}), reply_to=message)
"""


def write_data(directory: Path, samples: int) -> None:
    """Write texts.npz: token ids, and classes that they do not tell."""
    generator, labels = np.random.default_rng(0), np.arange(samples) % CLASSES
    train, test = generator.integers(1, IDS, (2, samples, LENGTH), dtype=np.int32)
    np.savez(directory / "texts.npz", x_train=train, x_test=test, y_train=labels, y_test=labels)


def write_model(directory: Path, width: int, layers: int = LAYERS) -> None:
    """Write frozen.py, the module of the run's model."""
    (directory / "frozen.py").write_text(MODEL.replace("@SIZES@", f"{width}, {layers}, {IDS}"))


def one(directory: Path, *, clients: int, batch: int, samples: int, pool: bool, dtype: str) -> None:
    """Run in this process, its clients in a pool of two or here too. Print what this process took as JSON."""
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    import corolla

    # a worker per half of the cores
    where: dict[str, Any] = {"backend": "pool", "cpus_per_client": available_cores() / WORKERS}
    before = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.monotonic()
    corolla.run(
        **(where if pool else {"in_process": True}),
        method="fedcac",
        clients=clients,
        model="frozen:make",
        train="*lora*,*classifier*",
        dataset=f"npz:{directory / 'texts.npz'}",
        partition="iid",
        frozen_dtype=dtype,
        train_samples=samples,
        test_samples=samples,
        batch_size=batch,
        local_epochs=1,
        num_server_rounds=1,
        device="cpu",
        data_dir=str(directory / "data"),
        state_dir=str(directory / f"state-{clients}-{pool}"),
        output_dir=str(directory / f"runs-{pool}"),
    )
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"peak": resource_peak(), "cpu": seconds, "wall": time.monotonic() - begun}))


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def alone(directory: Path) -> None:
    """Build the network and make a client's passes in PyTorch alone. Print the peak bytes and the seconds as JSON."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(directory))
    begun = time.process_time()
    network = importlib.import_module("frozen").make(1, CLASSES, 1)
    build = time.process_time() - begun
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora" in name or "classifier" in name)
    with np.load(directory / "texts.npz") as data:
        x, y = torch.from_numpy(data["x_train"][:SAMPLES]).float(), torch.from_numpy(data["y_train"][:SAMPLES])

    def passes() -> None:
        torch.autograd.backward(torch.nn.functional.cross_entropy(network(x), y))
        with torch.no_grad():
            for _ in range(TESTS):
                network(x)

    passes()
    seconds = interleaved({"passes": passes}, PASSES, time.process_time)["passes"]
    print(json.dumps({"peak": resource_peak(), "build": build, "passes": seconds}))


def printed_by(command: Sequence[str]) -> dict[str, float]:
    """Run this benchmark in a new process with further arguments. Return what its last line says."""
    words = [sys.executable, "-m", "benchmarks.adapters", *command]
    found: dict[str, float] = json.loads(subprocess.check_output(words, text=True).splitlines()[-1])
    return found


def measured(
    directory: Path, clients: int, *, pool: bool = False, samples: int = SAMPLES, dtype: str = "float32"
) -> dict[str, float]:
    """Run in a new process. Return its peak bytes, its processor seconds and its seconds.

    pool: with workers. The peak is then that of all processes, each page counted once. samples: of a client, for training
    and for testing. dtype: in which the frozen matrices are stored.
    """
    batch = POOL_BATCH if pool else samples
    asked = {"clients": clients, "batch": batch, "samples": samples, "pool": pool, "dtype": dtype}
    command = [sys.executable, "-m", "benchmarks.adapters", "--one", str(directory), json.dumps(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = sampled(process, lambda: family(process))[0] if pool else 0
        printed, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found | ({"peak": peak} if pool else {})


def peers(directory: Path, clients: int) -> dict[str, float]:
    """Run the app of Flower with one actor of Ray. Return the peak bytes, processor seconds and seconds of all processes."""
    app = directory / "peers"
    write_app(app, "peers", PEERS, PEERS_CONFIG)
    shutil.copy(directory / "frozen.py", app)
    cores = available_cores()
    config = f"data='{directory / 'texts.npz'}' samples={SAMPLES} classes={CLASSES}"
    federation = f"num-supernodes={clients} client-resources-num-cpus={cores} client-resources-num-gpus=0.0"
    # another number than the machine's would let Ray start as many actors
    federation += f" init-args-num-cpus={cores}"
    begun = time.monotonic()
    with SimulationSuperLink() as link:
        words = ["run", str(app), link.name, "--stream", "--run-config", config, "--federation-config", federation]
        with subprocess.Popen(
            [*link.inside, script("flwr"), *words],
            env=link.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            # read beside the sampling, or a full pipe would stop the app
            with ThreadPoolExecutor(1) as reader:
                printed = reader.submit(process.communicate)
                peak, cpu = sampled(process, lambda: processes_with(f"{LAUNCH}={link.environment[LAUNCH]}"))
                out, _ = printed.result()
    if "FOUND 1" not in out:
        raise SystemExit(out)
    return {"peak": peak, "cpu": cpu, "wall": time.monotonic() - begun}


def sampled(process: subprocess.Popen[str], beside: Callable[[], Iterable[psutil.Process]]) -> tuple[int, float]:
    """Return the most bytes that processes had at a time until one ends, and their processor seconds.

    beside: returns the processes that belong to it. A page that several share counts once.
    """
    most, seconds = 0, dict[tuple[int, float], float]()
    while process.poll() is None:
        found = 0
        with contextlib.suppress(psutil.Error):
            for one in beside():
                with contextlib.suppress(psutil.Error):
                    found += one.memory_full_info().pss
                    seconds[one.pid, one.create_time()] = sum(one.cpu_times()[:2])
        most = max(most, found)
        time.sleep(SAMPLED_EVERY)
    return most, sum(seconds.values())


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return a process and its descendants."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def large(directory: Path) -> dict[str, Any]:
    """Run with the large network. Return what it took, and its peak by the 8 GB that it may take."""
    write_data(directory, LARGE_CLIENTS * LARGE_SAMPLES)
    write_model(directory, LARGE_WIDTH, LARGE_LAYERS)
    row = measured(directory, LARGE_CLIENTS, samples=LARGE_SAMPLES, dtype="bfloat16")
    return {
        f"{LARGE_CLIENTS} clients": row,
        "parameters": IDS * LARGE_WIDTH + LARGE_LAYERS * 12 * LARGE_WIDTH**2,
        "peak by 8 GB": row["peak"] / LARGE_PEAK,
    }


def main() -> None:
    """Measure, print, check."""
    if "--alone" in sys.argv:
        alone(Path(sys.argv[2]))
        return
    if "--one" in sys.argv:
        one(Path(sys.argv[2]), **json.loads(sys.argv[3]))
        return
    parser = arguments(__doc__)
    parser.add_argument("--large", action="store_true", help="a network of 1.1 billion parameters alone")
    options = parser.parse_args()
    if options.large:
        with tempfile.TemporaryDirectory() as name:
            finish(large(Path(name)), {"peak by 8 GB": 1.0}, options)
        return
    width, counts = (192, (2, 8)) if options.short else (768, (2, 8, 16))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_data(directory, SAMPLES * max(SMALL_CLIENTS))
        write_model(directory, 12)
        few, many = (measured(directory, clients)["cpu"] for clients in SMALL_CLIENTS)
        small_passes = printed_by(["--alone", str(directory)])["passes"]
        pool_base = measured(directory, counts[-1], pool=True)["peak"]
        write_model(directory, width)
        plain = printed_by(["--alone", str(directory)])
        rows = {clients: measured(directory, clients) for clients in counts}
        pool = measured(directory, counts[-1], pool=True)
        theirs = peers(directory, counts[-1]) if importlib.util.find_spec("peft") else None
    # embeddings, and per block four projections, two layers of four times the width
    network = 4 * (IDS * width + LAYERS * 12 * width**2)
    trained = 4 * (LAYERS * 2 * 2 * 8 * width + CLASSES * (width + 1))
    results: dict[str, Any] = {"PyTorch alone": plain} | {f"{clients} clients": row for clients, row in rows.items()}
    results |= {f"{counts[-1]} clients, pool of {WORKERS}": pool, "network": network, "trained": trained}
    if theirs:
        results[f"{counts[-1]} clients, Flower with peft, one actor of Ray"] = theirs
    first, last = rows[counts[0]], rows[counts[-1]]
    beyond = max(row["peak"] - clients * trained for clients, row in rows.items()) - plain["peak"] - BESIDE
    results["networks in memory beyond PyTorch alone"] = max(0.0, beyond) / network
    more = counts[-1] - counts[0]
    results["networks per further client"] = (last["peak"] - first["peak"]) / more / network
    results["milliseconds of a client beyond its passes"] = 1000 * (
        (last["cpu"] - first["cpu"]) / more - plain["passes"]
    )
    results["milliseconds of a small network's client beyond its passes"] = 1000 * (
        (many - few) / (SMALL_CLIENTS[1] - SMALL_CLIENTS[0]) - small_passes
    )
    beyond = pool["peak"] - pool_base - BESIDE - counts[-1] * trained
    results["pool: networks in memory beyond a small one's run"] = max(0.0, beyond) / network
    targets = {
        "networks in memory beyond PyTorch alone": 0.5,
        "networks per further client": 0.05,
        "milliseconds of a small network's client beyond its passes": 30.0,
        "pool: networks in memory beyond a small one's run": 1.5,
    }
    finish(results, targets, options)


if __name__ == "__main__":
    main()
