"""Every method on the adapters of a frozen network: which run, which refuse, and that none of them copies what is frozen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_app.errors import MethodError
from fl_app.server.run_folder import read_summary
from strategies import METHODS
from strategies.base import drop_network
from tests.conftest import Run
from tests.test_all_methods import start

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tasks.md"
HEADING = "### Methods that refuse `train` or `share`"
SETTINGS: dict[str, str] = {"model": "tests.methods.test_on_adapters:adapted", "train": "*lora*,5.*"}
# the frozen tensors that passes used; as they are alive, no two have one place in memory
USED: dict[int, Tensor] = {}


class Adapted(nn.Module):
    """A linear layer that is frozen, and what trains beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.randn(2, inputs) / 8)
        self.lora_b = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        # with the key train it is a parameter no more
        if not isinstance(self.base.weight, nn.Parameter):
            USED[self.base.weight.data_ptr()] = self.base.weight
        answer: Tensor = self.base(x) + x @ self.lora_a.T @ self.lora_b.T
        return answer


def adapted(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return two layers with adapters, and a classifier."""
    body = Adapted(in_channels * image_size**2, 16), nn.ReLU(), Adapted(16, 8), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(8, num_classes))


def refusing() -> set[str]:
    """Return the methods that refuse, as the page has them."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n{HEADING}\n")
    points = rest.partition("\n## ")[0].split("\n- ")
    named = " ".join(point for point in points if point.startswith("**`train`"))
    return {name for name in METHODS if re.search(rf"\b{name}\b", named, re.IGNORECASE)}


def test_heterofl_runs_where_it_narrows_no_layer(run: Run) -> None:
    folder = run(method="heterofl", heterofl={"rates": "1"}, **SETTINGS)
    assert read_summary(folder.path)["failures"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_on_adapters_or_refuses_by_name(tmp_path: Path, method: str) -> None:
    USED.clear()
    drop_network()
    try:
        folder, _ = start(tmp_path, "one", method=method, **SETTINGS)
    except MethodError as error:
        assert (error.key, method in refusing(), method in error.rule) == ("train", True, True), error
        return
    finally:
        frozen = len(USED)
        USED.clear()
    assert method not in refusing()
    assert read_summary(folder.path)["failures"] == 0
    # one network with two frozen layers
    assert frozen == 2, frozen
