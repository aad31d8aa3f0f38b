"""One client's part of a prepared data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.data import index_files
from fl_app.data.index_files import partition_of, remarks
from fl_app.data.prepared import DatasetInfo, Prepared, Samples, Targets
from fl_app.data.sources import prepare_for
from fl_app.errors import UserError


@dataclass(frozen=True)
class ClientData:
    """One client's samples x [n, ...] and targets y [n] or [n, k]; `info` describes the whole data set."""

    x_train: Samples
    y_train: Targets
    x_test: Samples
    y_test: Targets
    info: DatasetInfo


def open_client(config: RunConfig, client_id: int, *, data_path: str = "", look: bool = False) -> ClientData:
    """Open one client's samples; milliseconds once data set and partition are prepared (`check` does both).

    data_path: the SuperNode's own data, used by dataset `node` alone, whose client holds all of it. look: as `prepare`. Raises
    UserError for a client_id outside [0, num-clients) and as `prepare_for` and `partition.split` do.
    """
    if not 0 <= client_id < config.num_clients:
        raise UserError(f"client {client_id}: must be >= 0 and below num-clients ({config.num_clients})")
    if config.dataset == "node":
        if not data_path:
            raise UserError(
                f"client {client_id}: dataset node needs each SuperNode's own data; start it with "
                "--node-config 'data-path=\"/site\"'"
            )
        site = prepare_for(config, data_path, look=look)
        return ClientData(site.x_train, site.y_train, site.x_test, site.y_test, site.info)
    data = prepare_for(config, look=look)
    shares = partition_of(config, data)
    train, test = shares.client(client_id)
    return ClientData(*_take(data, train), *_take(data, test), data.info)


def check(config: RunConfig, force: bool = False) -> DatasetInfo:
    """Prepare data set and partition in full, so that everything wrong with them shows before a run starts.

    force: again, also what is there. Not for dataset `node`, whose data only the SuperNodes can see. Raises UserError.
    """
    assert config.dataset != "node"
    data = prepare_for(config, force=force, look=True)
    partition_of(config, data, force)
    return data.info


def partition_remarks(config: RunConfig) -> list[str]:
    """Say which samples several clients hold, one holds repeatedly, or nobody holds. Raises UserError as `check`."""
    data = prepare_for(config)
    return remarks(partition_of(config, data), data.info.num_train, data.info.num_test, data.info.samples)


def repeated(config: RunConfig) -> list[str]:
    """Say which clients hold a sample more than once. Raises UserError as `check`."""
    data = prepare_for(config)
    return index_files.repeated(partition_of(config, data), data.info.samples)


def _take(data: Prepared, indices: NDArray[np.int64]) -> tuple[Samples, Targets]:
    """Copy samples by their index into [train; test]."""
    n = data.info.num_train
    in_train = indices < n
    if in_train.all():
        return data.x_train[indices], data.y_train[indices]
    x = np.empty((len(indices), *data.x_train.shape[1:]), data.x_train.dtype)
    y = np.empty((len(indices), *data.y_train.shape[1:]), data.y_train.dtype)
    x[in_train], y[in_train] = data.x_train[indices[in_train]], data.y_train[indices[in_train]]
    x[~in_train], y[~in_train] = data.x_test[indices[~in_train] - n], data.y_test[indices[~in_train] - n]
    return x, y
