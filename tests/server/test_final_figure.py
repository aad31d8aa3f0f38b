"""A final evaluation that nobody, or not everybody, answered: it ends with an error, or says of how many clients it is."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import corolla
from client_app.client_app import app
from corolla.experiments import compare, result_table, significance, sweep
from corolla.experiments.runs import RecordedRun
from corolla.report.arrays import read_runs
from corolla.report.tables import warnings
from fl_app.errors import UserError
from fl_app.metrics import Metric
from fl_app.server.record import evaluation_record
from fl_app.server.run_folder import read_metrics, read_summary
from strategies import METHOD_PARAMS
from tests.conftest import SMALL, Command, Made, Run
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


def test_clients_without_an_answer_are_named(run: Run, tmp_path: Path, command: Command) -> None:
    """By the run, and by whoever resumes it later."""
    keys = {**SETTING, "dataset": f"table:{wine(tmp_path / 'wine.csv')}"}
    answers = ("no client answered", "client 0 (celle)", "out of memory", "client 2 (verden)")
    with rejected(UserError, "", "evaluation after round 2", *answers) as first:
        run(app=failing_at(1), **keys, num_server_rounds=2)
    assert read_summary(tmp_path / "runs" / "run")["final-accuracy"] is None
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


# Clients that are missing from the final evaluation: every place that shows a final figure says of how many clients it is

LOST = (1, 4)


def losing(message: Message, context: Context) -> Message:
    """Answer as the ClientApp does; two clients fail when they are evaluated."""
    if message.metadata.message_type == "evaluate" and context.node_config["partition-id"] in LOST:
        raise RuntimeError("out of memory")
    return app(message, context)


@pytest.fixture
def folders(made_once: Made, tmp_path: Path) -> list[Path]:
    """A run that lost two of six clients, and one that lost none."""
    settings: dict[str, Any] = {"num_clients": 6, "num_server_rounds": 2}
    lacking = made_once(tmp_path / "runs" / "lacking", app=losing, method="local", run_name="lacking", **settings)
    whole = made_once(tmp_path / "runs" / "whole", method="fedavg", run_name="whole", **settings)
    return [lacking.path, whole.path]


def test_the_summary_counts_clients_and_failures_of_evaluations(folders: list[Path]) -> None:
    lacking, whole = (RecordedRun(path) for path in folders)
    summary = lacking.summary
    assert (summary["final-clients"], summary["final-clients-expected"], summary["failures"]) == (4, 6, 2)
    assert summary["absent"] == list(LOST) and summary["digest"] is None
    assert lacking.coverage_note == "4 of 6 clients" and whole.coverage_note == ""
    assert [(t, failure["client"]) for t, failure in lacking.failures] == [(2, 1), (2, 4)]


def test_every_table_says_so(folders: list[Path], command: Command) -> None:
    lacking = RecordedRun(folders[0], METHOD_PARAMS)
    _, row = result_table.single_runs([lacking])
    assert row[1].endswith("% (4 of 6 clients)") and row[2].endswith("% (4 of 6 clients)") and "clients" not in row[3]
    for words in (["compare", *map(str, folders)], ["runs", str(folders[0].parent)]):
        _, out, err = command(*words)
        assert out.count("(4 of 6 clients)") == (2 if words[0] == "compare" else 1), out
        if words[0] == "compare":
            assert (
                mentions(err, "warning", folders[0], "final figures cover 4", "6 clients")
                and str(folders[1]) not in err
            )
    frame = corolla.compare(folders)
    assert list(frame["clients"]) == ["4 of 6 clients", "all"]
    assert "4 of 6 clients" in corolla.load(folders[0])._repr_html_()
    text = warnings(read_runs(folders))
    assert mentions(text, "final figures cover 4", "6 clients") and text.count("final figures") == 1


def test_a_sweeps_files_say_so(folders: list[Path], tmp_path: Path) -> None:
    runs, _ = compare.load(folders, METHOD_PARAMS)
    points = [sweep.Point(run.path.name, {"method": run.config.method}, {}, run.config) for run in runs]
    rows = result_table.sweep_rows(points, {sweep.identity(run.config): run for run in runs})
    result_table.write_results(tmp_path, rows, "title", [])
    assert (tmp_path / "results.md").read_text().count("(4 of 6 clients)") == 2
    found = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(line["final-clients"], line["final-clients-expected"]) for line in found] == [("4", "6"), ("6", "6")]


def test_a_paired_comparison_is_of_the_clients_that_both_have(folders: list[Path]) -> None:
    lacking, whole = (RecordedRun(path, METHOD_PARAMS) for path in folders)
    found = significance.paired([lacking], [whole])
    assert found is not None and found.pairs == 4
    mine, its = significance.final(lacking), significance.final(whole)
    assert set(mine) == {"0", "2", "3", "5"} and len(its) == 6
    assert found.mean == pytest.approx(sum(mine[i] - its[i] for i in mine) / 4)


def test_clients_that_never_train_are_counted_apart() -> None:
    row = {"accuracy": 0.5, "loss": 1.0, "test-samples": 4, "sha256": "0" * 64}
    record = evaluation_record(dict.fromkeys((0, 2, 3), row), 5, 0, [], unseen=frozenset({3, 4}))
    assert (record["evaluated"], record["expected"], record["absent"]) == (2, 3, [1, 4])


def test_what_earlier_versions_recorded(folders: list[Path]) -> None:
    path = folders[0]
    text = (path / "metrics.jsonl").read_text().replace('"evaluated"', '"before"')
    (path / "metrics.jsonl").write_text(text)
    assert RecordedRun(path).coverage == (4, 6)
