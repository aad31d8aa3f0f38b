"""FedProto: means and distances by hand, its limit Local, two rounds by hand, and the nearest prototype as a classifier."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_app.errors import MethodError
from fl_app.layout import NO_TENSORS, Layout
from fl_app.transport.wire import Expected, Upload, WireError
from strategies.base.state import UploadBuffer
from strategies.baselines.fedproto import (
    METHOD,
    FedProtoParams,
    check_counts,
    comparable,
    mean_prototypes,
)
from strategies.engine.screening import USUAL, Screening
from tests.facts import rejected
from tests.methods.federation import Federation, close


def test_means_of_one_client_and_bad_counts() -> None:
    P = np.array([[[1.0, 2], [np.nan, np.inf]]])
    means, counts = mean_prototypes(P, [[3, 0]])
    assert means.tolist() == [[1, 2], [0, 0]] and counts.tolist() == [3, 0] and counts.dtype == np.int64
    for wrong in ([[3]], [3, 0], [[3, -1]]):
        with rejected(ValueError, "", "[N, C, k]", "[N, C]", ">= 0", "got [1, 2, 2] and"):
            mean_prototypes(P, wrong)


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
