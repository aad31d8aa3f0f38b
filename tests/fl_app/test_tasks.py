"""The built-in tasks' losses and metrics beside torchmetrics' and by hand; the user's own; what is refused."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.functional import classification as tmc
from torchmetrics.functional import regression as tmr

from fl_app import plugins, tasks
from fl_app.errors import UserError
from fl_app.tasks import Classification, Metric, MultiLabel, Regression
from strategies import METHODS
from tests.conftest import config

OWN = """
from fl_app.tasks import Metric, Task

class Median(Task):
    metrics = (Metric("mae", higher_is_better=False, low=0),)

    def loss(self, outputs, y):
        return (outputs - y).abs().mean()

    def measure(self, outputs, y, names):
        return {"mae": float((outputs - y).abs().mean())}

class Nothing(Task):
    pass

NOT_ONE = 3
"""


def test_classification_is_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(60, 4, generator=generator), torch.randint(0, 4, (60,), generator=generator)
    found = Classification().measure(logits, y, ("accuracy", "balanced-accuracy", "macro-f1", "auc"))
    want = {
        "accuracy": tmc.multiclass_accuracy(logits, y, 4, average="micro"),
        "balanced-accuracy": tmc.multiclass_accuracy(logits, y, 4, average="macro"),
        "macro-f1": tmc.multiclass_f1_score(logits, y, 4, average="macro"),
        "auc": tmc.multiclass_auroc(logits, y, 4),
    }
    assert found == pytest.approx({name: float(value) for name, value in want.items()}, abs=1e-6)


def test_classes_a_client_has_not_do_not_count() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])  # predicted 0, 1, 1
    # recalls 1/2 and 1; F1 2/3 and 2/3
    y = torch.tensor([0, 0, 1])
    found = Classification().measure(logits, y, ("balanced-accuracy", "macro-f1"))
    assert found == pytest.approx({"balanced-accuracy": 0.75, "macro-f1": 2 / 3})
    assert math.isnan(Classification().measure(logits, torch.zeros(3, dtype=torch.long), ("auc",))["auc"])


def test_multi_label_is_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, y = torch.randn(50, 3, generator=generator), torch.randint(0, 2, (50, 3), generator=generator).float()
    found = MultiLabel().measure(logits, y, ("auc", "f1"))
    want = (tmc.multilabel_auroc(logits, y.long(), 3), tmc.multilabel_f1_score(logits, y.long(), 3))
    assert [found["auc"], found["f1"]] == pytest.approx([float(value) for value in want], abs=1e-6)
    assert math.isnan(MultiLabel().measure(logits, torch.ones(50, 3), ("auc",))["auc"])


@pytest.mark.parametrize("columns", [1, 2])
def test_regression_is_torchmetrics(columns: int) -> None:
    generator = torch.Generator().manual_seed(2)
    outputs, y = torch.randn(40, columns, generator=generator), torch.randn(40, columns, generator=generator)
    found = Regression().measure(outputs, y, ("rmse", "mae", "r2"))
    want = {
        "rmse": tmr.mean_squared_error(outputs.flatten(), y.flatten(), squared=False),
        "mae": tmr.mean_absolute_error(outputs.flatten(), y.flatten()),
        "r2": tmr.r2_score(outputs.squeeze(1), y.squeeze(1)),
    }
    assert found == pytest.approx({name: float(value) for name, value in want.items()}, abs=1e-6)
    assert math.isnan(Regression().measure(outputs[:1], y[:1], ("r2",))["r2"])
    assert Regression().total(outputs, y).item() == pytest.approx(40 * Regression().loss(outputs, y).item())


MEASURED = """
import json, sys, torch
from fl_app.tasks import Classification, MultiLabel, Regression
generator = torch.Generator().manual_seed(3)
logits, y = torch.randn(50, 3, generator=generator), torch.randint(0, 2, (50, 3), generator=generator)
found = [
    Classification().measure(logits, y[:, 0] + y[:, 1], ("balanced-accuracy", "macro-f1", "auc")),
    MultiLabel().measure(logits, y.float(), ("auc", "f1")), Regression().measure(logits, y.float(), ("mae", "r2")),
]
"""


def test_a_part_of_torchmetrics_measures_as_the_whole() -> None:
    heavy = "print(json.dumps([found, sorted({'torchvision', 'torch._dynamo', 'scipy', 'torchmetrics'} & set(sys.modules))]))"
    part = subprocess.run(
        [sys.executable, "-c", MEASURED + heavy], capture_output=True, text=True, check=True, timeout=120
    )
    whole: dict[str, Any] = {}
    # here torchmetrics was imported at the top
    exec(MEASURED, whole)
    assert json.loads(part.stdout) == [whole["found"], []]


def test_the_users_own_task(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN)
    plugins.reset(tmp_path)
    try:
        task = tasks.of(config(task="own_task:Median", partition="iid"))
        assert task.headline == Metric("mae", higher_is_better=False, low=0) and not task.cross_entropy
        with pytest.raises(UserError, match="task own_task:Nothing: needs metrics"):
            tasks.named("own_task:Nothing")
        with pytest.raises(UserError, match="task own_task:NOT_ONE: must be a class made of fl_app.tasks.Task, got 3"):
            tasks.named("own_task:NOT_ONE")
    finally:
        plugins.reset()


def test_what_is_measured() -> None:
    def names(**changes: str) -> list[str]:
        return [metric.name for metric in tasks.measured(config(partition="iid", **changes))]

    assert names() == ["accuracy"]
    assert names(metrics="all") == ["accuracy", "balanced-accuracy", "macro-f1", "auc"]
    assert names(metrics="auc") == ["accuracy", "auc"]
    assert names(task="regression") == ["rmse", "mae", "r2"]
    assert names(task="regression", metrics="r2") == ["rmse", "r2"]
    with pytest.raises(UserError, match="metrics: must be all, or some of auc, f1, got 'rmse'"):
        names(task="multi-label", metrics="rmse")
    with pytest.raises(UserError, match="task: must be one of .*, got 'regresion'; did you mean regression"):
        names(task="regresion")


def test_tasks_import_nothing_heavy() -> None:
    code = "import sys, fl_app.tasks; print(' '.join(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not {"torch", "torchmetrics"} & loaded


def test_the_page_names_the_methods_that_need_classes() -> None:
    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8").split())
    found = re.search(r"every method runs with every task, but for (.*?), which are about classes", page)
    assert found is not None
    named = [name.lower() for name in re.split(", | and ", found[1])]
    assert sorted(named) == sorted(name for name, method in METHODS.items() if method.needs_classes)
