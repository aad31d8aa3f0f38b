"""A report has a column and a learning curve for every metric that was measured, and says of which clients a mean is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla.report.all_runs import accuracy
from corolla.report.arrays import curve, read_runs
from corolla.report.groups import grouped, judged_by
from corolla.report.page import write_report
from tests.conftest import Run
from tests.facts import mentions
from tests.report.test_pictures import assert_drawn_within


def settings(tmp_path: Path) -> dict[str, Any]:
    g = np.random.default_rng(1)
    x, y = g.normal(size=(180, 4)).astype(np.float32), g.integers(0, 2, 180)
    y[160:] = 1
    np.savez(tmp_path / "d.npz", x_train=x[:120], y_train=y[:120], x_test=x[120:], y_test=y[120:])
    parts = {f"train_idx_{i}": np.arange(40 * i, 40 * i + 40) for i in range(3)}
    parts |= {f"test_idx_{i}": np.arange(20 * i, 20 * i + 20) for i in range(3)}
    np.savez(tmp_path / "p.npz", **parts)
    files = {"dataset": f"npz:{tmp_path / 'd.npz'}", "partition": f"file:{tmp_path / 'p.npz'}"}
    return {**files, "num_server_rounds": 3, "metrics": "auc"}


@pytest.mark.usefixtures("undrawn")
def test_a_column_a_curve_and_differences(run: Run, tmp_path: Path) -> None:
    keys = settings(tmp_path)
    folders = [run(**keys, method=name, run_name=name).path for name in ("fedavg", "local")]
    groups = grouped(read_runs(folders))
    panels = {panel.name: panel for panel in accuracy(groups)}
    assert {"accuracy", "auc", "clients", "clients-auc"} <= set(panels)
    assert panels["auc"].title == "AUC over rounds" and mentions(
        panels["clients-auc"].title, "Final AUC", "each client"
    )
    assert mentions(panels["auc"].caption, "2 of 3 clients (2", "class")
    assert "one class" not in panels["accuracy"].caption
    (auc,) = [metric for metric in groups[0].first.others if metric.name == "auc"]
    drawn = curve(judged_by(groups[0], auc).runs, "before")
    assert drawn is not None
    means = [record["auc-before"] for record in groups[0].first.rounds.values()]
    assert drawn["mean"].tolist() == pytest.approx(means, abs=1e-11)
    page, _ = write_report(folders, tmp_path / "report")
    text = page.read_text()
    assert "final-auc (%)" in text and "2 of 3 clients" in text and mentions(text, "chosen on test", "data")
    assert 'id="differences"' in text and "Wilcoxon" in text and "Client by client" in text
    assert (tmp_path / "report" / "report-figures" / "auc.png").is_file()
    assert_drawn_within(panels["auc"])


@pytest.mark.usefixtures("undrawn")
def test_validation_has_a_column(run: Run, tmp_path: Path) -> None:
    folder = run(**settings(tmp_path), validation_ratio=0.25).path
    text = write_report([folder], tmp_path / "report")[0].read_text()
    assert (
        ">validation (%)<" in text
        and "final-validation-auc (%)" in text
        and mentions(text, "chosen by validation", "data")
    )
    assert 'id="differences"' not in text
