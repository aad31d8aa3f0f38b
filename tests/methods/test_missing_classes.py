"""All methods with classes that a client or all clients lack, one sample, and no test data: their losses are as ever."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fl_app.server.run_folder import read_metrics
from strategies import METHODS
from tests.conftest import Run
from tests.methods.goldens import FILE, TOLERANCE, losses, of_clients, setting

# Chance has a loss of 2.3, and FedGen reaches 116. A constant in place of "never" is far beyond this bound.
ORDINARY = 1000
GOLDENS = json.loads(FILE.read_text("utf-8"))


@pytest.mark.parametrize(
    ("method", "private"),
    [
        (method, private)
        for method in sorted(METHODS)
        for private in (False, True)
        if METHODS[method].sums or not private
    ],
)
def test_losses_are_as_ever(run: Run, tmp_path: Path, method: str, private: bool) -> None:
    # a private round needs three clients
    changes = {"private": True, "fraction_train": 1.0, "model": "mlp"} if private else {}
    records = list(read_metrics(run(**{**setting(tmp_path, method), **changes}).path))
    found = [pair for record in records for pair in losses(record)]
    assert len(found) > 20 and [pair for pair in found if not abs(pair[1]) < ORDINARY] == []
    assert not any(record["failures"] for record in records)
    if not private:
        np.testing.assert_allclose(of_clients(records), GOLDENS[method], rtol=TOLERANCE, atol=TOLERANCE)
    tested = records[-1]["evaluation"]["clients"]
    # the last has no test data, and a private run does not say so
    for name in ("accuracy", "accuracy-finetuned"):
        assert [row[name] is None for row in tested.values()] == [False, False, True]


def test_every_method_has_losses_of_its_own() -> None:
    assert GOLDENS.keys() == METHODS.keys()
    alike = {name for name, own in GOLDENS.items() if [*GOLDENS.values()].count(own) > 1}
    # no two of three clients are split into clusters, and the mean is of equal weights
    assert alike <= {"cfl"}
