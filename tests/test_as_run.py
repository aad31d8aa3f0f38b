"""benchmarks/as_run.py: FedAvg's bits as Corolla has them; of each row what sets it apart from the method of its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks import as_run
from benchmarks.as_run import APFL, FLUTE, FedALA, Worker
from fl_app import presets, weights
from fl_app.config import RunConfig, parse
from fl_app.keys import Scalar
from fl_app.server.run_folder import read_metrics
from fl_app.weights import load_safetensors
from strategies import METHOD_PARAMS
from tests.conftest import Run

ROUNDS = {"num_server_rounds": 3, "evaluate_every": 1, "fraction_train": 0.5}  # two of three clients


@pytest.fixture
def raw(raw_config: dict[str, Scalar]) -> Mapping[str, Scalar]:
    return raw_config | {"num-server-rounds": 3, "evaluate-every": 1, "fraction-train": 0.5}


def configure(raw: Mapping[str, Scalar], method: str, **keys: Scalar) -> RunConfig:
    return parse({**raw, "method": method, **{f"{method}.{name.replace('_', '-')}": keys[name] for name in keys}}, METHOD_PARAMS)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b))


def test_the_worker_is_fedavg_bit_for_bit(raw: Mapping[str, Scalar], run: Run) -> None:
    folder = run(**ROUNDS)
    worker = Worker(configure(raw, "fedavg"))
    tests = dict(worker.run())
    assert list(tests) == [1, 2, 3]
    for record in read_metrics(folder.path):
        assert tests[record["round"]] == pytest.approx({name: record["evaluation"][name] for name in tests[1]}, abs=1e-9)
    assert same(worker.global_model.params, load_safetensors(folder.path / "models" / "global.safetensors", worker.layout).params)


def test_apfl_mixes_outputs_and_steps_twice_on_one_gradient(raw: Mapping[str, Scalar]) -> None:
    config = configure({**raw, "batch-size": 64}, "apfl", alpha=0.4, alpha_updates="first-epoch")  # one batch
    row = APFL(config)
    trainer = row.trainer(0, 1)
    (x, y), *_ = trainer.data.train()
    sent = row.fit(trainer)
    w, v = row.network(), row.network()
    eta, alpha = config.learning_rate, 0.4
    gradients = torch.autograd.grad(cross_entropy(w(x), y), list(w.parameters()))
    with torch.no_grad():
        for value, g in zip(w.parameters(), gradients, strict=True):
            value -= eta * g
    mixed = alpha * v(x) + (1 - alpha) * w(x).detach()
    own = torch.autograd.grad(cross_entropy(mixed, y), list(v.parameters()))
    with torch.no_grad():
        for value, g in zip(w.parameters(), gradients, strict=True):
            value -= eta * g
        for value, g in zip(v.parameters(), own, strict=True):
            value -= eta * g
        pairs = zip(v.parameters(), w.parameters(), own, gradients, strict=True)
        slope = sum(float(((a - b) * (alpha * g + (1 - alpha) * h)).sum()) for a, b, g, h in pairs)
    assert np.allclose(sent.params, weights.read(w).params, atol=1e-6)
    assert np.allclose(row.own[0].params, weights.read(v).params, atol=1e-6)
    assert row.alphas[0] == pytest.approx(alpha - eta * (slope + 0.02 * alpha), abs=1e-6)
    assert row.own[1] is row.initial and row.alphas[1] == alpha  # nobody else's
    with torch.no_grad():
        again = row.trainer(0, 2)  # w is the global model again, v its own
        want = row.alphas[0] * v(x) + (1 - row.alphas[0]) * row.network()(x)
        assert torch.allclose(row.answers(again, x), want, atol=1e-5)


def test_fedala_mixes_with_whoever_came_before_and_hardly_ever_in_a_test(raw: Mapping[str, Scalar]) -> None:
    row = FedALA(configure(raw, "fedala", weight_learning_rate=30.0))
    first = row.trainer(0, 1)
    assert same(first.read().params, row.initial.params) and not row.start and (row.weights == 1).all()
    own, received = row.fit(first).params[row.first :], row.initial.params[row.first :]
    lower, upper = np.split(row.trainer(1, 1).read().params, [row.first])  # another client
    assert same(lower, row.initial.params[: row.first])
    assert ((0 <= row.weights) & (row.weights <= 1)).all() and (row.weights < 1).any()
    assert np.allclose(upper, own + (received - own) * row.weights, atol=1e-6) and not same(upper, received)
    assert same(row.trainer(2, 1).read().params, row.initial.params)  # after a mixture that nobody trained: no mixing


def test_fedala_whose_weights_do_not_learn_is_fedavg(raw: Mapping[str, Scalar]) -> None:
    row, fedavg = FedALA(configure(raw, "fedala", weight_learning_rate=0.0)), Worker(configure(raw, "fedavg"))
    assert dict(row.run()) == dict(fedavg.run())
    assert same(row.global_model.params, fedavg.global_model.params)


def test_flutes_body_never_trains(raw: Mapping[str, Scalar]) -> None:
    row = FLUTE(configure(raw, "flute"))
    assert len(dict(row.run())) == 3
    body = row.layout.take
    assert same(body(row.global_model, row.shared).params, body(row.initial, row.shared).params)
    heads = [kept["local.params"] for kept in row.kept if kept]
    assert len(heads) >= 2 and not same(heads[0], heads[1])


def test_a_row_writes_its_tests(raw: Mapping[str, Scalar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "read_preset", lambda name: {**raw, "method": name.rpartition("/")[2]})
    monkeypatch.setattr("sys.argv", ["as_run", "flute", "--output", str(tmp_path / "out")])
    as_run.main()
    found = json.loads((tmp_path / "out" / "flute.json").read_text())
    assert found["preset"] == "fedobp/fashion-mnist-dirichlet-0.1/flute" and list(found["tests"]) == ["1", "2", "3"]
    assert set(found["tests"]["3"]) == {"accuracy", "accuracy-pooled"}


def test_a_model_with_running_statistics_is_refused(raw: Mapping[str, Scalar]) -> None:
    with pytest.raises(Exception, match="running statistics"):
        Worker(configure({**raw, "model": "resnet8"}, "fedavg"))
