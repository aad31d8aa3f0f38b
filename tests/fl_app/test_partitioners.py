"""FedCAC's partition as a flwr-datasets Partitioner."""

from __future__ import annotations

import pytest
from datasets import Dataset

from fl_app.partitioners import ClientDirichletPartitioner
from tests.fl_app.test_partition import Y_ALL, Y_TEST, Y_TRAIN, K, split


def test_partitioner_equals_the_split() -> None:
    ours = split("dirichlet-client", seed=3)
    train = ClientDirichletPartitioner(4, "label", 0.3, 20, seed=3)
    train.dataset = Dataset.from_dict({"i": range(200), "label": Y_TRAIN})
    test = ClientDirichletPartitioner(4, "label", 0.3, 10, prior=[1] * K, seed=3)
    test.dataset = Dataset.from_dict({"label": Y_TEST})
    assert train.num_partitions == 4
    for i, (mine, held_out) in enumerate(ours):
        assert sorted(train.load_partition(i)["i"]) == mine.tolist()
        assert sorted(test.load_partition(i)["label"]) == sorted(Y_ALL[held_out])


def test_partitioner_errors() -> None:
    for arguments, message in (
        ((0, "label", 0.1, 5), "num_partitions must be >= 1, got 0"),
        ((2, "label", 0.1, 0), "partition_size must be >= 1, got 0"),
        ((2, "label", 0.0, 5), "alpha must be > 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            ClientDirichletPartitioner(*arguments)
    for extra, message in (({"partition_size": 301}, "at most the 200"), ({"prior": [1.0]}, "each of the 5 classes")):
        partitioner = ClientDirichletPartitioner(**({"num_partitions": 2, "partition_by": "label", "alpha": 0.1,
                                                     "partition_size": 5} | extra))  # fmt: skip
        partitioner.dataset = Dataset.from_dict({"label": Y_TRAIN})
        with pytest.raises(ValueError, match=message):
            partitioner.load_partition(0)
