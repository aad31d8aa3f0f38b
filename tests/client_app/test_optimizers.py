"""The optimizers on flat vectors beside torch.optim's, clipping beside torch's, and the schedule by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from client_app.flat import SGD, Adam
from fl_app.errors import ConfigurationError, UserError
from fl_app.stopping import plateau_of
from tests.conftest import config
from tests.facts import rejected


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_hundred_steps_are_torchs(name: str, clip: float, weight_decay: float) -> None:
    torch.manual_seed(0)
    start, data, target = torch.randn(30), torch.randn(100, 20, 30), torch.randn(100, 20)
    reference, flat = nn.Parameter(start.clone()), start.clone()
    if name == "sgd":
        theirs: torch.optim.Optimizer = torch.optim.SGD([reference], lr=0.01, momentum=0.9, weight_decay=weight_decay)
        ours: SGD | Adam = SGD(flat, momentum=0.9, weight_decay=weight_decay, clip_norm=clip)
    else:
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        theirs = kind([reference], lr=0.01, weight_decay=weight_decay)
        ours = Adam(flat, weight_decay=weight_decay, decoupled=name == "adamw", clip_norm=clip)
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


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_leaves_what_is_frozen(weight_decay: float, decoupled: bool) -> None:
    flat, still = torch.ones(4), torch.tensor([True, False, True, False])
    optimizer = Adam(flat, weight_decay=weight_decay, decoupled=decoupled, fixed=still, clip_norm=1.0)
    for _ in range(5):
        optimizer.step(torch.full((4,), 2.0), 0.1)
    assert flat[still].tolist() == [1, 1] and (flat[~still] < 1).all()


def test_the_schedule() -> None:
    cosine = config(schedule="cosine", num_server_rounds=4, learning_rate_decay=0.5)
    halves = [0.5**k * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [cosine.rate_factor(t) for t in range(1, 5)] == pytest.approx(halves)
    assert [config(learning_rate_decay=0.5).rate_factor(t) for t in (1, 2, 3)] == [1, 0.5, 0.25]


def test_a_step_schedule() -> None:
    step = config(schedule="step:3", num_server_rounds=8, learning_rate_decay=0.5)
    assert [step.rate_factor(t) for t in range(1, 9)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
    # a resumed run may have more rounds, unlike one with a cosine
    assert not step.spanning_keys() and [spec.name for spec, _ in config(schedule="cosine").spanning_keys()] == [
        "schedule"
    ]


@pytest.mark.parametrize(
    "schedule", ["step", "step:", "step:0", "plateau", "plateau:0", "step:-1", "step:1.5", "linear", ""]
)
def test_a_schedule_that_there_is_not(schedule: str) -> None:
    with rejected(ConfigurationError, "schedule", "must be constant", "step:K or plateau:K"):
        config(schedule=schedule, learning_rate_decay=0.5)


@pytest.mark.parametrize("schedule", ["step:3", "plateau:3"])
def test_a_schedule_of_steps_needs_its_factor(schedule: str) -> None:
    with pytest.raises(UserError, match="schedule: needs learning-rate-decay"):
        config(schedule=schedule)


def test_a_plateau_schedule_is_lowered_by_what_the_server_tells() -> None:
    plateau = config(schedule="plateau:2", learning_rate_decay=0.5, num_server_rounds=8)
    lowered = dataclasses.replace(plateau, drops=3)
    assert [each.rate_factor(t) for each in (plateau, lowered) for t in (1, 7)] == [1, 1, 0.125, 0.125]
    assert not plateau.spanning_keys()


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"report_accuracy": False}, "report-accuracy"),
        ({"dp_epsilon": 1.0}, "validation-ratio"),
    ],
)
def test_a_plateau_needs_a_loss(more: dict[str, object], rule: str) -> None:
    with pytest.raises(UserError, match=rule) as refused:
        config(schedule="plateau:2", learning_rate_decay=0.5, **more)
    assert refused.value.key == "schedule"


@pytest.mark.parametrize(
    ("losses", "drops"),
    [
        ([], 0),
        ([3, 2, 1], 0),
        ([1, 1, 1], 1),
        # a lower loss begins anew, and so does a drop; the lowest loss stays
        ([3, 4, 2, 3, 3, 2, 2, 2.5, 2.5], 3),
        ([None, 1, None, None], 1),
    ],
    ids=["none", "lower", "equal", "several", "missing"],
)
def test_drops_on_a_plateau(losses: list[float | None], drops: int) -> None:
    rule = plateau_of(config(schedule="plateau:2", learning_rate_decay=0.5))
    assert rule.drops([{"round": t, rule.record: loss} for t, loss in enumerate(losses, 1)]) == drops


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_takes_no_momentum(optimizer: str) -> None:
    with rejected(ConfigurationError, "momentum", optimizer, "own moments", "leave it 0", "got 0.9"):
        config(optimizer=optimizer, momentum=0.9)
