"""The first clients of a split like FedOBP's of Fashion-MNIST, as an npz data set and a partition file.

FedOBP's setting has 100 clients: all 70,000 images divided per class by Dirichlet(0.1), a quarter of each client's
images for test. A machine with two cores can run 20 of them:

    python -m studies.fashion_mnist_split fashion-mnist-split
    corolla run --set dataset=npz:fashion-mnist-split/data.npz --set partition=file:fashion-mnist-split/split.npz --clients 20
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import parse
from fl_app.data import data_root, prepare
from fl_app.partition import Share, split
from strategies import METHOD_PARAMS

Arrays = dict[str, NDArray[Any]]


def divide(labels: NDArray[Any], num_train: int, options: argparse.Namespace) -> list[Share]:
    """Return the split's first clients: for each one, the indices of its training images and of its test images.

    labels: of the training set, then of the test set; num_train: the size of the training set.
    """
    parts = split(
        "dirichlet",
        labels[:num_train],
        labels[num_train:],
        int(labels.max()) + 1,
        num_clients=options.of,
        seed=options.seed,
        alpha=options.alpha,
        classes_per_client=1,
        train_samples=0,
        test_samples=0,
        min_samples=10,
        test_ratio=0.25,
    )
    return parts[: options.clients]


def arrays_of(images: NDArray[Any], labels: NDArray[Any], parts: list[Share]) -> tuple[Arrays, Arrays]:
    """Return the contents of data.npz and split.npz.

    data.npz has the clients' images, one client's after the other's. split.npz has each client's range.
    """
    data: Arrays = {}
    ranges: Arrays = {}
    for k, name in enumerate(("train", "test")):
        chosen = np.concatenate([part[k] for part in parts])
        data[f"x_{name}"], data[f"y_{name}"] = images[chosen], labels[chosen]
        start = 0
        for i, part in enumerate(parts):
            end = start + len(part[k])
            ranges[f"{name}_idx_{i}"] = np.arange(start, end)
            start = end
    return data, ranges


def main() -> None:
    """Write data.npz and split.npz."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("output", type=Path)
    arguments.add_argument("--clients", type=int, default=20, help="clients kept")
    arguments.add_argument("--of", type=int, default=100, help="clients the data is divided among")
    arguments.add_argument("--alpha", type=float, default=0.1)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    source = prepare("fashion-mnist", data_root(parse({}, METHOD_PARAMS)))
    images = np.concatenate([source.x_train, source.x_test])[:, 0]
    labels = np.concatenate([source.y_train, source.y_test])
    parts = divide(labels, len(source.y_train), options)
    data, ranges = arrays_of(images, labels, parts)
    options.output.mkdir(parents=True, exist_ok=True)
    np.savez(options.output / "data.npz", **data)  # type: ignore[arg-type]
    np.savez(options.output / "split.npz", **ranges)  # type: ignore[arg-type]
    print(
        f"{len(parts)} clients, {len(data['y_train'])} training and {len(data['y_test'])} test images in {options.output}"
    )


if __name__ == "__main__":
    main()
