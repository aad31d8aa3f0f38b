"""FedALA: a step by hand, learning against a naive reference, its invariants, its limit bit for bit, evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from client_app.stored_state import StoredState
from fl_app import rng, weights
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import read_metrics
from strategies.base import RoundContext
from strategies.baselines import fedala
from strategies.baselines.fedala import FedALAUpdate, mix, mixed_from, settled, step
from tests.conftest import Run
from tests.methods.trials import CLASSES, Small, another, client, copied, outcome


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_step_by_hand() -> None:
    # A = 1 - g (w_g - w_prev): 1 - .25 * 1 = .75; w_g = w_prev: 1; 1 + .5 * 2 = 2, cut to 1; 1 - .75 * 1 = .25.
    own, received = doubles(0, 1, -1, 0.5), doubles(1, 1, 1, -0.5)
    got = step(own, received, torch.ones(4, dtype=torch.float64), doubles(0.25, 9, -0.5, -0.75), 1.0)
    assert got.dtype == torch.float64 and got.tolist() == [0.75, 1, 1, 0.25]
    assert mix(own, received, got).tolist() == [0.75, 1, 1, 0.25]
    assert step(own, received, got, doubles(9, 9, 9, -9), 10.0).tolist() == [0, 1, 0, 0]


@given(st.integers(1, 20), st.floats(0, 5), st.integers(0, 2**32 - 1))
def test_weights_stay_in_the_unit_interval(n: int, rate: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    own, received, gradient = torch.randn(3, n, generator=random)
    at = torch.rand(n, generator=random)
    got = step(own, received, at, gradient, rate)
    assert ((got >= 0) & (got <= 1)).all()
    assert torch.equal(step(own, own, at, gradient, rate), at)  # nothing to choose between
    between = mix(own, received, got)
    slack = 1e-6 * (own.abs() + received.abs())
    assert ((between >= torch.minimum(own, received) - slack) & (between <= torch.maximum(own, received) + slack)).all()


@given(st.integers(0, 2**32 - 1))
def test_mixtures_end_at_both_models_exactly(seed: int) -> None:
    own, received = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed)) * torch.tensor([[1e4], [1e-4]])
    assert torch.equal(mix(own, received, torch.ones(50)), received)
    assert torch.equal(mix(own, received, torch.zeros(50)), own)


def test_when_the_loss_has_settled() -> None:
    assert not settled([1.0] * 10, 0.1, 100) and settled([1.0] * 11, 0.1, 100)
    rising = [float(i) for i in range(11)]
    # std of ten numbers in a row: sqrt(99/12) = 2.872
    assert not settled(rising, 2.8, 100) and settled(rising, 2.9, 100)
    assert settled([9.0] + [1.0] * 10, 0.1, 100)  # the last ten alone
    assert settled(rising, 0.1, 11) and settled([1.0], 0.1, 1)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (1, {"fc"}),
        (2, {"fc", "bn"}),
        (3, {"fc", "bn", "conv"}),
        (0, {"fc", "bn", "conv", "stem"}),
        (9, {"fc", "bn", "conv", "stem"}),
    ],
)
def test_the_last_modules(layers: int, names: set[str]) -> None:
    layout = Layout.of(Small())
    first = mixed_from(layout, layers)
    assert {slot.name.split(".")[0] for slot in layout.params if slot.start >= first} == names
    assert all((slot.name.split(".")[0] in names) == (slot.start >= first) for slot in layout.params)


def naive(
    ctx: RoundContext[Any], received: Model, own: np.ndarray, first: int, known: np.ndarray | None
) -> tuple[np.ndarray, int]:
    """A after learning, and the number of epochs, word by word: the whole model in float64, one batch after the other."""
    data, c, p = ctx.trainer.data, ctx.config, ctx.params  # type: ignore[attr-defined]
    n = ctx.num_samples
    chosen = rng.generator(c.seed, "ala", ctx.round, ctx.client_id).choice(
        n, max(1, int(p.sample_share * n)), replace=False
    )
    module = Small()
    weights.write(module, received)
    module.double().eval()
    theirs, mine = torch.tensor(received.params).double(), torch.tensor(received.params).double()
    mine[first:] = torch.tensor(own).double()
    A = torch.ones_like(theirs)
    if known is not None:
        A[first:] = torch.tensor(known).double()
    losses: list[float] = []
    while True:
        total = 0.0
        for at in range(0, len(chosen), c.batch_size):
            x, y = data.chosen(torch.tensor(chosen[at : at + c.batch_size]))
            nn.utils.vector_to_parameters(mine + (theirs - mine) * A, module.parameters())
            module.zero_grad()
            loss = nn.functional.cross_entropy(module(x.double()), y)
            loss.backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([q.grad.reshape(-1) for q in module.parameters() if q.grad is not None])
            A[first:] = (A - p.weight_learning_rate * gradient * (theirs - mine)).clamp(0, 1)[first:]
            total += loss.item() * len(y)
        losses.append(total / len(chosen))
        if (
            known is not None
            or (len(losses) > 10 and np.std(losses[-10:]) < p.threshold)
            or len(losses) == p.max_epochs
        ):
            return A[first:].numpy(), len(losses)


@pytest.mark.parametrize("layers", [1, 2, 3, 0])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_learning_rate": 20.0},
        {"sample_share": 0.3},
        {"threshold": 1e-6, "max_epochs": 13},
        {"threshold": 100.0},
    ],
    ids=str,
)
def test_learning_against_a_naive_reference(
    monkeypatch: pytest.MonkeyPatch, layers: int, changes: dict[str, float]
) -> None:
    ctx = client("fedala", fedala={"layers": layers, "weight_learning_rate": 5.0, **changes}, learning_rate=0.3)
    update, state, start = FedALAUpdate(), StoredState(), ctx.initial()
    assert update.merge(start, state, ctx) is start
    first_model = update.train(start, state, ctx)
    first = mixed_from(ctx.layout, layers)
    assert (
        set(state.arrays) == {"fedala.own"}
        and state.arrays["fedala.own"].tobytes() == first_model.params[first:].tobytes()
    )

    steps: list[int] = []
    monkeypatch.setattr(fedala, "step", lambda *args: (steps.append(1), step(*args))[1])
    # the first time until it settles, then an epoch
    for seed in (1, 2):
        received, own = another(first_model, seed), state.arrays["fedala.own"]
        want, epochs = naive(ctx, received, own, first, state.arrays.get("fedala.weights"))
        steps.clear()
        merged = update.merge(received, state, ctx)
        assert len(steps) == epochs * -(-max(1, int(ctx.params.sample_share * 20)) // ctx.config.batch_size)
        assert (epochs == 1) == (seed == 2) and (seed == 2 or epochs >= 11)
        A = state.arrays["fedala.weights"]
        np.testing.assert_allclose(A, want, atol=2e-4)
        assert ((A >= 0) & (A <= 1)).all() and (A < 1).any() and A.shape == own.shape
        assert merged.params[:first].tobytes() == received.params[:first].tobytes()  # below P exactly w_g
        assert merged.buffers.tobytes() == received.buffers.tobytes()
        np.testing.assert_allclose(merged.params[first:], own + (received.params[first:] - own) * A, atol=1e-6)
        assert (merged.params[first:] == received.params[first:])[A == 1].all()
        after = update.train(merged, state, ctx)
        assert after.params.tobytes() == ctx.trainer.train(merged).params.tobytes()  # as FedAvg
        assert sum(a.nbytes for a in state.arrays.values()) == 8 * (ctx.layout.d - first)


def test_features_are_computed_once_where_the_classifier_gives_the_logits() -> None:
    class Likelihood(Small):
        """The same model to cross-entropy, but its last Linear layer does not give the output."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(1)

    learnt, passes = [], []
    for module in (Small(), Likelihood()):
        torch.manual_seed(0)
        module.load_state_dict(Small().state_dict())
        ctx = client("fedala", module=module, learning_rate=0.3)
        update, state = FedALAUpdate(), StoredState()
        trained = update.train(ctx.initial(), state, ctx)
        count: list[int] = []
        module.register_forward_hook(lambda *_, count=count: count.append(1))
        update.merge(another(trained, 1), state, ctx)
        learnt.append(state.arrays["fedala.weights"])
        passes.append(len(count))
    np.testing.assert_allclose(learnt[0], learnt[1], atol=1e-5)
    assert passes[0] == 1 and passes[1] >= 11


def test_a_model_without_bias_and_samples_on_the_classifier_alone() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES, bias=False))
    ctx = client("fedala", module=module, n=1, learning_rate=0.3)
    update, state = FedALAUpdate(), StoredState()
    trained = update.train(ctx.initial(), state, ctx)
    update.merge(another(trained, 1), state, ctx)
    assert state.arrays["fedala.weights"].shape == (64 * CLASSES,)


def test_what_the_users_model_holds_fixed_and_what_is_equal_keeps_its_weight() -> None:
    module = Small()
    module.bn.requires_grad_(False)
    ctx = client("fedala", module=module, fedala={"layers": 3})
    update, state = FedALAUpdate(), StoredState()
    trained = update.train(ctx.initial(), state, ctx)
    assert update.merge(trained, state, ctx).params.tobytes() == trained.params.tobytes()
    assert (state.arrays["fedala.weights"] == 1).all()
    assert [q.requires_grad for q in module.parameters()] == [True] * 4 + [False] * 2 + [True] * 2


def test_with_a_rate_it_is_not(run: Run) -> None:
    setting = {"num_server_rounds": 3, "learning_rate": 0.3}
    assert outcome(run, "fedala", **setting) != outcome(run, "fedavg", **setting)


def test_evaluating_twice_gives_one_hash(run: Run) -> None:
    folder = run(method="fedala", num_server_rounds=3, evaluate_every=2, learning_rate=0.3)
    records = list(read_metrics(folder.path))
    ctx = client("fedala", learning_rate=0.3)
    update, state = FedALAUpdate(), StoredState()
    trained = update.train(ctx.initial(), state, ctx)
    once, again = (update.merge(another(trained, 1), copied(state), ctx) for _ in range(2))
    assert once.params.tobytes() == again.params.tobytes() != another(trained, 1).params.tobytes()
    assert len({row["sha256"] for row in records[-1]["evaluation"]["clients"].values()}) == 3
