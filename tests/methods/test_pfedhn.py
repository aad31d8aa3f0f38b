"""pFedHN: a hypernetwork by hand, its slopes from torch, two rounds by hand, and what the variant keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies.baselines.pfedhn import PFedHNParams, generate, initial_network, slopes
from tests.methods.federation import Federation, close


def test_by_hand() -> None:
    # Hidden 2 * 3 - 1 = 5 and -3. Without a ReLU theta = (5 - 21 + 1, 10 - 21 - 1), with one (5 + 1, 10 - 1).
    network = {
        "w0": np.array([[2], [-1]], np.float32),
        "b0": np.array([-1, 0], np.float32),
        "w": np.array([[1, 7], [2, 7]], np.float32),
        "b": np.array([1, -1], np.float32),
    }
    v = np.array([3], np.float32)
    assert generate(network, v).tolist() == [-15, -12] and generate(network, v, relu_last=True).tolist() == [6, 9]
    network["w"][1, 1] = 4
    found, toward = slopes(network, v, np.array([1, -1], np.float32))
    # The units' slopes are 1 - 2 = -1 and 7 - 4 = 3; to the embedding 2 * -1 - 1 * 3.
    assert found["b0"].tolist() == [-1, 3] and found["w0"].tolist() == [[-3], [9]] and toward.tolist() == [-5]
    assert found["b"].tolist() == [1, -1] and found["last"].tolist() == [5, -3]
    found, toward = slopes(network, v, np.array([1, -1], np.float32), relu_last=True)
    # Back through the first unit alone: 1 - 2 = -1, times 2 to the embedding.
    assert found["b0"].tolist() == [-1, 0] and found["w0"].tolist() == [[-3], [0]] and toward.tolist() == [-2]
    assert found["b"].tolist() == [1, -1] and found["last"].tolist() == [5, 0]


@given(st.integers(1, 3), st.integers(0, 2), st.integers(1, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_slopes_are_those_of_torch(width: int, layers: int, d: int, relu_last: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    params = PFedHNParams(hidden=4, layers=layers)
    network = initial_network(width, params, random.normal(size=d).astype(np.float32), random)
    v, delta = random.normal(size=width).astype(np.float32), random.normal(size=d).astype(np.float32)
    tensors = {name: torch.tensor(layer, requires_grad=True) for name, layer in {**network, "v": v}.items()}
    h = tensors["v"]
    for k in range(layers + 1):
        h = tensors[f"w{k}"] @ h + tensors[f"b{k}"]
        h = torch.relu(h) if relu_last or k < layers else h
    theta = tensors["w"] @ h + tensors["b"]
    close(generate(network, v, relu_last=relu_last), theta.detach().numpy(), atol=1e-5)
    (theta @ torch.tensor(delta)).backward()  # type: ignore[no-untyped-call]
    found, toward = slopes(network, v, delta, relu_last=relu_last)
    found["w"] = np.outer(found["b"], found.pop("last"))
    for name, slope in {**found, "v": toward}.items():
        grad = tensors[name].grad
        assert grad is not None
        close(slope, grad.numpy(), atol=1e-5)


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    """A value x has a speed s: s <- s / 2 + slope + 0.1 x and x <- x - s / 2. Only the uploading client's embedding moves."""
    own = {"hidden": 3, "layers": 0, "momentum": 0.5, "weight_decay": 0.1, "embedding": 2, "learning_rate": 0.5}
    fed: Any = Federation(tmp_path, "pfedhn", pfedhn=own)
    server = fed.server
    network = {name: layer.copy() for name, layer in server.network.items()}
    embeddings = server.memory["embeddings"].copy()
    close(network["b"], fed.initial.params)
    momentum, speeds = {name: np.zeros_like(layer) for name, layer in network.items()}, np.zeros_like(embeddings)
    for ids in ([0, 2], [1, 2]):
        before = embeddings.copy()
        W = fed.round(ids=ids).W
        for row, i in enumerate(ids):
            found, toward = slopes(network, embeddings[i], generate(network, embeddings[i]) - W[row])
            found["w"] = np.outer(found["b"], found.pop("last"))
            speeds[i] = 0.5 * speeds[i] + toward + 0.1 * embeddings[i]
            embeddings[i] -= 0.5 * speeds[i]
            for name in network:
                momentum[name] = 0.5 * momentum[name] + found[name] + 0.1 * network[name]
                network[name] = network[name] - 0.5 * momentum[name]
        for name, layer in network.items():
            close(server.network[name], layer, atol=1e-4)
        close(server.memory["embeddings"], embeddings, atol=1e-4)
        close(server.memory["momentum.embeddings"], speeds, atol=1e-4)
        others = [i for i in range(3) if i not in ids]
        assert (server.memory["embeddings"][others] == before[others]).all()
    close(server.model_for(1).params, generate(server.network, embeddings[1]), atol=1e-4)
    assert not any(state.arrays for state in fed.states)


def test_the_variant_keeps_the_classifier(tmp_path: Path) -> None:
    fed: Any = Federation(tmp_path, "pfedhn", pfedhn={"local_head": True, "hidden": 3})
    uploads = fed.round()
    assert uploads.W.shape == (3, fed.layout.d - 18) and fed.server.exported(0) is None
    assert all(set(state.arrays) == {"local.params", "local.buffers"} for state in fed.states)
