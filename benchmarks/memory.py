"""Memory of a whole simulation: SuperLink, ServerApp, Ray and its actors, sampled until the run ends.

python -m benchmarks.memory             # 100 clients x ResNet-18, FedCAC: a personalized model per client on the server
python -m benchmarks.memory --short     # 10 clients x ResNet-18

Counted is the proportional set size (PSS, Linux): shared pages once. Besides the peak it tells how many vectors of the model's
size the ServerApp holds per client beyond what a run with a tiny model takes.
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
    """Run a simulation; return the largest PSS in bytes of all its processes, and of the ServerApp."""
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
    command = [str(Path(sys.executable).parent / "corolla"), "run", "--clients", str(clients), *words]
    with (directory / "log").open("w") as log:
        run = psutil.Popen(command, env=flower_environment(directory / "flwr"), stdout=log, stderr=log)
    highest = {"all": 0.0, "serverapp": 0.0}
    while run.poll() is None:
        sizes = {process.pid: pss(process) for process in [run, *run.children(recursive=True)]}
        highest["all"] = max(highest["all"], sum(size for size, _ in sizes.values()))
        highest["serverapp"] = max(highest["serverapp"], sum(size for size, server in sizes.values() if server))
        time.sleep(0.5)
    if run.returncode:
        sys.exit((directory / "log").read_text())
    return highest


def pss(process: psutil.Process) -> tuple[float, bool]:
    """Proportional set size in bytes, and whether the process is the ServerApp's."""
    try:
        return process.memory_full_info().pss, any("flwr-simulation" in word for word in process.cmdline())
    except psutil.Error:
        return 0.0, False


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
    results["ServerApp: vectors per client"] = (large["serverapp"] - small["serverapp"]) / (clients * VECTOR)
    finish(results, {"peak GB of the simulation": 12.0, "ServerApp: vectors per client": 2.2}, options)


if __name__ == "__main__":
    main()
