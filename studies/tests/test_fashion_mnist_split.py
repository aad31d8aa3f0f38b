"""The data of the early stage's sweep: each client has the images that the split assigns to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fl_app.config import parse
from fl_app.data import open_client, prepare
from fl_app.partition import split
from strategies import METHOD_PARAMS
from studies import fashion_mnist_split


def test_the_first_clients_have_the_images_of_the_split(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = prepare("digits", data_dir)
    monkeypatch.setattr(fashion_mnist_split, "prepare", lambda name, root: digits)
    monkeypatch.setattr("sys.argv", ["split", str(tmp_path / "out"), "--clients", "3", "--of", "12", "--alpha", "1"])
    fashion_mnist_split.main()
    parts = split(
        "dirichlet",
        np.asarray(digits.y_train),
        np.asarray(digits.y_test),
        10,
        num_clients=12,
        seed=0,
        alpha=1.0,
        classes_per_client=1,
        train_samples=0,
        test_samples=0,
        min_samples=10,
        test_ratio=0.25,
    )
    settings = {
        "dataset": f"npz:{tmp_path}/out/data.npz",
        "partition": f"file:{tmp_path}/out/split.npz",
        "num-clients": 3,
        "data-dir": str(tmp_path / "data"),
    }
    config = parse(settings, METHOD_PARAMS)
    images = np.concatenate([digits.x_train, digits.x_test])
    labels = np.concatenate([digits.y_train, digits.y_test])
    for i in range(3):
        client = open_client(config, i)
        for k, (x, y) in enumerate(((client.x_train, client.y_train), (client.x_test, client.y_test))):
            np.testing.assert_array_equal(y, labels[parts[i][k]])
            np.testing.assert_array_equal(np.asarray(x).reshape(len(y), -1), images[parts[i][k]].reshape(len(y), -1))
