"""Partitions as index files: each is computed and written once, and every process reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_app import tasks
from fl_app.checksums import hash_of, refuse_damage
from fl_app.config import RunConfig
from fl_app.data.prepared import DatasetInfo, Prepared, hides_values, prepared_in
from fl_app.errors import DataError, counted, describe, listed
from fl_app.files import build_once, cache_key, no_such
from fl_app.known_names import BY_CLASS, BY_COLUMN, FIXED_SIZES, OWN_PARTITION, PARTITIONS, divisions
from fl_app.partition import Column, Indices, Share, spilled, split
from fl_app.sources import NODE

SAME_MIX = ("dirichlet-client", "pathological")
"""Partitions that test a client on the class mix it trains on."""

MIX_RULES = 2
"""Version of the rules that keep this mix. Partitions of other versions are not used."""

_FOREIGN = 0.1


@dataclass(frozen=True)
class Partition:
    """All clients' indices.

    flat: int64 [total], training then test indices of client 0, of client 1, ... offsets: int64 [2N + 1], the start of
    each part in `flat`, and the end. directory: that of the two files.
    """

    flat: Indices
    offsets: Indices
    directory: Path

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return (len(self.offsets) - 1) // 2

    @property
    def sha256(self) -> str:
        """Hash of all clients' indices, as hexadecimal digits."""
        return hash_of(self.directory, ("flat.npy", "offsets.npy"))

    @property
    def is_disjoint(self) -> bool:
        """Whether no training sample is in two clients' parts, nor twice in one."""
        parts = [self.client(client_id)[0] for client_id in range(self.num_clients)]
        indices = np.concatenate(parts) if parts else self.flat[:0]
        return len(np.unique(indices)) == len(indices)

    def client(self, client_id: int) -> Share:
        """Return (train, test) indices of one client, int64 [n] and [m], into [train; test]."""
        start, middle, stop = self.offsets[2 * client_id : 2 * client_id + 3].tolist()
        return np.array(self.flat[start:middle]), np.array(self.flat[middle:stop])


def partition_of(config: RunConfig, data: Prepared, force: bool = False) -> Partition:
    """Open a data set's partition.

    Raises UserError as `open_partition` does, and if the partition divides by classes and the task has none.
    """
    if config.partition in BY_CLASS and not tasks.of(config).has_classes:
        raise DataError(
            key="partition",
            rule=f"{config.partition} divides by classes, and task {config.task} has none; take iid, "
            "by-column or file:",
        )
    groups = None if data.groups is None else (data.groups.train, data.groups.test, data.groups.names)
    y_train, y_test = data.y_train, data.y_test
    if hides_values(config) and tasks.of(config).has_classes:
        # which samples have no class must not change the division
        y_train, y_test = np.maximum(y_train, 0), np.maximum(y_test, 0)
    return open_partition(config, y_train, y_test, data.info.num_classes, data.key, data.root, force, groups)


def open_partition(
    config: RunConfig,
    y_train: Indices,
    y_test: Indices,
    num_classes: int,
    dataset_key: str,
    root: Path,
    force: bool = False,
    groups: Column | None = None,
) -> Partition:
    """Open the partition that `config` describes. Compute and write it first if no process has done so, or if `force`.

    y_train, y_test: int64 [n], [m], read only to compute it. dataset_key: `Prepared.key`. root: data directory. groups:
    as in `split`. Raises UserError as `split` does, and if the files are damaged.
    """
    target = prepared_in(root) / "partitions" / _key(config, dataset_key)

    def build(directory: Path) -> None:
        shares = split(
            config.partition,
            y_train,
            y_test,
            num_classes,
            num_clients=config.num_clients,
            seed=_seed(config),
            alpha=config.dirichlet_alpha,
            classes_per_client=config.classes_per_client,
            train_samples=config.train_samples,
            test_samples=config.test_samples,
            min_samples=config.min_samples,
            test_ratio=config.test_ratio,
            assignment=config.pathological_assignment,
            balance=config.dirichlet_balance,
            dataset=config.dataset,
            groups=groups,
        )
        parts = [part for share in shares for part in share]
        np.save(directory / "offsets.npy", np.cumsum([0, *map(len, parts)], dtype=np.int64))
        np.save(directory / "flat.npy", np.concatenate(parts))

    build_once(target, build, key="data-dir", force=force)
    try:
        shares = Partition(
            np.asarray(np.load(target / "flat.npy", mmap_mode="r")), np.load(target / "offsets.npy"), target
        )
        sound = shares.num_clients == config.num_clients and len(shares.flat) == shares.offsets[-1]
        problems = [] if sound else ["flat.npy has another length than offsets.npy states"]
    except Exception as error:
        # numpy may raise anything for damaged bytes
        problems = [describe(error)]
    refuse_damage("data-dir", target, problems)
    return shares


def remarks(partition: Partition, info: DatasetInfo, brief: bool = False) -> list[str]:
    """Return lines that count the samples that several clients hold, and those that one client holds repeatedly.

    info: of the data set. brief: only the second, which only a user's own partition allows.
    """
    lines, what = [], info.samples
    for part, name in enumerate(("training", "test")):
        hands = [partition.client(i)[part] for i in range(partition.num_clients)]
        distinct = [np.unique(hand) for hand in hands]
        holders = np.bincount(np.concatenate(distinct), minlength=info.num_train + info.num_test)
        if not brief and (several := np.count_nonzero(holders > 1)):
            dealt = np.count_nonzero(holders)
            lines.append(
                f"{name}: {several} of {dealt} {what} are held by several clients, each by {holders.max()} at most"
            )
        repetitions = [len(hand) - len(once) for hand, once in zip(hands, distinct, strict=True)]
        if who := [f"client {i}: {n} of {len(hands[i])}" for i, n in enumerate(repetitions) if n]:
            lines.append(f"{name}: {what} that one client holds repeatedly: {listed(who)}")
    return lines


def unused(config: RunConfig, partition: Partition, num_train: int, num_test: int, what: str = "images") -> list[str]:
    """Return a line that counts the samples that no client holds, with the keys that would use them.

    There is no line if all samples are held. what: the word for samples.
    """
    held = np.zeros(num_train + num_test, bool)
    held[partition.flat] = True
    train, test = (np.count_nonzero(~part) for part in (held[:num_train], held[num_train:]))
    if not train and not test:
        return []
    line = f"unused: {train} of {num_train} training and {test} of {num_test} test {what} of the data set"
    sizes = (("train-samples", config.train_samples, train), ("test-samples", config.test_samples, test))
    cut = [f"{key} = 0" for key, size, left in sizes if size > 0 and left and config.partition in FIXED_SIZES]
    if cut:
        return [f"{line}; {' and '.join(cut)} would give each client an equal share of all"]
    if config.partition == "pathological":
        return [f"{line}; a larger classes-per-client or num-clients would use them"]
    if config.partition in FIXED_SIZES:
        return [f"{line}; partition = dirichlet would use them"]
    return [line]


def mix_remarks(config: RunConfig, partition: Partition, data: Prepared) -> list[str]:
    """Return lines about test samples that do not match the clients' training samples; none for a task without classes.

    A line names clients with many foreign test samples: samples of classes that the client does not train on. Another
    names clients that have fewer test samples than asked for, so that they keep the class mix of training. The last
    names classes without test samples.
    """
    if not tasks.of(config).has_classes:
        return []
    labels = np.concatenate([data.y_train, data.y_test])
    shares = [partition.client(i) for i in range(partition.num_clients)]
    counts = [[np.bincount(labels[part], minlength=data.info.num_classes) for part in share] for share in shares]
    lines, fewer, foreign = [], [], []
    names = client_names(config, data.info)
    asked = (config.test_samples or data.info.num_test // config.num_clients) if config.partition in SAME_MIX else 0
    for i, (train, test) in enumerate(counts):
        part = test[train == 0].sum() / max(1, test.sum())
        if part > _FOREIGN:
            foreign.append(f"client {names[i] if names else i}: {100 * part:.0f} %")
        if 0 < test.sum() < asked and (config.test_samples or config.partition != "pathological"):
            fewer.append(f"client {names[i] if names else i}: {test.sum()}")
    if fewer:
        lines.append(f"test: fewer than {asked} samples, to keep the class mix of training: {listed(fewer)}")
    if foreign:
        lines.append(f"test: samples of classes that a client does not train on: {listed(foreign)}")
    present, testable = (np.bincount(y, minlength=data.info.num_classes) for y in (data.y_train, data.y_test))
    if len(data.y_test) and (untested := np.flatnonzero((present > 0) & (testable == 0))).size:
        lines.append(f"test: the data set has no test samples of {listed([data.info.classes[k] for k in untested])}")
    return lines


def client_names(config: RunConfig, info: DatasetInfo) -> tuple[str, ...]:
    """Return the names of a run's clients, by client id, if a column of the data names them; else ()."""
    return info.groups if config.partition == BY_COLUMN and config.dataset != NODE else ()


def spills(config: RunConfig, y_train: Indices, num_classes: int, what: str, least: float = 0.0) -> list[str]:
    """Return a line that counts training samples of other classes than `dirichlet-client` drew for their clients.

    A client gets these if the drawn classes have too few samples. what: the word for samples. least: no line if these
    are less than this part of all clients' training samples.
    """
    if config.partition != "dirichlet-client":
        return []
    each = config.train_samples or len(y_train) // config.num_clients
    counts = spilled(
        y_train,
        num_classes,
        num_clients=config.num_clients,
        seed=_seed(config),
        alpha=config.dirichlet_alpha,
        size=each,
    )
    total, largest = int(counts.sum()), int(np.bincount(y_train, minlength=num_classes).max())
    if not total or total < least * each * config.num_clients:
        return []
    held = each * config.num_clients
    return [
        f"training: {np.count_nonzero(counts)} of {counted(config.num_clients, 'client')} are less skewed than dirichlet-alpha = "
        f"{config.dirichlet_alpha:g} makes them: {total} of {held} {what} ({each} per client) are of other classes than "
        f"drawn, because no class has more than {largest}; set train-samples to {largest} or less, or raise num-clients"
    ]


def _key(config: RunConfig, dataset_key: str) -> str:
    """Return a partition's directory name, made of exactly the values that define the partition."""
    parts: list[Any] = [dataset_key, config.partition, config.num_clients]
    seeds = ("seed", "partition-seed")
    kinds = divisions(config.partition, "", config.test_samples)
    of_partition = ((key, value) for key, value in config.own_keys() if not kinds.isdisjoint(key.partitions))
    parts += [value for key, value in of_partition if key.name not in seeds]
    name = config.partition
    if config.partition.startswith(OWN_PARTITION):
        name = "file"
        path = Path(config.partition.removeprefix(OWN_PARTITION)).expanduser()
        if not path.is_file():
            raise DataError(key="partition", rule=no_such(path))
        parts += [str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size]
    elif config.partition in PARTITIONS:
        parts.append(_seed(config))
        if config.partition in SAME_MIX:
            parts.append(MIX_RULES)
    return cache_key(f"{name}-{config.num_clients}", parts)


def _seed(config: RunConfig) -> int:
    return config.seed if config.partition_seed < 0 else config.partition_seed
