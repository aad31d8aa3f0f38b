"""The cost of a client's round beside its training, by cause: digits, `mlp`, 20 samples a client, all in one process.

python -m benchmarks.client_cost [--short] [--model MODEL] [--method METHOD] [--clients N]

The ClientApp answers every client's message of two rounds; the second round counts. Seconds are this thread's processor
time, and the first quartile over the clients, which other work on the machine disturbs least. A first run is timed as a
whole. In a second run each cause's functions have a clock, which stops while another cause's function runs. Their
shares divide the first run's time. The yardstick is the loop that a user of PyTorch would write for the same training.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import Message
from torch import nn

from benchmarks.measure import arguments, finish
from client_app.client_app import app
from client_app.session import prepare_training
from fl_app import models
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS

clock = time.thread_time
TARGET_MS = 2.0
SAMPLES, BATCH, TESTED = 20, 10, 5

CAUSES: Mapping[str, tuple[str, ...]] = {
    "Flower's objects and the codec": ("fl_app.transport.wire:decode_download", "fl_app.transport.wire:encode_upload"),
    "opening data": ("client_app.session:Session.opened", "client_app.batches:Batches.__init__"),
    "the network as vectors": (
        "client_app.session:Session.network",
        "client_app.trainer:LocalTrainer.__init__",
        "client_app.flat:FlatModule.__init__",
    ),
    "client state and its place": (
        "client_app.client:CorollaClient._state_of",
        "client_app.stored_state:StateStore.load",
        "client_app.client:CorollaClient._save",
    ),
    "random seeds": ("torch:manual_seed", "fl_app.rng:seed_global", "fl_app.rng:torch_seed"),
    "evaluation, before and after": ("client_app.client:CorollaClient._measured",),
    "models in and out of the network": (
        "client_app.flat:FlatModule.load",
        "client_app.flat:FlatModule.read",
        "client_app.flat:FlatModule.freeze",
    ),
    "training": ("client_app.trainer:LocalTrainer.train",),
    "all else": ("client_app.client:CorollaClient._train",),
}
"""By cause, the functions that stand for it: `module:name`. Their caller, Flower, belongs to the first cause."""
FIRST, TRAINING = next(iter(CAUSES)), "training"


class Clocks:
    """Seconds by cause. Time in a function of one cause does not count for the cause that called it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Count the time inside for a cause."""
        self._switch()
        self._running.append(cause)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = clock()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def counted(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with its time counted for a cause."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(cause):
                return function(*args, **kwargs)

        return timed


@contextmanager
def on_the_clocks(clocks: Clocks) -> Iterator[None]:
    """Time the functions of all causes inside."""
    patches = []
    for cause, names in CAUSES.items():
        for name in names:
            module, _, path = name.partition(":")
            *outer, last = path.split(".")
            owner = functools.reduce(getattr, outer, importlib.import_module(module))
            patches.append(patch.object(owner, last, clocks.counted(cause, getattr(owner, last))))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def measured(options: argparse.Namespace, clocks: Clocks | None = None) -> list[dict[str, float]]:
    """Run two rounds of all clients. Return the seconds by cause of each message of the second round.

    Without clocks all time counts for the first cause.
    """
    found: list[dict[str, float]] = []

    class Counting(InProcessGrid):
        def _handle(self, message: Message) -> Message:
            if message.metadata.message_type != "train" or message.metadata.group_id != "2":
                return super()._handle(message)
            used = clocks or Clocks()
            used.seconds.clear()
            with used.of(FIRST):
                reply = super()._handle(message)
            found.append(dict(used.seconds))
            return reply

    with tempfile.TemporaryDirectory() as directory:
        raw: dict[str, Scalar] = {
            "method": options.method,
            "model": options.model,
            "num-server-rounds": 2,
            "num-clients": options.clients,
            "train-samples": SAMPLES,
            "test-samples": TESTED,
            "local-epochs": 1,
            "batch-size": BATCH,
            "device": "cpu",
            "evaluate-every": 0,
            "run-name": "client-cost",
            "output-dir": directory,
            "state-dir": str(Path(directory) / "state"),
        }
        with on_the_clocks(clocks) if clocks else nullcontext():
            run(Counting(app, raw, options.clients), parse(raw, METHOD_PARAMS), lambda *_: None)
    return found


def bare_loop(model: str) -> Callable[[], None]:
    """Return one client's training as a user of PyTorch would write it: an epoch of SGD on prepared samples."""
    module = models.build(model, in_channels=1, num_classes=10, image_size=8)
    x, y = torch.rand(SAMPLES, 1, 8, 8), torch.arange(SAMPLES) % 10
    loss_of = nn.CrossEntropyLoss()

    def train() -> None:
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        order = torch.randperm(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            batch = order[start : start + BATCH]
            optimizer.zero_grad()
            loss_of(module(x[batch]), y[batch]).backward()
            optimizer.step()

    return train


def quickest(values: list[float]) -> float:
    """Return the first quartile of the values."""
    return statistics.quantiles(values, n=4)[0]


def seconds_of(case: Callable[[], None]) -> float:
    """Return the processor time of a call."""
    started = clock()
    case()
    return clock() - started


def main() -> None:
    """Print milliseconds by cause."""
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=0, help="default 300, with --short 100")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--method", default="fedavg")
    options = parser.parse_args()
    options.clients = options.clients or (100 if options.short else 300)
    logging.disable(logging.WARNING)
    prepare_training(1)
    bare = bare_loop(options.model)
    yardstick = [seconds_of(bare) for _ in range(options.clients)]
    whole = quickest([sum(seconds.values()) for seconds in measured(options)])
    yardstick += [seconds_of(bare) for _ in range(options.clients)]
    parts = measured(options, Clocks())
    by_cause = {cause: quickest([seconds.get(cause, 0.0) for seconds in parts]) for cause in CAUSES}
    scale = 1000 * whole / sum(by_cause.values())
    causes = {cause: seconds * scale for cause, seconds in by_cause.items()}
    results = {
        "model": options.model,
        "method": options.method,
        "clients": options.clients,
        "milliseconds a client": 1000 * whole,
        "of them": causes,
        "beyond its training": 1000 * whole - causes[TRAINING],
        "a plain PyTorch loop": 1000 * quickest(yardstick),
    }
    finish(results, {"beyond its training": TARGET_MS}, options)


if __name__ == "__main__":
    main()
