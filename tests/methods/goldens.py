"""The losses of a short run of every method, as they were when somebody last looked at them: tests/methods/goldens.json.

python -m tests.methods.goldens [METHOD ...]    # computes them anew, after a change that is meant to change them

Three rounds of two of three clients, on BatchNorm, keys at their defaults but `OWN`. Client 0 has samples of the classes 0 and 1,
client 1 of 1 and 2, client 2 one sample and no test data. Losses agree between machines to `TOLERANCE`, relative and absolute.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS, SMALL, run_with
from tests.methods.runs import arrays
from tests.small_models import BATCHNORM

# where a method at its defaults is another one, or its losses grow without bound
OWN: dict[str, dict[str, Any]] = {
    "fedgen": {"generator_steps": 5, "alpha": 0.5, "beta": 0.5},
    "fedpake": {"threshold": 0.1, "divisor": "limit"},
    "perfedmask": {"capacity": 0.6},
}
FILE = Path(__file__).with_name("goldens.json")
TOLERANCE = 2e-5


def setting(directory: Path, method: str) -> dict[str, Any]:
    """Return the run's keys. directory: gets its data."""
    file = directory / "split.npz"
    train = {"train_idx_0": [0, 1, 10, 11, 20, 21], "train_idx_1": [2, 12, 22, 31, 32], "train_idx_2": [3]}
    tests = {"test_idx_0": np.arange(10), "test_idx_1": np.arange(10, 20), "test_idx_2": np.zeros(0, int)}
    np.savez(file, **train, **tests)  # type: ignore[arg-type]
    data = {"dataset": arrays(directory), "partition": f"file:{file}", "num_clients": 3, "batch_size": 4}
    rounds = {
        "num_server_rounds": 3,
        "finetune_epochs": 1,
        "learning_rate": 0.2,
        "momentum": 0.5,
        "fraction_train": 0.67,
    }
    return {
        "method": method,
        method: OWN.get(method, {}),
        **BATCHNORM,
        **data,
        **rounds,
        **IN_TWO_ROUNDS.get(method, {}),
    }


def losses(record: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of a record under a name with "loss", at any depth."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from losses(value, f"{name}/{key}")
    elif isinstance(record, float) and "loss" in name:
        yield name, record


def of_clients(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the clients' losses of all rounds, and of the evaluation."""
    return [value for record in records for name, value in losses(record) if "/clients/" in name]


def main() -> None:
    """Write the losses of the methods that are named, or of all."""
    from fl_app.server.run_folder import read_metrics

    found = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    for method in sys.argv[1:] or METHODS:
        with tempfile.TemporaryDirectory() as place:
            own = {"output-dir": f"{place}/runs", "state-dir": f"{place}/state", "data-dir": f"{place}/data"}
            folder = run_with(SMALL | own)(**setting(Path(place), method))
            found[method] = [float(f"{value:.7g}") for value in of_clients(read_metrics(folder.path))]
    lines = (f"{json.dumps(method)}: {json.dumps(found[method])}" for method in sorted(found))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
