"""What a client says of its data when training diverges on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app.errors import UserError
from tests.conftest import Run


def write(path: Path, scale: float, shift: float) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(90, 4)).astype(np.float32)
    y = (x.sum(1) * 2).astype(np.float32)
    x = x * scale
    y = y + shift
    np.savez(path, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    return path


@pytest.mark.parametrize(
    ("scale", "shift", "says", "silent"),
    [
        (1e6, 0.0, r'; inputs are in -\S+e\+06 .. \S+e\+06: normalize = "mean-std" scales them', "targets"),
        (1.0, 288.0, r"; targets are in 27\d\S* .. 29\d\S*: scale them, or lower the learning rate", "inputs"),
    ],
)
def test_values_far_from_1_are_named(
    run: Run, tmp_path: Path, scale: float, shift: float, says: str, silent: str
) -> None:
    setting: dict[str, Any] = {
        "method": "fedavg", "task": "regression", "dataset": f"npz:{write(tmp_path / 'd.npz', scale, shift)}",
        "partition": "iid", "train_samples": 0, "test_samples": 0, "num_clients": 2, "learning_rate": 10.0,
        "num_server_rounds": 1, "normalize": "unit",
    }  # fmt: skip
    with pytest.raises(UserError, match=says) as caught:
        run(**setting)
    assert silent not in str(caught.value)
