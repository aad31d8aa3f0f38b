"""Training on a GPU: correctness, speed beside the plain loop, memory. Needs no Ray and no SuperLink.

python -m benchmarks.gpu_check [--device cuda:1]

Without a GPU the script prints that nothing was checked, and exits with code 0. `--device cpu` runs the same code. The
last part, a whole run in one process, needs Flower, and is left out where Flower is not installed. A failed check makes
the exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.measure import arguments, interleaved, machine
from benchmarks.training import client_data, configure, ours, plain, relative
from client_app.session import prepare_training
from client_app.trainer import LocalTrainer, resolve_device
from fl_app import models, weights
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.keys import Scalar
from fl_app.layout import Model

SHAPES = {"cnn": (28, 1), "resnet8": (32, 3)}  # pixels, channels
BATCH = 100
# In units of one step's length. float32: a GPU sums in another order, and cuDNN may transform. bfloat16: every layer
# has 8 bits, and gradients of random labels nearly cancel (0.1 and 0.18 on a CPU). A wrong gradient is off by 1.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


def exact() -> None:
    """Make float32 exact on a GPU: TF32, torch's default for convolutions, keeps 10 bits."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def wait(device: torch.device) -> None:
    """Return when the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def correctness(config: RunConfig, data: ClientData, start: Model) -> dict[str, float]:
    """Return differences from the CPU.

    They are one step by precision, in units of the step, and the evaluation's loss, relative.
    """
    step = dataclasses.replace(config, local_epochs=1)
    on_cpu = dataclasses.replace(step, device="cpu")
    first = ClientData(
        data.x_train[:BATCH], data.y_train[:BATCH], data.x_train[:BATCH], data.y_train[:BATCH], data.info
    )
    want = ours(on_cpu, first, start)
    found = {
        f"{precision}: one step's difference from the CPU": relative(
            ours(dataclasses.replace(step, precision=precision), first, start),  # type: ignore[arg-type]
            want,
            start,
        )
        for precision in TOLERANCE
    }
    losses = [
        LocalTrainer(models.build(c.model, **data.info.model_arguments), c, first, 1, 0).evaluate(start)[0]
        for c in (step, on_cpu)
    ]
    return found | {"float32: evaluation's difference from the CPU": abs(losses[0] / losses[1] - 1)}


def speed(config: RunConfig, data: ClientData, start: Model, repeats: int) -> dict[str, Any]:
    """Return samples per second of the plain loop and of ours, by precision, and ours' peak memory on the GPU."""
    device = resolve_device(config.device)

    def timed(train: Callable[[], Model]) -> None:
        train()
        wait(device)

    cases: dict[str, Callable[[], Model]] = {
        "plain float32": partial(plain, config, data, start, torch.contiguous_format),
        "plain float32, channels last": partial(plain, config, data, start, torch.channels_last),
    }
    for precision in TOLERANCE:
        changed = dataclasses.replace(config, precision=precision)  # type: ignore[arg-type]
        cases[f"ours {precision}"] = partial(ours, changed, data, start)
    peaks = {}
    # this loop is also a warm-up: cuDNN chooses algorithms, the allocator fills
    for name, case in cases.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        timed(case)
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(device)
    seconds = interleaved({name: partial(timed, case) for name, case in cases.items()}, repeats)
    samples = config.local_epochs * len(data.y_train)
    return {"samples per second": {name: samples / s for name, s in seconds.items()}, "peak bytes on the GPU": peaks}


def whole_run(device: str) -> dict[str, float]:
    """Run FedCAC on digits in this process, on the device and on the CPU. Return accuracies and seconds per round."""
    from client_app.client_app import app
    from fl_app import server_app
    from fl_app.config import parse
    from fl_app.server.run_folder import read_metrics, read_summary
    from fl_app.transport.inprocess import InProcessGrid
    from strategies import METHOD_PARAMS

    found = {}
    for name in (device, "cpu"):
        with tempfile.TemporaryDirectory() as directory:
            raw: dict[str, Scalar] = {
                "method": "fedcac",
                "num-clients": 3,
                "num-server-rounds": 3,
                "device": name,
                "run-name": "run",
                "output-dir": directory,
                "state-dir": directory,
                "data-dir": directory,
            }
            config = parse(raw, METHOD_PARAMS)
            folder = server_app.run(InProcessGrid(app, raw, 3), config, lambda *_: None).path
            where = "on the CPU" if name == "cpu" else "on the GPU"
            found[f"accuracy {where}"] = float(read_summary(folder)["final-accuracy"])
            found[f"seconds of a round {where}"] = min(r["seconds"]["wait"] for r in read_metrics(folder))
    return found


def check_device(device: torch.device, small: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the results, and the wrong ones."""
    results: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        results |= {"gpu": properties.name, "gpu-memory": properties.total_memory, "cuda": torch.version.cuda}
    wrong = []
    samples, epochs, repeats = (BATCH, 1, 1) if small else (2000, 5, 5)
    for name, (side, channels) in SHAPES.items():
        config = configure(model=name, local_epochs=epochs, batch_size=BATCH, learning_rate=0.01, device=str(device))
        data = client_data(samples, side, channels)
        start = weights.read(models.build(name, **data.info.model_arguments))
        differences = correctness(config, data, start)
        wrong += [
            f"{name}, {what}: {d:.2g}" for what, d in differences.items() if not d <= TOLERANCE[what.split(":")[0]]
        ]
        results[name] = {**differences, **speed(config, data, start, repeats)}
    if importlib.util.find_spec("flwr") is None:
        results["whole run"] = "left out: Flower is not installed"
    else:
        results["whole run"] = run = whole_run(str(device))
        accuracies = [value for name, value in run.items() if name.startswith("accuracy")]
        if max(accuracies) - min(accuracies) > 0.05:  # of 120 test images
            wrong.append(f"whole run: accuracies {accuracies}")
    return results, wrong


def main() -> None:
    """Check, measure, print."""
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--device", default="auto", help="default: the first GPU")
    options = parser.parse_args()
    device = resolve_device(options.device)
    if options.device == "auto" and device.type == "cpu":
        print("no GPU: nothing checked")
        return
    prepare_training(threads=1)
    exact()
    started = time.perf_counter()
    results, wrong = check_device(device, options.short)
    print(
        json.dumps(
            {**results, "seconds": time.perf_counter() - started, "machine": machine(), "wrong": wrong}, indent=2
        )
    )
    if wrong:
        sys.exit("wrong results:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
