"""A run whose evaluation nobody answered, or that has no final figure, ends with an error, after everything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.client_app import app
from fl_app.errors import UserError
from fl_app.metrics import Metric
from fl_app.server.record import evaluation_record
from fl_app.server.run_folder import read_metrics, read_summary
from tests.conftest import SMALL, Command, Run
from tests.experiments.months import SETTING, wine
from tests.facts import mentions, rejected


def failing_at(*rounds: int) -> ClientApp:
    """Return an app whose clients all fail when they are evaluated after these rounds, counted from 1."""
    evaluated: dict[int, int] = {}

    def handle(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "evaluate":
            client = int(context.node_config["partition-id"])
            evaluated[client] = evaluated.get(client, 0) + 1
            if evaluated[client] in rounds:
                raise RuntimeError("out of memory")
        return app(message, context)

    return handle  # type: ignore[return-value]


def data(directory: Path, y_test: Any) -> dict[str, Any]:
    """Write 60 rows for training and some for test; return a run's settings for them."""
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    labels = (x[:, :1] > 0).astype(int)
    np.savez(directory / "d.npz", x_train=x, y_train=labels, x_test=x[: len(y_test)], y_test=np.array(y_test))
    keys = {"dataset": f"npz:{directory / 'd.npz'}", "partition": "iid", "train_samples": 0, "test_samples": 0}
    return {**keys, "task": "multi-label"}


def test_a_final_evaluation_without_an_answer(run: Run, tmp_path: Path) -> None:
    with rejected(UserError, "", "evaluation after round 2", "no client answered", "client 0", "out of memory"):
        run(app=failing_at(1))
    assert read_summary(tmp_path / "runs" / "run")["final-accuracy"] is None


def test_clients_without_an_answer_are_named(run: Run, tmp_path: Path, command: Command) -> None:
    """By the run, and by whoever resumes it later."""
    keys = {**SETTING, "dataset": f"table:{wine(tmp_path / 'wine.csv')}"}
    with rejected(UserError, "", "client 0 (celle)", "client 2 (verden)") as first:
        run(app=failing_at(1), **keys)
    code, _, err = command("run", "--resume", tmp_path / "runs" / "run")
    assert code == 2 and str(first.value).partition("\n")[0] in " ".join(err.split())


def test_an_earlier_evaluation_without_an_answer(run: Run, tmp_path: Path) -> None:
    with rejected(UserError, "", "evaluation after round 1", "no client answered", "rest"):
        run(app=failing_at(1), evaluate_every=1)
    assert read_summary(tmp_path / "runs" / "run")["final-accuracy"] > 0


def test_a_figure_that_no_client_has(run: Run, tmp_path: Path) -> None:
    one_class = data(tmp_path, [[1]] * 9)
    with rejected(UserError, "", "final-auc", "no client that", "trains", "not defined", "test samples"):
        run(**one_class)
    summary = read_summary(tmp_path / "runs" / "run")
    assert summary["digest"] and summary["final-f1"] is not None
    assert run(**one_class, report_accuracy=False, run_name="quiet").path.is_dir()


def test_a_metric_that_some_client_has_not_is_named(run: Run, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "p.npz",
        **{f"train_idx_{i}": np.arange(20 * i, 20 * i + 20) for i in range(3)},
        **{f"test_idx_{i}": np.arange(2 * i, 2 * i + 2) for i in range(3)},
    )
    keys = data(tmp_path, [[0], [1], [1], [1], [0], [1]]) | {"partition": f"file:{tmp_path / 'p.npz'}"}
    last = list(read_metrics(run(**keys).path))[-1]["evaluation"]
    assert last["undefined"] == {"auc": [1]}
    assert last["auc"] == pytest.approx((last["clients"]["0"]["auc"] + last["clients"]["2"]["auc"]) / 2)


def test_what_no_client_has_is_not_listed() -> None:
    rows = {0: {"auc": None, "f1": 0.5, "loss": 1.0}, 1: {"auc": None, "f1": None, "loss": 1.0}}
    rows = {i: {**row, "test-samples": 2, "sha256": "0" * 64} for i, row in rows.items()}
    record = evaluation_record(rows, 2, 0, [], (Metric("auc", ratio=True), Metric("f1", ratio=True)))
    assert record["undefined"] == {"f1": [1]}


def test_the_command_ends_with_an_error(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {name.replace("_", "-"): value for name, value in data(tmp_path, [[1]] * 9).items()}
    words = [word for item in (SMALL | keys).items() for word in ("--set", "=".join(map(str, item)))]
    for again in (["run", "--in-process", *words], ["run", "--in-process", "--resume", "runs/run"]):
        code, _, err = command(*again)
        assert code == 2 and mentions(err, "final-auc", "no client that", "trains"), err
