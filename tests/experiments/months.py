"""Tables of one month and the next: real rows, with columns, classes and words in another order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

WINE = ("barolo", "grignolino", "barbera")


def wine(path: Path, *, columns: Sequence[int] = (), words: bool = False, rows: slice = slice(None)) -> Path:
    """Write scikit-learn's wines as a CSV file with a client column. columns: an order of the 13 features."""
    x, y = load_wine(return_X_y=True, as_frame=True)
    order = np.random.default_rng(0).permutation(len(x))
    frame = x.iloc[order].reset_index(drop=True)
    if words:
        frame["strength"] = np.where(frame["alcohol"] > 13, "strong", "light")
    names = [frame.columns[k] for k in columns] or list(frame.columns[:13])
    frame = frame[[*names, *frame.columns[13:]]]
    frame["kind"] = np.array(WINE)[y.iloc[order].to_numpy()]
    frame["plant"] = np.array(["celle", "verden", "uelzen"])[np.arange(len(frame)) % 3]
    frame.iloc[rows].to_csv(path, index=False)
    return path


def diabetes(path: Path, targets: Sequence[str], far: float = 0.0) -> Path:
    """Write scikit-learn's diabetes data with two targets, in an order. far: what is added to the first."""
    x, y = load_diabetes(return_X_y=True, as_frame=True)
    frame = x.drop(columns="bmi") * 10
    both = {"progress": y / 100 + far, "bmi": x["bmi"] * 10}
    for name in targets:
        frame[name] = both[name]
    frame.to_csv(path, index=False)
    return path


def cancer(path: Path, rows: slice, columns: Sequence[int] = tuple(range(8))) -> Path:
    """Write eight columns of scikit-learn's breast cancer data."""
    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    frame = x.iloc[rows, list(columns)].copy()
    frame["kind"] = np.array(["malignant", "benign"])[y.iloc[rows].to_numpy()]
    frame.to_csv(path, index=False)
    return path


def month_of(path: Path, plant: int, plants: int, month: int, kinds: Sequence[str] = ("malignant", "benign")) -> Path:
    """Write a plant's rows of a month: its part of the breast cancer data, drifted by 5 % each month, with days 1 to 28.

    A third kind is the name of the benign rows with the largest mean area.
    """
    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    order = np.random.default_rng(month).permutation(len(x))[plant::plants]
    frame = (x.iloc[order, :8] * (1 + 0.05 * month)).reset_index(drop=True)
    frame["day"] = np.arange(len(frame)) % 28 + 1
    frame["kind"] = np.array(kinds[:2])[y.iloc[order].to_numpy()]
    if len(kinds) > 2:
        benign = frame.index[frame["kind"] == kinds[1]]
        frame.loc[frame.loc[benign, "mean area"].nlargest(len(benign) // 3).index, "kind"] = kinds[2]
    frame.to_csv(path, index=False)
    return path


SETTING: dict[str, Any] = {
    "target": "kind",
    "client": "plant",
    "partition": "by-column",
    "num_clients": 3,
    "learning_rate": 0.05,
    "local_epochs": 3,
}
"""A run on the wines."""
