"""Adapters of a frozen network: memory and processor seconds of a run beside the number of clients.

python -m benchmarks.adapters            # a frozen network of 66 million parameters, 2, 8 and 16 clients
python -m benchmarks.adapters --short    # 8 million parameters, 2 and 8 clients

A text encoder of the size of DistilBERT with random weights; a matrix of rank 8 beside each projection of its attention
trains, and the classifier. Every run is a process of its own, and has one round of FedCAC with 20 samples a client. The
memory is the process's peak (resident), with the activations of a client's pass. A run with a tiny network is its base.

In a pool of two workers, it is the peak of the sum over all processes, each page counted once (PSS), with two samples a
step. The frozen tensors must be there once: at most 1.5 networks, what trains per client, and 100 MB for all else.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import arguments, finish, resource_peak

SAMPLES, LENGTH, CLASSES = 20, 32, 4
WORKERS, POOL_BATCH = 2, 2
# bytes for activations and messages of a pool
POOL_BESIDE = 100e6
SAMPLED_EVERY = 0.02
IDS, LAYERS = 30522, 6
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


def write_data(directory: Path, samples: int) -> None:
    """Write texts.npz: token ids, and classes that they do not tell."""
    generator, labels = np.random.default_rng(0), np.arange(samples) % CLASSES
    train, test = generator.integers(1, IDS, (2, samples, LENGTH), dtype=np.int32)
    np.savez(directory / "texts.npz", x_train=train, x_test=test, y_train=labels, y_test=labels)


def write_model(directory: Path, width: int) -> None:
    """Write frozen.py, the module of the run's model."""
    (directory / "frozen.py").write_text(MODEL.replace("@SIZES@", f"{width}, {LAYERS}, {IDS}"))


def one(directory: Path, clients: int, batch: int, pool: bool) -> None:
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
        train_samples=SAMPLES,
        test_samples=SAMPLES,
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


def measured(directory: Path, clients: int, *, pool: bool = False) -> dict[str, float]:
    """Run in a new process. Return its peak bytes, its processor seconds and its seconds.

    pool: with workers. The peak is then that of all processes, each page counted once.
    """
    batch = POOL_BATCH if pool else SAMPLES
    command = [sys.executable, "-m", "benchmarks.adapters", "--one", str(directory), str(clients), str(batch)]
    command += ["pool"] * pool
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = sampled_peak(process) if pool else 0
        printed, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found | ({"peak": peak} if pool else {})


def sampled_peak(process: subprocess.Popen[str]) -> int:
    """Return the most bytes that a process and its descendants had at a time, until it ends. A shared page counts once."""
    root, most = psutil.Process(process.pid), 0
    while process.poll() is None:
        found = 0
        with contextlib.suppress(psutil.Error):
            for one in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    found += one.memory_full_info().pss
        most = max(most, found)
        time.sleep(SAMPLED_EVERY)
    return most


def main() -> None:
    """Measure, print, check."""
    if "--one" in sys.argv:
        one(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), "pool" in sys.argv)
        return
    options = arguments(__doc__).parse_args()
    width, counts = (192, (2, 8)) if options.short else (768, (2, 8, 16))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_data(directory, SAMPLES * max(counts))
        write_model(directory, 12)
        base = measured(directory, counts[0])["peak"]
        pool_base = measured(directory, counts[-1], pool=True)["peak"]
        write_model(directory, width)
        rows = {clients: measured(directory, clients) for clients in counts}
        pool = measured(directory, counts[-1], pool=True)
    # embeddings, and per block four projections, two layers of four times the width
    network = 4 * (IDS * width + LAYERS * 12 * width**2)
    trained = 4 * (LAYERS * 2 * 2 * 8 * width + CLASSES * (width + 1))
    results: dict[str, Any] = {f"{clients} clients": row for clients, row in rows.items()}
    results |= {f"{counts[-1]} clients, pool of {WORKERS}": pool, "network": network, "trained": trained}
    results["networks in memory beyond a small one's run"] = (rows[counts[0]]["peak"] - base) / network
    more = rows[counts[-1]]["peak"] - rows[counts[0]]["peak"]
    results["networks per further client"] = more / (counts[-1] - counts[0]) / network
    beyond = pool["peak"] - pool_base - POOL_BESIDE - counts[-1] * trained
    results["pool: networks in memory beyond a small one's run"] = max(0.0, beyond) / network
    targets = {"networks per further client": 0.05, "pool: networks in memory beyond a small one's run": 1.5}
    finish(results, targets, options)


if __name__ == "__main__":
    main()
