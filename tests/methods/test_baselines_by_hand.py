"""FedProx, FedPer, FedRep, FedBN, LG-FedAvg, Ditto and pFedMe: by hand, at their limits, on the wire and in whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client_app.stored_state import StoredState
from client_app.trainer import LocalTrainer
from fl_app import weights
from fl_app.config import parse
from fl_app.data import ClientData, DatasetInfo
from fl_app.errors import ConfigurationError
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder
from strategies import METHOD_PARAMS, METHODS
from strategies.base import RoundContext, Uploads
from strategies.baselines import pfedme
from tests.conftest import flat
from tests.facts import rejected

LN3 = math.log(3)


def s(a: float) -> float:
    return 1 / (1 + math.exp(2 * a))


def tiny(a: float) -> Model:
    return Model(np.array([a, -a], np.float32), np.zeros(0, np.float32))


def tiny_client(
    method: str, num_samples: int, module: nn.Module | None = None, pixels: np.ndarray | None = None, **changes: Any
) -> RoundContext[Any]:
    """Context of a client whose samples are all the pixel 1 with label 0, batch size 1, one epoch."""
    raw = {"method": method, "batch-size": 1, "local-epochs": 1, "device": "cpu", "learning-rate": LN3}
    config = parse(raw | flat(changes), METHOD_PARAMS)
    if module is None:
        module = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    if pixels is None:
        pixels = np.full((num_samples, 1, 1, 1), 255, np.uint8)
    labels = np.zeros(num_samples, np.int64)
    info = DatasetInfo(1, 1, ("0", "1"), num_samples, num_samples, (0.0,), (1.0,))
    layout, initial = Layout.of(module), weights.read(module)
    trainer = LocalTrainer(module, config, ClientData(pixels, labels, pixels, labels, info), 1, 0)
    shared = METHODS[method].shared(layout, config.params) if method not in ("fedper", "lg-fedavg") else layout.names
    return RoundContext(config, config.params, 1, 0, layout, shared, lambda: initial, trainer, num_samples, {})


def close(model: Model, a: float) -> bool:
    return np.allclose(model.params, [a, -a], rtol=0, atol=2e-7)


def test_fedprox_two_steps_by_hand() -> None:
    # mu = 1/2, received a = 0. Step 1: the penalty is zero at its centre; a = 0 + ln3 * 1/2 = ln(3)/2 = 0.5493061.
    # Step 2: a = ln(3)/2 + ln3 * (1/4 - 1/2 * ln(3)/2) = 0.5493061 + 1.0986123 * (0.25 - 0.2746531) = 0.5222220.
    ctx = tiny_client("fedprox", 2, fedprox={"mu": 0.5})
    update, state = METHODS["fedprox"].local_update(), StoredState()
    after = update.train(tiny(0), state, ctx)
    assert close(after, LN3 / 2 + LN3 * (1 / 4 - LN3 / 4))
    assert abs(float(after.params[0]) - 0.5222220) < 1e-6
    assert not state.arrays
    # the penalty does not touch its centre: one step equals FedAvg's
    assert close(update.train(tiny(0), state, tiny_client("fedprox", 1, fedprox={"mu": 0.5})), LN3 / 2)


def test_ditto_two_rounds_by_hand() -> None:
    # Round 1 receives a = 0 and has no personal model: both start at 0, one step each, the penalty is zero there:
    # a = v = ln(3)/2. Round 2 receives a = 0 again (as if the others had voted it back): the copy again steps to ln(3)/2;
    # lambda = 1/2: v = ln(3)/2 + ln3 * (s(ln(3)/2) - 1/2 * (ln(3)/2 - 0)) = 0.5222220, the centre being the RECEIVED model.
    ctx = tiny_client("ditto", 1, ditto={"proximal_weight": 0.5})
    update, state = METHODS["ditto"].local_update(), StoredState()
    assert close(update.personal(tiny(0.25), state, ctx), 0.25)
    first = update.train(tiny(0), state, ctx)
    assert close(first, LN3 / 2) and close(update.personal(first, state, ctx), LN3 / 2)
    second = update.train(tiny(0), state, ctx)
    assert close(second, LN3 / 2)
    assert close(update.personal(second, state, ctx), LN3 / 2 + LN3 * (1 / 4 - LN3 / 4))
    assert close(update.upload(tiny(0), second, state, ctx).model, LN3 / 2)  # the copy travels, not v
    # personal-epochs = 2: a second step from there
    more = tiny_client("ditto", 1, ditto={"proximal_weight": 0.5, "personal_epochs": 2})
    kept = StoredState({"personal.params": tiny(LN3 / 2).params, "personal.buffers": tiny(0).buffers})
    update.train(tiny(0), kept, more)
    v = LN3 / 2 + LN3 * (1 / 4 - LN3 / 4)
    assert close(Model(kept.arrays["personal.params"], tiny(0).buffers), v + LN3 * (s(v) - v / 2))


def test_pfedme_one_batch_by_hand() -> None:
    # K = 2, alpha = ln 3, lambda = 1/2, eta = 1/4; received w = 0.
    # theta_1 = 0 + ln3 * (1/2 - 1/2 * 0) = ln(3)/2; theta_2 = ln(3)/2 + ln3 * (1/4 - 1/2 * (ln(3)/2 - 0)) = 0.5222220.
    # w = 0 - eta lambda (0 - theta_2) = 1/8 * 0.5222220 = 0.0652778. The personal model is theta_2.
    ctx = tiny_client(
        "pfedme",
        1,
        pfedme={"outer_learning_rate": 0.25, "inner_steps": 2, "inner_learning_rate": LN3, "proximal_weight": 0.5},
    )
    update, state = METHODS["pfedme"].local_update(), StoredState()
    w = update.train(tiny(0), state, ctx)
    theta = LN3 / 2 + LN3 * (1 / 4 - LN3 / 4)
    assert close(w, theta / 8) and abs(float(w.params[0]) - 0.0652778) < 1e-6
    assert close(update.personal(w, state, ctx), theta)
    assert isinstance(ctx.trainer, LocalTrainer) and math.isclose(
        ctx.trainer.last_loss, math.log(2), rel_tol=1e-6
    )  # f at the received model


def test_pfedme_second_batch_goes_on_from_theta_and_the_new_w() -> None:
    # As above with two batches: theta goes on from theta_2, its centre is now w_1; then w_2 = w_1 + 1/8 * (theta_4 - w_1).
    ctx = tiny_client(
        "pfedme",
        2,
        pfedme={"outer_learning_rate": 0.25, "inner_steps": 2, "inner_learning_rate": LN3, "proximal_weight": 0.5},
    )
    w, theta = 0.0, 0.0
    for _ in range(2):
        for _ in range(2):
            theta += LN3 * (s(theta) - 0.5 * (theta - w))
        w += 0.125 * (theta - w)
    update, state = METHODS["pfedme"].local_update(), StoredState()
    sent = update.train(tiny(0), state, ctx)
    assert close(sent, w) and close(update.personal(sent, state, ctx), theta)
    # in the next round theta starts from what is received then, not from the one kept
    kept = {name: array.copy() for name, array in state.arrays.items()}
    update.train(tiny(0), state, ctx)
    assert all(np.array_equal(kept[name], state.arrays[name]) for name in kept)


def test_pfedme_server_steps_towards_the_unweighted_mean(tmp_path: Path) -> None:
    # w_g = (1, 2); mean of (3, 2) and (5, 6) is (4, 4), whatever the sample counts.
    # beta 1/2: (1/2 * 1 + 1/2 * 4, 1/2 * 2 + 1/2 * 4) = (2.5, 3); beta 1: (4, 4); beta 2: (-1 + 8, -2 + 8) = (7, 6).
    W = np.array([[3, 2], [5, 6]], np.float32)
    for beta, want in [(0.5, [2.5, 3]), (1.0, [4, 4]), (2.0, [7, 6])]:
        mixed = pfedme.mix(np.array([1, 2], np.float32), W, beta)
        assert mixed.dtype == np.float32 and mixed.tolist() == want
    config = parse({"method": "pfedme", "pfedme.beta": 0.5}, METHOD_PARAMS)
    layout = Layout.of(nn.Linear(1, 2, bias=False))
    received = Model(np.array([1, 2], np.float32), np.zeros(0, np.float32))
    server = pfedme.PFedMe(config, config.params, layout, received, layout.names, RunFolder(tmp_path, "x"))
    server.personalize(1, Uploads([0, 1], W, np.zeros((2, 0), np.float32), np.array([1.0, 9.0]), None, {}, [{}, {}]))
    assert server.global_model.params.tolist() == [2.5, 3]


def test_pfedme_refuses_outer_steps_that_carry_w_past_theta() -> None:
    with rejected(
        ConfigurationError, "pfedme.outer-learning-rate", "times pfedme.proximal-weight (15)", "must be below 1"
    ):
        small_client("pfedme", pfedme={"outer_learning_rate": 0.1})


class Small(nn.Module):
    """One pixel -> 3 features -> BatchNorm -> classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.feature, self.bn, self.classifier = nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.relu(self.bn(self.feature(x.flatten(1)))))


def small_client(method: str, module: nn.Module | None = None, **changes: Any) -> RoundContext[Any]:
    pixels = np.arange(0, 240, 20, dtype=np.uint8).reshape(12, 1, 1, 1)
    torch.manual_seed(0)
    changes = {"batch_size": 4, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01, **changes}
    return tiny_client(method, 12, module or Small(), pixels, **changes)


def test_fedrep_trains_the_head_then_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = small_client("fedrep", local_epochs=3)
    calls: list[tuple[dict[str, Any], Model, Model]] = []
    train = ctx.trainer.train

    def record(start: Model, **how: Any) -> Model:
        after = train(start, **how)
        calls.append((how, start, after))
        return after

    monkeypatch.setattr(ctx.trainer, "train", record)
    start, state = ctx.initial(), StoredState()
    update = METHODS["fedrep"].local_update()
    final = update.train(start, state, ctx)
    update.keep_local(final, state, ctx)
    head = frozenset({"classifier.weight", "classifier.bias"})
    body = ctx.layout.names - head
    assert ctx.local == head and {"bn.running_mean", "bn.running_var"} <= body
    assert [c[0] for c in calls] == [
        {"epochs": 2, "purpose": "train-head", "frozen": body},
        {"epochs": 1, "purpose": "train-body", "frozen": head},
    ]
    with_head = ctx.layout.tensors(calls[0][2])
    before, after = ctx.layout.tensors(start), ctx.layout.tensors(final)
    # statistics are the body's: they move in the second phase only
    for name in ctx.layout.names:
        assert np.array_equal(with_head[name], before[name]) == (name in body), name
        assert np.array_equal(after[name], with_head[name]) == (name in head), name
    assert np.array_equal(state.arrays["local.params"], ctx.layout.take(final, head).params)
    assert state.arrays["local.buffers"].size == 0


def test_fedrep_epochs_are_configurable() -> None:
    ctx = small_client("fedrep", local_epochs=3)
    update = METHODS["fedrep"].local_update()
    default = update.train(ctx.initial(), StoredState(), ctx)
    same = small_client("fedrep", local_epochs=1, fedrep={"head_epochs": 2})
    other = small_client("fedrep", local_epochs=3, fedrep={"body_epochs": 2})
    assert np.array_equal(default.params, update.train(same.initial(), StoredState(), same).params)
    assert not np.array_equal(default.params, update.train(other.initial(), StoredState(), other).params)


def test_parameters_a_users_model_holds_fixed_stay_fixed() -> None:
    module = Small()
    module.feature.requires_grad_(False)
    for method in ("fedrep", "ditto", "pfedme"):
        ctx = small_client(method, module)
        update, state, start = METHODS[method].local_update(), StoredState(), ctx.initial()
        for _ in range(2):
            after = update.train(start, state, ctx)
        for model in (after, update.personal(after, state, ctx)):
            tensors = ctx.layout.tensors(model)
            assert np.array_equal(tensors["feature.weight"], ctx.layout.tensors(start)["feature.weight"]), method
            assert not np.array_equal(tensors["classifier.weight"], ctx.layout.tensors(start)["classifier.weight"])


def test_a_fixed_body_under_a_frozen_head_trains_nothing() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2))
    module[1].requires_grad_(False)
    ctx = small_client("fedrep", module)
    after = METHODS["fedrep"].local_update().train(ctx.initial(), StoredState(), ctx)
    unchanged, start = ctx.layout.tensors(after), ctx.layout.tensors(ctx.initial())
    assert [n for n in unchanged if not np.array_equal(unchanged[n], start[n])] == ["3.weight", "3.bias"]


def test_dittos_second_model_has_its_own_batches_and_statistics_pfedmes_has_not() -> None:
    # same start, same loss: only the batches differ
    ditto = small_client("ditto", ditto={"proximal_weight": 0})
    update, state = METHODS["ditto"].local_update(), StoredState()
    sent = update.train(ditto.initial(), state, ditto)
    assert not np.array_equal(sent.params, state.arrays["personal.params"])
    assert not np.array_equal(sent.buffers, state.arrays["personal.buffers"])
    envelope = small_client("pfedme")
    update, state = METHODS["pfedme"].local_update(), StoredState()
    sent = update.train(envelope.initial(), state, envelope)
    assert np.array_equal(sent.buffers, state.arrays["personal.buffers"])
    assert not np.array_equal(sent.params, state.arrays["personal.params"])
