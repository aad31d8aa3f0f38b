"""A user's own partition: `file:/path.npz` with index arrays per client."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import npz_file
from fl_app.errors import DataError
from fl_app.files import no_such
from fl_app.sources import SOURCES


def read_shares(
    path: Path, sides: Sequence[tuple[str, str, NDArray[np.int64], int]], num_clients: int, dataset: str
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return every client's (train, test) indices into [train; test], int64, in the file's order.

    sides: (key prefix, word in errors, labels [n], offset) of training and test set. Raises UserError naming the
    client.
    """
    if not path.is_file():
        raise DataError(key="partition", rule=no_such(path))
    arrays, _ = npz_file.read("partition", path, lambda name: name.startswith(("train_idx", "test_idx")))
    dealt = []
    for side, word, labels, offset in sides:
        rows = _rows(path, side, arrays)
        if len(rows) != num_clients:
            raise DataError(
                key="num-clients", rule=f"must be {len(rows)}, as many as {path}'s {side}_idx has", value=num_clients
            )
        for i, row in enumerate(rows):
            bad = row[(row < 0) | (row >= len(labels))]
            if len(bad):
                raise DataError(
                    key="partition",
                    rule=f"{path}: client {i}: {side} index {bad[0]} is not in [0, {len(labels)}) of the {word} "
                    f"set of {dataset}; {counting(dataset)}",
                )
            if side == "train" and not len(row):
                raise DataError(key="partition", rule=f"{path}: client {i} has no training samples")
        dealt.append([offset + row.astype(np.int64) for row in rows])
    return list(zip(*dealt, strict=True))


def counting(dataset: str) -> str:
    """Return how a file's numbers count the samples of a data set."""
    source = SOURCES.get(dataset.partition(":")[0])
    order = f": {source.order}" if source and source.order else ""
    return f"train_idx and test_idx each count from 0, in their own part{order}"


def unused(path: Path) -> list[str]:
    """Return the names of a file's arrays that no client's part is read from."""
    names = npz_file.names("partition", path)
    read = {name for side in ("train_idx", "test_idx") for name in _names(side, names)}
    return [name for name in names if name not in read]


def _names(name: str, names: Iterable[str]) -> list[str]:
    """Return the arrays of a part, `train_idx` or `test_idx`: the one with all clients, else one per client."""
    return [name] if name in names else [key for key in names if re.fullmatch(rf"{name}_\d+", key)]


def _rows(path: Path, side: str, arrays: dict[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
    """Return one index array per client of `train_idx` [N, n] or of `train_idx_0`, `train_idx_1`, ..."""
    name = f"{side}_idx"
    found = _names(name, arrays)
    expected = found if name in arrays else [f"{name}_{i}" for i in range(len(found))]
    if not found or set(expected) - set(found):
        missing = next((key for key in expected if key not in found), f"{name}, nor {name}_0")
        raise DataError(key="partition", rule=f"{path} has no {missing}")
    for key in expected:
        ndim = 2 if key == name else 1
        if arrays[key].ndim != ndim:
            raise DataError(
                key="partition", rule=f"{path}: {key} must have {ndim} dimensions, got shape {arrays[key].shape}"
            )
        if arrays[key].dtype.kind not in "iu" and arrays[key].size:
            raise DataError(key="partition", rule=f"{path}: {key} must hold integers, got {arrays[key].dtype}")
    return list(arrays[name]) if name in arrays else [arrays[key] for key in expected]
