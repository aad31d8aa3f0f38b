"""FLUTE: neural collapse by hand and against autograd, training against the textbook loop, the limit that is FedPer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from client_app.stored_state import StoredState
from fl_app import rng, weights
from fl_app.errors import UserError
from fl_app.layout import Layout, Model
from strategies.base import RoundContext
from strategies.baselines.flute import METHOD, FLUTEParams, FLUTEUpdate, collapse, shared, target
from tests.conftest import Run
from tests.methods.trials import Small, client, outcome

NOTHING = {"collapse_weight": 0.0, "head_weight": 0.0, "feature_weight": 0.0, "head_learning_rate": 0.0}


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def value_of(head: Tensor, present: Tensor) -> Tensor:
    """NC(H) word by word, for autograd."""
    c = len(head)
    u = present.double()[:, None]
    goal = (u @ u.T) * (torch.eye(c).double() - torch.ones(c, c).double() / c) / math.sqrt(c - 1)
    gram = head @ head.T
    return torch.linalg.norm(gram / torch.linalg.norm(gram) - goal)


def test_by_hand() -> None:
    # C = 2, k = 1, H = (1, 0): P = HH^T = ((1, 0), (0, 0)), T = ((.5, -.5), (-.5, .5)), P - T = ((.5, .5), (.5, -.5)), NC = 1.
    # <P, R> = .5, R - .5 P = ((0, .5), (.5, -.5)), times 2H: (0, 1). A step of 1/2 leads to (1, -1/2), towards (1, -1).
    value, gradient = collapse(doubles([1], [0]), torch.tensor([True, True]))
    assert value.item() == 1 and gradient.tolist() == [[0], [1]]
    # Only class 0 there: T = ((.5, 0), (0, 0)). H = (1, 1): ||HH^T|| = 2, P - T = ((0, .5), (.5, .5)), NC = sqrt(3)/2, R =
    # (P - T)/NC, <P, R> = (3/4)/NC = sqrt(3)/2; 2(R - <P, R> P)H/2 = (1/sqrt(3), 2/sqrt(3)) - sqrt(3)/2 (1, 1): a step
    # shrinks the absent class's row.
    value, gradient = collapse(doubles([1], [1]), torch.tensor([True, False]))
    root = math.sqrt(3)
    assert value.item() == pytest.approx(root / 2)
    np.testing.assert_allclose(gradient.squeeze(1).numpy(), [1 / root - root / 2, 2 / root - root / 2])
    # Three classes, no client lacks one: T = (I - 1/3)/sqrt(2); one class: its entry alone.
    goal = target(torch.ones(3, 1).double(), torch.ones(3, dtype=torch.bool))
    np.testing.assert_allclose(goal.numpy(), (np.eye(3) - 1 / 3) / math.sqrt(2))
    alone = target(torch.ones(3, 1).double(), torch.tensor([False, True, False]))
    assert np.count_nonzero(alone.numpy()) == 1 and alone[1, 1].item() == pytest.approx(2 / 3 / math.sqrt(2))


@given(st.integers(2, 7), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_the_gradient_against_autograd_and_across_the_head(c: int, k: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    head = torch.randn(c, k, generator=random, dtype=torch.float64, requires_grad=True)
    present = torch.rand(c, generator=random) < 0.7
    want = value_of(head, present)
    value, gradient = collapse(head.detach(), present)
    assert value.dtype == torch.float64 and value.item() == pytest.approx(want.item(), abs=1e-12)
    # collapsed, with one feature and two classes: the norm has no derivative there
    if want.item() < 1e-6:
        return
    (by_autograd,) = torch.autograd.grad(want, head)
    np.testing.assert_allclose(
        gradient.numpy(), by_autograd.numpy(), atol=1e-12 * max(1, by_autograd.abs().max().item())
    )
    assert (head.detach() * gradient).sum().item() == pytest.approx(0, abs=1e-12)
    single, slope = collapse(head.detach().float(), present)
    assert single.dtype == slope.dtype == torch.float32 and single.item() == pytest.approx(want.item(), abs=1e-5)


@pytest.mark.parametrize("c", [2, 3, 10])
def test_a_simplex_has_collapsed(c: int) -> None:
    present = torch.ones(c, dtype=torch.bool)
    simplex = (torch.eye(c) - 1 / c).double()
    assert collapse(7 * simplex, present)[0].item() == pytest.approx(0, abs=1e-12)
    assert target(simplex, present).norm().item() == pytest.approx(1)


def test_no_gradient_where_there_is_none() -> None:
    value, gradient = collapse(torch.zeros(3, 4), torch.ones(3, dtype=torch.bool))
    assert value.item() == pytest.approx(1) and not gradient.any()
    # H = (1, -1): P = T exactly
    value, gradient = collapse(doubles([1], [-1]), torch.tensor([True, True]))
    assert value.item() == 0 and not gradient.any()
    tiny, slope = collapse(torch.full((2, 2), 1e-30), torch.ones(2, dtype=torch.bool))  # HH^T underflows
    assert torch.isfinite(tiny) and not slope.any()


def textbook(ctx: RoundContext[Any], start: Model) -> tuple[Model, np.ndarray]:
    """Both phases with autograd on the printed loss, float64; the trained model, and the head kept after the server's step."""
    c, p, data = ctx.config, ctx.params, ctx.trainer.data  # type: ignore[attr-defined]
    module = Small()
    weights.write(module, start)
    module.double().train()
    statistics = {name: b.clone() for name, b in module.named_buffers()}
    present = torch.bincount(data.train_labels, minlength=4) > 0
    body_epochs = min(p.body_epochs, c.local_epochs)
    for purpose, epochs in (("train-head", c.local_epochs - body_epochs), ("train", body_epochs)):
        generator = torch.Generator().manual_seed(rng.torch_seed(c.seed, purpose, 1, 0))
        optimizer = torch.optim.SGD(
            module.parameters(), c.learning_rate, momentum=c.momentum, weight_decay=c.weight_decay
        )
        module.requires_grad_(purpose == "train")
        module.fc.requires_grad_(True)
        for _ in range(epochs):
            for batch in torch.randperm(ctx.num_samples, generator=generator).split(c.batch_size):
                x, y = data.chosen(batch)
                z = torch.relu(module.bn(module.conv(module.stem(x.double())))).flatten(1)
                loss = cross_entropy(module.fc(z), y) + p.collapse_weight * value_of(module.fc.weight, present)
                loss = loss + p.head_weight * module.fc.weight.square().sum()
                if purpose == "train":
                    loss = loss + p.feature_weight * z.square().sum(1).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if purpose == "train-head":
            for name, buffer in module.named_buffers():
                buffer.copy_(statistics[name])
    trained = weights.read(module)
    (slope,) = torch.autograd.grad(value_of(module.fc.weight, present), module.fc.weight)
    kept = module.fc.weight - p.head_learning_rate / 3 * slope
    return trained, torch.cat([kept.reshape(-1), module.fc.bias]).detach().numpy()


@pytest.mark.parametrize("labels", [4, 2])
@pytest.mark.parametrize("changes", [{}, {"body_epochs": 2}, {"body_epochs": 9}, NOTHING], ids=str)
def test_training_against_the_textbook_loop(changes: dict[str, float], labels: int) -> None:
    large = {"collapse_weight": 0.5, "head_weight": 0.1, "feature_weight": 0.02}  # so that each is seen
    setting = {"momentum": 0.5, "weight_decay": 0.01, "local_epochs": 3, "learning_rate": 0.05, "batch_size": 8}
    ctx = client("flute", labels=labels, n=21, flute={**large, **changes}, **setting)  # 21: a last batch of 5
    update, state, start = FLUTEUpdate(), StoredState(), ctx.initial()
    after = update.train(start, state, ctx)
    want, kept = textbook(ctx, start)
    np.testing.assert_allclose(after.params, want.params, rtol=1e-3, atol=3e-6)
    np.testing.assert_allclose(after.buffers, want.buffers, rtol=1e-3, atol=3e-6)  # of the body's epochs alone
    update.keep_local(after, state, ctx)
    np.testing.assert_allclose(state.arrays["local.params"], kept, rtol=1e-3, atol=3e-6)
    # "after" is before the server's step
    assert update.personal(after, state, ctx) is after
    head = ctx.layout.take(after, ctx.local).params
    assert (state.arrays["local.params"] == head)[-4:].all()  # the bias has no step
    assert np.array_equal(state.arrays["local.params"], head) == (changes is NOTHING)
    assert sum(a.nbytes for a in state.arrays.values()) == 4 * head.size


def test_the_reported_loss_has_no_penalties() -> None:
    ctx = client("flute", flute={"feature_weight": 1e-30, "body_epochs": 9}, learning_rate=1e-9, local_epochs=1)
    heavy = client("flute", flute={"feature_weight": 100.0, "body_epochs": 9}, learning_rate=1e-9, local_epochs=1)
    for one in (ctx, heavy):
        FLUTEUpdate().train(one.initial(), StoredState(), one)
    assert ctx.trainer.last_loss == pytest.approx(heavy.trainer.last_loss, rel=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("weight", NOTHING)
def test_each_weight_counts(run: Run, weight: str) -> None:
    setting = {"num_server_rounds": 2, "local_epochs": 2}
    some = {**NOTHING, "body_epochs": 2, weight: 0.5}
    assert outcome(run, "flute", flute=some, **setting) != outcome(run, "fedper", **setting)


def test_a_single_class_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    assert METHOD.shared is shared
    with pytest.raises(UserError, match="at least 2 classes"):
        shared(Layout.of(module), FLUTEParams())
