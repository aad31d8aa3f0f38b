"""OrganAMNIST and OrganCMNIST of MedMNIST v2 (Yang et al., Scientific Data 2023), from their official .npz files.

The user puts the file into the data directory. Training and validation images together are the training set. A
partition that divides all data, as FedOBP's does, then uses all three parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fl_app.data.npz import members
from fl_app.data.prepared import Arrays, DataRequest, Prepared, Samples, Targets, open_or_convert, save
from fl_app.data.user_arrays import refuse, samples, targets
from fl_app.errors import DataError
from fl_app.sources import named_data
from fl_app.tasks import Classification

CLASSES = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
SPLITS = ("train", "val", "test")


def prepare(request: DataRequest) -> Prepared:
    """Open `medmnist-a` or `medmnist-c` from its file in the data directory. Raises UserError."""
    known = named_data(request.dataset)
    assert known is not None
    path = (request.root / known.file).resolve()
    if not path.is_file():
        raise DataError(
            key="dataset",
            rule=f"{request.dataset} needs the file {path.name} in the data directory: no {path}. Get it "
            "(28 x 28 pixels) from medmnist.com or with the Python package medmnist",
        )

    def convert(directory: Path) -> Sequence[str]:
        save(directory, _read_splits(path, known.image_size))
        return CLASSES

    parts = [str(path), path.stat().st_mtime_ns, path.stat().st_size]
    return open_or_convert(request, request.dataset, parts, convert)


def _read_splits(path: Path, side: int) -> Arrays:
    arrays = members(path, [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels")])
    parts: list[tuple[Samples, Targets]] = []
    for split in SPLITS:
        x_name, y_name = f"{split}_images", f"{split}_labels"
        x, y = arrays[x_name], arrays[y_name]
        # MedMNIST has a column per task, here one
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if x.dtype != np.uint8:
            refuse(path, x_name, "be uint8 with values 0 .. 255", x.dtype)
        if x.shape[1:] != (side, side):
            raise DataError(
                key="dataset", rule=f"{path}: {x_name} must have shape [n, {side}, {side}]", value=list(x.shape)
            )
        if len(x) != len(y):
            refuse(path, y_name, f"have one label for each of the {len(x)} images", len(y))
        some = [str(k) for k in range(int(y.max(initial=0)) + 1)]
        labels, _, _ = targets(path, Classification(), (y_name, y), (y_name, y[:0]), some)
        if labels.max(initial=0) >= len(CLASSES):
            raise DataError(
                key="dataset", rule=f"{path}: {y_name} must hold labels below {len(CLASSES)}, got {labels.max()}"
            )
        parts.append((samples(path, x_name, x), labels))
    (x_train, y_train), (x_val, y_val), (x_test, y_test) = parts
    return np.concatenate([x_train, x_val]), np.concatenate([y_train, y_val]), x_test, y_test
