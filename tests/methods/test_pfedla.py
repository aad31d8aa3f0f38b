"""pFedLA: weights and slopes by hand and from torch, and two rounds by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies.baselines.pfedla import layer_weights, unit_slopes
from tests.methods.federation import Federation, close


def test_weights_by_hand() -> None:
    units = np.array([[1, 3, -5], [-1, -1, -1], [2, 0, 2]], np.float32)
    alpha, kept = layer_weights(units, 2)
    # the second layer has no positive unit: it is the client's own
    assert alpha.tolist() == [[0.25, 0.75, 0], [0, 0, 1], [0.5, 0, 0.5]] and kept.tolist() == [False, True, False]
    alpha, kept = layer_weights(units, 0, keep=1)
    assert alpha[2].tolist() == [1, 0, 0] and kept.tolist() == [False, True, True]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_slopes_are_those_of_torch(layers: int, n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    units, toward = random.normal(size=(layers, n)).astype(np.float32), random.normal(size=(layers, n))
    units[:, 0] = np.abs(units[:, 0]) + 0.1
    u = torch.tensor(units, dtype=torch.float64, requires_grad=True)
    alpha = torch.relu(u) / torch.relu(u).sum(1, keepdim=True)
    (alpha * torch.tensor(toward)).sum().backward()  # type: ignore[no-untyped-call]
    assert u.grad is not None
    close(unit_slopes(units, toward, np.zeros(layers, bool)), u.grad.numpy(), atol=1e-3)
    assert not unit_slopes(units, toward, np.ones(layers, bool)).any()


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    own = {"hidden": 4, "embedding": 3, "learning_rate": 0.5}
    fed: Any = Federation(tmp_path, "pfedla", pfedla=own)
    server = fed.server
    # all start with the initial model, whatever the weights
    for i in range(3):
        close(server.model_for(i).params, fed.initial.params)
    W = fed.round(ids=[0, 1]).W
    models = np.stack([W[0], W[1], fed.initial.params]).astype(np.float64)
    networks = {i: dict(server.network_of(i)) for i in range(3)}
    received = {}
    for i in range(3):
        alpha, _ = layer_weights(server.units(networks[i]), i)
        rows = np.repeat(alpha, server.layout.sizes, axis=0)
        received[i] = (rows.T * models).sum(0)
        close(server.model_for(i).params, received[i])
    # the second round's step, from torch
    after = fed.round(ids=[0]).W[0]
    tensors = {name: torch.tensor(layer, requires_grad=True) for name, layer in networks[0].items()}
    h = tensors["v"]
    for k in range(3):
        h = torch.relu(tensors[f"w{k}"] @ h + tensors[f"b{k}"])
    units = torch.relu(tensors["w"] @ h + tensors["b"]).view(len(server.layout.params), 3)
    weights = torch.repeat_interleave(units / units.sum(1, keepdim=True), torch.tensor(server.layout.sizes), dim=0)
    mixed = (weights.T * torch.tensor(models.astype(np.float32))).sum(0)
    (mixed @ torch.tensor((received[0] - after).astype(np.float32))).backward()  # type: ignore[no-untyped-call]
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        close(server.network_of(0)[name], networks[0][name] - 0.5 * tensor.grad.numpy(), atol=1e-4)
    assert server.personal[0]["params"].tobytes() == after.tobytes()


def test_with_all_layers_its_own_a_client_is_local_bit_for_bit(tmp_path: Path) -> None:
    own = {"hidden": 4, "embedding": 3, "keep_layers": 9}
    fed: Any = Federation(tmp_path, "pfedla", momentum=0.5, pfedla=own)
    plain: Any = Federation(tmp_path, "local", momentum=0.5)
    for ids in (None, [0, 2], None):
        fed.round(ids=ids)
        plain.round(ids=ids)
        assert fed.models.tobytes() == plain.models.tobytes()
