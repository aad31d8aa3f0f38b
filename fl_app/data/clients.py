"""One client's part of a prepared data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig, class_names
from fl_app.data.partitions import open_partition
from fl_app.data.prepared import DatasetInfo, Images, Labels, Prepared, data_root
from fl_app.data.sources import prepare, prepare_site
from fl_app.errors import UserError


@dataclass(frozen=True)
class ClientData:
    """One client's samples: x uint8 [n, C, S, S], y int64 [n]; `info` describes the whole data set."""

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    info: DatasetInfo


def open_client(config: RunConfig, client_id: int, *, data_path: str = "") -> ClientData:
    """Open one client's samples; milliseconds once data set and partition are prepared (`check` does both).

    data_path: the SuperNode's own data, used by dataset `node` alone, whose client holds all of it. Raises UserError
    for a client_id outside [0, num-clients) and as `prepare`, `prepare_site` and `partition.split` do.
    """
    if not 0 <= client_id < config.num_clients:
        raise UserError(f"client {client_id}: must be >= 0 and below num-clients ({config.num_clients})")
    root, names = data_root(config), class_names(config.classes)
    if config.dataset == "node":
        if not data_path:
            raise UserError(
                f"client {client_id}: dataset node needs each SuperNode's own data; start it with "
                "--node-config 'data-path=\"/site\"'"
            )
        site = prepare_site(data_path, root, classes=names, image_size=config.image_size)
        return ClientData(site.x_train, site.y_train, site.x_test, site.y_test, site.info)
    data = prepare(config.dataset, root, classes=names, image_size=config.image_size)
    shares = open_partition(config, data.y_train, data.y_test, data.info.num_classes, data.key, root)
    train, test = shares.client(client_id)
    return ClientData(*_take(data, train), *_take(data, test), data.info)


def check(config: RunConfig) -> DatasetInfo:
    """Prepare data set and partition in full, so that everything wrong with them shows before a run starts.

    Not for dataset `node`, whose data only the SuperNodes can see. Raises UserError.
    """
    assert config.dataset != "node"
    root = data_root(config)
    data = prepare(config.dataset, root, classes=class_names(config.classes), image_size=config.image_size)
    open_partition(config, data.y_train, data.y_test, data.info.num_classes, data.key, root)
    return data.info


def _take(data: Prepared, indices: NDArray[np.int64]) -> tuple[Images, Labels]:
    """Copy samples by their index into [train; test]."""
    n = data.info.num_train
    in_train = indices < n
    if in_train.all():
        return data.x_train[indices], data.y_train[indices]
    x = np.empty((len(indices), *data.x_train.shape[1:]), np.uint8)
    y = np.empty(len(indices), np.int64)
    x[in_train], y[in_train] = data.x_train[indices[in_train]], data.y_train[indices[in_train]]
    x[~in_train], y[~in_train] = data.x_test[indices[~in_train] - n], data.y_test[indices[~in_train] - n]
    return x, y
