"""Constants stored as bfloat16: a network computes with them as with the float32 tensors of the same values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fl_app import trainable_tensors
from fl_app.narrow_tensors import NarrowTensor, plain


class Tied(nn.Module):
    """Embeddings whose matrix is the last layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle = nn.Embedding(11, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.middle(self.tokens(ids)), self.tokens.weight)


class Positions(nn.Module):
    """Matrices of a layer, used in every other way than by layers."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.first, self.last = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x) * self.place + self.place.to(x.dtype)[None]) @ self.table.T[:4]
        query, key, _ = self.table.chunk(3, dim=1)
        x = torch.cat([x @ query, torch.stack([self.place] * len(x)) @ key], dim=-1).exp()
        return self.last(x.view(*x.shape[:-1], 2, -1).mean(-2))


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        again: Tensor = checkpoint(lambda y: F.linear(self.inner(y).tanh(), self.inner.weight), x, use_reentrant=False)
        return self.last(again)


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def attention() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), "0.*,2.*", floats(3, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), "0.*", floats(2, 1, 6, 6)),
    "attention": (attention, "0.*", floats(2, 3, 4)),
    "recurrent": (lambda: nn.GRU(4, 4), "bias*", floats(2, 3, 4)),
    "tied": (Tied, "middle.*", lambda: torch.randint(11, (2, 3))),
    "positions": (Positions, "first.*,last.*", floats(2, 5, 4)),
    "checkpointed": (Checkpointed, "first.*,last.*", floats(3, 4)),
}


def pair(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a network with narrow tensors, the same with float32 tensors of the same values, and an input."""
    make, train, example = NETWORKS[name]
    stored = make()
    trainable_tensors.freeze(stored, train, "bfloat16")
    wide = copy.deepcopy(stored)
    trainable_tensors.widen(wide)
    assert any(isinstance(one, NarrowTensor) for one in stored.buffers())
    assert not any(isinstance(one, NarrowTensor) for one in wide.buffers())
    return stored, wide, example()


def outcome(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return a network's output and its gradients."""
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    y.float().square().sum().backward()
    return [y.detach(), *(one.grad for one in module.parameters() if one.grad is not None)]


@pytest.mark.parametrize("name", NETWORKS)
def test_results_are_those_of_float32_tensors(name: str) -> None:
    stored, wide, x = pair(name)
    for found, expected in zip(outcome(stored, x), outcome(wide, x), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, expected)
    for network in (stored, wide):
        network.eval()
    with torch.no_grad():
        one, other = stored(x), wide(x)
    # in evaluation, PyTorch's transformer layer and recurrent layers have ways of their own for float32 tensors
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", sorted({*NETWORKS} - {"recurrent"}))
def test_results_under_autocast_are_those_of_float32_tensors(name: str) -> None:
    stored, wide, x = pair(name)
    with torch.autocast("cpu", torch.bfloat16):
        results = outcome(stored, x), outcome(wide, x)
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ("linear", "convolution", "tied"))
def test_gradients_per_record_are_those_of_float32_tensors(name: str) -> None:
    stored, wide, x = pair(name)

    def each(module: nn.Module) -> dict[str, Tensor]:
        def loss(values: dict[str, Tensor], record: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(module, values, (record[None],))
            return out.square().sum()

        values = {key: one.detach() for key, one in module.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)

    found, expected = each(stored), each(wide)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_a_backward_pass_keeps_no_float32_values() -> None:
    stored, _, x = pair("linear")
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    address = plain(stored[1].weight).data_ptr()
    with graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stored(x)
    # the middle layer's matrix is kept by its own operation, as it is stored
    assert kept and stored[1].weight.data_ptr() == address
    assert all(one.shape != (4, 4) or one.data_ptr() == stored[0].weight.data_ptr() for one in kept)


def test_a_write_changes_what_is_stored() -> None:
    stored = torch.ones(2, 2, dtype=torch.bfloat16).as_subclass(NarrowTensor)
    assert stored.dtype == torch.float32 and stored.nbytes == 8 and stored.shape == (2, 2)
    version, written = stored._version, stored
    written += written
    written[0] = 5
    written.mul_(3)
    torch.add(stored, 1, out=written)
    assert written is stored and stored._version == version + 4 and plain(stored).tolist() == [[16, 16], [7, 7]]


def test_what_is_handed_on_stays_stored() -> None:
    stored = torch.ones(2, 2, dtype=torch.bfloat16).as_subclass(NarrowTensor)
    assert copy.deepcopy({"one": stored})["one"] is stored
    for one in (stored.detach(), stored.data, stored.to("cpu"), pickle.loads(pickle.dumps(stored))):
        assert isinstance(one, NarrowTensor) and plain(one).dtype == torch.bfloat16
    for one in (stored.float(), stored.to(torch.float32), stored.clone(), stored * 1):
        assert type(one) is Tensor and one.dtype == torch.float32
    assert stored.numpy().dtype == "float32"
    assert torch.ones(1, dtype=torch.float64).to(stored).dtype == torch.float32
