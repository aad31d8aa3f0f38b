"""What has a name here: partitions, tasks, models, trackers; for data sources see fl_app/sources.py. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BY_CLASS = ("dirichlet-client", "dirichlet", "dirichlet-fl-bench", "pathological")
"""Partitions that divide by labels."""

OVER_CLASSES = ("dirichlet", "dirichlet-fl-bench")
"""Partitions that divide all data, each class by itself."""

FIXED_SIZES = ("dirichlet-client", "pathological", "iid")
"""Partitions that give every client `train-samples` and `test-samples`."""

PARTITIONS = (*BY_CLASS, "iid")
"""Partitions that are drawn by a seed."""

BY_COLUMN = "by-column"
OWN_PARTITION = "file:"
"""Prefix of a partition that is a file of the user's own."""

SCALING = ("mean", "std", "shift", "scale", "target-shift")
"""What numbers of data are normalised, shifted and scaled by, as clients tell it and as run.json keeps it."""

TASKS = ("classification", "multi-label", "regression")


@dataclass(frozen=True)
class Network:
    """A model known by name. blocks: BasicBlocks per stage of a ResNet, () for other networks.

    extra: units of a linear layer before the classifier, 0: none.
    """

    blocks: tuple[int, ...] = ()
    extra: int = 0


MODELS: Mapping[str, Network] = {
    "mlp": Network(),
    "cnn": Network(),
    "resnet8": Network((1, 1, 1)),
    "resnet10": Network((1, 1, 1, 1)),
    "resnet18": Network((2, 2, 2, 2)),
    "resnet34": Network((3, 4, 6, 3)),
    "resnet18-fedobp": Network((2, 2, 2, 2), extra=1000),
}

TRACKERS: Mapping[str, str] = {"mlflow": "mlflow-skinny", "wandb": "wandb", "tensorboard": "tensorboard"}
"""What can follow a run, by the name of its package, and what pip installs that with."""
