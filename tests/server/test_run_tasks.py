"""Whole runs in one process of other tasks than classification, and of images that are not square."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla.api.live import log_to
from fl_app import models
from fl_app.layout import Layout
from fl_app.server.run_folder import read_about, read_metrics, read_summary
from tests.api.test_live import display, drawn
from tests.conftest import Run
from tests.facts import mentions
from tests.report.builders import write
from tests.tracking.test_tensorboard import read_events


def arrays(directory: Path, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Write a data set, a quarter of it for test, and return a run's settings for it."""
    k = len(x) * 3 // 4
    np.savez(directory / "data.npz", x_train=x[:k], y_train=y[:k], x_test=x[k:], y_test=y[k:])
    return {"dataset": f"npz:{directory / 'data.npz'}", "partition": "iid", "train_samples": 0, "test_samples": 0}


def test_multi_label(run: Run, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32)
    labels = (x[:, :3] > 0).astype(int)
    folder = run(
        **arrays(tmp_path, x, labels), task="multi-label", classes="red,green,blue", learning_rate=0.5, local_epochs=5
    )
    records, summary = list(read_metrics(folder.path)), read_summary(folder.path)
    assert read_about(folder.path)["classes"] == ["red", "green", "blue"]
    assert 0.3 < records[0]["auc-before"] < 0.9 < records[1]["auc-before"] <= summary["best-auc"]
    assert summary["final-auc"] > 0.95 and summary["final-f1"] > 0.85 and summary["failures"] == 0
    assert set(records[-1]["clients"]) == {"0", "1", "2"} and "accuracy" not in records[-1]["evaluation"]


@pytest.mark.parametrize("model", ["cnn", "resnet8"])
def test_images_that_are_not_square(run: Run, tmp_path: Path, model: str) -> None:
    y = np.arange(96) % 2
    x = np.random.default_rng(0).integers(0, 100, (96, 6, 4), np.uint8)
    x[y == 1, 4:] += 120  # the two lowest of six rows
    folder = run(**arrays(tmp_path, x, y), model=model, learning_rate=0.05, momentum=0.9, local_epochs=5)
    summary, last = read_summary(folder.path), list(read_metrics(folder.path))[-1]
    network = models.build(model, in_channels=1, num_classes=2, image_size=6, input_shape=(1, 6, 4))
    layout = Layout.of(network)
    assert all(row["upload-bytes"] == 4 * (layout.d + layout.b) for row in last["clients"].values())
    assert summary["failures"] == 0 and summary["digest"]
    # in training, where chance is 0.69; BatchNorm's statistics take more rounds
    assert last["loss"] < 0.3


def test_a_regression_is_told_by_its_headline(run: Run, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    (panel, _), (plain, console) = display(), display(terminal=False)
    with log_to(panel):
        folder = run(**arrays(tmp_path, x, x.sum(1)), task="regression", learning_rate=0.02, track="tensorboard")
    records, summary = list(read_metrics(folder.path)), read_summary(folder.path)
    before = [record["rmse-before"] for record in records]

    shown = "\n".join(drawn(panel))
    assert (
        mentions(shown, "rmse (mean ± std)", "before", "after training")
        and f"{before[1]:.4g} ± " in shown
        and "accuracy" not in shown
    )
    with log_to(plain):
        run(**arrays(tmp_path, x, x.sum(1)), task="regression", learning_rate=0.02, run_name="again")
    assert f"round 2/2: rmse {before[1]:.4g} ± " in console.file.getvalue()  # type: ignore[attr-defined]

    page, names = write(tmp_path / "out", folder.path)
    assert "RMSE over rounds" in page and f">{summary['final-rmse']:.4g}<" in page and "ccuracy" not in page
    assert {"rmse", "clients-rmse"} <= names and not any("accuracy" in name for name in names)

    events = read_events(folder.path)
    tags = events.Tags()["scalars"]
    assert {"rmse/before-training", "rmse/after-training", "rmse/all-clients", "all-clients/mae"} <= set(tags)
    assert [event.value for event in events.Scalars("rmse/before-training")] == pytest.approx(before, rel=1e-5)
    assert not any("accuracy" in tag for tag in tags)
