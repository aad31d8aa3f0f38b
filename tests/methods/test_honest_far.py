"""Nobody is dropped who is honest, though most clients have the same one class and it has another (key `max-update-norm`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import attacks
from benchmarks.attacks import ATTACKS
from fl_app.config import parse
from fl_app.data import prepare
from fl_app.keys import Scalar
from fl_app.server.run_folder import RunFolder, read_metrics
from strategies import METHOD_PARAMS
from tests.conftest import Run

# the class that most clients have
MOST = 3
ROUNDS = 8
SETTINGS: dict[str, Any] = {
    "num_server_rounds": ROUNDS,
    "local_epochs": 5,
    "batch_size": 32,
    "evaluate_every": 0,
    "max_update_norm": 3.0,
}
METHODS = ["fedavg", "fedcac"]
OTHERS = ["feddac", "fedobp", "scaffold", "fedpake", "fedper", "fedamp", "fedfomo", "feddwa", "pfedfda"]


def partition(directory: Path, data: Path, classes: Sequence[Sequence[int]], samples: int) -> str:
    """Write a partition in which each client has so many training samples of its classes, and a few to test; return its name."""
    digits = prepare("digits", data)
    arrays: dict[str, Any] = {}
    for side, labels, count in (("train", digits.y_train, samples), ("test", digits.y_test, 4)):
        left = {c: np.flatnonzero(np.asarray(labels) == c).tolist() for c in range(10)}
        for i, own in enumerate(classes):
            part = -(-count // len(own))
            arrays[f"{side}_idx_{i}"] = np.array([left[c].pop() for c in own for _ in range(part)])
    np.savez(directory / "partition.npz", **arrays)
    return f"file:{directory / 'partition.npz'}"


def dropped(folder: RunFolder) -> list[tuple[int, str]]:
    return [
        (failure["client"], failure["cause"]) for record in read_metrics(folder.path) for failure in record["failures"]
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("method", [*METHODS, *OTHERS])
@pytest.mark.parametrize(
    "others", [[[7], [1]], [[0, 1, 2, 4, 5, 6, 7, 8, 9]] * 2], ids=["one other class", "all other classes"]
)
def test_most_have_the_same_one_class(
    run: Run, tmp_path: Path, data_dir: Path, method: str, others: list[list[int]]
) -> None:
    """Eight of ten clients; the others' updates do not shrink as theirs do."""
    name = partition(tmp_path, data_dir, [[MOST]] * 8 + others, 16)
    folder = run(method=method, num_clients=10, partition=name, train_samples=0, test_samples=0, **SETTINGS)
    assert dropped(folder) == []


@pytest.mark.nightly
@pytest.mark.parametrize("method", [*METHODS, "feddac", "fedobp"])
@pytest.mark.parametrize(
    "drawn",
    [
        {"partition": "dirichlet", "dirichlet_alpha": 0.05, "min_samples": 1},
        {"partition": "pathological", "classes_per_client": 1},
        {"partition": "pathological", "classes_per_client": 1, "fraction_train": 0.5},
    ],
    ids=["dirichlet", "pathological", "half of them"],
)
def test_partitions_of_papers(run: Run, method: str, drawn: dict[str, Scalar]) -> None:
    folder = run(method=method, num_clients=10, train_samples=0, test_samples=0, **SETTINGS, **drawn)
    assert dropped(folder) == []


@pytest.mark.parametrize("method", ["fedavg", "fedcac"])
def test_of_three_clients_two_have_the_same_class(run: Run, tmp_path: Path, data_dir: Path, method: str) -> None:
    name = partition(tmp_path, data_dir, [[MOST], [MOST], [7]], 24)
    assert dropped(run(method=method, partition=name, train_samples=0, test_samples=0, **SETTINGS)) == []


@pytest.mark.nightly
def test_the_clients_that_adapt_pfedfdas_gaussians_are_not_dropped(run: Run) -> None:
    """Two of twelve do, the others keep them as they are."""
    split = {"partition": "dirichlet", "dirichlet_alpha": 0.1, "train_samples": 0, "test_samples": 0}
    folder = run(method="pfedfda", num_clients=12, **split, **{**SETTINGS, "num_server_rounds": 4})
    assert dropped(folder) == []


@pytest.mark.parametrize(
    "attack",
    ["x 1e6", "w -> -w", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("-5 x update", "noise"))],
)
def test_a_liar_among_them_is_dropped_and_nobody_else(
    run: Run, raw_config: dict[str, Any], tmp_path: Path, data_dir: Path, attack: str
) -> None:
    """The bound has grown by what they move, not by what a liar may."""
    own = {"method": "fedavg", "partition": partition(tmp_path, data_dir, [[MOST]] * 8 + [[7], [1]], 16)}
    own |= {"num-clients": 10, "train-samples": 0, "test-samples": 0}
    config = parse({**raw_config, **own}, METHOD_PARAMS)
    app = attacks.client_app(ATTACKS[attack], 1, config)
    folder = run(app=app, **{name.replace("-", "_"): value for name, value in own.items()}, **SETTINGS)
    assert [client for client, _ in dropped(folder)] == [9] * ROUNDS
