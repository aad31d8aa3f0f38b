"""All methods with classes that a client or all clients lack, one sample, and no test data: all losses are of ordinary size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fl_app.server.run_folder import read_metrics
from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS, Run
from tests.methods.runs import arrays

# Chance has a loss of 2.3, and FedGen reaches 116. A constant in place of "never" is far beyond this bound.
ORDINARY = 1000


def uneven(directory: Path) -> dict[str, object]:
    """Clients of the classes 0 and 1, of 1 and 2, and of one sample. They are tested with all ten classes; one has no test data."""
    file = directory / "split.npz"
    train = {"train_idx_0": [0, 1, 10, 11, 20, 21], "train_idx_1": [2, 12, 22, 31, 32], "train_idx_2": [3]}
    tests = {"test_idx_0": np.arange(10), "test_idx_1": np.arange(10, 20), "test_idx_2": np.zeros(0, int)}
    np.savez(file, **train, **tests)  # type: ignore[arg-type]
    return {"dataset": arrays(directory), "partition": f"file:{file}", "num_clients": 3, "batch_size": 4}


def losses(record: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of a record under a name with "loss", at any depth."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from losses(value, f"{name}/{key}")
    elif isinstance(record, float) and "loss" in name:
        yield name, record


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("private", [False, True])
def test_losses_are_of_ordinary_size(run: Run, tmp_path: Path, method: str, private: bool) -> None:
    if private and not METHODS[method].sums:
        pytest.skip("it cannot run private")
    setting = {"num_server_rounds": 3, "finetune_epochs": 1, "learning_rate": 0.05}
    # a private round needs three clients
    setting |= {"private": True} if private else {"fraction_train": 0.67}
    folder = run(method=method, model="mlp", **uneven(tmp_path), **setting, **IN_TWO_ROUNDS.get(method, {}))
    records = list(read_metrics(folder.path))
    found = [pair for record in records for pair in losses(record)]
    assert len(found) > 20 and [pair for pair in found if not abs(pair[1]) < ORDINARY] == []
    assert not any(record["failures"] for record in records)
    tested = records[-1]["evaluation"]["clients"]
    # the last has no test data, and a private run does not say so
    for name in ("accuracy", "accuracy-finetuned"):
        assert [row[name] is None for row in tested.values()] == [False, False, True]
