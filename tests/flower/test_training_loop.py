"""What a method asks of a user's training loop, and the table of the methods that an app can run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import corolla.flower
from corolla.cli.reference import pages_with_tables
from corolla.flower import FedProx, PartialFed, epochs, objective, pFedHN
from corolla.flower.abilities import Ability, ability
from corolla.flower.training_loop import BEYOND_APP
from fl_app.errors import UserError
from strategies import METHODS
from tests.flower.apps import Arrays, Train, app_of, drift, grid_of, initial, record_of

ROOT = Path(__file__).resolve().parents[2]
LR, MU, EPOCHS = 0.1, 0.7, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return logits


def start() -> Arrays:
    torch.manual_seed(0)
    return {name: tensor.numpy() for name, tensor in Net().state_dict().items()}


def loop(
    own: Callable[[torch.Tensor, nn.Module], torch.Tensor] = objective, counted: Any = epochs
) -> tuple[Train, list[Any]]:
    """A user's loop with weight decay and momentum, and its calls: (start, end, epochs)."""
    calls: list[Any] = []

    def train(arrays: Arrays, client: int, round: int) -> Arrays:
        net = Net()
        net.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
        optimizer = torch.optim.SGD(net.parameters(), LR, weight_decay=0.1, momentum=0.5)
        torch.manual_seed(100 * client + round)
        x, y = torch.randn(8, 4), torch.randint(2, (8,))
        number = counted(EPOCHS)
        for _ in range(number):
            optimizer.zero_grad()
            own(nn.functional.cross_entropy(net(x), y), net).backward()
            optimizer.step()
        trained = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
        calls.append((arrays, trained, number))
        return trained

    return train, calls


def test_without_a_method_the_loss_is_the_user_s() -> None:
    loss = torch.ones(())
    assert objective(loss, Net()) is loss and epochs(4) == 4


def test_a_correction_is_a_term_of_the_gradient() -> None:
    """FedProx in a user's loop moves as the same loop does whose loss has the proximal term."""

    def by_hand(loss: torch.Tensor, net: nn.Module) -> torch.Tensor:
        centre = centres.setdefault(id(net), [p.detach().clone() for p in net.parameters()])
        return loss + MU / 2 * sum(((p - c) ** 2).sum() for p, c in zip(net.parameters(), centre, strict=True))

    centres: dict[int, list[torch.Tensor]] = {}
    found = FedProx(mu=MU).start(grid_of(app_of(loop()[0])), record_of(start()), 2)
    expected = corolla.flower.FedAvg().start(grid_of(app_of(loop(by_hand)[0])), record_of(start()), 2)
    for name in start():
        np.testing.assert_allclose(found.arrays[name].numpy(), expected.arrays[name].numpy(), rtol=1e-5, atol=1e-7)


def test_the_shown_loss_stays() -> None:
    shown: list[float] = []

    def noting(loss: torch.Tensor, net: nn.Module) -> torch.Tensor:
        changed = objective(loss, net)
        shown.append(float((changed - loss).detach()))
        return changed

    FedProx(mu=MU).start(grid_of(app_of(loop(noting)[0])), record_of(start()), 1)
    assert set(shown) == {0.0}


def test_a_frozen_head_does_not_move() -> None:
    train, calls = loop()
    corolla.flower.FedBABU().start(grid_of(app_of(train)), record_of(start()), 2)
    for before, after, _ in calls:
        assert (before["head.weight"] == after["head.weight"]).all() and (
            before["head.bias"] == after["head.bias"]
        ).all()
        assert (before["body.weight"] != after["body.weight"]).any()


def test_fedrep_trains_head_and_body_in_turn_for_its_own_epochs() -> None:
    train, calls = loop()
    corolla.flower.FedRep(head_epochs=4, body_epochs=2).start(grid_of(app_of(train)), record_of(start()), 2)
    assert [number for _, _, number in calls] == [4, 2] * 8
    for k, (before, after, _) in enumerate(calls):
        moved = {name.partition(".")[0] for name in before if (before[name] != after[name]).any()}
        assert moved == ({"head"} if k % 2 == 0 else {"body"})


def test_ditto_keeps_a_second_model() -> None:
    train, calls = loop()
    app = app_of(train)
    strategy = corolla.flower.Ditto()
    strategy.start(grid_of(app), record_of(start()), 2)
    assert len(calls) == 16
    assert not np.array_equal(app.seen[0]["body.weight"], app.seen[1]["body.weight"])


@pytest.mark.parametrize(
    ("cls", "lacks"),
    [("FedProx", "objective"), ("FedBABU", "objective"), ("FedRep", "epochs"), ("FedAMP", "objective")],
)
def test_a_missing_line_is_named(cls: str, lacks: str) -> None:
    plain = {"objective": lambda loss, net: loss, "epochs": lambda number: number}
    train, _ = loop(own=plain["objective"]) if lacks == "objective" else loop(counted=plain["epochs"])
    with pytest.raises(UserError, match=rf"corolla.flower.{lacks}\("):
        getattr(corolla.flower, cls)().start(grid_of(app_of(train)), record_of(start()), 2)


@pytest.mark.parametrize("cls", ["pFedMe", "MOON"])
def test_a_method_that_needs_more_ends_the_run(cls: str) -> None:
    with pytest.raises(UserError, match="corolla run"):
        getattr(corolla.flower, cls)().start(grid_of(app_of()), record_of(start()), 3)


@pytest.mark.parametrize("cls", ["FedEM", "FedConcat", "HeteroFL", "FAVOR", "APPLE"])
def test_a_method_that_declares_more_is_refused_at_once(cls: str) -> None:
    with pytest.raises(UserError) as error:
        getattr(corolla.flower, cls)()
    assert error.value.rule == BEYOND_APP


def test_fixed_layers_of_partialfed_need_no_line() -> None:
    """Every client keeps its head, and has the mean of the bodies."""
    trained = dict[int, Arrays]()

    def train(arrays: Arrays, client: int, round: int) -> Arrays:
        trained[client] = drift(arrays, client, round)
        return trained[client]

    app = app_of(train, samples=lambda client: 10)
    PartialFed(strategy="fix", load="body*, bn*").start(grid_of(app, 2), record_of(initial()), 2)
    for client in (0, 1):
        assert (app.seen[client]["head.weight"] == trained[client]["head.weight"].astype(np.float32)).all()
        mean = (trained[0]["body.weight"] + trained[1]["body.weight"]) / 2
        np.testing.assert_allclose(app.seen[client]["body.weight"], mean, rtol=1e-6)
    assert ability("partialfed").beyond


def test_a_method_made_for_its_nodes_refuses_later_ones() -> None:
    app, strategy = app_of(), pFedHN()
    strategy.start(grid_of(app, 2), record_of(initial()), 1)
    with pytest.raises(UserError) as error:
        strategy.start(grid_of(app, 4), record_of(initial()), 1)
    assert error.value.key == "nodes"


def test_abilities_are_found_by_trying() -> None:
    any_loop = [
        "fedavg",
        "local",
        "fedcac",
        "feddac",
        "fedpake",
        "fedobp",
        "fedper",
        "fedbn",
        "lg-fedavg",
        "cfl",
        "pfedsim",
        "feddwa",
    ]
    assert {ability(method) for method in any_loop} == {Ability()}
    assert ability("fedrep").lines == {"objective", "epochs"}
    assert [method for method in METHODS if ability(method).judges] == ["fedfomo", "ifca"]
    assert sum(not ability(method).beyond for method in METHODS) >= 22


def test_the_page_has_the_table() -> None:
    path = ROOT / "docs" / "flower-app.md"
    assert pages_with_tables(ROOT)[path] == path.read_text(encoding="utf-8")
