"""The optimizers on flat vectors beside torch.optim's, clipping beside torch's, and the schedule by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from client_app.flat import SGD, AdamW
from fl_app.errors import UserError
from tests.conftest import config


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_hundred_steps_are_torchs(name: str, clip: float, weight_decay: float) -> None:
    torch.manual_seed(0)
    start, data, target = torch.randn(30), torch.randn(100, 20, 30), torch.randn(100, 20)
    reference, flat = nn.Parameter(start.clone()), start.clone()
    if name == "sgd":
        theirs: torch.optim.Optimizer = torch.optim.SGD([reference], lr=0.01, momentum=0.9, weight_decay=weight_decay)
        ours: SGD | AdamW = SGD(flat, momentum=0.9, weight_decay=weight_decay, clip_norm=clip)
    else:
        theirs = torch.optim.AdamW([reference], lr=0.01, weight_decay=weight_decay)
        ours = AdamW(flat, weight_decay=weight_decay, clip_norm=clip)
    for x, y in zip(data, target, strict=True):
        (x @ reference - y).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_([reference], clip)
        theirs.step()
        theirs.zero_grad()
        moving = flat.clone().requires_grad_()
        ours.step(torch.autograd.grad((x @ moving - y).square().mean(), moving)[0], 0.01)
    assert (flat - reference.detach()).abs().max() < 1e-6
    assert (flat - start).abs().max() > 0.1


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_leaves_what_is_frozen(weight_decay: float) -> None:
    flat, still = torch.ones(4), torch.tensor([True, False, True, False])
    optimizer = AdamW(flat, weight_decay=weight_decay, fixed=still, clip_norm=1.0)
    for _ in range(5):
        optimizer.step(torch.full((4,), 2.0), 0.1)
    assert flat[still].tolist() == [1, 1] and (flat[~still] < 1).all()


def test_the_schedule() -> None:
    cosine = config(schedule="cosine", num_server_rounds=4, learning_rate_decay=0.5)
    halves = [0.5**k * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [cosine.rate_factor(t) for t in range(1, 5)] == pytest.approx(halves)
    assert [config(learning_rate_decay=0.5).rate_factor(t) for t in (1, 2, 3)] == [1, 0.5, 0.25]


def test_adamw_takes_no_momentum() -> None:
    with pytest.raises(UserError, match="momentum: adamw has its own moments; leave it 0, got 0.9"):
        config(optimizer="adamw", momentum=0.9)
