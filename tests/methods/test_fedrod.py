"""FedRoD: the balanced softmax by hand, its limits, and a client's step from torch alone."""

from __future__ import annotations

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
from strategies.baselines.fedrod import METHOD, balanced_softmax_loss
from tests.conftest import Run
from tests.methods.federation import Federation, close
from tests.methods.one_client import client, samples, small
from tests.methods.runs import outcome


def test_the_loss_by_hand() -> None:
    # Logits 0, log 2, 5 and counts 3, 1, 0: shares 3 / 5 and 2 / 5; the third class does not count.
    logits = np.array([[0, np.log(2), 5.0]] * 2)
    value = balanced_softmax_loss(logits, np.array([0, 1]), np.array([3, 1, 0]))
    assert float(value) == pytest.approx(-(np.log(0.6) + np.log(0.4)) / 2, rel=1e-12)


def test_the_loss_and_its_slope_by_loops() -> None:
    random = np.random.default_rng(0)
    logits, y, counts = random.normal(size=(6, 4)), np.array([0, 1, 3, 3, 0, 1]), np.array([7, 2, 0, 1])
    g = torch.tensor(logits, requires_grad=True)
    value = balanced_softmax_loss(g, torch.tensor(y), torch.tensor(counts))
    value.backward()  # type: ignore[no-untyped-call]
    shares = [[counts[c] * np.exp(row[c]) / sum(counts * np.exp(row)) for c in range(4)] for row in logits]
    assert value.item() == pytest.approx(
        -np.mean([np.log(row[c]) for row, c in zip(shares, y, strict=True)]), rel=1e-12
    )
    assert g.grad is not None
    close(g.grad.numpy(), (np.array(shares) - np.eye(4)[y]) / 6, atol=1e-12)
    # a client of one class has nothing to tell apart
    assert float(balanced_softmax_loss(logits[:1], [3], [0, 0, 0, 5])) == 0


@given(st.integers(1, 4), st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_equal_counts_give_the_cross_entropy(n: int, classes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits, y = torch.tensor(random.normal(size=(n, classes))), torch.tensor(random.integers(0, classes, n))
    plain = float(cross_entropy(logits, y))
    for count in (1, 7):
        assert float(balanced_softmax_loss(logits, y, np.full(classes, count))) == pytest.approx(plain, rel=1e-9)
    counts = random.integers(1, 9, classes)
    shifted = balanced_softmax_loss(logits, y, counts)
    assert float(balanced_softmax_loss(logits + 3, y, 10 * counts)) == pytest.approx(float(shifted), rel=1e-9)


def test_without_balance_all_that_travels_is_fedavgs_bit_for_bit(run: Run) -> None:
    setting = {"model": "mlp", "momentum": 0.5, "weight_decay": 0.01, "fraction_train": 0.7}
    plain, some = outcome(run, "fedavg", **setting), outcome(run, "fedrod", fedrod={"balanced": False}, **setting)
    assert plain[1]["global.safetensors"] == some[1]["global.safetensors"]
    assert outcome(run, "fedrod", **setting)[1]["global.safetensors"] != plain[1]["global.safetensors"]


def test_a_clients_step_by_torch() -> None:
    # Two rounds of one batch each; momentum has no part in a single step.
    images, labels = samples(6)
    ctx = client("fedrod", small(), images, labels, batch_size=6, local_epochs=1, learning_rate=0.5)
    update, state, start = METHOD.local_update(), StoredState(), ctx.initial()
    head = np.zeros(18, np.float32)
    at = ctx.layout.indices(ctx.layout.classifier)
    for _ in range(2):
        after = update.train(start, state, ctx)
        module = small()
        weights.write(module, start)
        x, y = torch.tensor(images).float() / 255, torch.tensor(labels)
        W, b = (torch.tensor(a, requires_grad=True) for a in (head[:15].reshape(3, 5), head[15:]))
        z = torch.relu(module.features(x.flatten(1)))  # type: ignore[operator]
        g = module.classifier(z)  # type: ignore[operator]
        counts = torch.bincount(y, minlength=3)
        loss = cross_entropy(g + counts.log(), y) + cross_entropy(g.detach() + z.detach() @ W.T + b, y)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
        assert W.grad is not None and b.grad is not None
        head = head - 0.5 * np.concatenate([W.grad.numpy().reshape(-1), b.grad.numpy()])
        close(after.params, weights.read(module).params, atol=1e-5)
        close(state.arrays["fedrod.head"], head, atol=1e-5)
        used = update.personal(after, state, ctx)
        close(used.params[at] - after.params[at], head, atol=1e-5)
        assert (used.params[~at] == after.params[~at]).all()
        start = after


def test_the_head_never_travels(tmp_path: Path) -> None:
    federation: Any = Federation(tmp_path, "fedrod")
    # a client that never trained has no head of its own
    assert federation.evaluated(1).params.tobytes() == federation.server.global_model.params.tobytes()
    uploads = federation.round()
    close(federation.server.global_model.params, np.average(uploads.W, axis=0, weights=[10, 6, 8]))
    assert all(set(state.arrays) == {"fedrod.head"} for state in federation.states)
    assert len({federation.evaluated(i).params.tobytes() for i in range(3)}) == 3
