"""FedGen's client half: its steps against plain PyTorch, what each loss trains, and the counts it sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from client_app.stored_state import StoredState
from client_app.trainer import LocalTrainer
from fl_app import rng, weights
from fl_app.layout import Model
from strategies.base import RoundContext
from strategies.baselines.fedgen import METHOD, FedGenParams, initial_generator
from tests.methods.runs import client
from tests.methods.test_fedgen import TINY, entering, sequential


def with_batchnorm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def one_batch(round: int = 3, lent: bool = True, **fedgen: Any) -> RoundContext[Any]:
    """A client with six samples of the classes 0 and 2, one batch, and a generator that knows the classes 0 and 1."""
    x = np.random.default_rng(0).integers(0, 256, (6, 1, 2, 2), np.uint8)
    made = initial_generator(3, 6, FedGenParams(noise_dim=3, hidden=4), seed=5)
    extras = {
        "generator": made.params,
        "generator-statistics": made.buffers + np.float32(0.1),
        "qualified": np.array([1, 1, 0], np.uint8),
    }
    return client(
        "fedgen",
        with_batchnorm(),
        x,
        np.array([0, 0, 2, 2, 2, 0]),
        num_classes=3,
        round=round,
        batch_size=8,
        local_epochs=1,
        learning_rate=0.5,
        extras=extras if lent else {},
        fedgen={**TINY, **fedgen},
    )


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 3.0), (2.0, 0.0), (0.0, 3.0)])
def test_a_step_of_the_client_against_plain_pytorch(alpha: float, beta: float) -> None:
    ctx = one_batch(alpha=alpha, beta=beta, decay=0.9)
    start = ctx.initial()
    after = METHOD.local_update().train(start, StoredState(), ctx)

    order = torch.randperm(6, generator=torch.Generator().manual_seed(rng.torch_seed(0, "train", 3, 0)))
    x, y = ctx.trainer.samples(order.numpy())
    module = with_batchnorm()
    made = sequential(ctx.params, 3, 6, Model(ctx.extras["generator"], ctx.extras["generator-statistics"])).eval()
    stream = ctx.rng("fedgen")
    drawn = torch.tensor(stream.choice(np.array([0, 1]), 5 if alpha else 0))
    labels = torch.cat([drawn, y]) if beta else drawn
    z = made(entering(torch.tensor(stream.random((len(labels), 3), np.float32)), labels, 3)).detach()
    logits = module(x)
    loss = value = cross_entropy(logits, y)
    if alpha:
        loss = loss + 5 / 8 * alpha * 0.9**2 * cross_entropy(module[-1](z[:5]), drawn)
    if beta:
        q = module[-1](z[len(drawn) :]).softmax(1).detach()
        loss = loss + beta * 0.9**2 * (q * (q.log() - logits.log_softmax(1))).sum(1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter -= 0.5 * parameter.grad
    want = weights.read(module)
    np.testing.assert_allclose(after.params, want.params, atol=1e-6)
    np.testing.assert_allclose(after.buffers, want.buffers, atol=1e-6)
    assert ctx.trainer.last_loss == pytest.approx(value.item(), abs=1e-6)  # type: ignore[attr-defined]


def test_the_loss_on_generated_features_trains_the_classifier_alone() -> None:
    plain, drawn = one_batch(lent=False), one_batch(alpha=50, beta=0)
    first, second = (
        ctx.layout.tensors(METHOD.local_update().train(ctx.initial(), StoredState(), ctx)) for ctx in (plain, drawn)
    )
    assert {name for name in first if not np.array_equal(first[name], second[name])} == {"4.weight", "4.bias"}


def test_counts_travel_with_the_model() -> None:
    ctx = one_batch()
    sent = METHOD.local_update().upload(ctx.initial(), ctx.initial(), StoredState(), ctx)
    counts = sent.extras["class-counts"]
    assert counts.dtype == np.int32 and counts.tolist() == [3, 0, 3] and sent.num_examples == 6
    off = one_batch(alpha=0, beta=0)
    assert METHOD.local_update().upload(off.initial(), off.initial(), StoredState(), off).extras == {}


def test_no_forward_pass_of_the_network_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, calls = one_batch(), []
    logits = LocalTrainer.logits
    monkeypatch.setattr(LocalTrainer, "logits", lambda self, module, x: calls.append(len(x)) or logits(self, module, x))
    METHOD.local_update().train(ctx.initial(), StoredState(), ctx)
    assert calls == [6]
