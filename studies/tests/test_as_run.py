"""studies/as_run.py: the worker is Corolla's FedAvg, and each row equals a naive loop of its code's steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from client_app.trainer import LocalTrainer
from corolla import presets
from fl_app import rng, weights
from fl_app.config import RunConfig, parse
from fl_app.keys import Scalar
from fl_app.server.run_folder import read_metrics
from fl_app.weights import load_safetensors
from strategies import METHOD_PARAMS
from studies import as_run
from studies.as_run import APFL, FLUTE, FedALA, Worker
from tests.conftest import Run, flat

ROUNDS = {"num_server_rounds": 3, "evaluate_every": 1, "fraction_train": 0.5, "local_epochs": 2}  # two of three clients


@pytest.fixture
def raw(raw_config: dict[str, Scalar]) -> Mapping[str, Scalar]:
    return raw_config | flat(ROUNDS)


def configure(raw: Mapping[str, Scalar], method: str, **keys: Scalar) -> RunConfig:
    return parse(
        {**raw, "method": method, **{f"{method}.{name.replace('_', '-')}": keys[name] for name in keys}}, METHOD_PARAMS
    )


def vector(module: nn.Module) -> np.ndarray:
    return weights.read(module).params


def move(module: nn.Module, slopes: tuple[Tensor, ...], rate: float) -> None:
    with torch.no_grad():
        for value, slope in zip(module.parameters(), slopes, strict=True):
            value -= rate * slope


def slopes_of(loss: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(module.parameters()))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b))


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, atol=2e-6))


def test_the_worker_is_fedavg(raw: Mapping[str, Scalar], run: Run) -> None:
    folder = run(**ROUNDS)
    worker = Worker(configure(raw, "fedavg"))
    tests = dict(worker.run())
    assert list(tests) == [1, 2, 3]
    for record in read_metrics(folder.path):
        assert tests[record["round"]] == pytest.approx(
            {name: record["evaluation"][name] for name in tests[1]}, abs=1e-9
        )
    # bit for bit: the mean of two clients does not depend on their order
    assert same(
        worker.global_model.params,
        load_safetensors(folder.path / "models" / "global.safetensors", worker.layout).params,
    )


def test_apfl_mixes_outputs_and_steps_twice_on_one_gradient(raw: Mapping[str, Scalar]) -> None:
    config = configure(raw, "apfl", alpha=0.4, alpha_updates="first-epoch")
    row, eta, alpha = APFL(config), config.learning_rate, 0.4
    sent = row.fit(row.trainer(0, 1))
    w, v, trainer = row.network(), row.network(), row.trainer(0, 1)
    steps = 0
    for x, y in trainer.batches():
        shared = slopes_of(cross_entropy(w(x), y), w)
        move(w, shared, eta)
        own = slopes_of(cross_entropy(alpha * v(x) + (1 - alpha) * w(x).detach(), y), v)
        move(w, shared, eta)
        move(v, own, eta)
        if trainer.epoch == 1:
            quadruples = zip(v.parameters(), w.parameters(), own, shared, strict=True)
            slope = sum(float(((a - b) * (alpha * g + (1 - alpha) * h)).detach().sum()) for a, b, g, h in quadruples)
            alpha -= eta * (slope + 0.02 * alpha)
            steps += 1
    assert steps == 3 and abs(alpha - 0.4) > 1e-5
    assert close(sent.params, vector(w)) and close(row.own[0].params, vector(v))
    assert row.alphas[0] == pytest.approx(alpha, abs=1e-6)
    assert row.own[1] is row.initial and row.alphas[1] == 0.4  # other clients' stay
    with torch.no_grad():
        (x, _), *_ = trainer.data.in_order("test")
        # the global model is still the first
        want = alpha * v(x) + (1 - alpha) * row.network()(x)
        assert torch.allclose(row.answers(row.trainer(0, 2), x), want, atol=1e-5)


class NaiveALA:
    """The worker's model and weights A, on the last two tensors."""

    def __init__(self, row: FedALA) -> None:
        self.row, self.model, self.A = row, row.network(), [torch.ones(10, 64), torch.ones(10)]
        self.epochs: list[int] = []

    def receive(self, client: int, round: int) -> nn.Module:
        received = self.row.network()
        weights.write(received, self.row.global_model)
        theirs, own = list(received.parameters()), list(self.model.parameters())
        if float((theirs[0] - own[0]).detach().sum()) == 0:
            own = theirs
        trainer = LocalTrainer(self.row.network(), self.row.config, self.row.clients[client], round, client)
        n = len(self.row.clients[client].y_train)
        chosen = rng.generator(0, "ala", round, client).permutation(n)[: int(0.8 * n)]
        mixed, losses = self.row.network(), list[float]()
        pairs = list(zip(own[-2:], theirs[-2:], strict=True))

        def mix() -> None:
            weights.write(mixed, weights.read(received))
            with torch.no_grad():
                for value, (a, b), share in zip(list(mixed.parameters())[-2:], pairs, self.A, strict=True):
                    value.copy_(a + (b - a) * share)

        mix()
        while not losses or not self.epochs and not (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
            for at in range(0, len(chosen), 8):
                x, y = trainer.samples(chosen[at : at + 8])
                loss = cross_entropy(mixed(x), y)
                slopes = slopes_of(loss, mixed)[-2:]
                rate = self.row.config.params.weight_learning_rate
                with torch.no_grad():
                    self.A = [
                        (A - rate * g * (b - a)).clamp(0, 1) for A, g, (a, b) in zip(self.A, slopes, pairs, strict=True)
                    ]
                mix()
            losses.append(loss.item())
        self.epochs.append(len(losses))
        self.model = mixed
        return mixed


def test_fedala_mixes_with_whoever_came_before_and_hardly_ever_in_a_test(raw: Mapping[str, Scalar]) -> None:
    row = FedALA(configure(raw, "fedala", weight_learning_rate=30.0))
    assert [slot.shape for slot in row.layout.params[-2:]] == [(10, 64), (10,)]
    naive = NaiveALA(row)
    A = naive.A
    for client in (1, 0, 2):
        trainer, start = row.trainer(client, 1), naive.receive(client, 1)
        assert close(trainer.read().params, vector(start)), client
        weights.write(naive.model, row.fit(trainer))
    assert naive.epochs == [11, 1, 1] and (A[0] - naive.A[0]).abs().max() > 0.01
    for client in (0, 1, 2):  # a test
        got, want = row.trainer(client, 1).read().params, vector(naive.receive(client, 1))
        assert close(got, want) and same(got, row.global_model.params) == (client > 0)
    assert close(row.weights, torch.cat([part.flatten() for part in naive.A]).numpy())


def test_fedala_whose_weights_do_not_learn_is_fedavg(raw: Mapping[str, Scalar]) -> None:
    row, fedavg = FedALA(configure(raw, "fedala", weight_learning_rate=0.0)), Worker(configure(raw, "fedavg"))
    assert dict(row.run()) == dict(fedavg.run())
    assert same(row.global_model.params, fedavg.global_model.params)


def collapse(H: Tensor, labels: Tensor) -> Tensor:
    """NC(H), as FL-bench's server writes it."""
    gram, u = H @ H.T, torch.zeros(10, 1).index_fill_(0, labels.unique(), 1)
    return (gram / gram.norm() - u @ u.T * (torch.eye(10) - 0.1) / 3).norm()


def test_flutes_body_never_trains(raw: Mapping[str, Scalar]) -> None:
    row = FLUTE(configure(raw, "flute", collapse_weight=0.5, head_weight=0.01, head_learning_rate=5.0))
    module, trainer = row.network(), row.trainer(0, 1)
    for x, y in trainer.batches():
        H = list(module.parameters())[-2]
        loss = cross_entropy(module(x), y) + 0.5 * collapse(H, trainer.data.train_labels) + 0.01 * H.square().sum()
        slopes = slopes_of(loss, module)
        move(module, tuple(torch.zeros_like(g) for g in slopes[:-2]) + slopes[-2:], row.config.learning_rate)
    sent = row.fit(row.trainer(0, 1))
    assert close(sent.params, vector(module)) and not close(sent.params, row.initial.params)
    # then the server's step, over the two clients of a round
    H = list(module.parameters())[-2]
    (slope,) = torch.autograd.grad(collapse(H, trainer.data.train_labels) / 2, [H])
    with torch.no_grad():
        H -= 5.0 * slope
    row.global_model = row.fit(row.trainer(1, 1))
    assert close(row.trainer(0, 2).read().params, vector(module))
    # it has no head yet: the mean head
    assert same(row.trainer(2, 2).read().params, row.global_model.params)
    assert len(dict(row.run())) == 3
    body = [row.layout.take(model, row.shared).params for model in (row.global_model, row.initial)]
    assert same(*body)


def test_a_row_writes_its_tests(raw: Mapping[str, Scalar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "read_preset", lambda name: {**raw, "method": name.rpartition("/")[2]})
    monkeypatch.setattr("sys.argv", ["as_run", "flute", "--seed", "3", "--output", str(tmp_path / "out")])
    as_run.main()
    found = json.loads((tmp_path / "out" / "flute,seed=3.json").read_text())
    assert found["preset"] == "fedobp/fashion-mnist-dirichlet-0.1/flute" and found["seed"] == 3
    assert list(found["tests"]) == ["1", "2", "3"] and set(found["tests"]["3"]) == {"accuracy", "accuracy-pooled"}


def test_a_model_with_running_statistics_is_refused(raw: Mapping[str, Scalar]) -> None:
    with pytest.raises(Exception, match="running statistics"):
        Worker(configure({**raw, "model": "resnet8"}, "fedavg"))
