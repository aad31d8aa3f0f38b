"""Memory of a whole simulation: the server and all processes of its clients, sampled until the run ends.

python -m benchmarks.memory             # 100 clients x ResNet-18, FedCAC: a personalized model per client on the server
python -m benchmarks.memory --short     # 10 clients x ResNet-18

The unit is the proportional set size (PSS, Linux), which counts shared pages once. Beside the peak the script prints
the number of model-sized vectors that the server's process holds per client, beyond the memory of a run with a tiny model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import arguments, finish
from benchmarks.simulation import write_images
from fl_app.processes import flower_environment

# bytes of ResNet-18's parameters for 10 classes
VECTOR = 4 * 11_173_962


def peak(directory: Path, model: str, clients: int, rounds: int) -> dict[str, float]:
    """Run a simulation in the pool. Return the largest PSS in bytes of all its processes, and of the server's process."""
    settings = {
        "method": "fedcac",
        "model": model,
        "dataset": f"npz:{directory / 'images.npz'}",
        "partition": "iid",
        "train-samples": 20,
        "test-samples": 4,
        "batch-size": 20,
        "local-epochs": 1,
        "num-server-rounds": rounds,
        "device": "cpu",
        "data-dir": directory / "data",
        "state-dir": directory / f"state-{model}",
        "output-dir": directory,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [
        str(Path(sys.executable).parent / "corolla"),
        "run",
        "--backend",
        "pool",
        "--clients",
        str(clients),
        *words,
    ]
    with (directory / "log").open("w") as log:
        run = psutil.Popen(command, env=flower_environment(directory / "flwr"), stdout=log, stderr=log)
    highest = {"all": 0.0, "server": 0.0}
    while run.poll() is None:
        # the command's own process runs the server
        sizes = {process.pid: pss(process) for process in [run, *run.children(recursive=True)]}
        highest = {"all": max(highest["all"], sum(sizes.values())), "server": max(highest["server"], sizes[run.pid])}
        time.sleep(0.5)
    if run.returncode:
        sys.exit((directory / "log").read_text())
    return highest


def pss(process: psutil.Process) -> float:
    """Return the proportional set size in bytes; 0 for a process that has ended."""
    try:
        size: float = process.memory_full_info().pss
    except psutil.Error:
        return 0.0
    return size


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    clients, rounds = (10, 2) if options.short else (100, 2)
    results: dict[str, Any] = {"clients": clients}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "flwr").mkdir()
        write_images(directory / "images.npz", 20 * clients, 4 * clients)
        small = peak(directory, "mlp", clients, 1)
        large = peak(directory, "resnet18", clients, rounds)
    results["peak bytes"] = {"mlp": small, "resnet18": large}
    results["peak GB of the simulation"] = large["all"] / 1e9
    results["server: vectors per client"] = (large["server"] - small["server"]) / (clients * VECTOR)
    finish(results, {"peak GB of the simulation": 12.0, "server: vectors per client": 2.2}, options)


if __name__ == "__main__":
    main()
