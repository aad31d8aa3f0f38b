"""Rows of FedOBP's Table 6 as its code runs them, which differ from the methods that the rows name.

python -m studies.as_run apfl|fedala|flute [--seed 0] [--output studies/results/fedobp-fashion-mnist/as-run]

Its code base is FL-bench (github.com/KarhouTam/FL-bench). This script runs its serial mode: one object, the worker,
trains and tests all clients, one after the other. (Some of the authors' stored logs come from two workers side by
side.)

Data, split, first model, clients of a round and batches are those of sweeps/fedobp-fashion-mnist.toml. So a row differs
from Corolla's row of the same name in the method alone. A round's clients train in the order of the draw. All clients
are tested after every `evaluate-every` rounds, before fine-tuning.
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

from client_app.session import prepare_training
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
from strategies.base import RoundContext
from strategies.baselines.apfl import next_alpha
from strategies.baselines.fedala import head, head_inputs, mix, mixed_from, settled, step
from strategies.baselines.flute import FLUTEUpdate, on_head
from strategies.kernels.aggregate import weighted_mean

SWEEP = Path(__file__).resolve().parent / "sweeps" / "fedobp-fashion-mnist.toml"


class Worker:
    """FedAvg, and the code that all rows share.

    Per client, one after the other: `receive`, then `fit` in a round or `answers` in a test.
    """

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
        """Return the run's model, with its method's initial values."""
        return METHODS[self.config.method].network(self.config, **self.clients[0].info.model_arguments)

    def receive(self, trainer: LocalTrainer) -> None:
        """Load the model that the trainer's client starts from."""
        trainer.load(self.global_model)

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train the loaded model. Return the model that the client sends."""
        return trainer.train(trainer.read())

    def answers(self, trainer: LocalTrainer, x: Tensor) -> Tensor:
        """Return the logits to test, with the loaded model."""
        return trainer.logits(trainer.module, x)

    def trainer(self, client: int, round: int) -> LocalTrainer:
        """Return a client's trainer, after `receive`."""
        trainer = LocalTrainer(self.network(), self.config, self.clients[client], round, client)
        self.receive(trainer)
        return trainer

    def train(self, round: int) -> None:
        """Run one round: train the drawn clients in the order of the draw, and average them by samples."""
        config = self.config
        draw = rng.generator(config.seed, "sampling", round)
        chosen = draw.choice(config.num_clients, config.cohort_size(config.num_clients), replace=False).tolist()
        sent = np.stack([self.fit(self.trainer(i, round)).params for i in chosen])
        sizes = np.array([len(self.clients[i].y_train) for i in chosen], np.float64)
        self.global_model = Model(weighted_mean(sent, sizes), self.global_model.buffers)

    @torch.no_grad()
    def test(self, round: int) -> dict[str, float]:
        """Return the mean accuracy over clients, and the accuracy over all test samples."""
        right = []
        for i in range(self.config.num_clients):
            trainer = self.trainer(i, round)
            trainer.module.eval()
            count = 0
            for x, y in trainer.data.in_order("test"):
                count += int((self.answers(trainer, x).argmax(1) == y).sum())
            right.append(count)
        sizes = np.array([len(client.y_test) for client in self.clients])
        return {"accuracy": float(np.mean(right / sizes)), "accuracy-pooled": float(sum(right) / sizes.sum())}

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Train. Yield each test with its round."""
        for round in range(1, self.config.num_server_rounds + 1):
            self.train(round)
            if round % self.config.evaluate_every == 0 or round == self.config.num_server_rounds:
                yield round, self.test(round)


class APFL(Worker):
    """APFL that mixes outputs instead of parameters: those of w, which is sent, and of v, which stays with the client.

    w takes two steps per batch on the same gradient, because the gradient is still there when the optimizer steps for
    v's loss. In the first epoch, alpha's gradient uses it too.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.own = [self.initial] * config.num_clients
        self.alphas = [float(config.params.alpha)] * config.num_clients

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train w, v and alpha; return w."""
        client, eta = trainer.client_id, trainer.learning_rate
        alpha = self.alphas[client]
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
        w, alpha = trainer.read(), self.alphas[trainer.client_id]
        theirs = trainer.logits(trainer.module, x)
        trainer.load(self.own[trainer.client_id])
        logits = alpha * trainer.logits(trainer.module, x) + (1 - alpha) * theirs
        trainer.load(w)
        return logits


def mixed_loss(trainer: LocalTrainer, alpha: float, theirs: Tensor, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return a batch's loss for a module's logits mixed with given logits."""
    return trainer.loss(alpha * trainer.logits(module, x) + (1 - alpha) * theirs, y)


class FedALA(Worker):
    """FedALA with the worker's last model as the old local model, and with one set of weights A, the worker's.

    If that model and the received one are equal in their first tensors, there is no mixing. This is so for the very
    first client, so its A settles without learning. It is also so for all clients of a test but the first, because each
    follows another tested client.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.first = mixed_from(self.layout, config.params.layers)
        self.held = self.initial
        self.weights = torch.ones(self.layout.d - self.first)
        self.start = True

    def receive(self, trainer: LocalTrainer) -> None:
        """Learn A on the client's sample, and load the mixture."""
        p, first, end = self.config.params, self.first, self.layout.params[0].stop
        same = np.sum(self.global_model.params[:end] - self.held.params[:end]) == 0
        trainer.load(self.global_model if same else self.held)
        own = trainer.weights[first:].clone()
        trainer.load(self.global_model)
        received = trainer.weights[first:].clone()
        A = self.weights.to(received)
        n = len(self.clients[trainer.client_id].y_train)
        order = rng.generator(self.config.seed, "ala", trainer.round, trainer.client_id).permutation(n)
        found = head_inputs(trainer, order[: int(p.sample_share * n)])
        assert found is not None, "the model's last layer is its classifier"
        z, y = (torch.split(part, self.config.batch_size) for part in found)
        shape = trainer.classifier().weight.shape
        losses: list[float] = []
        # one epoch; the first time, until A settles
        while not losses or self.start and not settled(losses, p.threshold, p.max_epochs):
            for batch in zip(z, y, strict=True):
                loss, gradient = head(shape, *batch)(mix(own, received, A))
                A = step(own, received, A, gradient, p.weight_learning_rate)
            losses.append(float(loss))
        self.start, self.weights = False, A
        trainer.weights[first:] = mix(own, received, A)
        self.held = trainer.read()

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train. The worker then holds the result."""
        self.held = super().fit(trainer)
        return self.held


class FLUTE(Worker):
    """FLUTE with a body that keeps its first values, because features are detached from the graph.

    All epochs train the head, which stays with the client. The server averages the heads too: a client without a head
    starts from their mean.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.kept: list[dict[str, Any]] = [{} for _ in self.clients]

    def context(self, trainer: LocalTrainer) -> tuple[Any, RoundContext[Any]]:
        """Return the state and context for FLUTE's client half.

        Its initial model, for a client without a head, is the server's.
        """
        ctx = RoundContext(
            config=self.config,
            params=self.config.params,
            round=trainer.round,
            client_id=trainer.client_id,
            layout=self.layout,
            shared=self.shared,
            initial=lambda: self.global_model,
            trainer=trainer,
            num_samples=len(self.clients[trainer.client_id].y_train),
            extras={},
        )
        return SimpleNamespace(arrays=self.kept[trainer.client_id]), ctx

    def receive(self, trainer: LocalTrainer) -> None:
        """Load the received body, and the client's head or, without one, the mean head."""
        state, ctx = self.context(trainer)
        body = self.layout.take(self.global_model, self.shared)
        trainer.load(FLUTEUpdate().merge(body, state, ctx))

    def fit(self, trainer: LocalTrainer) -> Model:
        """Train the head, and take the server's step on it. Return head and unchanged body."""
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
    settings = {**presets.read_preset(preset), **sweep.read_sweep(SWEEP).settings}
    config = parse({**settings, "seed": options.seed, "client-threads": 1}, METHOD_PARAMS)
    prepare_training(config.client_threads)
    started, tests = time.perf_counter(), {}
    for round, found in ROWS[options.row](config).run():
        tests[round] = found
        figures = ", ".join(f"{name} {100 * share:.2f} %" for name, share in found.items())
        print(f"{options.row}, round {round}: {figures}", flush=True)
    if options.output:
        result = {"preset": preset, "seed": options.seed, "tests": tests, "seconds": int(time.perf_counter() - started)}
        options.output.mkdir(parents=True, exist_ok=True)
        publish_text(options.output / f"{options.row},seed={options.seed}.json", json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
