"""Weights and statistics that do not fit the fixed point of a private run are clipped; one bit at the end tells it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app import client_app
from client_app.private_round import Masker
from client_app.trainer import LocalTrainer
from fl_app import plugins
from fl_app.debugging import Place
from fl_app.server.run_folder import read_summary
from fl_app.transport.wire import PRIVATE_KEYS, SEED_KEYS, SUM, Expected, Upload
from tests.conftest import Run, f32
from tests.facts import mentions
from tests.privacy.runs import PRIVATE, rounds

LINE = """
from torch import nn
def build(in_channels, num_classes, image_size):
    return nn.Linear(2, num_classes)
"""


@pytest.fixture
def near_150(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a linear regression whose targets are near 150: what it learns is the bias."""
    (tmp_path / "line.py").write_text(LINE)
    plugins.reset(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 2)).astype(np.float32)
    y = 150 + x @ f32(2, -1) + rng.normal(size=240).astype(np.float32)
    np.savez(tmp_path / "data.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    yield {
        "dataset": f"npz:{tmp_path / 'data.npz'}",
        "partition": "iid",
        "train_samples": 0,
        "test_samples": 0,
        "task": "regression",
        "model": "line:build",
        "learning_rate": 0.1,
        "local_epochs": 5,
        "num_clients": 5,
        "max_update_norm": 0,
        # private runs scale each site by its own data: another model
        "normalize": "unit",
    }
    plugins.reset()


def test_a_regression_of_large_targets_is_clipped_without_an_error_and_the_end_tells(
    run: Run, near_150: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "corolla")
    plain = read_summary(run(run_name="plain", **near_150).path)
    # the noise of the targets has a deviation of 1
    assert plain["final-rmse"] < 1.3
    narrow = run(run_name="narrow", private=True, **near_150)
    # the bias is at most 8
    assert read_summary(narrow.path)["final-rmse"] > 100
    assert [record["failures"] for record in rounds(narrow)] == [[], []]
    told = "private-range: values of clients 0, 1, 2, 3, 4 beyond 8 were clipped in this run"
    assert told in caplog.messages
    caplog.clear()
    wide = run(run_name="wide", private=True, private_range=256, **near_150)
    assert read_summary(wide.path)["final-rmse"] == pytest.approx(plain["final-rmse"], rel=1e-3)
    assert not any("private-range" in line for line in caplog.messages)


def test_a_model_that_leaves_the_range_for_some_data_tells_nothing_of_them(
    run: Run, monkeypatch: pytest.MonkeyPatch, arriving: list[tuple[Upload, Expected]]
) -> None:
    """A server that moves a bias by bisection would read the shares of a client's labels off its errors."""
    original = Masker.mask

    def larger(masker: Masker, upload: Upload) -> Upload:
        if masker.site.keys.ring.client_id == 2:
            upload.model.params[:3] = 9, -1e9, np.nan
        return original(masker, upload)

    monkeypatch.setattr(Masker, "mask", larger)
    folder = run(method="fedavg", **PRIVATE)
    assert all(sorted(record["clients"]) == ["0", "1", "2", "3", "4"] for record in rounds(folder))
    names = [set(upload.metrics) for upload, expected in arriving if SUM in expected.extras]
    assert len(names) == 10 and all(own == names[0] for own in names)


def test_training_that_diverges_at_a_site_shows_only_at_the_end(
    run: Run, near_150: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Else a server finds by bisection, with models that it makes, from which size on a record makes training diverge."""
    caplog.set_level("INFO", "corolla")
    folder = run(private=True, report_accuracy=False, **{**near_150, "learning_rate": 1e30, "num_server_rounds": 2})
    assert [record["failures"] for record in rounds(folder)] == [[]] * 2
    assert any("training diverged" in line for line in caplog.messages)


@pytest.mark.parametrize("tells", [False, True])
def test_training_that_fails_at_a_site_shows_only_at_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, tells: bool
) -> None:
    """A server would find a site's number of rows by the batch sizes that leave one row, at which BatchNorm fails."""
    monkeypatch.setattr(client_app, "_place", lambda context: Place.DEPLOYMENT)
    monkeypatch.setenv("COROLLA_SITE_DIR", str(tmp_path / "site"))
    original = LocalTrainer.train

    def fails(trainer: LocalTrainer, *args: Any, **more: Any) -> Any:
        if trainer.client_id == 2:
            raise ValueError("Expected more than 1 value per channel when training")
        return original(trainer, *args, **more)

    monkeypatch.setattr(LocalTrainer, "train", fails)
    keys = {i: {PRIVATE_KEYS: SEED_KEYS} for i in range(5)}
    settings = {**PRIVATE, "method": "fedavg", "report_accuracy": tells, "num_server_rounds": 1, "round_retries": 1}
    folder = run(node_configs=keys, **settings)
    (record,) = rounds(folder)
    assert [f["client"] for f in record["failures"]] == [2] * tells
    assert mentions(caplog.text, "Expected more than 1", "per channel")
