"""Rows of FedOBP's Table 6 as its code runs them, which are other methods than those of their names.

python -m benchmarks.as_run apfl|fedala|flute [--seed 0] [--output results/fedobp-fashion-mnist/as-run]

Its code base is FL-bench (github.com/KarhouTam/FL-bench). In its serial mode, which this is, one object trains and tests all
clients, one by one; some of the authors' stored logs are of two such objects side by side. Data, split, first model, clients of a
round and batches are those of sweeps/fedobp-fashion-mnist.toml, so that a row differs from Corolla's of that name in the method
alone; a round's clients train in the order they are drawn in. Figures: the tests after every `evaluate-every` rounds, before
fine-tuning.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from client_app.trainer import LocalTrainer
from corolla import presets
from corolla.experiments import sweep
from fl_app import rng, weights
from fl_app.config import RunConfig, parse
from fl_app.data import open_client
from fl_app.errors import UserError
from fl_app.files import publish_text
from fl_app.layout import Layout, Model
from strategies import METHOD_PARAMS, METHODS
from strategies.aggregate import weighted_mean
from strategies.apfl import next_alpha
from strategies.base import RoundContext
from strategies.fedala import head, head_inputs, mix, mixed_from, settled, step
from strategies.flute import FLUTEUpdate, on_head

SWEEP = Path(__file__).resolve().parent.parent / "sweeps" / "fedobp-fashion-mnist.toml"


class Worker:
    """FedAvg, and what the rows have in common. `receive`, then `fit` or `answers`, for one client after the other."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.clients = [open_client(config, i) for i in range(config.num_clients)]
        module = self.network()
        self.layout, self.initial = Layout.of(module), weights.read(module)
        if self.layout.b:
            raise UserError(
                f"model: rows as run are of models without running statistics, {config.model} has {self.layout.b}"
            )
        self.shared = METHODS[config.method].travelling(config, self.layout)
        self.global_model = self.initial

    def network(self) -> nn.Module:
        """The run's model, as its method draws it."""
        return METHODS[self.config.method].network(self.config, **self.clients[0].info.model_arguments)

    def receive(self, trainer: LocalTrainer) -> None:
        """Load what the trainer's client starts from."""
        trainer.load(self.global_model)

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train the loaded model; what is sent."""
        return trainer.train(trainer.read())

    def answers(self, trainer: LocalTrainer, x: Tensor) -> Tensor:
        """The logits that are tested, with the loaded model."""
        return trainer.logits(trainer.module, x)

    def trainer(self, client: int, round: int) -> LocalTrainer:
        """A client's trainer, with what it has received."""
        trainer = LocalTrainer(self.network(), self.config, self.clients[client], round, client)
        self.receive(trainer)
        return trainer

    def train(self, round: int) -> None:
        """One round: the clients that Corolla draws, in the order of the draw, and their mean by samples."""
        config = self.config
        draw = rng.generator(config.seed, "sampling", round)
        chosen = draw.choice(config.num_clients, config.drawn(config.num_clients), replace=False).tolist()
        sent = np.stack([self.fit(self.trainer(i, round)).params for i in chosen])
        sizes = np.array([len(self.clients[i].y_train) for i in chosen], np.float64)
        self.global_model = Model(weighted_mean(sent, sizes), self.global_model.buffers)

    @torch.no_grad()
    def test(self, round: int) -> dict[str, float]:
        """Mean accuracy over clients, and over all test samples."""
        right: list[int] = []
        for i in range(self.config.num_clients):
            trainer = self.trainer(i, round)
            trainer.module.eval()
            right.append(sum(int((self.answers(trainer, x).argmax(1) == y).sum()) for x, y in trainer.data.test()))
        sizes = np.array([len(client.y_test) for client in self.clients])
        return {"accuracy": float(np.mean(right / sizes)), "accuracy-pooled": float(sum(right) / sizes.sum())}

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Train; yield each test with its round."""
        for round in range(1, self.config.num_server_rounds + 1):
            self.train(round)
            if round % self.config.evaluate_every == 0 or round == self.config.num_server_rounds:
                yield round, self.test(round)


class APFL(Worker):
    """Outputs are mixed, not parameters. w takes two steps per batch on one gradient, because the second loss, whose gradient v
    takes, finds w's old one still there; alpha's uses it too, in the first epoch.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.own = [self.initial] * config.num_clients
        self.alphas = [float(config.params.alpha)] * config.num_clients

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train w, v and alpha; send w."""
        client, eta, alpha = trainer.client_id, trainer.learning_rate, self.alphas[trainer.client_id]
        w = trainer.weights.clone()
        trainer.load(self.own[client])
        v = trainer.weights.clone()
        step_w, step_v = trainer.optimizer(w).step, trainer.optimizer(v).step
        for x, y in trainer.batches():
            trainer.weights.copy_(w)
            trainer.differentiate(x, y)
            g_w = trainer.gradient.clone()
            step_w(g_w.clone(), eta)
            trainer.weights.copy_(w)
            with torch.no_grad():
                theirs = trainer.logits(trainer.module, x)
            trainer.weights.copy_(v)
            trainer.differentiate(x, y, partial(mixed_loss, trainer, alpha, theirs), counted=False)
            g_v = trainer.gradient.clone()
            step_v(trainer.gradient, eta)
            step_w(g_w.clone(), eta)
            if trainer.epoch == 1:
                slope = (alpha * g_v + (1 - alpha) * g_w).double()
                decay = self.config.params.alpha_decay
                alpha = next_alpha(alpha, v.double(), w.double(), slope, learning_rate=eta, decay=decay)
        trainer.weights.copy_(v)
        self.own[client], self.alphas[client] = trainer.read(), alpha
        trainer.weights.copy_(w)
        return trainer.read()

    def answers(self, trainer: LocalTrainer, x: Tensor) -> Tensor:
        """Mix v's logits with those of the loaded w."""
        theirs, w, alpha = trainer.logits(trainer.module, x), trainer.read(), self.alphas[trainer.client_id]
        trainer.load(self.own[trainer.client_id])
        logits = alpha * trainer.logits(trainer.module, x) + (1 - alpha) * theirs
        trainer.load(w)
        return logits


def mixed_loss(trainer: LocalTrainer, alpha: float, theirs: Tensor, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A batch's loss of a module's logits mixed with given ones."""
    return trainer.loss(alpha * trainer.logits(module, x) + (1 - alpha) * theirs, y)


class FedALA(Worker):
    """The "old local model" that the received one is mixed with is whatever the worker had last, and the weights A are the
    worker's. Where the first tensor of both is the same there is no mixing: so for the very first client, whose weights must
    settle (which they thus do without having learnt), and for all clients of a test but its first, each after another test.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.first = mixed_from(self.layout, config.params.layers)
        self.held, self.weights, self.start = self.initial, torch.ones(self.layout.d - self.first), True

    def receive(self, trainer: LocalTrainer) -> None:
        """Learn A on the client's sample, and load the mixture."""
        p, first, slot = self.config.params, self.first, self.layout.params[0]
        same = np.sum(self.global_model.params[: slot.stop] - self.held.params[: slot.stop]) == 0
        trainer.load(self.global_model if same else self.held)
        own = trainer.weights[first:].clone()
        trainer.load(self.global_model)
        received = trainer.weights[first:].clone()
        A = self.weights.to(received)
        n = len(self.clients[trainer.client_id].y_train)
        chosen = rng.generator(self.config.seed, "ala", trainer.round, trainer.client_id).permutation(n)[
            : int(p.sample_share * n)
        ]
        found = head_inputs(trainer, chosen)
        assert found is not None, "the model's last layer is its classifier"
        z, y = (torch.split(part, self.config.batch_size) for part in found)
        shape = trainer.classifier().weight.shape
        losses: list[float] = []
        while not losses or self.start and not settled(losses, p.threshold, p.max_epochs):
            for batch in zip(z, y, strict=True):
                loss, gradient = head(shape, *batch)(mix(own, received, A))
                A = step(own, received, A, gradient, p.weight_learning_rate)
            losses.append(float(loss))
        self.start, self.weights = False, A
        trainer.weights[first:] = mix(own, received, A)
        self.held = trainer.read()

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train; the worker has the result from now on."""
        self.held = super().fit(trainer)
        return self.held


class FLUTE(Worker):
    """Features are detached from the graph, so the body keeps its first values: all epochs train the head, which stays local. The
    server has the mean of the heads too, which a client starts from that has none of its own.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.kept: list[dict[str, Any]] = [{} for _ in self.clients]

    def context(self, trainer: LocalTrainer) -> tuple[Any, RoundContext[Any]]:
        """What FLUTE's client half is given; whoever has no head of its own starts from the server's."""
        n = len(self.clients[trainer.client_id].y_train)
        ctx = RoundContext(
            self.config,
            self.config.params,
            trainer.round,
            trainer.client_id,
            self.layout,
            self.shared,
            lambda: self.global_model,
            trainer,
            n,
            {},
        )
        return SimpleNamespace(arrays=self.kept[trainer.client_id]), ctx

    def receive(self, trainer: LocalTrainer) -> None:
        """Load the body received and the client's head; the mean head if it has none yet."""
        trainer.load(FLUTEUpdate().merge(self.layout.take(self.global_model, self.shared), *self.context(trainer)))

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train the head, take the server's step on it; what is sent has the body of before."""
        state, ctx = self.context(trainer)
        after = trainer.train(trainer.read(), frozen=self.shared, correction=on_head(ctx))
        FLUTEUpdate().keep_local(after, state, ctx)
        return after


ROWS = {"apfl": APFL, "fedala": FedALA, "flute": FLUTE}


def main() -> None:
    """Run a row, print its tests, write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for ROW,seed=SEED.json; default: none")
    options = parser.parse_args()
    preset = f"fedobp/fashion-mnist-dirichlet-0.1/{options.row}"
    settings = {
        **presets.read_preset(preset),
        **sweep.read_sweep(SWEEP).settings,
        "seed": options.seed,
        "client-threads": 1,
    }
    config = parse(settings, METHOD_PARAMS)
    started, tests = time.perf_counter(), {}
    for round, found in ROWS[options.row](config).run():
        tests[round] = found
        print(
            f"{options.row}, round {round}: {', '.join(f'{name} {100 * x:.2f} %' for name, x in found.items())}",
            flush=True,
        )
    if options.output:
        result = {"preset": preset, "seed": options.seed, "tests": tests, "seconds": int(time.perf_counter() - started)}
        options.output.mkdir(parents=True, exist_ok=True)
        publish_text(options.output / f"{options.row},seed={options.seed}.json", json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
