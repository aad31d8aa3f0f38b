"""Models that give no gradients per record are refused before a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from client_app.dp import check_module
from fl_app.errors import UserError
from tests.conftest import config


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.classifier = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.lstm(x)[0][:, -1])
        return logits


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.classifier = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.attention(x, x, x)[0][:, -1])
        return logits


@pytest.mark.parametrize(
    ("build", "shape", "words"),
    [
        (Recurrent, (5, 3), "gives no gradients per record"),
        (Attentive, (5, 4), "gives no gradients per record"),
        (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), (3,), "does not keep records apart"),
    ],
)
def test_a_model_that_mixes_records_is_refused(
    build: Callable[[], nn.Module], shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(UserError, match=f"^dp-epsilon: .*{words}"):
        check_module(build(), config(), shape)


def test_a_check_leaves_the_model_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.GroupNorm(1, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    check_module(module, config(), (3,))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())
