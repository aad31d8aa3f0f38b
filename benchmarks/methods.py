"""Local training of every method beside FedAvg's: seconds of a client's round, and its expected passes over the data.

python -m benchmarks.methods [--short]

A round is a client's work between a download and its upload, without evaluations: merge, train, score, and make the
model to evaluate, before training and after. It is the client's third round, so that all of a method's state exists.
All methods take turns with a bare forward pass and a bare solve (pFedFDA's). Their shares of FedAvg's epoch convert the
counted passes into time. Seconds are the processor's, on one thread, so that other work on the machine matters little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks.measure import arguments, finish, interleaved
from benchmarks.training import client_data
from client_app.session import prepare_training
from client_app.stored_state import StoredState
from client_app.trainer import LocalTrainer
from corolla.testing import local_round
from fl_app import weights
from fl_app.config import RunConfig, parse
from fl_app.data import ClientData
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder
from fl_app.transport.wire import Upload
from strategies import METHOD_PARAMS, METHODS
from strategies.base import RoundContext
from strategies.base.server_half import Turn
from strategies.base.state import UploadBuffer
from strategies.baselines import pfedfda
from strategies.engine.plain import PlainRounds

EPOCHS = 5
TARGET = 1.15  # measured / counted
FORWARD, SOLVE = "forward passes", "a solve"  # separate cases


class Passes(NamedTuple):
    """Forward and backward passes over the training data, and solves with a k x k matrix.

    forward, backward: per local epoch; more_forward, more_backward: in addition, per round; solves: per round.
    """

    forward: float = 1
    backward: float = 1
    more_forward: float = 0
    more_backward: float = 0
    solves: int = 0

    def seconds(self, taken: Mapping[str, float]) -> float:
        """Return the expected seconds, from those of FedAvg, of its forward passes, and of a solve."""
        forward, backward = EPOCHS * self.forward + self.more_forward, EPOCHS * self.backward + self.more_backward
        per_epoch = forward * taken[FORWARD] + backward * (taken["fedavg"] - taken[FORWARD])
        return per_epoch / EPOCHS + self.solves * taken[SOLVE]

    def __str__(self) -> str:
        """Return the text in the table; E is the number of local epochs."""
        text = f"{_sum(self.forward, self.more_forward)} forward, {_sum(self.backward, self.more_backward)} backward"
        return text + (f", {self.solves} solves" if self.solves else "")


def _sum(per_epoch: float, more: float) -> str:
    parts = [f"{per_epoch:g} E".removeprefix("1 ")] * bool(per_epoch) + [f"{more:g}"] * bool(more)
    return " + ".join(parts) or "0"


COUNTED = {
    # E - 1 epochs on the head, without a backward pass through the body, then one on the body
    "fedrep": Passes(1, 0, 0, 1),
    "flute": Passes(1, 0, 0, 1),  # the same as fedrep
    "ditto": Passes(2, 2),
    "pfedme": Passes(5, 5),  # inner steps
    "apfl": Passes(2, 2),
    "fedselect": Passes(2, 2),
    "feddpa": Passes(2, 2, 1, 1),  # plus the Fisher information
    "moon": Passes(3, 1),  # two reference models
    "fedntd": Passes(2, 1),  # one reference model
    # features at two bodies, and at each about 40 solves
    "pfedfda": Passes(1, 1, 2, 0, 80),
    "fedala": Passes(1, 1, 0.8, 0),  # features, to learn A on
    "feddwa": Passes(2, 2),  # the guidance
    # prototypes; an epoch of alignment; gradients for the information
    "fedas": Passes(1, 1, 3, 2),
    # a fifth is held out, to judge three models
    "fedfomo": Passes(0.8, 0.8, 0.6, 0),
    "ifca": Passes(1, 1, 4, 0),  # models to choose from
    "fedem": Passes(3, 3, 3, 0),  # components
    "perfedavg": Passes(1, 1, 2, 2),  # a step on all data before each evaluation
    "fedproto": Passes(1, 1, 1, 0),  # prototypes
    # statistics, an epoch of the head without a backward pass through the body, centroids
    "fedpac": Passes(1, 1, 3, 0),
    # rounds that train encoders; later rounds have K forward passes over three batches
    "fedconcat": Passes(),
}
"""The cost of a method's round by its specification, with all defaults.

A method not named here costs the same as FedAvg.
"""


def counted(method: str) -> Passes:
    """Return the passes of one round of a method."""
    return COUNTED.get(method, Passes())


class Client:
    """One client of a method, and its server, without messages."""

    def __init__(self, config: RunConfig, data: ClientData) -> None:
        method = METHODS[config.method]
        self.config, self.data, self.method = config, data, method
        module = method.network(config, **data.info.model_arguments)
        self.layout, self.initial = Layout.of(module), weights.read(module)
        self.shared = method.shared(self.layout, config.params)
        self.server = method.server(config, self.layout, self.initial, self.shared, RunFolder(Path(), ""))
        self.state = StoredState()

    def context(self, round: int) -> tuple[RoundContext[Any], Model]:
        """Return the client's context in a round, and the model that it is sent."""
        download = self.server.download_for(0, Turn(self.config, round), "train")
        trainer = LocalTrainer(
            self.method.network(self.config, **self.data.info.model_arguments), self.config, self.data, round, 0
        )
        context = RoundContext(
            self.config,
            self.config.params,
            round,
            0,
            self.layout,
            self.shared,
            lambda: self.initial,
            trainer,
            len(self.data.y_train),
            download.extras,
        )
        return context, download.model

    def take_part(self, round: int) -> None:
        """Take part in a round as the only client."""
        context, received = self.context(round)
        turn = Turn(self.config, round)
        self.server.begin(turn)
        self.server.sample_clients(self.server.state, [0], turn)
        upload = local_round(self.method, context, received, self.state)
        buffer = UploadBuffer.of([0], self.server.form(self.server.state, turn))
        buffer.add(0, PlainRounds(self.server).check(0, upload), upload.metrics)
        self.server.personalize(round, buffer.result())

    def third_round(self) -> Callable[[], Upload]:
        """Take part in two rounds. Return the third as a function that can be repeated."""
        for round in (1, 2):
            self.take_part(round)
        context, received = self.context(3)
        return lambda: local_round(
            self.method, context, received, StoredState(dict(self.state.arrays), self.state.version)
        )


def forward(context: RoundContext[Any], model: Model) -> None:
    """Do a forward pass over the training data per local epoch.

    Batches, and BatchNorm's statistics, are those of training.
    """
    with torch.no_grad():
        network = context.trainer.network(model).train()
        for x, _ in context.trainer.batches():
            context.trainer.logits(network, x)


def solve(context: RoundContext[Any]) -> Callable[[], object]:
    """Return one solve, with a matrix as wide as the classifier's input."""
    classes, width = pfedfda.head_shape(context.layout)
    means, covariance = np.ones((classes, width)), np.eye(width) + 0.5
    return partial(pfedfda.lda_head, means, covariance, np.ones(classes), eps=1e-4)


def measure(model: str, side: int, channels: int, batch: int, steps: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of a round, by method. A method that refuses the model is named and left out."""
    data = client_data(batch * steps, side, channels)
    cases: dict[str, Callable[[], object]] = {}
    for method in METHODS:
        raw: dict[str, Scalar] = {
            "method": method,
            "model": model,
            "num-clients": 1,
            "local-epochs": EPOCHS,
            "batch-size": batch,
        }
        try:
            client = Client(parse({**raw, "learning-rate": 0.01, "device": "cpu"}, METHOD_PARAMS), data)
        except UserError as error:
            print(f"{method} is left out with {model}: {error}", file=sys.stderr)
            continue
        if method == "fedavg":
            context, received = client.context(1)
            cases |= {FORWARD: partial(forward, context, received), SOLVE: solve(context)}
        cases[method] = client.third_round()
    with threadpool_limits(1, "blas"):
        return interleaved(cases, repeats, time.process_time)


def seconds_table(seconds: dict[str, dict[str, float]]) -> tuple[str, dict[str, float]]:
    """Return the measured ratios as a Markdown table, and measured / counted by model and method."""
    heads = [f"{model} / FedAvg | {model}, measured / counted" for model in seconds]
    lines = ["| method | passes | " + " | ".join(heads) + " |", "|---" * (2 + 2 * len(seconds)) + "|"]
    ratios: dict[str, float] = {}
    for method in METHODS:
        cells = []
        for model, taken in seconds.items():
            if method not in taken:
                cells.append("– | –")
                continue
            measured = taken[method] / taken["fedavg"]
            ratio = taken[method] / counted(method).seconds(taken)
            ratios[f"{model}: {method}, measured / counted"] = ratio
            cells.append(f"{measured:.2f} | {ratio:.2f}")
        lines.append(f"| `{method}` | {counted(method)} | " + " | ".join(cells) + " |")
    return "\n".join(lines), ratios


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    prepare_training(threads=1)
    steps, repeats = (2, 1) if options.short else (6, 5)
    seconds = {
        name: measure(name, side, channels, batch, steps, repeats)
        for name, side, channels, batch in (("cnn", 28, 1, 50), ("resnet8", 32, 3, 50))
    }
    text, ratios = seconds_table(seconds)
    print(text)
    finish({"seconds": seconds, **ratios}, dict.fromkeys(ratios, TARGET), options)


if __name__ == "__main__":
    main()
