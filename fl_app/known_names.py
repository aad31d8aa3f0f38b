"""What has a name here: the data sets, the models, the partitions and the tasks. Imports nothing heavy, the run config asks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NamedData:
    """A data set known by name, whose images are [in_channels, image_size, image_size].

    torchvision: its class in torchvision.datasets, if it is there; train, test: that class's arguments for either part.
    file: its name in the data directory, where the user puts it. has_path: written `name:/path`, where the user's copy lies.
    """

    in_channels: int
    num_classes: int
    image_size: int
    torchvision: str = ""
    train: Mapping[str, str | bool] = field(default_factory=lambda: {"train": True})
    test: Mapping[str, str | bool] = field(default_factory=lambda: {"train": False})
    file: str = ""
    has_path: bool = False


_BYCLASS_TRAIN: Mapping[str, str | bool] = {"split": "byclass", "train": True}
_BYCLASS_TEST: Mapping[str, str | bool] = {"split": "byclass", "train": False}

DATASETS: Mapping[str, NamedData] = {
    "digits": NamedData(1, 10, 8),  # scikit-learn's
    "mnist": NamedData(1, 10, 28, "MNIST"),
    "fashion-mnist": NamedData(1, 10, 28, "FashionMNIST"),
    "emnist": NamedData(1, 62, 28, "EMNIST", _BYCLASS_TRAIN, _BYCLASS_TEST),
    "svhn": NamedData(3, 10, 32, "SVHN", {"split": "train"}, {"split": "test"}),
    "cifar10": NamedData(3, 10, 32, "CIFAR10"),
    "cifar100": NamedData(3, 100, 32, "CIFAR100"),
    "medmnist-a": NamedData(1, 11, 28, file="organamnist.npz"),  # OrganAMNIST
    "medmnist-c": NamedData(1, 11, 28, file="organcmnist.npz"),  # OrganCMNIST
    "tiny-imagenet": NamedData(3, 200, 64, has_path=True),
}
BY_CLASS = ("dirichlet-client", "dirichlet", "dirichlet-fl-bench", "pathological")  # partitions that divide by labels
OVER_CLASSES = ("dirichlet", "dirichlet-fl-bench")  # those that divide all data, each class by itself
PARTITIONS = (*BY_CLASS, "iid")
BY_COLUMN = "by-column"
FIXED_SIZES = ("dirichlet-client", "pathological", "iid")
TASKS = ("classification", "multi-label", "regression")
NODE = "node"  # each SuperNode's own data
OWN_DATA = ("folder", "npz", "table", "hf")  # the user's, written folder:/path
PATH_DATASETS = (*(f"{kind}:" for kind in OWN_DATA), *(f"{name}:" for name, data in DATASETS.items() if data.has_path))


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
