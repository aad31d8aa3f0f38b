"""Names of partitions, means, tasks, models and trackers; fl_app/sources.py has those of data. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")
"""Corolla's own packages."""

BY_CLASS = ("dirichlet-client", "dirichlet", "dirichlet-fl-bench", "pathological")
"""Partitions that divide by labels."""

OVER_CLASSES = ("dirichlet", "dirichlet-fl-bench")
"""Partitions that divide all data, class by class."""

FIXED_SIZES = ("dirichlet-client", "pathological", "iid")
"""Partitions that give every client `train-samples` and `test-samples`."""

PARTITIONS = (*BY_CLASS, "iid")
"""Partitions drawn by a seed."""

UNBALANCED = "blocks-unbalanced"
"""The value of `pathological-assignment` for PFLlib's unbalanced partition."""

OWN_TEST_PART = "pathological-own-test-part"
"""The partition `pathological` with `test-samples = -1`, as a word in a key's `partitions`."""


def divisions(partition: str, dataset: str, test_samples: int) -> frozenset[str]:
    """Return the words for a run's division of data that a key's `partitions` may contain."""
    own = {OWN_TEST_PART} if partition == "pathological" and test_samples < 0 else set()
    return frozenset({partition.partition(":")[0], dataset.partition(":")[0], *own})


STEP = "step:"
"""Prefix of a schedule: the rounds between its steps follow."""

PLATEAU = "plateau:"
"""Prefix of a schedule: the rounds without a lower loss before a step follow."""

BY_COLUMN = "by-column"
CLIENT_NAME = "client-name"
"""The client property with the client's name in the data, if a column names clients. Private runs do not send it."""
OWN_PARTITION = "file:"
"""Prefix of a partition that is a user's own file."""

SCALING = ("mean", "std", "shift", "scale", "target-shift")
"""Names, in clients' answers and in run.json, of the numbers that normalize, shift and scale the data."""

Average = Literal["none", "median", "trimmed-mean", "krum", "geometric-median"]
"""Rules for means over clients. Each has a file in strategies/kernels/averages/, apart from "none", the plain mean."""

TASKS = ("classification", "multi-label", "regression")


@dataclass(frozen=True)
class Architecture:
    """A model with a name. blocks: BasicBlocks per stage of a ResNet; () for other networks.

    extra: units of a linear layer before the classifier; 0: there is none. tokens: its samples are token ids, not images.
    """

    blocks: tuple[int, ...] = ()
    extra: int = 0
    tokens: bool = False


MODELS: Mapping[str, Architecture] = {
    "mlp": Architecture(),
    "cnn": Architecture(),
    "resnet8": Architecture((1, 1, 1)),
    "resnet10": Architecture((1, 1, 1, 1)),
    "resnet18": Architecture((2, 2, 2, 2)),
    "resnet34": Architecture((3, 4, 6, 3)),
    "resnet18-fedobp": Architecture((2, 2, 2, 2), extra=1000),
    "transformer": Architecture(tokens=True),
}

VOCABULARY = 20_000
"""Token ids that the model `transformer` knows, and to which texts are converted."""

TRACKERS: Mapping[str, str] = {"mlflow": "mlflow-skinny", "wandb": "wandb", "tensorboard": "tensorboard"}
"""Experiment trackers by import name, with the name of the package that pip installs."""
