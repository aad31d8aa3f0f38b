"""FedAS: weights, prototypes and the alignment's loss by hand, information against plain PyTorch, and its limit FedPer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from client_app.stored_state import StoredState
from fl_app import weights
from fl_app.layout import NOTHING, Model
from fl_app.transport.wire import Upload, WireError
from strategies.baselines.fedas import METHOD, FedASUpdate, alignment_loss, fisher_weights, information, prototypes
from strategies.baselines.fedper import METHOD as FEDPER
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import client, same, samples, small


def test_weights_by_hand() -> None:
    assert fisher_weights([3, 1]).tolist() == [0.75, 0.25]
    assert fisher_weights([0, 0, 0, 0]).tolist() == [0.25] * 4


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_weights_are_shares(traces: list[float]) -> None:
    shares = fisher_weights(traces)
    assert (shares >= 0).all() and shares.sum() == pytest.approx(1)


def test_prototypes_and_alignment_by_hand() -> None:
    # Class 0: (0, 2) and (2, 0), mean (1, 1); class 2: (3, 3) alone. z (1, 3) and (1, 1) of class 0: squares 0 + 4 and 0, mean over
    # samples and features 1; z (4, 1) of class 2 to (3, 3): (1 + 4)/2 = 2.5; z (3, 3) with it: 1.25.
    means, there = prototypes(np.array([[0.0, 2], [2, 0], [3, 3]]), np.array([0, 0, 2]), 4)
    assert means.tolist() == [[1, 1], [0, 0], [3, 3], [0, 0]] and there.tolist() == [True, False, True, False]
    at = torch.from_numpy(means)
    assert alignment_loss(torch.tensor([[4.0, 1]]), torch.tensor([2]), at).item() == 2.5
    z, y = torch.tensor([[1.0, 3], [1, 1], [4, 1], [3, 3]]), torch.tensor([0, 0, 2, 2])
    assert alignment_loss(z, y, at).item() == pytest.approx(1 + 1.25)


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_alignment_is_a_sum_over_classes_of_means(n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    z, y, means = random.normal(size=(n, 3)), random.integers(0, 4, n), random.normal(size=(4, 3))
    want = sum(np.mean((z[y == c] - means[c]) ** 2) for c in np.unique(y))
    got = alignment_loss(torch.from_numpy(z), torch.from_numpy(y), torch.from_numpy(means))
    assert got.item() == pytest.approx(want)


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_information_against_plain_pytorch(kinds: dict[str, Any]) -> None:
    ctx = client("fedas", small(**kinds), *samples(10), batch_size=4)
    x, y = samples(10)
    module = small(**kinds).eval()
    weights.write(module, ctx.initial())
    want = 0.0
    for at in (0, 4, 8):
        module.zero_grad()
        images = torch.tensor(x[at : at + 4]).float() / 255
        cross_entropy(module(images), torch.tensor(y[at : at + 4])).backward()  # type: ignore[no-untyped-call]
        want += sum(float((p.grad.double() ** 2).sum()) for p in module.parameters() if p.grad is not None)
    assert information(ctx.initial(), ctx) == pytest.approx(want, rel=1e-5)
    assert ctx.trainer.read().buffers.tobytes() == ctx.initial().buffers.tobytes()  # nothing gathered


def test_alignment_against_plain_pytorch() -> None:
    x, y = samples(6)
    ctx = client(
        "fedas", small(), x, y, batch_size=6, fedas={"alignment_learning_rate": 0.5}, weight_decay=0.1, momentum=0.9
    )
    random, start = np.random.default_rng(0), ctx.initial()
    own = Model(start.params + random.normal(0, 0.3, start.params.size).astype(np.float32), start.buffers)
    state, update = StoredState(), METHOD.local_update()
    assert isinstance(update, FedASUpdate)
    assert update.aligned(start, state, ctx) is start  # no model of its own yet
    update.keep_personal(own, state)
    got = update.aligned(start, state, ctx)

    images, labels = torch.tensor(x).float() / 255, torch.tensor(y)
    reference, module = small(), small()
    weights.write(reference, own)

    def features(network: Any) -> torch.Tensor:
        return torch.relu(network.features(images.flatten(1)))  # type: ignore[no-any-return]

    means = {c: features(reference)[labels == c].mean(0).detach() for c in labels.unique().tolist()}
    z = features(module)
    sum(((z[labels == c] - mean) ** 2).mean() for c, mean in means.items()).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in module.features.parameters():  # type: ignore[union-attr]
            parameter -= 0.5 * parameter.grad
    close(got.params, weights.read(module).params)


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_without_alignment_and_with_equal_information_it_is_fedper_with_equal_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: dict[str, Any]
) -> None:
    monkeypatch.setattr("strategies.baselines.fedas.information", lambda model, ctx: 2.0)
    common: dict[str, Any] = {"sizes": (8, 8, 8), "network": lambda: small(**kinds), "momentum": 0.5}
    ours = Federation(tmp_path, "fedas", fedas={"alignment_epochs": 0}, **common)
    theirs = Federation(tmp_path, "fedper", **common)
    assert theirs.method is FEDPER
    for ids in ([0, 1, 2], [0, 2], [1]):
        ours.round(ids=ids)
        theirs.round(ids=ids)
        assert same(ours.server.global_model, theirs.server.global_model)


def test_a_client_is_evaluated_with_its_own_model(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "fedas")
    federation.round(ids=[0, 1])
    state = federation.states[0].arrays
    own = Model(state["personal.params"], state["personal.buffers"])
    federation.round(ids=[1, 2])
    assert same(federation.evaluated(0), own)
    assert sum(array.nbytes for array in state.values()) == 4 * (federation.layout.d + federation.layout.b)
    ctx, received = federation.context(0)
    start = METHOD.local_update().merge(received, federation.states[0], ctx)
    assert (ctx.layout.take(start, ctx.shared).params == received.params).all()
    assert (ctx.layout.take(start, ctx.local).params == ctx.layout.take(own, ctx.local).params).all()


def test_the_mean_is_weighted_by_information(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "fedas", network=lambda: small(batchnorm=True))
    federation.round()
    uploads = federation.round()
    traces = np.array([m["fisher-trace"] for m in uploads.metrics])
    close(federation.server.global_model.params, traces / traces.sum() @ uploads.W)
    close(federation.server.global_model.buffers, traces / traces.sum() @ uploads.B)


def test_information_that_cannot_be_is_refused(tmp_path: Path) -> None:
    server = Federation(tmp_path, "fedas").server
    for value in (-1.0, math.nan, math.inf, "3", None):
        with rejected(WireError, "", "fisher-trace", "number >= 0"):
            server.check(Upload(NOTHING, metrics={} if value is None else {"fisher-trace": value}))
