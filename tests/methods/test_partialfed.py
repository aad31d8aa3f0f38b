"""PartialFed: rounds on two layers by hand, learning against autograd, its limits bit for bit, and the texts of `load`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from client_app.client import CorollaClient
from client_app.stored_state import StoredState
from corolla.testing import federation
from fl_app import rng, weights
from fl_app.errors import ConfigurationError, Diverged, MethodError
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from strategies import METHODS
from strategies.base import RoundContext
from strategies.baselines.fedfomo import held_out
from strategies.baselines.partialfed import (
    PartialFedParams,
    PartialFedUpdate,
    gradient_of_choices,
    layers_of,
    loadable,
    relaxed,
    temperature,
)
from tests.conftest import Run, config
from tests.facts import rejected
from tests.methods import runs
from tests.methods.trials import Small, another, client, copied
from tests.small_models import BATCHNORM

CHOICES = "partialfed.choices"


FIX = {"strategy": "fix"}


@pytest.mark.parametrize(
    ("load", "batchnorm", "modules"),
    [
        ("bottom:0", "global", set()),
        ("top:0", "global", set()),
        ("bottom:1", "global", {"stem"}),
        ("bottom:3", "global", {"stem", "conv", "bn"}),
        ("top:2", "global", {"bn", "fc"}),
        ("top:2", "local", {"fc"}),
        ("bottom:4", "global", {"stem", "conv", "bn", "fc"}),
        ("top:4", "local", {"stem", "conv", "fc"}),
        ("*", "global", {"stem", "conv", "bn", "fc"}),
        ("conv, f*", "global", {"conv", "fc"}),
        ("bn", "local", set()),
    ],
)
def test_the_layers_that_load_names(load: str, batchnorm: Any, modules: set[str]) -> None:
    layout = Layout.of(Small())
    found = loadable(layout, PartialFedParams(load=load, batchnorm=batchnorm))
    assert found == {name for name in layout.names if name.split(".")[0] in modules}


def test_a_pattern_may_name_single_tensors() -> None:
    layout = Layout.of(Small())
    assert loadable(layout, PartialFedParams(load="*.bias,bn.running_mean")) == {
        "stem.bias",
        "conv.bias",
        "bn.bias",
        "fc.bias",
        "bn.running_mean",
    }


def test_layers_are_modules_with_parameters_in_order() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    assert layers_of(Layout.of(network)) == [
        {"0.weight", "0.bias", "1.running_mean", "1.running_var"},
        {"3.weight"},
    ]


@pytest.mark.parametrize("load", ["bottom:", "top:x", "bottom:-1", "top:1.5", "bottom:1,fc", "bottom: ", "", " , "])
def test_a_text_of_another_form_is_refused(load: str) -> None:
    with rejected(ConfigurationError, "partialfed.load", "bottom:K", "whole number", value=load):
        config(method="partialfed", partialfed={"load": load})


@pytest.mark.parametrize(
    ("load", "kind", "rule"),
    [
        ("bottom:5", MethodError, "K must be at most 4"),
        ("top:5", MethodError, "K must be at most 4"),
        ("stem,head.*", ConfigurationError, "no tensor of the model matches 'head.*'"),
        ("middle:2", ConfigurationError, "no tensor of the model matches 'middle:2'"),
    ],
)
def test_layers_that_the_model_lacks_are_refused(load: str, kind: type[Exception], rule: str) -> None:
    wanted = config(method="partialfed", partialfed={"load": load})
    with rejected(kind, "partialfed.load", rule):
        METHODS["partialfed"].travelling(wanted, Layout.of(Small()))


def test_they_are_refused_before_a_client_trains(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: CorollaClient, download: object) -> None:
        raise AssertionError("a client was asked to train")

    monkeypatch.setattr(CorollaClient, "_train", train)
    with rejected(MethodError, "partialfed.load", "K must be at most", value="bottom:9"):
        run(method="partialfed", partialfed={"load": "bottom:9"})


def test_fixed_layers_by_hand() -> None:
    # d = 8: features has the first four parameters, classifier the last four. Equal weights: the mean of 0..7 and 8..15.
    W = np.arange(16, dtype=np.float32).reshape(2, 8)
    fed = federation("partialfed", clients=2, partialfed={**FIX, "load": "bottom:1"})
    initial = fed.initial.params
    fed.round(W)
    assert fed.models.tolist() == [[4, 5, 6, 7, 4, 5, 6, 7], [4, 5, 6, 7, 12, 13, 14, 15]]
    fed = federation("partialfed", clients=2, partialfed={**FIX, "load": "top:1"})
    fed.round(W)
    assert fed.models.tolist() == [[0, 1, 2, 3, 8, 9, 10, 11], [8, 9, 10, 11, 8, 9, 10, 11]]
    # a client that was away has no layers of its own: it starts them from the initial model
    fed = federation("partialfed", clients=2, partialfed={**FIX, "load": "top:1"})
    fed.round(W[:1], ids=[0])
    assert fed.models.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [*initial[:4].tolist(), 4, 5, 6, 7]]


def test_chosen_layers_by_hand() -> None:
    # log-odds of 1000 are beyond every step: y is exactly 0 or 1, and so is its slope 0
    W = np.arange(16, dtype=np.float32).reshape(2, 8)
    fed = federation("partialfed", clients=2)
    fed.round(W)
    for state, choices in zip(fed.states, ([1e3, -1e3], [-1e3, -1e3]), strict=True):
        np.testing.assert_allclose(state.arrays[CHOICES], np.log(9))  # nine to one
        state.arrays[CHOICES] = np.array(choices)
    assert fed.models.tolist() == [[4, 5, 6, 7, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    # all of both models went to the server
    assert fed.server.state.model.params.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


class Two(nn.Module):
    """Pixel 1 -> u -> logits (p u, q u)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x.flatten(1)))
        return logits


def test_a_step_of_the_choices_by_hand() -> None:
    # One sample of class 0, so one batch. The loss is log(1 + exp((q - p) u)); with s = sigmoid((q - p) u) its
    # derivatives by u, p, q are s (q - p), -s u, s u. Received: u = 2, (p, q) = (1, -1). Own: all 0. So at the mixture
    # u = 2 y_1, p = y_2, q = -y_2, and the slopes are s (q - p) 2 = -4 s y_2 and -s u - s u = -4 s y_1.
    # tau = 2 * .5 = 1 in round 2.
    ctx = runs.client(
        "partialfed",
        Two(),
        np.full((1, 1, 1, 1), 255, np.uint8),
        np.zeros(1, np.int64),
        round=2,
        batch_size=1,
        local_epochs=1,
        partialfed={"choice_learning_rate": 3.0, "temperature": 2.0, "temperature_decay": 0.5},
    )
    received = Model(np.array([2, 1, -1], np.float32), np.zeros(0, np.float32))
    own = Model(np.zeros(3, np.float32), np.zeros(0, np.float32))
    a = np.array([0.25, -0.5])
    y = 1 / (1 + np.exp(-(a + rng.generator(ctx.config.seed, "partialfed", 2, 0).logistic(size=2))))
    s = 1 / (1 + np.exp(4 * y[0] * y[1]))
    want = a - 3 * y * (1 - y) * np.array([-4 * s * y[1], -4 * s * y[0]])
    np.testing.assert_allclose(PartialFedUpdate().learn(own, received, a, ctx), want, rtol=1e-6)
    assert (want > a).all()  # the received layers lower the loss


def test_relaxed_choices_by_hand() -> None:
    # sigmoid(log 3) = 3/4; at half the temperature sigmoid(2 log 3) = 9/10
    choices, noise = np.array([np.log(3), 0.0, 5.0]), np.array([0.0, -np.log(3), -5.0])
    np.testing.assert_allclose(relaxed(choices, noise, 1.0), [0.75, 0.25, 0.5])
    np.testing.assert_allclose(relaxed(choices, noise, 0.5), [0.9, 0.1, 0.5])
    np.testing.assert_allclose(
        gradient_of_choices(np.array([0.75, 0.25, 0.5]), np.array([16.0, -16.0, 4.0]), 0.5), [6, -6, 2]
    )


@given(st.integers(0, 2**32 - 1), st.floats(1e-300, 10), st.floats(0, 1e3))
def test_relaxed_choices_stay_in_the_unit_interval(seed: int, tau: float, size: float) -> None:
    draw = np.random.default_rng(seed)
    choices, noise = size * draw.normal(size=5), draw.logistic(size=5)
    found = relaxed(choices, noise, tau)
    assert ((found >= 0) & (found <= 1)).all()
    assert ((found > 0.5) <= (choices + noise > 0)).all() and ((found < 0.5) <= (choices + noise < 0)).all()


def test_a_cold_choice_is_a_bernoulli_draw() -> None:
    # 40,000 draws: three standard deviations are at most 3 * sqrt(1 / 4 / 40,000) = .0075
    draw = np.random.default_rng(0)
    for log_odds in (-2.0, 0.0, 1.0):
        found = relaxed(np.full(40_000, log_odds), draw.logistic(size=40_000), 1e-9)
        assert set(found.round(6)) == {0.0, 1.0}
        assert abs(found.mean() - 1 / (1 + np.exp(-log_odds))) < 0.0075


def test_the_temperature_falls_and_stays_positive() -> None:
    p = PartialFedParams(temperature=4.0, temperature_decay=0.5)
    assert [temperature(p, round) for round in (1, 2, 3)] == [4, 2, 1]
    assert temperature(p, 10_000) > 0 and np.isfinite(1 / temperature(p, 10_000))


def by_autograd(
    ctx: RoundContext[Any], own: Model, received: Model, choices: np.ndarray, shared: frozenset[str]
) -> np.ndarray:
    """The choices after a round: the loss's derivative by them from autograd, through the whole network in float64."""
    noise, p = rng.generator(ctx.config.seed, "partialfed", ctx.round, ctx.client_id), ctx.params
    tau = p.temperature * p.temperature_decay ** (ctx.round - 1)
    module = Small()
    weights.write(module, received)
    module.double().train()
    mine, theirs = (
        {name: torch.tensor(value).double() for name, value in ctx.layout.tensors(model).items()}
        for model in (own, received)
    )
    layers = [names for names in layers_of(ctx.layout) if names & shared]
    parameters = {name for name, _ in module.named_parameters()}
    a = torch.tensor(choices, requires_grad=True)
    held = held_out(ctx)
    ctx.trainer.leave_out(np.setdiff1d(np.arange(ctx.num_samples), held) if len(held) else held)
    for batch in ctx.trainer.data.epochs(ctx.config.local_epochs, "choices"):  # type: ignore[attr-defined]
        y = torch.sigmoid((a + torch.tensor(noise.logistic(size=len(choices)))) / tau)
        mixed = {
            name: mine[name] + y[k] * (theirs[name] - mine[name])
            for k, names in enumerate(layers)
            for name in names & parameters
        }
        loss = nn.functional.cross_entropy(functional_call(module, mixed, (batch.x.double(),)), batch.y)
        (gradient,) = torch.autograd.grad(loss, a)
        a = (a - p.choice_learning_rate * gradient).detach().requires_grad_()
    return a.detach().numpy()


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"choice_learning_rate": 20.0, "temperature": 0.5},
        {"temperature": 3.0, "temperature_decay": 0.7},
        {"load": "top:3", "batchnorm": "local"},
        {"validation_ratio": 0.0, "load_probability": 0.5},
        {"validation_ratio": 0.6, "load_probability": 0.75},
    ],
    ids=str,
)
def test_learning_against_autograd(own: dict[str, Any]) -> None:
    ctx = client("partialfed", partialfed=own, learning_rate=0.3, round=3, local_epochs=2)
    update, state = PartialFedUpdate(), StoredState()
    start = ctx.layout.take(ctx.initial(), ctx.shared)
    merged = update.merge(start, state, ctx)
    trained = update.train(merged, state, ctx)
    update.keep_local(trained, state, ctx)
    odds = ctx.params.load_probability / (1 - ctx.params.load_probability)
    np.testing.assert_allclose(state.arrays[CHOICES], np.log(odds))
    assert len(state.arrays[CHOICES]) == len([names for names in layers_of(ctx.layout) if names & ctx.shared])
    for seed in (1, 2):
        received = ctx.layout.take(another(trained, seed), ctx.shared)
        whole = ctx.layout.put(trained, received, ctx.shared)
        want = by_autograd(ctx, trained, whole, state.arrays[CHOICES], ctx.shared)
        merged = update.merge(received, state, ctx)
        np.testing.assert_allclose(state.arrays[CHOICES], want, rtol=1e-3, atol=1e-5)
        assert (want != np.log(odds)).all()
        # each layer is one of the two, bit for bit, with its statistics
        tensors, mine, theirs = (ctx.layout.tensors(model) for model in (merged, trained, whole))
        for names, choice in zip([n & ctx.shared for n in layers_of(ctx.layout) if n & ctx.shared], want, strict=True):
            for name in names:
                assert tensors[name].tobytes() == (theirs if choice >= 0 else mine)[name].tobytes()
        for name in ctx.local:
            assert tensors[name].tobytes() == mine[name].tobytes()
        after = update.train(merged, state, ctx)
        assert after.params.tobytes() == ctx.trainer.train(merged).params.tobytes()  # as FedAvg
        update.keep_local(trained, state, ctx)


def test_weights_never_see_the_samples_that_choices_are_learned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = client("partialfed", learning_rate=0.3, n=20)
    seen: dict[str, set[int]] = {"choices": set(), "train": set()}
    batches = ctx.trainer.batches

    def watched(epochs: int | None = None, purpose: str = "train") -> Any:
        for batch in batches(epochs, purpose):
            seen[purpose] |= set(ctx.trainer.indices.tolist())
            yield batch

    def train(start: Model) -> Model:
        for _ in watched():
            pass
        return start

    monkeypatch.setattr(ctx.trainer, "batches", watched)
    monkeypatch.setattr(ctx.trainer, "train", train)
    update, state = PartialFedUpdate(), StoredState()
    for round in (1, 2):
        start = update.merge(another(ctx.initial(), round), state, ctx)
        update.keep_local(update.train(start, state, ctx), state, ctx)
        assert seen["train"] == set(range(20)) - set(held_out(ctx).tolist())
    assert seen["choices"] == set(held_out(ctx).tolist()) and len(seen["choices"]) == 4


def test_statistics_follow_their_layer_and_learning_leaves_none() -> None:
    ctx = client("partialfed", learning_rate=0.3)
    update, state = PartialFedUpdate(), StoredState()
    trained = update.train(update.merge(ctx.initial(), state, ctx), state, ctx)
    update.keep_local(trained, state, ctx)
    received = Model(another(trained, 1).params, trained.buffers + 1)
    for sign in (1.0, -1.0):
        state.arrays[CHOICES] = np.array([1e3, 1e3, sign * 1e3, 1e3])
        merged = update.merge(received, state, ctx)
        assert merged.buffers.tobytes() == (received if sign > 0 else trained).buffers.tobytes()


def test_layers_without_a_gradient_keep_their_choice() -> None:
    module = Small()
    module.bn.requires_grad_(False)
    ctx = client("partialfed", module=module)
    update, state = PartialFedUpdate(), StoredState()
    trained = update.train(update.merge(ctx.initial(), state, ctx), state, ctx)
    update.keep_local(trained, state, ctx)
    update.merge(another(trained, 1), state, ctx)
    stem, conv, bn, fc = state.arrays[CHOICES]
    assert bn == np.log(0.9 / (1 - 0.9)) and bn not in (stem, conv, fc)
    assert [q.requires_grad for q in module.parameters()] == [True] * 4 + [False] * 2 + [True] * 2


def test_choices_that_are_no_numbers_are_a_divergence() -> None:
    ctx = client("partialfed", partialfed={"choice_learning_rate": 1e300})
    received, own = ctx.initial(), Model(ctx.initial().params * 1e30, ctx.initial().buffers)
    with pytest.raises(Diverged, match="partialfed's choices"):
        PartialFedUpdate().learn(own, received, np.zeros(4), ctx)


def test_evaluations_learn_and_keep_nothing(run: Run) -> None:
    often = run(method="partialfed", num_server_rounds=3, evaluate_every=1, learning_rate=0.3, run_name="often")
    once = run(method="partialfed", num_server_rounds=3, evaluate_every=0, learning_rate=0.3, run_name="once")
    assert digest(often) == digest(once)
    ctx = client("partialfed", learning_rate=0.3)
    update, state = PartialFedUpdate(), StoredState()
    trained = update.train(update.merge(ctx.initial(), state, ctx), state, ctx)
    update.keep_local(trained, state, ctx)
    one, two = (update.merge(another(trained, 1), copied(state), ctx) for _ in range(2))
    assert one.params.tobytes() == two.params.tobytes() and len(set(state.arrays[CHOICES])) == 1


def digest(folder: RunFolder) -> str:
    return str(read_summary(folder.path)["digest"])


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"batchnorm": "local"}, "fedbn"),
        ({"load": "bottom:4"}, "fedper"),
        ({"load": "top:1"}, "lg-fedavg"),
    ],
)
def test_fixed_layers_are_those_of_other_methods(run: Run, own: dict[str, Any], other: str) -> None:
    setting = {**BATCHNORM, "num_server_rounds": 3, "fraction_train": 0.7}
    first = run(method="partialfed", partialfed={**FIX, **own}, run_name="first", **setting)
    assert digest(first) == digest(run(method=other, run_name="second", **setting))


def test_learned_choices_are_neither(run: Run) -> None:
    setting = {"num_server_rounds": 3, "learning_rate": 0.3, "partition": "pathological"}
    found = run(method="partialfed", partialfed={"choice_learning_rate": 30.0}, run_name="found", **setting)
    shares = [record["loaded-share"] for record in read_metrics(found.path)]
    assert shares[0] == 1 and 0 <= shares[-1] < 1
    assert len({digest(found), *(digest(run(method=m, run_name=m, **setting)) for m in ("fedavg", "local"))}) == 3


@pytest.mark.parametrize("own", [{}, FIX], ids=["adaptive", "fix"])
def test_the_key_share_limits_what_is_loaded(run: Run, own: dict[str, Any]) -> None:
    setting = {"num_server_rounds": 3, "share": "*.weight"}
    found = run(method="partialfed", partialfed=own, run_name="found", **setting)
    same = digest(found) == digest(run(method="fedavg", run_name="fedavg", **setting))
    assert same == bool(own)


def test_a_budget_needs_fixed_layers() -> None:
    METHODS["partialfed"].check(config(method="partialfed", dp_epsilon=8.0, partialfed=FIX))
    with rejected(MethodError, "dp-epsilon", "partialfed.strategy = fix", value=8.0):
        METHODS["partialfed"].check(config(method="partialfed", dp_epsilon=8.0))
