"""What clients report, checked and summarized."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from fl_app.layout import Model
from fl_app.metrics import Metric, Reports, of_evaluation
from fl_app.server import record as records
from fl_app.tasks import Classification, MultiLabel, Regression
from fl_app.transport.wire import Upload, WireError
from tests.conftest import f32
from tests.facts import rejected

SAID = {"train-samples": 24, "test-samples": 10}


def upload(num_examples: int = 24, **metrics: Any) -> Upload:
    reported = {name.replace("_", "-"): value for name, value in metrics.items()}
    return Upload(Model(f32(1), f32()), metrics={"test-samples": 10, "loss": 0.5} | reported, num_examples=num_examples)


def test_known_numbers_are_kept_and_nothing_else() -> None:
    sent = upload(
        accuracy_before=0.5, seconds_train=1.0, alpha=0.25, collaborators=3, text="x", state_version="000002-000000"
    )
    kept = {
        "test-samples": 10,
        "loss": 0.5,
        "accuracy-before": 0.5,
        "seconds-train": 1.0,
        "state-version": "000002-000000",
    }
    assert records.check_upload(sent) == kept
    assert records.check_upload(sent, Reports([Metric("alpha")]), SAID, "000002-000000") == {**kept, "alpha": 0.25}


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (upload(loss=1.5e308), r"metric loss must be a number in \[0, 1e\+30\], got 1.5e\+308"),
        (upload(loss_before=-1), "metric loss-before"),
        (upload(seconds_train=1e31), "metric seconds-train"),
        (upload(seconds_train="x" * 10), "metric seconds-train"),
        (
            upload(2**62),
            "num_examples must be the 24 that the client reported when it connected, got 4611686018427387904",
        ),
        (upload(test_samples=11), "test-samples must be the 10 that the client reported when it connected, got 11"),
        (upload(state_version="000001-000000"), "state-version must be 000002-000000 or empty, got '000001-000000'"),
        (upload(state_used="../x"), "state-used must be a state's version"),
    ],
)
def test_numbers_that_cannot_be(sent: Upload, words: str) -> None:
    with pytest.raises(WireError, match=words):
        records.check_upload(sent, None, SAID, "000002-000000")


def test_no_number_of_a_client_makes_a_mean_that_json_does_not_have() -> None:
    rows = [{"loss": 1.7e308, "test-samples": 2**52}] * 3
    assert records.mean_and_pooled(rows, "loss") == (None, None)
    notes = {"notes": [math.inf, 1.0]}
    rows = [records.client_row({"loss": value, "test-samples": 1}, 1, 1, 1, notes) for value in (math.inf, 1.0)]
    record = records.round_record(1, dict(enumerate(rows)), 2, 3, {"x": {"y": math.nan}}, [])
    assert json.loads(json.dumps(record, allow_nan=False))["loss"] == 1.0
    assert (
        record["x"] == {"y": None}
        and record["clients"]["0"]["notes"] == [None, 1.0]
        and record["clients"]["0"]["loss"] is None
    )


def test_an_evaluation_s_samples_are_those_the_client_told() -> None:
    sha = "ab" * 32
    assert records.check_evaluation({"accuracy": 0.5, "sha256": sha, "x": 3}, 10, SAID) == {
        "accuracy": 0.5,
        "sha256": sha,
    }
    with rejected(WireError, "", "test-samples", "10"):
        records.check_evaluation({"accuracy": 0.5, "sha256": sha}, 11, SAID)


def test_pooled_is_the_metric_over_all_samples_or_not_there() -> None:
    """With sklearn over all samples at once: RMSE is no mean of RMSEs, AUC follows from nobody's AUC."""
    g = np.random.default_rng(0)
    parts = [(g.normal(size=n), g.normal(scale=1 + n / 10, size=n)) for n in (5, 20, 80)]
    rows = [
        {
            "rmse": root_mean_squared_error(y, p),
            "mae": mean_absolute_error(y, p),
            "r2": r2_score(y, p),
            "test-samples": len(y),
        }
        for y, p in parts
    ]
    y, p = (np.concatenate(side) for side in zip(*parts, strict=True))
    record = records.reduced(rows, of_evaluation(Regression.metrics))
    assert record["rmse-pooled"] == pytest.approx(root_mean_squared_error(y, p), rel=1e-9)
    assert record["mae-pooled"] == pytest.approx(mean_absolute_error(y, p), rel=1e-9)
    assert "r2-pooled" not in record and record["r2"] == pytest.approx(np.mean([row["r2"] for row in rows]))
    assert record["rmse-pooled"] > np.average([row["rmse"] for row in rows], weights=[5, 20, 80])
    for task in (Classification, MultiLabel):
        names = {
            name for metric in of_evaluation(task.metrics) for name in metric.record_names if name.endswith("-pooled")
        }
        own = {"accuracy-pooled", "accuracy-finetuned-pooled"} if task is Classification else set()
        assert names == own | {"loss-pooled"}
