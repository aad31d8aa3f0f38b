"""Data sets, converted once into memory-mapped arrays, and each client's part of them.

`check` prepares everything before a run. `open_data` opens the data set that a run's clients share, and `open_client`
opens one client's samples. Both take milliseconds. fl_app/sources.py lists the function that reads each data set.
torch, torchvision, scikit-learn and PIL are imported only during conversion.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import tasks
from fl_app.checksums import DataHashes, Stamp, stamps_in, unchanged
from fl_app.config import RunConfig
from fl_app.data import index_files, validation
from fl_app.data.index_files import Partition, client_names, partition_of
from fl_app.data.moments import MomentSums
from fl_app.data.prepared import (
    DataRequest,
    DatasetInfo,
    Prepared,
    Samples,
    Targets,
    absolute,
    data_root,
    hides_values,
    keyed_hash,
    not_read,
)
from fl_app.data.user_arrays import known
from fl_app.errors import DataError, UserError
from fl_app.files import no_such
from fl_app.keys import KeySpec, Scalar, specs
from fl_app.known_names import BY_COLUMN
from fl_app.partition import Indices, own_file
from fl_app.sources import FOLDER, NODE, SOURCES, Source, path_in, source_of, suffix_of

__all__ = [
    "ClientData",
    "DataRequest",
    "DatasetInfo",
    "OpenedData",
    "Prepared",
    "check",
    "client_names",
    "data_root",
    "numbering",
    "open_client",
    "open_data",
    "partition_remarks",
    "prepare",
    "prepare_for",
    "trained_on",
]


log = logging.getLogger("corolla")

READ_BY = ("seed", "task")
"""Keys that decide how data are read, beside those of kind `data`."""
# a run warns if at least this part of all clients' training samples is of classes that a client did not draw
MANY_SPILLED = 0.05


@dataclass(frozen=True)
class ClientData:
    """One client's samples x [n, ...] and targets y [n] or [n, k]; `info` describes the whole data set.

    validation: samples and targets that are kept out of training (`validation-ratio`). None: there are none. unknown:
    the numbers of training and test samples that are left out, because their label is no class, or their target no
    number. Counts that a client sends include them.
    """

    x_train: Samples
    y_train: Targets
    x_test: Samples
    y_test: Targets
    info: DatasetInfo
    validation: tuple[Samples, Targets] | None = None
    unknown: tuple[int, int] = (0, 0)

    def with_columns(self, names: Sequence[str]) -> ClientData:
        """Return the data with these features alone, in this order. Raises UserError if one is missing."""
        if tuple(names) == self.info.facts.features:
            return self
        places = [self.info.facts.features.index(name) for name in names if name in self.info.facts.features]
        return dataclasses.replace(
            self,
            info=self.info.with_columns(names),
            x_train=self.x_train[:, places],
            x_test=self.x_test[:, places],
            validation=self.validation and (self.validation[0][:, places], self.validation[1]),
        )

    @property
    def num_train(self) -> int:
        """The number of training samples that the client reports."""
        return len(self.y_train) + self.unknown[0]

    @property
    def num_test(self) -> int:
        """The number of test samples that the client reports."""
        return len(self.y_test) + self.unknown[1]

    def of_known_labels(self) -> ClientData:
        """Return these data without the samples whose label is no class."""
        train, test, held_out = (known(y) for y in (self.y_train, self.y_test, self.y_validation))
        return dataclasses.replace(
            self,
            validation=self.validation and (self.x_validation[held_out], self.y_validation[held_out]),
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            x_test=self.x_test[test],
            y_test=self.y_test[test],
            unknown=(int(np.count_nonzero(~train)), int(np.count_nonzero(~test))),
        )

    @property
    def x_validation(self) -> Samples:
        """The validation samples; empty if there are none."""
        return self.x_train[:0] if self.validation is None else self.validation[0]

    @property
    def y_validation(self) -> Targets:
        """The targets of the validation samples."""
        return self.y_train[:0] if self.validation is None else self.validation[1]


@dataclass(frozen=True)
class OpenedData:
    """A run's data set, opened, and its partition. Without a partition one client holds the whole data set.

    stamps: the files' stamps when they were opened. scales_clients: whether each client's mean and standard deviation
    come from its own samples. They always include its validation samples.
    """

    config: RunConfig
    data: Prepared
    partition: Partition | None
    stamps: Mapping[Path, Stamp]
    scales_clients: bool = False

    @property
    def unchanged(self) -> bool:
        """Whether the files are still those that were opened."""
        return unchanged(self.stamps)

    @cached_property
    def hashes(self) -> DataHashes:
        """Hashes that identify the data set and its partition."""
        return DataHashes(self.data.sha256, self.partition.sha256 if self.partition else "")

    @cached_property
    def hidden_hashes(self) -> DataHashes:
        """One keyed hash of `hashes`, for parties that must not recognize the data.

        Raises OSError if the site's key cannot be stored.
        """
        read_by = {
            key.name: value for key, value in self.config.own_keys() if key.name in READ_BY or key.about == "data"
        }
        return DataHashes(keyed_hash("".join(self.hashes), json.dumps(read_by)), "")

    @cached_property
    def hides_values(self) -> bool:
        """Whether a value that cannot be used counts as missing."""
        return hides_values(self.config)

    def client(self, client_id: int, *, once: bool = False) -> ClientData:
        """Return one client's samples, with its validation samples apart.

        once: a sample that the user's own partition gives the client twice is one. It always is with `dp-epsilon`, whose
        noise is that of one record.
        In a private run a table's columns are in the order of their names: the server cannot put them in order.
        Raises UserError unless client_id is in [0, num-clients), and if it has too few samples to have validation samples.
        """
        if not 0 <= client_id < self.config.num_clients:
            rule = f"must be >= 0 and below num-clients ({self.config.num_clients})"
            raise DataError(key=f"client {client_id}", rule=rule)
        data = self.data
        if self.partition is None:
            whole = ClientData(data.x_train, data.y_train, data.x_test, data.y_test, data.info)
        else:
            train, test = self.partition.client(client_id)
            if once or self.config.dp_epsilon:
                train = train[np.sort(np.unique(train, return_index=True)[1])]
            whole = ClientData(*_take(data, train), *_take(data, test), data.info)
        if self.scales_clients:
            whole = dataclasses.replace(whole, info=data.info.scaled_by(MomentSums.of(whole.x_train).moments))
        if self.config.validation_ratio:
            kept, held_out = _validation_split(self.config, whole.y_train, client_id)
            whole = dataclasses.replace(
                whole,
                x_train=whole.x_train[kept],
                y_train=whole.y_train[kept],
                validation=(whole.x_train[held_out], whole.y_train[held_out]),
            )
        if self.config.private:
            whole = whole.with_columns(data.info.facts.by_column)
        return whole.of_known_labels() if self.hides_values else whole


# A client's part ------------------------------------------------------------------------------------------------------


def open_client(config: RunConfig, client_id: int, *, data_path: str = "") -> ClientData:
    """Open one client's samples. Raises UserError as `open_data` does, and for a client_id outside [0, num-clients)."""
    return open_data(config, data_path).client(client_id)


def trained_on(config: RunConfig, data: ClientData, limits: Sequence[tuple[KeySpec, Scalar]] = ()) -> int:
    """Return the number of training samples of which a client makes its batches, the least of all phases of a run.

    Samples whose label is no class of the run are none. limits: keys of the run's method with `trains_on`, and values.
    """
    own = [(spec, getattr(config, spec.field)) for spec in specs(RunConfig)]
    samples = len(data.y_train)
    for spec, value in [*limits, *own]:
        if spec.trains_on is not None:
            samples = spec.trains_on(value, samples, config.batch_size)
    return samples


def open_data(config: RunConfig, data_path: str = "", *, look: bool = False) -> OpenedData:
    """Open a run's data. This takes milliseconds once data set and partition are prepared (`check` does both).

    data_path: the SuperNode's own data, used only by dataset `node`; its client holds all of it. look: as in
    DataRequest. Raises UserError as `prepare_for` and `partition.split` do.
    """
    if config.dataset != NODE:
        data = prepare_for(config, look=look)
        partition = partition_of(config, data)
        scales = config.normalizes_by_site and tasks.normalization(config, data.x_train.dtype) == "mean-std"
        return OpenedData(config, data, partition, stamps_in(data.directory, partition.directory), scales)
    if not data_path:
        raise DataError(
            key="dataset",
            rule="node needs each SuperNode's own data; start it with --node-config 'data-path=\"/site\"'",
        )
    data = prepare_for(config, data_path, look=look)
    if data.info.facts.shift and tasks.normalization(config, data.x_train.dtype) != "mean-std":
        lines = "; ".join(data.info.facts.remarks)
        error = UserError(
            key="normalize",
            rule=f"must be mean-std, because {data_path} holds numbers far from zero beside their spread: {lines}",
        )
        if not hides_values(config):
            raise error
        log.warning("%s", error)
    return OpenedData(config, data, None, stamps_in(data.directory))


def count_clients(config: RunConfig) -> int:
    """Return the number of clients that a column of the data names; 0 unless the partition is `by-column`.

    Raises UserError as `check` does.
    """
    if config.partition != BY_COLUMN or config.dataset == NODE:
        return 0
    return len(prepare_for(config, look=True).info.groups)


def check(config: RunConfig, force: bool = False) -> DatasetInfo:
    """Prepare data set and partition in full, so that every error in them shows before a run starts.

    It does not work for dataset `node`: only the SuperNodes can see that data. force: prepare again even if both are
    prepared. Raises UserError.
    """
    assert config.dataset != NODE
    data = prepare_for(config, force=force, look=True)
    partition = partition_of(config, data, force)
    if config.validation_ratio:
        _validation_sizes(config, data, partition)
    return data.info


def partition_remarks(config: RunConfig, *, brief: bool = False) -> list[str]:
    """Return remarks about a partition, one line each.

    They name samples that several clients hold, samples that one client holds repeatedly, samples that no client holds,
    and clients with unexpected class mixes. With `validation-ratio` they also name clients with few validation samples.
    brief: only a run's warnings. They leave out samples that several clients hold, and samples of a benchmark that no
    client holds. Raises UserError as `check` does.
    """
    data = prepare_for(config)
    partition, info = partition_of(config, data), data.info
    held = index_files.remarks(partition, info, brief)
    # a benchmark leaves out samples because its paper does
    if not brief or source_of(config.dataset).known is None:
        held += index_files.unused(config, partition, info.num_train, info.num_test, info.samples)
    if own := path_in("partition", config.partition):
        path = Path(own).expanduser()
        held += not_read(path, [f"the array {name}" for name in own_file.unused(path)])
    spilled = index_files.spills(config, data.y_train, info.num_classes, info.samples, MANY_SPILLED if brief else 0.0)
    few = validation.remarks(_validation_sizes(config, data, partition)) if config.validation_ratio else []
    return [*held, *spilled, *index_files.mix_remarks(config, partition, data), *few]


def numbering(config: RunConfig) -> str:
    """Return a line stating how the numbers in a user's own partition count samples; "" for any other partition."""
    own = path_in("partition", config.partition)
    return f"{own}: {own_file.counting(config.dataset)}" if own else ""


def _validation_split(config: RunConfig, targets: Targets, client_id: int) -> tuple[Indices, Indices]:
    """Return the places of a client's samples for training and for validation. Raises UserError for fewer than two."""
    return validation.split(
        targets,
        config.validation_ratio,
        seed=config.seed,
        client_id=client_id,
        by_class=tasks.of(config).has_classes,
    )


def _validation_sizes(config: RunConfig, data: Prepared, partition: Partition) -> list[int]:
    """Return each client's number of validation samples. Raises UserError if a client has too few samples for any."""
    # a partition may take samples of the data set's test part for training
    labels = np.concatenate([data.y_train, data.y_test])
    sizes = []
    for client_id in range(partition.num_clients):
        train, _ = partition.client(client_id)
        sizes.append(len(_validation_split(config, labels[train], client_id)[1]))
    return sizes


def _take(data: Prepared, indices: NDArray[np.int64]) -> tuple[Samples, Targets]:
    """Copy samples by their index into [train; test]."""
    n = data.info.num_train
    in_train = indices < n
    if in_train.all():
        return data.x_train[indices], data.y_train[indices]
    if not in_train.any():
        return data.x_test[indices - n], data.y_test[indices - n]
    x = np.empty((len(indices), *data.x_train.shape[1:]), data.x_train.dtype)
    y = np.empty((len(indices), *data.y_train.shape[1:]), data.y_train.dtype)
    x[in_train], y[in_train] = data.x_train[indices[in_train]], data.y_train[indices[in_train]]
    x[~in_train], y[~in_train] = data.x_test[indices[~in_train] - n], data.y_test[indices[~in_train] - n]
    return x, y


# A whole data set -----------------------------------------------------------------------------------------------------


def prepare_for(config: RunConfig, data_path: str = "", *, force: bool = False, look: bool = False) -> Prepared:
    """Open a run's data set, or, for dataset `node`, the site's own data at `data_path`.

    A site may lack classes, and its test set may be missing or empty. force, look: as in DataRequest. Raises UserError
    as `prepare` does, and for a site that has no training samples, or a class that is not in `classes`.
    """
    return _prepare(DataRequest.of(config, data_path, force=force, look=look))


def prepare(dataset: str, root: Path, **more: Any) -> Prepared:
    """Open a data set. Convert it first if no process has done so.

    dataset: as in the run config, but not `node`. root: the data directory. more: other fields of DataRequest. Raises
    UserError naming the error in the data.
    """
    return _prepare(DataRequest(dataset, absolute(path_in("dataset", dataset)), root, **more))


def prepare_site(request: DataRequest) -> Prepared:
    """Open a site's own data: an image folder, an .npz file, a table, or a file of another source."""
    fitting = _sources_reading(request.path)
    if fitting:
        source = fitting[0]
    else:
        # these two sources have the clearest errors for missing files and for files that are no data
        source = SOURCES["npz"] if request.path.is_file() else SOURCES["folder"]
    return _ask(source, request)


def _prepare(request: DataRequest) -> Prepared:
    source = source_of(request.dataset)
    if source.path:
        if not os.path.exists(request.path):
            raise DataError(key="dataset", rule=no_such(request.path))
        _refuse_another_kind(source, request.path)
    return _ask(source, request)


def _ask(source: Source, request: DataRequest) -> Prepared:
    """Let a source prepare data. Raises UserError for settings that the source does not use."""
    where = str(request.path) if request.site else request.dataset
    if source.labels_only and not request.of_task.has_classes:
        raise DataError(key="task", rule=f"{where} has labels of classes, got {request.task}")
    if not request.site:
        # the sites of a run may be of several kinds, some of which have columns
        if source.labels_only and request.client:
            raise DataError(key="client", rule=f"{where} has no columns", value=request.client)
        for key, value in (
            ("exclude", request.exclude),
            ("categorical", request.categorical),
            ("impute", request.impute),
            ("na-values", request.na_values),
            ("separator", request.separator),
            ("tokenizer", (str(request.tokenizer),) if request.tokenizer.name else ()),
            ("test-after", (request.test_after,) if request.test_after else ()),
        ):
            if value and not source.has_columns:
                raise DataError(key=key, rule=f"{where} has no columns; leave it unset", value=",".join(value))
        if request.target and not source.has_columns:
            why = f"has its targets in {source.targets}; leave it unset" if source.targets else "has no columns"
            raise DataError(key="target", rule=f"{where} {why}", value=request.target)
    if source.known and request.classes:
        raise DataError(key="classes", rule=f"{where} has its own; leave it unset", value=",".join(request.classes))
    if source.known and request.image_size and not source.resizes:
        raise DataError(key="image-size", rule=f"{where} has its own; leave it unset", value=request.image_size)
    # `node` asks the source of the site's own file in turn
    if request.own.text and not source.has_columns and source.prefix != NODE:
        why = f"{where} is no table, and [data] of this site's site.toml says how one is read ({', '.join(request.own.given)})"
        if request.site:
            raise DataError(
                key="dataset", rule=f"{why}; remove [data], or start the node with a site.toml of its own (--site)"
            )
        log.warning("%s: it has no effect", why)
    module, _, name = source.prepare.partition(":")
    function: Callable[[DataRequest], Prepared] = getattr(importlib.import_module(module), name)
    return function(request)


def _sources_reading(path: Path) -> list[Source]:
    """Return the sources that read files with a path's suffix, or directories if the path is one."""
    kind = FOLDER if path.is_dir() else suffix_of(path)
    return [source for source in SOURCES.values() if kind in source.reads]


def _refuse_another_kind(source: Source, path: Path) -> None:
    """Raise UserError if a path exists that other sources read and this source does not."""
    fitting = _sources_reading(path) if path.exists() else []
    if not source.reads or not fitting or source in fitting:
        return
    first, *others = fitting
    meant = f"{first.prefix}:{path}"
    if first.has_columns:
        meant += " with target=COLUMN, the column to learn"
    for other in others:
        meant += f", or {other.prefix}:{path} {other.note}"
    kind = "folder" if path.is_dir() else suffix_of(path)
    raise DataError(key="dataset", rule=f"{source.prefix}: takes no {kind}, got {path}; did you mean {meant}?")
