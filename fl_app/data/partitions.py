"""Partitions as index files: computed and written once, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.files import build_once, cache_key
from fl_app.partition import Indices, Share, split


@dataclass(frozen=True)
class Partition:
    """All clients' indices: flat int64 [total]; offsets int64 [2N + 1]: training, test of client 0, of client 1, ..."""

    flat: Indices
    offsets: Indices

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return (len(self.offsets) - 1) // 2

    def client(self, client_id: int) -> Share:
        """Return (train, test) indices of one client, int64 [n] and [m], into [train; test]."""
        start, middle, stop = (int(o) for o in self.offsets[2 * client_id : 2 * client_id + 3])
        return np.array(self.flat[start:middle]), np.array(self.flat[middle:stop])


def open_partition(
    config: RunConfig, y_train: Indices, y_test: Indices, num_classes: int, dataset_key: str, root: Path
) -> Partition:
    """Open the partition `config` describes, computing and writing it first if no process has yet.

    y_train, y_test: int64 [n], [m], read only when it must be computed. dataset_key: `Prepared.key`. root: data
    directory. Raises UserError as `split` does.
    """
    target = root / "partitions" / _key(config, dataset_key)

    def build(directory: Path) -> None:
        shares = split(
            config.partition, y_train, y_test, num_classes, num_clients=config.num_clients, seed=config.seed,
            alpha=config.dirichlet_alpha, classes_per_client=config.classes_per_client,
            train_samples=config.train_samples, test_samples=config.test_samples, min_samples=config.min_samples,
            test_ratio=config.test_ratio, assignment=config.pathological_assignment, balance=config.dirichlet_balance,
            dataset=config.dataset,
        )  # fmt: skip
        parts = [part for share in shares for part in share]
        np.save(directory / "offsets.npy", np.cumsum([0, *map(len, parts)], dtype=np.int64))
        np.save(directory / "flat.npy", np.concatenate(parts))

    build_once(target, build, key="data-dir")
    return Partition(np.load(target / "flat.npy", mmap_mode="r"), np.load(target / "offsets.npy"))


def _key(config: RunConfig, dataset_key: str) -> str:
    """Name a partition by exactly what defines it."""
    parts: list[Any] = [dataset_key, config.partition, config.num_clients]
    parts += [value for key, value in config.own_keys() if config.partition in key.partitions]
    name = config.partition
    if config.partition.startswith("file:"):
        name = "file"
        path = Path(config.partition.removeprefix("file:")).expanduser()
        if not path.is_file():
            raise UserError(f"partition: no file {path}")
        parts += [str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size]
    return cache_key(f"{name}-{config.num_clients}", parts)
