"""All methods with classes that a client or all clients lack, one sample, and no test data: all losses are of ordinary size."""

from __future__ import annotations

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


@pytest.mark.parametrize("method", sorted(METHODS))
def test_losses_are_of_ordinary_size(run: Run, tmp_path: Path, method: str) -> None:
    setting = {"num_server_rounds": 3, "fraction_train": 0.67, "finetune_epochs": 1, "learning_rate": 0.05}
    folder = run(method=method, model="mlp", **uneven(tmp_path), **setting, **IN_TWO_ROUNDS.get(method, {}))
    entries = [entry for record in read_metrics(folder.path) for entry in [record, *record["clients"].values()]]
    losses = {
        (name, value) for e in entries for name, value in e.items() if "loss" in name and isinstance(value, float)
    }
    assert len(losses) > 6 and {(name, value) for name, value in losses if not value < ORDINARY} == set()
