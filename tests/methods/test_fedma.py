"""FedMA: matches and orders by hand, networks that compute the same, a pass by hand, and models that are no chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_app import models, weights
from fl_app.errors import UserError
from fl_app.layout import Layout
from strategies.baselines.fedma import METHOD, chain_of, match, permuted, units_of
from tests.conftest import Run
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import small


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


def test_a_pass_keeps_its_clients(tmp_path: Path) -> None:
    """Two layers: rounds 1 and 2 draw as round 1 does, 3 and 4 as round 2 does. In one shot each round has its own draw."""
    clients, keys = list(range(8)), {"sizes": (4,) * 8, "fraction_train": 0.5, "network": norm}
    passes: Any = Federation(tmp_path, "fedma", **keys)
    rounds: Any = Federation(tmp_path, "fedma", **keys, fedma={"one_shot": True})
    drawn = [rounds.server.sample(clients, round) for round in (1, 2, 3, 4)]
    assert drawn == [rounds.server.drawn(clients, round) for round in (1, 2, 3, 4)] and drawn[0] != drawn[1]
    assert [passes.server.sample(clients, round) for round in (1, 2, 3, 4)] == [drawn[k] for k in (0, 0, 1, 1)]


def test_models_that_are_no_chain_are_refused(run: Run) -> None:
    with rejected(UserError, "model", "a chain", "layers"):
        run(method="fedma", model="resnet8")
    single = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    with rejected(UserError, "model", "last layer", "classifier"):
        chain_of(Layout.of(single))
    assert METHOD.compose is not None
