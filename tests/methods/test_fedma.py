"""FedMA: matches and orders by hand, networks that compute the same, a pass by hand, and models that are no chain."""

from __future__ import annotations

import logging
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fl_app import models, weights
from fl_app.errors import UserError
from fl_app.layout import Layout, Model
from strategies.baselines.fedma import METHOD, chain_of, class_means, match, permuted, units_of, weighs_classes
from tests.conftest import Run, config
from tests.facts import mentions, rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import small


def test_matches_by_hand() -> None:
    # The second client has the first one's units in another order, the third nearly so.
    first = np.array([[1.0, 0], [0, 1], [-1, -1]])
    second, third = first[[2, 0, 1]], first[[1, 2, 0]] + 0.1
    found = match([first, second, third])
    for j, own in enumerate((first, second, third)):
        close(own[found[j]] - 0.1 * (j == 2), first[found[0]])
    assert found[1].tolist() == [1, 2, 0]
    with rejected(ValueError, "", "weights", "arrays"):
        match([first, first[:2]])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_no_permutation_alone_fits_better(n: int, units: int, seed: int) -> None:
    W = np.random.default_rng(seed).normal(size=(n, units, 2))
    found = match(list(W))
    assert all(sorted(order) == list(range(units)) for order in found.tolist())

    def fit(orders: Any) -> float:
        return float((sum(w[list(order)] for w, order in zip(W, orders, strict=True)) ** 2).sum())

    for j in range(n):
        for other in permutations(range(units)):
            assert fit([*found[:j], other, *found[j + 1 :]]) <= fit(found) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_noisy_copies_in_other_orders_are_matched(seed: int) -> None:
    # Two clients: one assignment is the optimum. Four copies with little noise: each finds its own way back.
    random = np.random.default_rng(seed)
    W = random.normal(size=(2, 7, 5))
    first, second = match(list(W))
    rows, best = linear_sum_assignment(-W[0] @ W[1].T)
    assert (second[np.argsort(first)][rows] == best).all()
    orders = [random.permutation(7) for _ in range(4)]
    copies = [W[0][order] + random.normal(0, 0.01, (7, 5)) for order in orders]
    found = match(copies)
    assert len({tuple(order[own]) for order, own in zip(orders, found, strict=True)}) == 1
    assert sorted(match([W[0]])[0].tolist()) == list(range(7)) and match(np.zeros((3, 1, 2))).tolist() == [[0]] * 3


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_network_in_another_order_computes_the_same(model: str) -> None:
    module = models.build(model, in_channels=1, num_classes=10, image_size=8).eval()
    layout, own = Layout.of(module), weights.read(module)
    chain, draw = chain_of(layout), np.random.default_rng(0)
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before, other = module(x), own
    orders = [draw.permutation(layer.units) for layer in chain[:-1]]
    for k, order in enumerate(orders):
        other = permuted(chain, k, other, order)
    weights.write(module, other)
    close(module(x).detach().numpy(), before.detach().numpy(), atol=1e-5)
    assert (other.params != own.params).any()
    # and matching finds the way back, layer by layer
    for k in range(len(orders)):
        (a, b) = match([units_of(chain, k, own.params), units_of(chain, k, other.params)])
        other = permuted(chain, k, other, b[np.argsort(a)])
    assert other.params.tobytes() == own.params.tobytes()


def norm() -> Any:
    return small(batchnorm=True)


def test_class_means_by_hand() -> None:
    # Class 0: (3 * 1 + 1 * 5) / 4 and (3 * 2 + 1 * 6) / 4. The second client alone has class 1, and nobody class 2.
    rows = np.array([[[1.0, 2], [7, 7], [1, 1]], [[5, 6], [3, 4], [2, 4]]])
    assert class_means(rows, [[3, 0, 0], [1, 2, 0]]).tolist() == [[2, 3], [3, 4], [1.5, 2.5]]
    assert weighs_classes(config(method="fedma")) and not weighs_classes(config(method="fedma", task="regression"))
    assert not weighs_classes(config(method="fedma", fedma={"mean": "samples"}))


@pytest.mark.parametrize("mean", ["classes", "samples"])
def test_a_pass_by_hand(tmp_path: Path, mean: str) -> None:
    fed: Any = Federation(tmp_path, "fedma", network=norm, fedma={"mean": mean})
    server, sizes = fed.server, np.array([10, 6, 8])
    chain, counts = server.chain, np.stack([np.bincount(y, minlength=3) for _, y in fed.data])
    assert [layer.weight.name for layer in chain] == ["features.weight", "classifier.weight"]
    lower = server.layout.indices(chain[0].names)

    def expected(W: Any, ids: list[int]) -> Any:
        if mean == "samples":
            return np.average(W, axis=0, weights=sizes[ids])
        result = np.mean(W, axis=0)
        for slot in (chain[1].weight, *chain[1].others):
            rows = np.asarray(W)[:, slot.start : slot.stop].reshape(len(W), 3, -1)
            each = [np.average(rows[:, c], axis=0, weights=counts[ids, c]) for c in range(3)]
            result[slot.start : slot.stop] = np.concatenate(each)
        return result

    uploads = fed.round()
    if mean == "classes":
        assert (uploads.extras["counts"] == counts).all() and (counts.sum(axis=0) > 0).all()
    sent = [Model(w, b) for w, b in zip(uploads.W, uploads.B, strict=True)]
    orders = match([units_of(chain, 0, m.params) for m in sent])
    sent = [permuted(chain, 0, m, order) for m, order in zip(sent, orders, strict=True)]
    average = expected([m.params for m in sent], [0, 1, 2])
    for i, model in enumerate(sent):
        close(server.model_for(i).params[lower], average[lower])
        assert (server.model_for(i).params[~lower] == model.params[~lower]).all()
    close(server.global_model.params, average)
    weights = None if mean == "classes" else sizes
    close(server.global_model.buffers, np.average([m.buffers for m in sent], axis=0, weights=weights))
    assert server.exported() is None
    # in the classifier's round the body stays
    body = server.model_for(0).params[lower].copy()
    uploads = fed.round(ids=[0, 1])
    assert all((w[lower] == body).all() for w in uploads.W)
    close(server.global_model.params, expected(uploads.W, [0, 1]))
    assert not server.personal and server.exported() is not None
    fed.round()
    assert (server.model_for(0).params[lower] != body).any() and server.exported() is None


def test_a_pass_keeps_its_clients(tmp_path: Path) -> None:
    """Two layers: rounds 1 and 2 draw as round 1 does, 3 and 4 as round 2 does. In one shot each round has its own draw."""
    clients, keys = list(range(8)), {"sizes": (4,) * 8, "fraction_train": 0.5, "network": norm}
    passes: Any = Federation(tmp_path, "fedma", **keys)
    rounds: Any = Federation(tmp_path, "fedma", **keys, fedma={"one_shot": True})
    drawn = [rounds.server.sample(clients, round) for round in (1, 2, 3, 4)]
    assert drawn == [rounds.server.drawn(clients, round) for round in (1, 2, 3, 4)] and drawn[0] != drawn[1]
    assert [passes.server.sample(clients, round) for round in (1, 2, 3, 4)] == [drawn[k] for k in (0, 0, 1, 1)]


def test_a_run_that_ends_within_a_pass_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rounds, own, warned in ((3, {}, True), (4, {}, False), (3, {"one_shot": True}, False)):
        caplog.clear()
        fed: Any = Federation(tmp_path, "fedma", network=norm, num_server_rounds=rounds, fedma=own)
        with caplog.at_level(logging.WARNING, "corolla"):
            fed.server.summary()
        assert (mentions(caplog.text, "multiple of 2", "got 3")) == warned
        assert (fed.server.exported() is not None) == bool(own)


def test_one_client_in_one_shot_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    some: Any = Federation(tmp_path, "fedma", sizes=(10,), fedma={"one_shot": True}, momentum=0.5)
    plain: Any = Federation(tmp_path, "fedavg", sizes=(10,), momentum=0.5)
    for _ in range(2):
        some.round()
        plain.round()
        assert some.models.tobytes() == plain.models.tobytes()


def test_models_that_are_no_chain_are_refused(run: Run) -> None:
    with rejected(UserError, "model", "a chain", "layers"):
        run(method="fedma", model="resnet8")
    single = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    with rejected(UserError, "model", "last layer", "classifier"):
        chain_of(Layout.of(single))
    assert METHOD.compose is not None
