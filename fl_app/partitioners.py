"""FedCAC's partition as one more flwr-datasets `Partitioner`, for use with `FederatedDataset` and friends.

A run itself calls `fl_app.partition.split`, which shares this arithmetic and imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from datasets import ClassLabel, Dataset
from flwr_datasets.partitioner import Partitioner
from numpy.typing import NDArray

from fl_app.partition import allocate, client_mixes, deal
from fl_app.rng import generator


class ClientDirichletPartitioner(Partitioner):  # type: ignore[misc]
    """Fixed-size partitions with class proportions q ~ Dir(alpha * prior) per partition (FedCAC, ICCV 2023, §4.1).

    num_partitions: N. partition_by: column of integer labels 0 .. K-1. alpha: concentration per class, > 0.
    partition_size: samples in each partition, at least 1. prior: [K], default the data set's class counts; only its
    proportions count. Partitioners with equal seed, alpha and prior draw the same q, so one for the training split and
    one for the test split give every client the same proportions in both. Partitions share samples only once a class
    is used up. Raises ValueError for a value out of range or a data set smaller than one partition.
    """

    def __init__(
        self, num_partitions: int, partition_by: str, alpha: float, partition_size: int,
        prior: Sequence[float] | None = None, seed: int = 42,
    ) -> None:  # fmt: skip
        """Check the values; nothing is dealt before the first partition is loaded."""
        super().__init__()
        for name, value in (("num_partitions", num_partitions), ("partition_size", partition_size)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not alpha > 0:
            raise ValueError(f"alpha must be > 0, got {alpha}")
        self._num_partitions = num_partitions
        self._partition_by = partition_by
        self._alpha = alpha
        self._partition_size = partition_size
        self._prior = prior
        self._seed = seed
        self._indices: list[NDArray[np.int64]] | None = None

    @property
    def num_partitions(self) -> int:
        """Number of partitions N."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the partition with this number, 0 .. N-1."""
        if self._indices is None:
            self._indices = self._deal()
        return self.dataset.select(self._indices[partition_id])

    def _deal(self) -> list[NDArray[np.int64]]:
        labels = np.asarray(self.dataset.with_format("numpy")[self._partition_by][:], np.int64)
        if self._partition_size > len(labels):
            raise ValueError(f"partition_size must be at most the {len(labels)} samples, got {self._partition_size}")
        feature = self.dataset.features[self._partition_by]
        num_classes = feature.num_classes if isinstance(feature, ClassLabel) else int(labels.max()) + 1
        room = np.bincount(labels, minlength=max(num_classes, len(self._prior or ())))
        prior = room if self._prior is None else np.asarray(self._prior, np.float64)
        if len(prior) != len(room):
            raise ValueError(f"prior must have one entry for each of the {len(room)} classes, got {len(prior)}")
        mixes = client_mixes(prior, self._alpha, self._num_partitions, self._seed)
        counts = np.stack([allocate(q, self._partition_size, room) for q in mixes])
        return deal(counts, labels, generator(self._seed, "partition-train"))
