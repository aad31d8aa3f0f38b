"""The prepared form of a data set: memory-mapped arrays that every client process opens in milliseconds.

A data set becomes <root>/datasets/<key>/ with x_train.npy, x_test.npy (uint8 [n, C, S, S]), y_train.npy, y_test.npy
(int64 [n]) and info.json. The key names what defines the data; a client process computes it again. The conversion is under a
lock and ends in a rename: many processes at once do it exactly once, and an interrupted one leaves nothing that would be used.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.files import build_once, cache_key

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Arrays = tuple[Images, Labels, Images, Labels]

FORMAT = 1
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
STATISTICS_BATCH = 1024


@dataclass(frozen=True)
class DatasetInfo:
    """What a model and a report need to know of a data set.

    Images are [in_channels, image_size, image_size]. classes: names in label order. mean, std: per channel, of the
    training images scaled to [0, 1]; std is 1 for a channel that never varies, so that dividing by it is safe.
    """

    in_channels: int
    image_size: int
    classes: tuple[str, ...]
    num_train: int
    num_test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.classes)

    @classmethod
    def from_json(cls, text: str) -> DatasetInfo:
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("classes", "mean", "std")}
        return cls(**fields)

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)


@dataclass(frozen=True)
class Prepared:
    """A converted data set: read-only memory maps, x uint8 [n, C, S, S], y int64 [n]; key names it among all others."""

    root: Path
    info: DatasetInfo
    key: str
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels


def data_root(config: RunConfig) -> Path:
    """Return `data-dir`, else $COROLLA_DATA_DIR, else corolla under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := config.data_dir or os.environ.get("COROLLA_DATA_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corolla"


def open_or_convert(
    root: Path, name: str, parts: Sequence[Any], convert: Callable[[Path], Sequence[str]], force: bool
) -> Prepared:
    """Open <root>/datasets/<key>, the key made of a readable name and `parts`, which JSON must hold.

    convert: writes the four arrays into a directory (see `save`) and returns the class names; called if no process has yet.
    """
    key = cache_key(name, [FORMAT, *parts])
    directory = root / "datasets" / key

    def build(fresh: Path) -> None:
        names = tuple(convert(fresh))
        x_train, _, x_test, _ = _load(fresh)
        mean, std = _statistics(x_train)
        channels, size = x_train.shape[1:3]
        info = DatasetInfo(channels, size, names, len(x_train), len(x_test), mean, std)
        (fresh / "info.json").write_text(info.to_json())

    build_once(directory, build, key="data-dir", force=force)
    info = DatasetInfo.from_json((directory / "info.json").read_text())
    return Prepared(root, info, key, *_load(directory))


def save(directory: Path, arrays: Arrays) -> None:
    """Write the four arrays a conversion ends in."""
    for name, array in zip(ARRAYS, arrays, strict=True):
        dtype = np.uint8 if name.startswith("x") else np.int64
        np.save(directory / f"{name}.npy", np.ascontiguousarray(array, dtype))


def _load(directory: Path) -> Arrays:
    x_train, y_train, x_test, y_test = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
    return x_train, y_train, x_test, y_test


def _statistics(x: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and population std per channel of x / 255, from exact counts of the 256 values."""
    counts = np.zeros((x.shape[1], 256), np.int64)
    for start in range(0, len(x), STATISTICS_BATCH):
        batch = x[start : start + STATISTICS_BATCH]
        for channel, row in enumerate(counts):
            row += np.bincount(batch[:, channel].reshape(-1), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt(np.maximum(weights @ values**2 - mean**2, 0))
    std[np.count_nonzero(counts, axis=1) == 1] = 1.0
    return tuple(map(float, mean)), tuple(map(float, std))


def at_least_two(names: Sequence[str], path: Path) -> Sequence[str]:
    """Return the class names of the data at `path`. Raises UserError if they are fewer than two."""
    if len(names) < 2:
        raise UserError(f"dataset: {path} must hold at least two classes, got {listed(names) or 'none'}")
    return names


def listed(names: Sequence[str]) -> str:
    """Return class names as an error prints them."""
    return ", ".join(names[:20]) + (f" ... ({len(names)})" if len(names) > 20 else "")
