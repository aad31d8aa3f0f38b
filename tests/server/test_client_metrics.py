"""One more client metric is an edit of one file: it shows wherever a round's record is shown. One nobody declared is named."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corolla.report import page
from fl_app import metrics, plugins
from fl_app.config import parse
from fl_app.errors import MethodError
from fl_app.figures import Scalars
from fl_app.metrics import Metric, Reports, admits
from fl_app.server import record as records
from fl_app.server.run_folder import read_metrics
from fl_app.transport.wire import WireError
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import PLUGINS, SMALL, Run
from tests.facts import mentions, rejected
from tests.report.conftest import undrawn as undrawn
from tests.server.test_record import upload
from tests.tracking.test_tensorboard import read_events

DECLARED = (PLUGINS / "drifting.py").read_text(encoding="utf-8")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    log = logging.getLogger("corolla")
    log.addHandler(caplog.handler)
    # to the root logger, which has the same handler
    log.propagate = False
    yield caplog
    log.removeHandler(caplog.handler)


@pytest.fixture
def plug_in(tmp_path: Path) -> Iterator[Path]:
    """A directory in which a method of the user's own is looked up."""
    directory = tmp_path / "own"
    directory.mkdir()
    plugins.reset(directory)
    yield directory
    plugins.reset()


@pytest.mark.usefixtures("undrawn")
def test_a_declared_client_metric_is_in_record_csv_report_and_tracker(run: Run, plug_in: Path, tmp_path: Path) -> None:
    (plug_in / "drifting.py").write_text(DECLARED)
    folder = run(method="drifting:METHOD", track="tensorboard")
    records = list(read_metrics(folder.path))
    rows = [[row["drift"] for row in record["clients"].values()] for record in records]
    assert all(value > 0 for values in rows for value in values)
    means = [float(np.mean(values)) for values in rows]
    assert [record["drift"] for record in records] == pytest.approx(means)

    html, pictures = page.write_report([folder.path], tmp_path, tables=tmp_path)
    assert mentions(html.read_text(encoding="utf-8"), "How far clients", "move")
    assert "drift-1.png" in {path.name for path in pictures.iterdir()}
    with (tmp_path / "rounds.csv").open() as file:
        assert [float(line["drift"]) for line in csv.DictReader(file)] == pytest.approx(means)
    with (tmp_path / "clients.csv").open() as file:
        found = [float(line["drift"]) for line in csv.DictReader(file)]
    assert found == pytest.approx([value for values in rows for value in values])
    assert [scalar.value for scalar in read_events(folder.path).Scalars("method/drift")] == pytest.approx(
        means, rel=1e-5
    )


def test_an_undeclared_client_metric_is_named_once_and_recorded_nowhere(
    run: Run, plug_in: Path, logged: pytest.LogCaptureFixture
) -> None:
    (plug_in / "drifting.py").write_text(DECLARED.replace("reports=(DRIFT,)", "reports=()"))
    folder = run(method="drifting:METHOD")
    assert logged.text.count("metric drift: clients report it, but the method's `reports` do not declare it") == 1
    assert "drift" not in (folder.path / "metrics.jsonl").read_text()


def test_a_name_alone_stands_in_the_clients_entries(run: Run, plug_in: Path, logged: pytest.LogCaptureFixture) -> None:
    (plug_in / "drifting.py").write_text(DECLARED.replace("reports=(DRIFT,)", "reports=('drift',)"))
    records = list(read_metrics(run(method="drifting:METHOD").path))
    assert all(row["drift"] > 0 for record in records for row in record["clients"].values())
    assert not any("drift" in record for record in records) and "drift" not in logged.text


@pytest.mark.parametrize("name", ["loss", "accuracy-before-pooled", "upload-bytes", "clients"])
def test_a_metric_cannot_have_the_name_of_another(plug_in: Path, name: str) -> None:
    (plug_in / "drifting.py").write_text(DECLARED.replace('"drift"', repr(name)))
    config = parse({**SMALL, "method": "drifting:METHOD"}, METHOD_PARAMS)
    with rejected(MethodError, "method drifting:METHOD", "reports", "names must differ", f"got {name}"):
        METHODS[config.method].check(config)


def test_a_client_that_sends_thousands_of_names_fills_no_log(logged: pytest.LogCaptureFixture) -> None:
    reports = Reports()
    for _ in range(2):
        reports.warn_of_undeclared(f"name-{k}" for k in range(1000))
    assert len(logged.records) == Reports.MOST_NAMED + 1 and "further metrics" in logged.records[-1].message


def test_a_declared_range_is_checked() -> None:
    own = Reports([Metric("share", ratio=True), Metric("distance", low=0)])
    kept = records.check_upload(upload(share=0.25, distance=float("inf")), own)
    assert kept["share"] == 0.25 and kept["distance"] == float("inf")
    for reported, words in (({"share": 1.5}, r"share must be a number in \[0, 1\]"), ({"distance": -1.0}, "distance")):
        with pytest.raises(WireError, match=words):
            records.check_upload(upload(**reported), own)


@pytest.mark.parametrize(
    ("value", "low", "high", "fits"),
    [
        (0.5, 0, 1, True),
        (1, 0, 1, True),
        (1.5, 0, 1, False),
        (True, 0, 1, False),
        ("0.5", 0, 1, False),
        (float("nan"), 0, 1, True),
        (float("inf"), 0, 1, False),
        (float("inf"), 0, float("inf"), True),
        (float("-inf"), 0, float("inf"), False),
        (float("-inf"), float("-inf"), 1, True),
        (1e31, 0, float("inf"), False),
    ],
)
def test_what_a_range_admits(value: object, low: float, high: float, fits: bool) -> None:
    assert admits(value, low, high) == fits


def test_a_picture_of_a_number_of_every_method_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    more = (*metrics.OF_EVERY_METHOD, Metric("battery", picture="Charge of the battery", unit="%"))
    monkeypatch.setattr(metrics, "OF_EVERY_METHOD", more)
    assert Scalars("battery", "Charge of the battery", "%") in METHODS["fedavg"].drawn
