"""The built-in tasks' losses and metrics beside torchmetrics' and by hand; the user's own; what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.functional import classification as tmc
from torchmetrics.functional import regression as tmr

from fl_app import plugins, tasks
from fl_app.errors import ConfigurationError
from fl_app.server.run_folder import read_metrics, read_summary
from fl_app.tasks import Classification, Metric, MultiLabel, Regression, scoring
from strategies import METHODS
from tests.conftest import Run, config
from tests.facts import rejected

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


@pytest.mark.parametrize("classes", [2, 10, 11, 14, 19, 20, 22, 26, 100])
def test_a_perfect_model_has_one_exactly(classes: int) -> None:
    y = torch.arange(3 * classes) % classes
    logits = torch.eye(classes)[y]
    names = ("accuracy", "balanced-accuracy", "macro-f1", "auc")
    assert Classification().measure(logits, y, names) == dict.fromkeys(names, 1.0)
    assert MultiLabel().measure(logits - 0.5, torch.eye(classes)[y], ("auc", "f1")) == {"auc": 1.0, "f1": 1.0}


def test_r2_is_centred_and_not_defined_for_a_constant_target() -> None:
    y = torch.tensor([[288.1, 1.0], [288.1, 2.0], [288.1, 3.0]])
    # of the second target: 1 - (1 + 0 + 0) / 2
    outputs = y + torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    assert math.isnan(Regression().measure(outputs[:, :1], y[:, :1], ("r2",))["r2"])
    assert Regression().measure(outputs, y, ("r2",))["r2"] == 0.5
    # errors of 1/64 against a spread of 1/32, far from 0: float32 squares would lose it
    far = torch.tensor([[2.0**20], [2.0**20 + 0.25]])
    found = Regression().measure(far + 0.125, far, ("r2", "rmse", "mae"))
    assert found == {"r2": 0.0, "rmse": 0.125, "mae": 0.125}


def test_labels_that_are_neither_true_nor_predicted_are_left_out() -> None:
    y = torch.zeros(6, 5)
    y[::2, 0] = y[1::2, 3] = 1
    perfect = 4 * y - 2
    assert MultiLabel().measure(perfect, y, ("auc", "f1")) == {"auc": 1.0, "f1": 1.0}
    # a label that is predicted and never true has F1 = 0
    perfect[0, 1] = 3
    assert MultiLabel().measure(perfect, y, ("f1",))["f1"] == pytest.approx(2 / 3)
    assert math.isnan(MultiLabel().measure(-torch.ones(4, 5), torch.zeros(4, 5), ("f1",))["f1"])


def test_auc_ranks_logits_where_probabilities_are_all_one() -> None:
    y = torch.tensor([0, 0, 1, 1])
    # the margins of class 1 are 20, 30, 40, 50: float32 probabilities are all 1
    logits = torch.tensor([[0.0, 20.0], [0.0, 30.0], [0.0, 40.0], [0.0, 50.0]])
    assert Classification().measure(logits, y, ("auc",))["auc"] == 1.0
    assert MultiLabel().measure(logits[:, 1:], y[:, None].float(), ("auc",))["auc"] == 1.0
    # of three classes a sample's rank is by its probability, not by one logit: 5 - 5 < 1 - 0
    third = torch.tensor([[5.0, 5.0, 0.0], [1.0, 0.0, -9.0]])
    odds = scoring.log_odds(third.double().numpy())
    assert odds[0, 0] < odds[1, 0]
    assert odds == pytest.approx(third.double().softmax(1).logit().numpy())


def test_equal_scores_count_half() -> None:
    truth = np.array([[True], [True], [False], [False]])
    # of four pairs: two right, one equal, one wrong
    assert scoring.aucs(truth, np.array([[2.0], [1.0], [1.0], [1.5]])) == [(2 + 0.5) / 4]
    assert np.isnan(scoring.aucs(truth, np.array([[math.nan], [1.0], [1.0], [0.0]]))).all()


FAILING = """
import numpy as np
from fl_app.tasks import Metric, Regression

NAMES = ("over", "wrong", "raises", "missing", "text", "fine")

class Failing(Regression):
    metrics = (*Regression.metrics[:1], *(Metric(name, ratio=True) for name in NAMES))

    def measure(self, outputs, y, names):
        found = dict(super().measure(outputs, y, ("rmse",)))
        values = {"over": np.float32(1.0000002), "wrong": 1.5, "text": "much", "fine": 0.25}
        if "raises" in names:
            raise ZeroDivisionError("division by zero")
        return {name: {**found, **values}[name] for name in names if name in {**found, **values}}
"""

WHY = {
    "wrong": "metric wrong must be a number in [0, 1], got 1.5",
    "raises": "ZeroDivisionError: division by zero",
    "missing": "measure did not return it",
    "text": "ValueError: could not convert string to float: 'much'",
}


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[str]:
    """A task of the user's own, four of whose metrics cannot be had."""
    (tmp_path / "failing.py").write_text(FAILING)
    plugins.reset(tmp_path)
    yield "failing:Failing"
    plugins.reset()


def test_a_metric_that_fails_costs_no_other(failing: str) -> None:
    task = tasks.named(failing)
    names = [metric.name for metric in task.metrics]
    values, why = tasks.measure(task, torch.ones(2, 1), torch.zeros(2, 1), names)
    assert {name: value for name, value in values.items() if not math.isnan(value)} == {
        "rmse": 1,
        "over": 1,
        "fine": 0.25,
    }
    assert why == WHY


def test_a_run_goes_on_without_the_metrics_that_fail(run: Run, failing: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=x.sum(1), x_test=x, y_test=x.sum(1))
    keys = {"dataset": f"npz:{tmp_path / 'd.npz'}", "partition": "iid", "train_samples": 0, "test_samples": 0}
    folder = run(task=failing, metrics="all", **keys)
    summary = read_summary(folder.path)
    assert summary["final-rmse"] > 0 and summary["digest"] and summary["failures"] == 0
    assert (summary["final-over"], summary["final-fine"], summary["final-wrong"]) == (1, 0.25, None)
    row = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]["0"]
    assert row["metric-errors"] == "; ".join(f"{name}: {cause}" for name, cause in WHY.items())


def test_rounding_is_clipped_and_no_more() -> None:
    ratio = Metric("r", ratio=True)
    assert [ratio.clipped(value) for value in (1.0000001192, -1e-9, 0.5, 1.5, -0.1)] == [1, 0, 0.5, 1.5, -0.1]
    assert math.isnan(ratio.clipped(math.nan)) and Metric("m", low=0).clipped(math.inf) == math.inf
    assert Metric("n").clipped(-3.0) == -3.0


def test_the_users_own_task(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN)
    plugins.reset(tmp_path)
    try:
        task = tasks.of(config(task="own_task:Median", partition="iid"))
        assert task.headline == Metric("mae", higher_is_better=False, low=0) and not task.cross_entropy
        with rejected(ConfigurationError, "task own_task:Nothing", "needs metrics"):
            tasks.named("own_task:Nothing")
        with rejected(ConfigurationError, "task own_task:NOT_ONE", "class made", "fl_app.tasks.Task", value=3):
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
    with rejected(ConfigurationError, "metrics", "must be all", "some of auc", "f1", value="rmse"):
        names(task="multi-label", metrics="rmse")
    with rejected(ConfigurationError, "task", "must be one", "got 'regresion'", "did you mean"):
        names(task="regresion")


def test_the_page_names_the_methods_that_need_classes() -> None:
    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8").split())
    found = re.search(r"these exceptions: - (.*?) need classes, and refuse other tasks by name", page)
    assert found is not None
    named = [name.lower() for name in re.split(", | and ", found[1])]
    assert sorted(named) == sorted(name for name, method in METHODS.items() if method.needs_classes)
