"""Clients that are missing from the final evaluation: every place that shows a final figure says of how many clients it is."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import corolla
from client_app.client_app import app
from corolla import cli
from corolla.experiments import compare, result_table, significance, sweep
from corolla.experiments.runs import RecordedRun
from corolla.report.arrays import read_runs
from corolla.report.tables import warnings
from fl_app.server.record import evaluation_record
from strategies import METHOD_PARAMS
from tests.conftest import Run
from tests.facts import mentions

LOST = (1, 4)


@pytest.fixture
def losing() -> ClientApp:
    """An app two of whose clients fail when they are evaluated."""

    def handle(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "evaluate" and context.node_config["partition-id"] in LOST:
            raise RuntimeError("out of memory")
        return app(message, context)

    return handle  # type: ignore[return-value]


@pytest.fixture
def folders(run: Run, losing: ClientApp) -> list[Path]:
    """A run that lost two of six clients, and one that lost none."""
    settings: dict[str, Any] = {"num_clients": 6, "num_server_rounds": 2}
    lacking = run(app=losing, method="local", run_name="lacking", **settings)
    whole = run(method="fedavg", run_name="whole", **settings)
    return [lacking.path, whole.path]


def test_the_summary_counts_clients_and_failures_of_evaluations(folders: list[Path]) -> None:
    lacking, whole = (RecordedRun(path) for path in folders)
    summary = lacking.summary
    assert (summary["final-clients"], summary["final-clients-expected"], summary["failures"]) == (4, 6, 2)
    assert summary["absent"] == list(LOST) and summary["digest"] is None
    assert lacking.coverage_note == "4 of 6 clients" and whole.coverage_note == ""
    assert [(t, failure["client"]) for t, failure in lacking.failures] == [(2, 1), (2, 4)]


def test_every_table_says_so(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = RecordedRun(folders[0], METHOD_PARAMS)
    _, row = result_table.single_runs([lacking])
    assert row[1].endswith("% (4 of 6 clients)") and row[2].endswith("% (4 of 6 clients)") and "clients" not in row[3]
    for words in (["compare", *map(str, folders)], ["runs", str(folders[0].parent)]):
        monkeypatch.setattr(sys, "argv", ["corolla", *words])
        with pytest.raises(SystemExit):
            cli.main()
        out, err = capsys.readouterr()
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
