"""`max-size-weight` bounds every weight that follows from the samples that clients report: all methods, one client that lies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from client_app.client import CorollaClient
from fl_app.server.run_folder import read_metrics
from fl_app.transport.wire import Download, Upload
from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS, Run

LIAR, TIMES = 2, 100_000
# the arrays in which clients report samples by class
COUNTS = ("counts", "class-counts")


def losses(run: Run, method: str, name: str) -> list[float]:
    setting: dict[str, Any] = {"evaluate_every": 0, "partition": "iid", "train_samples": 10, "max_size_weight": 1.0}
    folder = run(method=method, model="mlp", run_name=name, **setting, **IN_TWO_ROUNDS.get(method, {}))
    return [
        value
        for record in read_metrics(folder.path)
        for _, entry in sorted(record["clients"].items())
        for name, value in sorted(entry.items())
        if name.startswith("loss") and value is not None
    ]


# scaffold's server refuses an upload whose steps do not fit its samples
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"scaffold"}))
def test_a_client_that_claims_more_samples_does_not_count_more(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    honest = losses(run, method, "honest")
    train, count = CorollaClient._train, CorollaClient._reported_count

    def claims(self: CorollaClient, download: Download) -> Upload:
        upload = train(self, download)
        if self.client_id != LIAR:
            return upload
        extras = {n: array * TIMES if n in COUNTS else array for n, array in upload.extras.items()}
        return dataclasses.replace(upload, extras=extras)

    monkeypatch.setattr(CorollaClient, "_train", claims)
    monkeypatch.setattr(
        CorollaClient, "_reported_count", lambda self, n: count(self, n) * (TIMES if self.client_id == LIAR else 1)
    )
    np.testing.assert_allclose(losses(run, method, "lying"), honest, rtol=1e-5, atol=1e-6)
