"""Partitions as index files: each is computed and written once, and every process reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_app import tasks
from fl_app.checksums import hash_of, refuse_damage
from fl_app.config import RunConfig
from fl_app.data.prepared import Prepared
from fl_app.errors import UserError, describe, listed
from fl_app.files import build_once, cache_key
from fl_app.known_names import BY_CLASS, OWN_PARTITION, PARTITIONS
from fl_app.partition import Column, Indices, Share, spilled, split

SAME_MIX = ("dirichlet-client", "pathological")
"""Partitions whose clients are tested on the mix of classes they train on."""

MIX_RULES = 2
"""Version of the rules by which that mix is kept; partitions of other versions are not used."""

_FOREIGN = 0.1


@dataclass(frozen=True)
class Partition:
    """All clients' indices: flat int64 [total]; offsets int64 [2N + 1]: training, test of client 0, of client 1, ...

    directory: where its files are.
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

    def client(self, client_id: int) -> Share:
        """Return (train, test) indices of one client, int64 [n] and [m], into [train; test]."""
        start, middle, stop = (int(o) for o in self.offsets[2 * client_id : 2 * client_id + 3])
        return np.array(self.flat[start:middle]), np.array(self.flat[middle:stop])


def partition_of(config: RunConfig, data: Prepared, force: bool = False) -> Partition:
    """Open a data set's partition as `open_partition`. Raises UserError too for one by class where the task has none."""
    if config.partition in BY_CLASS and not tasks.of(config).has_classes:
        raise UserError(
            f"partition: {config.partition} divides by classes, and task {config.task} has none; take iid, by-column or file:"
        )
    groups = None if data.groups is None else (data.groups.train, data.groups.test, data.groups.names)
    return open_partition(config, data.y_train, data.y_test, data.info.num_classes, data.key, data.root, force, groups)


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
    """Open the partition `config` describes, computing and writing it first if no process has yet, or if `force`.

    y_train, y_test: int64 [n], [m], read only when it must be computed. dataset_key: `Prepared.key`. root: data
    directory. groups: as `split` takes them. Raises UserError as `split` does, and if what is there is damaged.
    """
    target = root / "partitions" / _key(config, dataset_key)

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
        shares = Partition(np.load(target / "flat.npy", mmap_mode="r"), np.load(target / "offsets.npy"), target)
        sound = shares.num_clients == config.num_clients and len(shares.flat) == shares.offsets[-1]
        problems = [] if sound else ["flat.npy does not end where offsets.npy says"]
    except Exception as error:
        # numpy may raise anything for damaged bytes
        problems = [describe(error)]
    refuse_damage("data-dir", target, problems)
    return shares


def remarks(partition: Partition, num_train: int, num_test: int, what: str = "images") -> list[str]:
    """Say how many samples several clients hold, how many one client holds repeatedly, and how many nobody holds.

    num_train, num_test: samples of the data set. what: samples are called so.
    """
    lines = []
    total = num_train + num_test
    used = np.zeros(total, bool)
    for part, name in enumerate(("training", "test")):
        hands = [partition.client(i)[part] for i in range(partition.num_clients)]
        distinct = [np.unique(hand) for hand in hands]
        holders = np.bincount(np.concatenate(distinct), minlength=total)
        used |= holders > 0
        if several := np.count_nonzero(holders > 1):
            dealt = np.count_nonzero(holders)
            lines.append(
                f"{name}: {several} of {dealt} {what} are held by several clients, each by {holders.max()} at most"
            )
        lines += _again(hands, name, what)
    unused = ~used
    if unused.any():
        lines.append(
            f"unused: {np.count_nonzero(unused[:num_train])} of {num_train} training and "
            f"{np.count_nonzero(unused[num_train:])} of {num_test} test {what} of the data set"
        )
    return lines


def mix_remarks(config: RunConfig, partition: Partition, data: Prepared) -> list[str]:
    """Say whose test samples are not in the mix of its training samples, or fewer than asked so that they are.

    A test sample is foreign if its client trains on no sample of its class. Nothing is said of a task without classes.
    """
    if not tasks.of(config).has_classes:
        return []
    labels = np.concatenate([data.y_train, data.y_test])
    shares = [partition.client(i) for i in range(partition.num_clients)]
    counts = [[np.bincount(labels[part], minlength=data.info.num_classes) for part in share] for share in shares]
    lines, fewer, foreign = [], [], []
    asked = (config.test_samples or data.info.num_test // config.num_clients) if config.partition in SAME_MIX else 0
    for i, (train, test) in enumerate(counts):
        part = test[train == 0].sum() / max(1, test.sum())
        if part > _FOREIGN:
            foreign.append(f"client {i}: {100 * part:.0f} %")
        if 0 < test.sum() < asked and (config.test_samples or config.partition != "pathological"):
            fewer.append(f"client {i}: {test.sum()}")
    if fewer:
        lines.append(f"test: fewer than {asked} samples, so that they are in the mix of training: {listed(fewer)}")
    if foreign:
        lines.append(f"test: samples of classes that a client does not train on: {listed(foreign)}")
    present, testable = (np.bincount(y, minlength=data.info.num_classes) for y in (data.y_train, data.y_test))
    if len(data.y_test) and (untested := np.flatnonzero((present > 0) & (testable == 0))).size:
        lines.append(f"test: the data set has no test samples of {listed([data.info.classes[k] for k in untested])}")
    return lines


def repeated(partition: Partition, what: str = "images") -> list[str]:
    """Say which clients hold samples more than once, which only the user's own partition allows. what: samples are called so."""
    lines = []
    for part, name in enumerate(("training", "test")):
        hands = [partition.client(i)[part] for i in range(partition.num_clients)]
        lines += _again(hands, name, what)
    return lines


def spills(config: RunConfig, y_train: Indices, num_classes: int, what: str, least: float = 0.0) -> list[str]:
    """Say how many training samples clients of `dirichlet-client` hold of other classes than drawn for them, which have no more.

    what: samples are called so. least: part of all clients' training samples from which on it is said.
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
    return [
        f"training: {np.count_nonzero(counts)} of {config.num_clients} clients are less skewed than dirichlet-alpha = "
        f"{config.dirichlet_alpha:g} makes them: of {each} {what} each, {total} in all had to be of other classes, as none "
        f"has more than {largest}; set train-samples to that or less, or raise num-clients"
    ]


def _again(hands: Sequence[Indices], name: str, what: str) -> list[str]:
    repetitions = [len(hand) - len(np.unique(hand)) for hand in hands]
    who = [f"client {i}: {n} of {len(hands[i])}" for i, n in enumerate(repetitions) if n]
    return [f"{name}: {what} that a client holds already, counted again: {listed(who)}"] if who else []


def _key(config: RunConfig, dataset_key: str) -> str:
    """Name a partition by exactly what defines it."""
    parts: list[Any] = [dataset_key, config.partition, config.num_clients]
    seeds = ("seed", "partition-seed")
    parts += [value for key, value in config.own_keys() if config.partition in key.partitions and key.name not in seeds]
    name = config.partition
    if config.partition.startswith(OWN_PARTITION):
        name = "file"
        path = Path(config.partition.removeprefix(OWN_PARTITION)).expanduser()
        if not path.is_file():
            raise UserError(f"partition: no file {path}")
        parts += [str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size]
    elif config.partition in PARTITIONS:
        parts.append(_seed(config))
        if config.partition in SAME_MIX:
            parts.append(MIX_RULES)
    return cache_key(f"{name}-{config.num_clients}", parts)


def _seed(config: RunConfig) -> int:
    return config.seed if config.partition_seed < 0 else config.partition_seed
