"""The user's own partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app.errors import DataError, UserError
from tests.facts import rejected
from tests.fl_app.test_partition import split


def write(tmp_path: Path, **arrays: Any) -> str:
    np.savez(tmp_path / "p.npz", **arrays)
    return f"file:{tmp_path / 'p.npz'}"


def test_file(tmp_path: Path) -> None:
    rows = split(write(tmp_path, train_idx=[[3, 1], [5, 7]], test_idx=[[0], [99]]), num_clients=2)
    assert [(a.tolist(), b.tolist()) for a, b in rows] == [([3, 1], [200]), ([5, 7], [299])]
    ragged = {"train_idx_0": np.array([4], np.uint8), "train_idx_1": [5, 6], "test_idx_0": [], "test_idx_1": [2]}
    rows = split(write(tmp_path, **ragged), num_clients=2)
    assert [(a.tolist(), b.tolist()) for a, b in rows] == [([4], []), ([5, 6], [202])]


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"train_idx": [[1], [2]]}, "p.npz has no test_idx, nor test_idx_0"),
        ({"train_idx_0": [1], "train_idx_2": [1], "test_idx": [[1], [2]]}, "p.npz has no train_idx_1"),
        ({"train_idx": [[1.5], [2]], "test_idx": [[1], [2]]}, "train_idx must hold integers, got float64"),
        ({"train_idx": [1, 2], "test_idx": [[1], [2]]}, r"train_idx must have 2 dimensions, got shape \(2,\)"),
        ({"train_idx": [[1], [200]], "test_idx": [[1], [2]]}, r"client 1: train index 200 is not in \[0, 200\)"),
        ({"train_idx": [[1], [2]], "test_idx": [[-1], [2]]}, r"client 0: test index -1 is not in \[0, 100\)"),
        ({"train_idx": [[1]] * 3, "test_idx": [[1]] * 3}, "num-clients: must be 3, .*p.npz's train_idx .*got 2"),
        ({"train_idx_0": [1], "train_idx_1": [], "test_idx": [[1], [2]]}, "client 1 has no training samples"),
        ({"train_idx": np.array([{}, {}]), "test_idx": [[1], [2]]}, "not a readable npz file"),
    ],
)
def test_file_errors(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(write(tmp_path, **arrays), num_clients=2)


def test_unreadable_files(tmp_path: Path) -> None:
    with rejected(DataError, "partition", "gone.npz", "no such file", "directory"):
        split(f"file:{tmp_path / 'gone.npz'}")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    for name, what in (("one.npy", "is a single array"), ("text.npz", "is not a readable npz file")):
        with pytest.raises(UserError, match=f"{name} {what}"):
            split(f"file:{tmp_path / name}")
