"""Metrics that were asked for are in every table; what a client's data do not define costs that figure alone."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import corolla
from corolla.cli import output
from corolla.experiments import compare, result_table, significance, sweep
from corolla.experiments.collect import collect
from corolla.experiments.runs import RecordedRun, listing
from fl_app import plugins
from fl_app.errors import ConfigurationError, UserError
from fl_app.metrics import Metric, undefined_note
from fl_app.server.events import Round, event_of
from fl_app.server.run_folder import read_metrics
from strategies import METHOD_PARAMS
from tests.conftest import Command, Run
from tests.facts import mentions, rejected
from tests.hospitals import write

NOTE = "AUC: 2 of 3 clients (2: one class)"


@pytest.fixture
def hospitals(tmp_path: Path) -> dict[str, Any]:
    """Settings of three clients with 40 rows for training and 20 for test each; the last has one class."""
    g = np.random.default_rng(1)
    x = g.normal(size=(180, 4)).astype(np.float32)
    y = (x[:, 0] + g.normal(scale=2, size=180) > 0).astype(int)
    train, test = np.arange(120), np.arange(120, 180)
    y[80:120] = y[160:] = 1
    np.savez(tmp_path / "d.npz", x_train=x[train], y_train=y[train], x_test=x[test], y_test=y[test])
    parts = {f"train_idx_{i}": np.arange(40 * i, 40 * i + 40) for i in range(3)}
    parts |= {f"test_idx_{i}": np.arange(20 * i, 20 * i + 20) for i in range(3)}
    np.savez(tmp_path / "p.npz", **parts)
    files = {"dataset": f"npz:{tmp_path / 'd.npz'}", "partition": f"file:{tmp_path / 'p.npz'}"}
    return {**files, "num_clients": 3, "num_server_rounds": 3}


def rows_of(path: Path) -> dict[str, Any]:
    rows: dict[str, Any] = list(read_metrics(path))[-1]["evaluation"]["clients"]
    return rows


def test_an_auc_is_that_of_the_model_and_its_mean_of_those_who_have_one(
    run: Run, hospitals: dict[str, Any], tmp_path: Path
) -> None:
    path = run(**hospitals, method="local", metrics="auc", collect_personal_models=True).path
    rows, summary = rows_of(path), RecordedRun(path).summary
    with np.load(tmp_path / "d.npz") as data:
        for i in range(2):
            part = slice(20 * i, 20 * i + 20)
            probabilities = corolla.load(path).model(i).probabilities(data["x_test"][part])
            expected = roc_auc_score(data["y_test"][part], np.asarray(probabilities)[:, 1])
            assert rows[str(i)]["auc"] == pytest.approx(expected, abs=1e-9)
    assert rows["2"]["auc"] is None and rows["2"]["accuracy"] is not None
    assert summary["final-auc"] == pytest.approx((rows["0"]["auc"] + rows["1"]["auc"]) / 2)
    assert summary["final-accuracy"] == pytest.approx(sum(row["accuracy"] for row in rows.values()) / 3)


def test_it_is_measured_in_every_round(run: Run, hospitals: dict[str, Any]) -> None:
    records = list(read_metrics(run(**hospitals, metrics="auc").path))
    for record in records:
        known = [row["auc-before"] for row in record["clients"].values() if row["auc-before"] is not None]
        assert len(known) == 2 and record["auc-before"] == pytest.approx(np.mean(known))
        assert "auc-after" in record and "auc-before-pooled" not in record


def test_every_table_has_it(run: Run, hospitals: dict[str, Any], tmp_path: Path, command: Command) -> None:
    folders = [run(**hospitals, method=name, metrics="auc", run_name=name).path for name in ("fedavg", "local")]
    one, other = (RecordedRun(path, METHOD_PARAMS) for path in folders)
    shown = f"{100 * one.summary['final-auc']:.2f}"
    header, row, _ = result_table.single_runs([one, other])
    assert dict(zip(header, row, strict=True))["auc"] == f"{shown} % (2 of 3 clients)"
    assert "clients)" not in row[1] and result_table.undefined_notes([one, other]) == [NOTE]
    points = [sweep.Point(r.path.name, {"method": r.config.method}, {}, r.config) for r in (one, other)]
    rows = result_table.sweep_rows(points, {sweep.identity(r.config): r for r in (one, other)})
    result_table.write_results(tmp_path, rows, "title", [])
    found = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert float(found[0]["final-auc-mean"]) == one.summary["final-auc"] and found[0]["final-auc-clients"] == "2"
    assert found[0]["final-clients"] == "3" and NOTE in (tmp_path / "results.md").read_text()
    columns = result_table.text_table(rows)[0]
    assert "final-auc" in columns and columns.index("final-auc") > columns.index("final-accuracy")
    listed = listing([one])
    assert listed[1][listed[0].index("auc")] == f"{shown} % (2 of 3 clients)"
    assert corolla.compare(folders)["final-auc"][0] == one.summary["final-auc"]
    out = command("compare", *folders)[1]
    assert f"{shown} (2 of 3 clients)" in out and NOTE in out and mentions(out, "chosen on test", "data")


def test_a_summary_names_the_clients_that_a_metric_leaves_out(
    run: Run, hospitals: dict[str, Any], command: Command
) -> None:
    path = run(**hospitals, metrics="auc").path
    code, out, _ = command("summary", path)
    assert code == 0 and out.splitlines()[-1] == NOTE
    assert json.loads(command("summary", path, "--json")[1])["undefined"] == {
        "auc": [{"client": 2, "reason": "one class"}]
    }
    facts = json.loads((path / "clients.json").read_text())
    facts["2"]["name"] = "Chur"
    (path / "clients.json").write_text(json.dumps(facts))
    assert command("summary", path)[1].splitlines()[-1] == NOTE.replace("(2:", "(Chur:")
    assert json.loads(command("summary", path, "--json")[1])["undefined"]["auc"][0]["name"] == "Chur"


def test_compare_by_another_metric_than_the_headline(run: Run, hospitals: dict[str, Any], command: Command) -> None:
    folders = [run(**hospitals, method=name, metrics="auc", run_name=name).path for name in ("fedavg", "local")]
    code, out, err = command("compare", *folders, "--metric", "auc")
    assert code == 0, err
    assert mentions(out, "client's final", "per cent", "minus") and "best-auc" in out.splitlines()[0]
    one, other = (RecordedRun(path, METHOD_PARAMS, "auc") for path in folders)
    mine, its = (rows_of(path) for path in folders)
    found = significance.paired([other], [one])
    assert found is not None and found.by_client == pytest.approx(
        {i: its[i]["auc"] - mine[i]["auc"] for i in ("0", "1")}
    )
    frame = corolla.compare(folders, metric="auc")
    assert frame["difference"][1] == found.mean and frame["pairs"][1] == 2
    # the best round before training, though the run was judged by accuracy
    best = max(record["auc-before"] for record in read_metrics(folders[0]))
    assert frame["best-auc"][0] == best
    plain = run(**hospitals, run_name="plain").path
    code, _, err = command("compare", plain, *folders, "--metric", "auc")
    assert code == 2 and mentions(err, "--metric auc", f"not measured in {plain}", "only accuracy")
    code, _, err = command("compare", *folders, "--metric", "auroc")
    assert code == 2 and mentions(err, "error", "--metric auroc", "not measured in")
    assert mentions(err.rstrip(), "did you mean", "auc?")
    code, _, err = command("compare", *folders, "--metric", "auc", "--paper")
    assert code == 2 and mentions(err, "--metric auc", "not with --paper")


def test_a_collected_run_keeps_the_metrics_asked_for(run: Run, hospitals: dict[str, Any], tmp_path: Path) -> None:
    folders = [run(**hospitals, method=name, metrics="auc", run_name=name).path for name in ("fedavg", "local")]
    kept = collect([RecordedRun(path, METHOD_PARAMS) for path in folders], tmp_path / "kept")
    for path, before in zip(kept, folders, strict=True):
        rows, full = rows_of(path), rows_of(before)
        for name in ("accuracy", "auc"):
            told = {i: round(row[name], 6) for i, row in full.items() if row[name] is not None}
            assert {i: row[name] for i, row in rows.items() if name in row} == told and len(told) > 1
        assert RecordedRun(path, METHOD_PARAMS).undefined_notes == [NOTE]
        first, (original, *_) = next(read_metrics(path)), list(read_metrics(before))
        assert first["clients"]["0"]["auc-after"] == round(original["clients"]["0"]["auc-after"], 6)
    frame = corolla.compare(kept, metric="auc")
    assert frame["difference"][1] == pytest.approx(corolla.compare(folders, metric="auc")["difference"][1], abs=1e-5)
    assert frame["pairs"][1] == 2


def test_a_headline_of_a_built_in_task(run: Run, hospitals: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "corolla"):
        path = run(**hospitals, headline="auc").path
    recorded, records = RecordedRun(path, METHOD_PARAMS), list(read_metrics(path))
    assert [metric.name for metric in recorded.metrics] == ["auc", "accuracy"]
    assert recorded.summary["best-auc"] == max(record["auc-before"] for record in records)
    assert "best-accuracy" not in recorded.summary and recorded.summary["final-accuracy"] is not None
    assert "auc" in caplog.text and NOTE in caplog.text
    header, row = result_table.single_runs([recorded])
    assert header[:3] == ["method", "final", "best"] and row[1].endswith("% (2 of 3 clients)")
    assert "pooled" not in result_table.caption(compare.result_rows([[recorded]]))
    assert compare.result_rows([[recorded]])[0].headline.name == "auc"
    assert output.of_run(recorded)["of-clients"] == "2 of 3 clients"


def test_a_headline_of_which_low_values_are_good(run: Run, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=x.sum(1), x_test=x, y_test=x.sum(1))
    keys = {"dataset": f"npz:{tmp_path / 'd.npz'}", "partition": "iid", "train_samples": 0, "test_samples": 0}
    path = run(task="regression", headline="mae", num_server_rounds=3, **keys).path
    summary, records = RecordedRun(path).summary, list(read_metrics(path))
    assert summary["best-mae"] == min(record["mae-before"] for record in records)
    assert {"final-mae-pooled", "final-rmse", "final-r2"} <= set(summary)


def test_a_headline_that_the_task_does_not_have(run: Run) -> None:
    with rejected(ConfigurationError, "headline", "accuracy", "did you mean", value="acuracy"):
        run(headline="acuracy")
    with rejected(UserError, "headline", "auc?", value="AUC"):
        run(headline="AUC")


UNDEFINED = """
import math
from fl_app.tasks import Classification, Metric

class Undefined(Classification):
    metrics = (Metric("share", ratio=True),)
    usual = ()

    def measure(self, outputs, y, names):
        found = {kind}
        if len(y.unique()) == 1:
            return found() if callable(found) else found
        return {{"share": float((outputs.argmax(1) == y).float().mean())}}
"""


@pytest.fixture(params=["{}", '{"share": math.nan}', "None", '{"share": None}', "lambda: 1 / 0"])
def undefined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A task of the user's own that has no headline where test data are of one class."""
    (tmp_path / "undefined.py").write_text(UNDEFINED.format(kind=request.param))
    plugins.reset(tmp_path)
    yield "undefined:Undefined"
    plugins.reset()


def test_a_client_without_the_headline_trains_all_the_same(run: Run, hospitals: dict[str, Any], undefined: str) -> None:
    path = run(**hospitals, task=undefined).path
    records, summary = list(read_metrics(path)), RecordedRun(path).summary
    assert all(set(record["clients"]) == {"0", "1", "2"} and not record["failures"] for record in records)
    rows = rows_of(path)
    assert rows["2"]["share"] is None and rows["2"]["loss"] > 0
    assert summary["final-share"] == pytest.approx((rows["0"]["share"] + rows["1"]["share"]) / 2)
    assert summary["failures"] == 0 and summary["digest"]
    (note,) = RecordedRun(path).undefined_notes
    assert note.startswith("share: 2 of 3 clients (2: ")
    # the models are those that a task with accuracy has
    assert summary["digest"] == RecordedRun(run(**hospitals, run_name="plain").path).summary["digest"]


def test_why_a_client_has_no_number() -> None:
    auc = Metric("auc", ratio=True, undefined="one class")
    rows: dict[str, Any] = {
        "0": {"auc": 0.5, "test-samples": 3},
        "1": {"auc": None, "test-samples": 0},
        "5": {"auc": None, "test-samples": 4},
        "10": {"auc": None, "test-samples": 4},
        "11": {"auc": None, "test-samples": 4, "metric-errors": "f1: none; auc: ValueError: no"},
    }
    assert mentions(undefined_note(rows, auc), "1 of 5 clients (1: no", "test samples; 5, 10", "11: it failed")
    assert undefined_note({"0": rows["0"]}, auc) == undefined_note({"5": rows["5"]}, auc) == ""


def test_a_round_names_the_clients_that_have_names(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table_of = {"target": "outcome", "client": "hospital", "exclude": "patient_id", "categorical": "ward"}
    file = write(tmp_path / "h.csv", 300, odd_spellings=False)
    everybody = {"train_samples": 0, "test_samples": 0, "partition": "by-column", "num_clients": 6}
    with caplog.at_level("INFO", "corolla"):
        run(**table_of, **everybody, dataset=f"table:{file}", model="mlp", headline="auc", num_server_rounds=1)
    (finished,) = [event for record in caplog.records if isinstance(event := event_of(record), Round)]
    assert mentions(finished.partial, "5 of 6 clients (Chur", "class")
    assert finished.sentence.endswith(f"; {finished.partial}")


def test_a_note_names_twenty_clients_at_most() -> None:
    auc = Metric("auc", ratio=True, undefined="one class")
    rows: dict[str, Any] = {str(i): {"auc": None if i else 0.5, "test-samples": 3} for i in range(10_000)}
    note = undefined_note(rows, auc)
    assert note.startswith("AUC: 1 of 10000 clients (1, 2, ") and mentions(
        note, "19", "20", "and 9979 more", "one class"
    )
