"""FedProto: means and distances by hand, its limit Local, two rounds by hand, and the nearest prototype as a classifier."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_app.errors import MethodError
from fl_app.layout import NO_TENSORS, Layout
from fl_app.transport.wire import Expected, Upload, WireError
from strategies.base.state import UploadBuffer
from strategies.baselines.fedproto import (
    METHOD,
    FedProtoParams,
    check_counts,
    comparable,
    distance,
    mean_prototypes,
    nearest,
    prototypes_of,
)
from strategies.engine.screening import USUAL, Screening
from tests.conftest import Run
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.runs import outcome


def test_means_by_hand() -> None:
    # Class 0: (1 * 4 + 3 * 8) / 4 = 7. Only the second client has class 1, nobody class 2.
    P = np.array([[[4.0], [9], [9]], [[8], [2], [9]]])
    means, counts = mean_prototypes(P, np.array([[1, 0, 0], [3, 2, 0]]))
    assert means.tolist() == [[7], [2], [0]] and counts.tolist() == [4, 2, 0]
    own, found = prototypes_of(np.array([[1, 2], [3, 4], [5, 6]], np.float32), np.array([2, 0, 2]), 3)
    assert own.tolist() == [[3, 4], [0, 0], [3, 4]] and found.tolist() == [1, 0, 2]


def test_means_of_one_client_and_bad_counts() -> None:
    P = np.array([[[1.0, 2], [np.nan, np.inf]]])
    means, counts = mean_prototypes(P, [[3, 0]])
    assert means.tolist() == [[1, 2], [0, 0]] and counts.tolist() == [3, 0] and counts.dtype == np.int64
    for wrong in ([[3]], [3, 0], [[3, -1]]):
        with rejected(ValueError, "", "[N, C, k]", "[N, C]", ">= 0", "got [1, 2, 2] and"):
            mean_prototypes(P, wrong)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_means_are_those_of_all_samples_together(n: int, classes: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = [(random.normal(size=(5, width)).astype(np.float32), random.integers(0, classes, 5)) for _ in range(n)]
    own = [prototypes_of(x, y, classes) for x, y in data]
    means, counts = mean_prototypes(np.stack([p for p, _ in own]), np.stack([c for _, c in own]))
    want, total = prototypes_of(np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data]), classes)
    close(means, want, atol=1e-5)
    assert counts.tolist() == total.tolist()


def test_prototypes_for_a_comparison_by_hand() -> None:
    """A missing class does not differ from the sent one, and the others count by their root mean square."""
    sent = np.array([[1, 1], [2, 2], [0, 0], [5, 5]], np.float32)
    P = np.array([[1, 5], [0, 0], [3, 4], [0, 0]])
    found = comparable(P, [2, 0, 1, 0], sent)
    np.testing.assert_allclose(found, [[1, 1 + 4 / np.sqrt(2)], [2, 2], 3 / np.sqrt(2) * np.array([1, 4 / 3]), [5, 5]])
    assert np.square(found - sent).sum() == pytest.approx((16 + 25) / 2) and found.dtype == np.float32
    np.testing.assert_array_equal(comparable(P, [0, 0, 0, 0], sent), sent)


def test_a_client_with_all_classes_is_not_far() -> None:
    """Nine clients have one class each, one has all ten: distances over classes would add up to more than the bound."""
    random = np.random.default_rng(0)
    centres, counts = random.standard_normal((10, 32)), np.vstack([np.eye(10), np.ones(10)])[1:]
    sent, screening = np.zeros((10, 32), np.float32), Screening()
    for round in (1, 2):
        P = np.where(counts[..., None] > 0, centres + 0.5 * random.standard_normal((10, 10, 32)), 0)
        stack = np.stack([comparable(*own, sent) for own in zip(P, counts, strict=True)])
        buffer = UploadBuffer.of(list(range(10)), Expected.of(NO_TENSORS))
        for i in range(10):
            buffer.metrics[i], buffer.sizes[i] = {}, 100
        known = {"prototypes": sent}
        assert screening.measure(round, buffer, {"prototypes": stack}, USUAL, lambda _: known) == []  # noqa: B023
        screening.accept(round, range(10))
        sent = mean_prototypes(P, counts)[0].astype(np.float32)


def test_distances_by_hand() -> None:
    # Class 0 has the mean (1, 1), at distance 5 from (4, 5); class 1 is (0, 0) itself; class 2 has no prototype.
    z = torch.tensor([[0.0, 0], [2, 2], [0, 0], [7, 7]], requires_grad=True)
    y, goal = torch.tensor([0, 0, 1, 2]), torch.tensor([[4.0, 5], [0, 0], [1, 1]])
    known = torch.tensor([True, True, False])
    value = distance(z, y, goal, known, pull="classes")
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == pytest.approx(5) and z.grad is not None
    close(z.grad.numpy(), np.array([[-0.3, -0.4], [-0.3, -0.4], [0, 0], [0, 0]]))
    # Squares 16, 25, 4, 9, 0, 0; the mean is over all four samples of two features.
    assert distance(z, y, goal, known, pull="samples").item() == pytest.approx(54 / 8)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_classifier_predicts_the_nearest(classes: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    P, z = random.normal(size=(classes, width)), random.normal(size=(9, width))
    counts = np.ones(classes, int)
    counts[0] = 0
    W, b = nearest(P, counts)
    apart = ((z[:, None] - P[None]) ** 2).sum(-1)
    apart[:, 0] = np.inf
    logits = z @ W.T + b
    clear = np.partition(apart, min(1, classes - 1), axis=1)
    sure = (clear[:, 1] - clear[:, 0] > 1e-4) if classes > 2 else np.ones(9, bool)
    assert (logits.argmax(1) == apart.argmin(1))[sure].all()


def test_without_weight_it_is_local_bit_for_bit(run: Run) -> None:
    setting = {"model": "mlp", "momentum": 0.5, "fraction_train": 0.7, "collect_personal_models": True}
    own = {"weight": 0.0, "predict": "classifier"}
    plain, some = outcome(run, "local", **setting), outcome(run, "fedproto", fedproto=own, **setting)
    clients = [name for name in plain[1] if name.startswith("client")]
    assert clients and all(some[1][name] == plain[1][name] for name in clients)
    assert outcome(run, "fedproto", **setting)[1] != some[1]


@pytest.mark.parametrize("mean", ["samples", "clients"])
def test_two_rounds_by_hand(tmp_path: Path, mean: str) -> None:
    federation: Any = Federation(tmp_path, "fedproto", fedproto={"mean": mean})
    server = federation.server
    uploads = federation.round()
    assert uploads.W.shape == (3, 0)
    P, counts = uploads.extras["prototypes"].astype(np.float64), uploads.extras["counts"]
    factors = counts if mean == "samples" else (counts > 0).astype(int)
    want = np.stack([(P[:, c] * factors[:, c, None]).sum(0) / max(factors[:, c].sum(), 1) for c in range(3)])
    close(server.memory["prototypes"], want)
    assert server.memory["counts"].tolist() == counts.sum(0).tolist()
    before, known = server.memory["prototypes"].copy(), server.memory["counts"].copy()
    # late uploads count less: half and a third
    factors = factors * np.array([[1], [1 / 2], [1 / 3]])
    server.personalize(1, dataclasses.replace(uploads, factors=np.array([1, 1 / 2, 1 / 3])))
    want = np.stack([(P[:, c] * factors[:, c, None]).sum(0) / max(factors[:, c].sum(), 1e-9) for c in range(3)])
    close(server.memory["prototypes"], want)
    server.memory |= {"prototypes": before.copy(), "counts": known}
    uploads = federation.round(ids=[1])
    gone = uploads.extras["counts"][0] == 0
    assert (server.memory["prototypes"][gone] == before[gone]).all()
    assert (server.memory["prototypes"][~gone] == uploads.extras["prototypes"][0][~gone]).all()
    used = federation.evaluated(0)
    at = federation.layout.indices(federation.layout.classifier)
    assert (used.params[at][:15].reshape(3, 5) == server.memory["prototypes"]).all()


def test_candidates_by_hand(tmp_path: Path) -> None:
    federation: Any = Federation(tmp_path, "fedproto", sizes=(10, 6), fedproto={"candidates": "own"})
    # client 0 has the classes 0 and 2, client 1 all; the prototypes of 0 and 1 have come
    federation.data[0] = federation.data[0][0], np.array([0, 2] * 5)
    federation.data[1] = federation.data[1][0], np.arange(6) % 3
    federation.rounds = 1
    federation.server.memory |= {"prototypes": np.eye(3, 5, dtype=np.float32), "counts": np.array([4, 4, 0])}
    at = federation.layout.indices(federation.layout.classifier)
    one, both = np.eye(5)[0], np.eye(3, 5)[:2].mean(0)
    for client, rows, bias in (
        (0, [one, one, one], [-0.5, -1.5005, -1.5005]),
        (1, [*np.eye(3, 5)[:2], both], [-0.5, -0.5, -1.5005]),
    ):
        head = federation.evaluated(client).params[at]
        close(head[:15].reshape(3, 5), np.array(rows))
        close(head[15:], np.array(bias))
    # no class of client 0 has a prototype: its classifier predicts
    federation.server.memory["counts"] = np.array([0, 4, 0])
    assert (federation.evaluated(0).params == federation.initial.params).all()


@pytest.mark.parametrize("stored", [False, True])
def test_fine_tuning_starts_from_the_clients_own_classifier(tmp_path: Path, stored: bool) -> None:
    federation: Any = Federation(tmp_path, "fedproto", finetune_epochs=1)
    federation.rounds = 1
    federation.server.memory |= {"prototypes": np.eye(3, 5, dtype=np.float32), "counts": np.array([4, 4, 0])}
    own = federation.initial.params + (1 if stored else 0)
    if stored:
        federation.states[0].arrays |= {"local.params": own, "local.buffers": federation.initial.buffers}
    ctx, received = federation.context(0)
    update, started = federation.method.local_update(), []
    ctx.trainer.train = lambda start, **_: started.append(start) or start  # type: ignore[func-returns-value]
    tested = update.personal(update.merge(received, federation.states[0], ctx), federation.states[0], ctx)
    update.finetune(tested, federation.states[0], ctx, 1)
    assert (started[0].params == own).all() and (tested.params != own).any()


def test_counts_and_models_that_cannot_be_are_refused() -> None:
    for counts in ([-1, 2], [3, 3]):
        upload = Upload(None, extras={"counts": np.array(counts)}, num_examples=4)  # type: ignore[arg-type]
        with rejected(WireError, "", "array counts", ">= 0", "4 samples"):
            check_counts(upload)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    with rejected(MethodError, "fedproto.predict", "needs a classifier", "bias"):
        METHOD.shared(Layout.of(module), FedProtoParams())
    assert METHOD.shared(Layout.of(module), FedProtoParams(predict="classifier")) == frozenset()
