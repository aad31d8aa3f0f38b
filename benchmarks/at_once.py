"""A round of many clients on one GPU: one by one, and K at a time (`corolla run --in-process --clients-at-once`).

python -m benchmarks.at_once [--device cuda:1] [--clients 40] [--rounds 4] [--precision float32 ...] [--short]

The setting is that of FedCAC's CIFAR-10 tables (40 clients with 500 images, 5 epochs, ResNet-8, batch 100) on random
images. The first round sets everything up, and the last one evaluates. The seconds are those of the quickest round
between them. The digests show whether both ways end with the same bits. Accuracies that differ by more than 0.1 count
as wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from benchmarks.measure import arguments, machine
from client_app.at_once import Lanes
from client_app.client_app import app
from client_app.trainer import resolve_device
from fl_app import server_app
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.server.run_folder import read_metrics, read_summary
from fl_app.transport.inprocess import InProcessGrid, first
from strategies import METHOD_PARAMS

SAMPLE_SECONDS = 0.002
LARGEST_DIFFERENCE = 0.1


def images(path: Path, clients: int, train: int, test: int) -> None:
    """Write random images with a brightness that follows from their class."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, 10, clients * (train + test))
    noise = draw.integers(-60, 60, (len(y), 3, 32, 32), dtype=np.int16)
    x = (128 + noise + 12 * (y[:, None, None, None] - 5)).astype(np.uint8)
    cut = clients * train
    np.savez(path, x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])


@contextmanager
def sampled(counts: Counter[str]) -> Iterator[None]:
    """Count, 500 times a second, the function that the running thread is in."""
    done = Event()

    def look() -> None:
        while not done.wait(SAMPLE_SECONDS):
            for frame in sys._current_frames().values():
                code = frame.f_code
                # skip threads that wait for their turn, and this one
                if code.co_name in ("wait", "_wait", "resume", "look", "_worker"):
                    continue
                outer, here = frame.f_back, f"{Path(code.co_filename).name}:{code.co_name}"
                while outer is not None and "site-packages" in outer.f_code.co_filename:
                    outer = outer.f_back
                counts[f"{here} < {outer.f_code.co_name if outer else ''}"] += 1

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rounds(config: dict[str, Scalar], at_once: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Run. Return the seconds of each round by phase, and the run's summary."""
    with tempfile.TemporaryDirectory() as directory:
        config = {**config, "output-dir": directory, "state-dir": directory, "data-dir": directory, "run-name": "run"}
        clients = int(config["num-clients"])
        lanes = Lanes(at_once)
        answer = first if at_once == 1 else lanes.answer
        grid = InProcessGrid(app, config, clients, answer=answer)
        folder = server_app.run(grid, parse(config, METHOD_PARAMS), lambda *_: None).path
        lanes.close()
        return [record["seconds"] for record in read_metrics(folder)], read_summary(folder)


def main() -> None:
    """Measure, print, check."""
    parser: argparse.ArgumentParser = arguments(__doc__)
    parser.add_argument("--device", default="auto", help="default: the first GPU, or the CPU")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--precision", nargs="+", default=["float32", "tf32", "bfloat16"])
    parser.add_argument("--profile", action="store_true", help="also print where the rounds' time goes")
    options = parser.parse_args()
    device = resolve_device(options.device)
    clients, train, test = (3, 100, 20) if options.short else (options.clients, 500, 100)
    results: dict[str, Any] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "images.npz"
        images(data, clients, train, test)
        config: dict[str, Scalar] = {
            "method": "fedcac",
            "dataset": f"npz:{data}",
            "model": "resnet8",
            "partition": "iid",
            "num-clients": clients,
            "num-server-rounds": 3 if options.short else options.rounds,
            "local-epochs": 1 if options.short else 5,
            "batch-size": 50 if options.short else 100,
            "train-samples": train,
            "test-samples": test,
            "learning-rate": 0.1,
            "momentum": 0.9,
            "device": str(device),
        }
        for precision in options.precision:
            accuracies = []
            for at_once in (1, clients):
                name = f"{precision}, " + ("one by one" if at_once == 1 else f"{clients} at once")
                where: Counter[str] = Counter()
                with sampled(where):
                    seconds, summary = rounds({**config, "precision": precision}, at_once)
                typical = min(seconds[1:-1], key=lambda each: each["round"])
                results[name] = {**typical, "digest": summary["digest"]}
                accuracies.append(float(summary["final-accuracy"]))
                print(name, json.dumps(results[name]), flush=True)
                if options.profile:
                    print("\n".join(f"  {count:5d} {place}" for place, count in where.most_common(40)), flush=True)
            if abs(accuracies[0] - accuracies[1]) > LARGEST_DIFFERENCE:
                wrong.append(f"{precision}: accuracies {accuracies}")
    print(json.dumps({**results, "machine": machine(), "wrong": wrong}, indent=2))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
