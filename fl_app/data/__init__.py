"""Data sets, converted once into memory-mapped arrays, and each client's part of them.

`check` prepares everything before a run. `open_data` opens what a run's clients share, and `open_client` one client's samples: both
in milliseconds. fl_app/sources.py says which file here reads a data set. torch, torchvision, scikit-learn and PIL are imported only
while converting.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.checksums import DataHashes, Stamp, stamps_in, unchanged
from fl_app.config import RunConfig
from fl_app.data import index_files
from fl_app.data.index_files import Partition, partition_of
from fl_app.data.prepared import DataRequest, DatasetInfo, Prepared, Samples, Targets, absolute, data_root, keyed_hash
from fl_app.errors import UserError
from fl_app.sources import FOLDER, NODE, SOURCES, Source, path_in, source_of

__all__ = [
    "ClientData",
    "DataRequest",
    "DatasetInfo",
    "OpenedData",
    "Prepared",
    "check",
    "check_client_id",
    "data_root",
    "open_client",
    "open_data",
    "partition_remarks",
    "prepare",
    "prepare_for",
]


# part of all clients' training or test samples
MANY_SPILLED = 0.05


@dataclass(frozen=True)
class ClientData:
    """One client's samples x [n, ...] and targets y [n] or [n, k]; `info` describes the whole data set."""

    x_train: Samples
    y_train: Targets
    x_test: Samples
    y_test: Targets
    info: DatasetInfo


@dataclass(frozen=True)
class OpenedData:
    """A run's data set, opened, and its partition; without one, all of it is one client's. stamps: of the files, when opened."""

    data: Prepared
    partition: Partition | None
    stamps: Mapping[Path, Stamp]

    @property
    def unchanged(self) -> bool:
        """Whether its files are still those that were opened."""
        return unchanged(self.stamps)

    @cached_property
    def hashes(self) -> DataHashes:
        """What the data set and its partition are told from others by."""
        return DataHashes(self.data.sha256, self.partition.sha256 if self.partition else "")

    @cached_property
    def hidden_hashes(self) -> DataHashes:
        """`hashes` for those who must not learn what the data are. Raises OSError where the site's key cannot be kept."""
        return DataHashes(keyed_hash("".join(self.hashes)), "")

    def client(self, client_id: int) -> ClientData:
        """Return one client's samples."""
        if self.partition is None:
            site = self.data
            return ClientData(site.x_train, site.y_train, site.x_test, site.y_test, site.info)
        train, test = self.partition.client(client_id)
        return ClientData(*_take(self.data, train), *_take(self.data, test), self.data.info)


# A client's part ------------------------------------------------------------------------------------------------------


def open_client(config: RunConfig, client_id: int, *, data_path: str = "") -> ClientData:
    """Open one client's samples as `open_data` does. Raises UserError for a client_id outside [0, num-clients), and as that."""
    check_client_id(config, client_id)
    return open_data(config, data_path).client(client_id)


def open_data(config: RunConfig, data_path: str = "", *, look: bool = False) -> OpenedData:
    """Open a run's data; milliseconds once data set and partition are prepared (`check` does both).

    data_path: the SuperNode's own data, used by dataset `node` alone, whose client holds all of it. look: as in `prepare`.
    Raises UserError as `prepare_for` and `partition.split` do.
    """
    if config.dataset != NODE:
        data = prepare_for(config, look=look)
        partition = partition_of(config, data)
        return OpenedData(data, partition, stamps_in(data.directory, partition.directory))
    if not data_path:
        raise UserError(
            "dataset: node needs each SuperNode's own data; start it with --node-config 'data-path=\"/site\"'"
        )
    data = prepare_for(config, data_path, look=look)
    if data.info.facts.shift and config.normalize != "mean-std":
        lines = "; ".join(data.info.facts.remarks)
        raise UserError(
            f"normalize: must be mean-std, for {data_path} holds numbers far from zero beside their spread: {lines}"
        )
    return OpenedData(data, None, stamps_in(data.directory))


def check_client_id(config: RunConfig, client_id: int) -> None:
    """Raise UserError for a client that a run does not have."""
    if not 0 <= client_id < config.num_clients:
        raise UserError(f"client {client_id}: must be >= 0 and below num-clients ({config.num_clients})")


def check(config: RunConfig, force: bool = False) -> DatasetInfo:
    """Prepare data set and partition in full, so that everything wrong with them shows before a run starts.

    force: prepare them again if they are there. Not for dataset `node`, whose data only the SuperNodes can see. Raises UserError.
    """
    assert config.dataset != NODE
    data = prepare_for(config, force=force, look=True)
    partition_of(config, data, force)
    return data.info


def partition_remarks(config: RunConfig, *, brief: bool = False) -> list[str]:
    """Say which samples several clients hold, one holds repeatedly, or nobody holds, and whose mixes of classes surprise.

    brief: only what a run warns of: repetitions, and mixes. Raises UserError as `check` does.
    """
    data = prepare_for(config)
    partition, info = partition_of(config, data), data.info
    if brief:
        held = index_files.repeated(partition, info.samples)
    else:
        held = index_files.remarks(partition, info.num_train, info.num_test, info.samples)
    spilled = index_files.spills(config, data.y_train, info.num_classes, info.samples, MANY_SPILLED if brief else 0.0)
    return [*held, *spilled, *index_files.mix_remarks(config, partition, data)]


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


# A whole data set -----------------------------------------------------------------------------------------------------


def prepare_for(config: RunConfig, data_path: str = "", *, force: bool = False, look: bool = False) -> Prepared:
    """Open a run's data set, or, for dataset `node`, the site's own at `data_path`.

    A site may lack classes, and its test set may be missing or empty. force, look: as in `prepare`. Raises UserError as `prepare`
    does, and for a site that has no training samples, or a class that is not in `classes`.
    """
    return _prepare(DataRequest.of(config, data_path, force=force, look=look))


def prepare(dataset: str, root: Path, **more: Any) -> Prepared:
    """Open a data set, converting it first if no process has yet.

    dataset: as in the run config, but not `node`. root: the data directory. more: other fields of DataRequest. Raises UserError
    naming what is wrong with the data.
    """
    return _prepare(DataRequest(dataset, absolute(path_in("dataset", dataset)), root, **more))


def prepare_site(request: DataRequest) -> Prepared:
    """Open a site's own data: an image folder, an .npz file, a table, or what another source of files reads."""
    fitting = _sources_reading(request.path)
    if fitting:
        source = fitting[0]
    else:
        # these two have the clearest errors for what is no data, or not there
        source = SOURCES["npz"] if request.path.is_file() else SOURCES["folder"]
    return _ask(source, request)


def _prepare(request: DataRequest) -> Prepared:
    source = source_of(request.dataset)
    if source.path:
        _refuse_another_kind(source, request.path)
    return _ask(source, request)


def _ask(source: Source, request: DataRequest) -> Prepared:
    """Let a source prepare data. Raises UserError for settings that mean nothing to it."""
    where = str(request.path) if request.site else request.dataset
    if source.labels_only and not request.of_task.has_classes:
        raise UserError(f"task: {where} has labels of classes, got {request.task}")
    if not request.site:
        # the sites of a run may be of several kinds, some of which have columns
        if source.labels_only and request.client:
            raise UserError(f"client: {where} has no columns, got {request.client!r}")
        for key, value in (
            ("exclude", request.exclude),
            ("categorical", request.categorical),
            ("na-values", request.na_values),
            ("separator", request.separator),
        ):
            if value and not source.has_columns:
                raise UserError(f"{key}: {where} has no columns; leave it unset, got {','.join(value)!r}")
        if request.target and not source.has_columns:
            why = f"has its targets in {source.targets}; leave it unset" if source.targets else "has no columns"
            raise UserError(f"target: {where} {why}, got {request.target!r}")
    if source.known and request.classes:
        raise UserError(f"classes: {where} has its own; leave it unset, got {','.join(request.classes)!r}")
    if source.known and request.image_size and not source.resizes:
        raise UserError(f"image-size: {where} has its own; leave it unset, got {request.image_size!r}")
    module, _, name = source.prepare.partition(":")
    function: Callable[[DataRequest], Prepared] = getattr(importlib.import_module(module), name)
    return function(request)


def _sources_reading(path: Path) -> list[Source]:
    """Return the sources that read what has a path's suffix, or a directory if there is one."""
    kind = FOLDER if path.is_dir() else path.suffix.lower()
    return [source for source in SOURCES.values() if kind in source.reads]


def _refuse_another_kind(source: Source, path: Path) -> None:
    """Raise UserError if there is something at a path that other sources read, and this one does not."""
    fitting = _sources_reading(path) if path.exists() else []
    if not source.reads or not fitting or source in fitting:
        return
    first, *others = fitting
    meant = f"{first.prefix}:{path}"
    if first.has_columns:
        meant += " with target=COLUMN, the one to learn"
    for other in others:
        meant += f", or {other.prefix}:{path} {other.note}"
    what = "folder" if path.is_dir() else path.suffix
    raise UserError(f"dataset: {source.prefix}: takes no {what}, got {path}; did you mean {meant}?")
