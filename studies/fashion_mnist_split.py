"""The first clients of a split like FedOBP's of Fashion-MNIST, as an npz data set and a partition file.

FedOBP's setting has 100 clients: all 70,000 images divided per class by Dirichlet(0.1), a quarter of each client's images for
test. A machine of two cores bears 20 of them:

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
from fl_app.partition import split
from strategies import METHOD_PARAMS


def main() -> None:
    """Write data.npz and split.npz."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("output", type=Path)
    arguments.add_argument("--clients", type=int, default=20, help="clients kept")
    arguments.add_argument("--of", type=int, default=100, help="clients the data is divided among")
    arguments.add_argument("--alpha", type=float, default=0.1)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    data = prepare("fashion-mnist", data_root(parse({}, METHOD_PARAMS)))
    parts = split(
        "dirichlet",
        np.asarray(data.y_train),
        np.asarray(data.y_test),
        data.info.num_classes,
        num_clients=options.of,
        seed=options.seed,
        alpha=options.alpha,
        classes_per_client=1,
        train_samples=0,
        test_samples=0,
        min_samples=10,
        test_ratio=0.25,
    )[: options.clients]
    images = np.concatenate([data.x_train, data.x_test])[:, 0]
    labels = np.concatenate([data.y_train, data.y_test])
    arrays: dict[str, NDArray[Any]] = {}
    ranges: dict[str, NDArray[Any]] = {}
    for k, name in enumerate(("train", "test")):
        chosen = np.concatenate([part[k] for part in parts])
        arrays |= {f"x_{name}": images[chosen], f"y_{name}": labels[chosen]}
        bounds = np.cumsum([0, *(len(part[k]) for part in parts)])
        ranges |= {f"{name}_idx_{i}": np.arange(a, b) for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False))}
    options.output.mkdir(parents=True, exist_ok=True)
    np.savez(options.output / "data.npz", **arrays)  # type: ignore[arg-type]
    np.savez(options.output / "split.npz", **ranges)  # type: ignore[arg-type]
    counts = [len(arrays[f"y_{name}"]) for name in ("train", "test")]
    print(f"{len(parts)} clients, {counts[0]} training and {counts[1]} test images in {options.output}")


if __name__ == "__main__":
    main()
