"""A user's own partition: `file:/path.npz` with index arrays per client."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import npz_file
from fl_app.errors import UserError
from fl_app.files import no_such


def read_shares(
    path: Path, sides: Sequence[tuple[str, str, NDArray[np.int64], int]], num_clients: int, dataset: str
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return every client's (train, test) indices into [train; test], int64, in the file's order.

    sides: (key prefix, word in errors, labels [n], offset) of training and test set. Raises UserError naming the
    client.
    """
    if not path.is_file():
        raise UserError(f"partition: {no_such(path)}")
    arrays, _ = npz_file.read("partition", path, lambda name: name.startswith(("train_idx", "test_idx")))
    dealt = []
    for side, word, labels, offset in sides:
        rows = _rows(path, side, arrays)
        if len(rows) != num_clients:
            raise UserError(f"num-clients: must be {len(rows)}, as many as {path}'s {side}_idx has, got {num_clients}")
        for i, row in enumerate(rows):
            bad = row[(row < 0) | (row >= len(labels))]
            if len(bad):
                raise UserError(
                    f"partition: {path}: client {i}: {side} index {bad[0]} is not in [0, {len(labels)}) of "
                    f"the {word} set of {dataset}"
                )
            if side == "train" and not len(row):
                raise UserError(f"partition: {path}: client {i} has no training samples")
        dealt.append([offset + row.astype(np.int64) for row in rows])
    return list(zip(*dealt, strict=True))


def _rows(path: Path, side: str, arrays: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
    """Return one index array per client of `train_idx` [N, n] or of `train_idx_0`, `train_idx_1`, ..."""
    name = f"{side}_idx"
    ragged = [key for key in arrays if re.fullmatch(rf"{name}_\d+", key)]
    expected = [f"{name}_{i}" for i in range(len(ragged))]
    if name not in arrays and (not ragged or set(expected) - set(ragged)):
        missing = next((key for key in expected if key not in arrays), f"{name}, nor {name}_0")
        raise UserError(f"partition: {path} has no {missing}")
    for key in [name] if name in arrays else expected:
        ndim = 2 if key == name else 1
        if arrays[key].ndim != ndim:
            raise UserError(f"partition: {path}: {key} must have {ndim} dimensions, got shape {arrays[key].shape}")
        if arrays[key].dtype.kind not in "iu" and arrays[key].size:
            raise UserError(f"partition: {path}: {key} must hold integers, got {arrays[key].dtype}")
    return list(arrays[name]) if name in arrays else [arrays[key] for key in expected]
