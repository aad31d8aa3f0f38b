"""Partitions: the samples of each client, drawn by a seed, the same in every process.

All indices point into the concatenation [train; test] of a data set. Sample i < num_train is x_train[i], any other
sample is x_test[i - num_train]. The partitions:

- `dirichlet-client` (FedCAC, ICCV 2023, after Hsu et al. 2019): client i draws q_i ~ Dir(alpha * prior) over the
  classes. It holds exactly `train_samples` training and `test_samples` test samples with these proportions. If a class
  has too few test samples, the client gets fewer test samples, in the class mix of its training samples (`keep_mix`),
  or UserError is raised. `prior` is the training set's class frequencies scaled to mean one over its classes, so alpha
  is the concentration per class. Counts are rounded by largest remainder. Deviation: the FedCAC authors' code rounds
  down and gives the rest to the last class.
- `dirichlet` (Li et al. 2022; flwr-datasets' DirichletPartitioner): each class of all data is divided over the clients
  by Dir(alpha). `test_ratio` of each client's samples, drawn at random, are its test set. `balance`: a client that has
  more than an equal share gets no samples of the following classes (flwr-datasets' self_balancing, PFLlib's and Li's
  code).
- `dirichlet-fl-bench`: the same, drawn as FL-bench's generate_data.py does (fl_bench.py). Test set sizes are rounded
  down.
- `pathological` (McMahan et al. 2017): `classes_per_client` classes per client, the same for training and test.
  `assignment` selects them (dealing.py). With `test_samples` = -1 both sets are divided together, and `test_ratio` of
  each client's samples, drawn at random, are its test set, as in PFLlib. flwr-datasets' PathologicalPartitioner is not
  used: it does not fix sizes.
- `iid`: disjoint uniform shares (those of flwr-datasets' IidPartitioner on shuffled data).
- `by-column`: client i holds the samples with the i-th sorted value of a data column, such as a hospital or a device.
- `file:/path.npz`: the user's own partition (own_file.py).

`dirichlet-client` and `pathological` deal each class from a shuffled pool. Clients get disjoint samples until the pool
is empty. Then it is reshuffled and dealt again: clients may share samples, but no client holds a sample twice.
Deviation: in the FedCAC authors' code every client draws from all samples of a class, so clients may share samples from
the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import extras
from fl_app.errors import DataError, UserError, counted
from fl_app.known_names import BY_COLUMN, OWN_PARTITION, UNBALANCED
from fl_app.partition import fl_bench, own_file
from fl_app.partition.dealing import (
    ASSIGNMENTS,
    Indices,
    allocate,
    apart,
    assign_classes,
    block_size,
    client_mixes,
    deal,
    even_shares,
    fewest_kept,
    keep_mix,
    largest_remainder,
    uneven_shares,
)
from fl_app.rng import generator, seed_sequence

__all__ = [
    "ASSIGNMENTS",
    "Column",
    "Indices",
    "Share",
    "allocate",
    "apart",
    "assign_classes",
    "block_size",
    "client_mixes",
    "deal",
    "fl_bench",
    "keep_mix",
    "own_file",
    "spilled",
    "split",
    "uneven_shares",
]

Share = tuple[Indices, Indices]
"""A client's (training, test) indices."""

Column = tuple[Indices, Indices, tuple[str, ...]]
"""(places of the training samples' values, of the test samples' values, the column's sorted values)."""

SHARED = frozenset({"dirichlet-client", "pathological"})
"""Partitions that share samples among clients when a class runs out.

If `train_samples` is set, these may have more clients than samples.
"""

DIRICHLET_RESTARTS = 10
_EQUAL_SHARE = "train-samples and test-samples can be 0, an equal share of all"


@dataclass(frozen=True)
class _Setting:
    """The arguments of `split`."""

    y_train: Indices
    y_test: Indices
    num_classes: int
    num_clients: int
    seed: int
    alpha: float
    classes_per_client: int
    train_samples: int
    test_samples: int
    min_samples: int
    test_ratio: float
    assignment: str
    balance: bool
    dataset: str
    groups: Column | None

    @property
    def sides(self) -> tuple[tuple[str, str, Indices, int], ...]:
        """(key prefix, word in errors, labels, offset into the concatenation) of training and test set."""
        return ("train", "training", self.y_train, 0), ("test", "test", self.y_test, len(self.y_train))

    @property
    def sizes(self) -> tuple[int, int]:
        """Training and test samples per client, 0 for an equal share."""
        return self.train_samples, self.test_samples

    def rng(self, purpose: str) -> np.random.Generator:
        return generator(self.seed, f"partition-{purpose}")


def split(
    name: str,
    y_train: Indices,
    y_test: Indices,
    num_classes: int,
    *,
    num_clients: int,
    seed: int,
    alpha: float,
    classes_per_client: int,
    train_samples: int,
    test_samples: int,
    min_samples: int,
    test_ratio: float,
    assignment: str = "balanced",
    balance: bool = False,
    dataset: str = "the data set",
    groups: Column | None = None,
) -> list[Share]:
    """Divide a data set over clients. The result depends only on the arguments (and the file named by `file:`).

    name: one of PARTITIONS or `file:/path.npz`. y_train, y_test: int64 [n], [m] in [0, num_classes); `iid` and
    `by-column` use only their lengths. train_samples, test_samples: per client; 0: an equal share; test_samples = -1,
    for `pathological`: `test_ratio` of each client's samples. assignment: of classes to clients, one of ASSIGNMENTS, for
    `pathological`. balance: for `dirichlet`. dataset: its name in errors.
    groups: for `by-column`.

    Returns per client (train, test): int64 indices into [train; test], sorted; for `file:` in the file's order. Raises
    UserError naming the key, the rule and the value if the data cannot be divided as asked.
    """
    setting = _Setting(
        np.asarray(y_train),
        np.asarray(y_test),
        num_classes,
        num_clients,
        seed,
        alpha,
        classes_per_client,
        train_samples,
        test_samples,
        min_samples,
        test_ratio,
        assignment,
        balance,
        dataset,
        groups,
    )
    if num_clients < 1:
        raise DataError(key="num-clients", rule="must be >= 1", value=num_clients)
    if name.startswith(OWN_PARTITION):
        path = Path(name.removeprefix(OWN_PARTITION)).expanduser()
        return own_file.read_shares(path, setting.sides, num_clients, dataset)
    if name not in PARTITIONS:
        raise DataError(key="partition", rule=f"unknown {name!r}")
    shared = name in SHARED and train_samples > 0
    if name != BY_COLUMN and not shared and len(y_train) < num_clients:
        raise DataError(
            key="num-clients", rule=f"must be <= {len(y_train)}, the training samples of {dataset}", value=num_clients
        )
    return [(np.sort(train), np.sort(test)) for train, test in PARTITIONS[name](setting)]


# Fixed sizes ----------------------------------------------------------------------------------------------------------


def _dirichlet_client(setting: _Setting) -> list[Share]:
    prior = np.bincount(setting.y_train, minlength=setting.num_classes)
    mixes = client_mixes(prior, setting.alpha, setting.num_clients, setting.seed)
    trained, as_drawn = np.zeros(mixes.shape, np.int64), np.ones(len(mixes), bool)
    dealt = []
    for (side, word, labels, offset), asked in zip(setting.sides, setting.sizes, strict=True):
        size = asked or len(labels) // setting.num_clients
        if size > len(labels):
            raise DataError(
                key=f"{side}-samples",
                rule=f"every client needs {size} samples but the {word} set of {setting.dataset} has "
                f"{len(labels)}; {_EQUAL_SHARE}",
            )
        room = np.bincount(labels, minlength=setting.num_classes)
        counts = np.stack([allocate(q, size, room) for q in mixes])
        if side == "test":
            counts = _in_the_mix_of(trained, as_drawn, mixes, counts, room, setting)
        trained, as_drawn = counts, _as_drawn(counts, mixes)
        dealt.append([offset + mine for mine in deal(counts, labels, setting.rng(side))])
    return list(zip(*dealt, strict=True))


def spilled(labels: Indices, num_classes: int, *, num_clients: int, seed: int, alpha: float, size: int) -> Indices:
    """Return each client's number of training samples that `dirichlet-client` replaces by other classes, int64 [N].

    A client's proportions may ask for more samples of a class than exist. labels: int64 [n]. size: samples per client.
    num_classes, num_clients, seed, alpha: as in `split`.
    """
    room = np.bincount(labels, minlength=num_classes)
    mixes = client_mixes(room, alpha, num_clients, seed)
    wanted = np.stack([allocate(q, size, np.full(num_classes, size)) for q in mixes])
    counts: Indices = np.maximum(wanted - room, 0).sum(axis=1)
    return counts


def _in_the_mix_of(
    trained: NDArray[np.int64],
    as_drawn: NDArray[np.bool_],
    mixes: NDArray[np.float64],
    tested: NDArray[np.int64],
    room: NDArray[np.int64],
    setting: _Setting,
) -> NDArray[np.int64]:
    """Return test samples per client and class, int64 [N, K], in the class mix of each client's training samples.

    trained: training samples per client and class, int64 [N, K]. as_drawn: bool [N], whether a client's training counts
    are its row of `mixes` [N, K] rounded. tested: the test samples asked for, int64 [N, K]. room: test samples of each
    class. Raises UserError if a client would keep fewer than `fewest_kept`.
    """
    kept = tested.copy()
    for i in np.flatnonzero(~(as_drawn & _as_drawn(tested, mixes))):
        train, size = trained[i], int(tested[i].sum())
        fitting = keep_mix(train.astype(np.float64), size, room)
        if fitting is None:
            have = ", ".join(f"{k}: {train[k]} and {room[k]}" for k in np.argsort(-train, kind="stable") if train[k])
            raise DataError(
                key="test-samples",
                rule=f"client {i} cannot have {fewest_kept(size)} of {size} test samples in the mix of its "
                "training samples; classes with its training samples and the test samples that "
                f"{setting.dataset} has: {have}; lower test-samples, raise dirichlet-alpha or "
                "classes-per-client, or take another partition",
            )
        kept[i] = fitting
    return kept


def _as_drawn(counts: NDArray[np.int64], mixes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which rows of counts [N, K] equal the rounded mixes, bool [N]: no class had too few samples."""
    return np.array([np.array_equal(largest_remainder(q, int(c.sum())), c) for q, c in zip(mixes, counts, strict=True)])


def _pathological(setting: _Setting) -> list[Share]:
    holds = _assigned(setting)
    if setting.test_samples < 0:
        return _own_test_parts(setting, holds)
    mixes = holds.astype(np.float64)
    trained, as_drawn = np.zeros(mixes.shape, np.int64), np.ones(len(mixes), bool)
    dealt = []
    for (side, word, labels, offset), size in zip(setting.sides, setting.sizes, strict=True):
        room = np.bincount(labels, minlength=setting.num_classes)
        if size:
            counts = np.stack([allocate(h, size, room, spill=False) for h in mixes])
        else:
            counts = even_shares(holds, room)
        sums = counts.sum(1)
        short = np.flatnonzero((sums < size) | ((sums == 0) & (side == "train")))
        if len(short):
            raise _too_few(setting, holds, int(short[0]), side, size, sums, f"the {word} set of ")
        if side == "test" and size:
            counts = _in_the_mix_of(trained, as_drawn, mixes, counts, room, setting)
        trained = counts
        # equal shares take from the client's own classes only, so they count as drawn
        as_drawn = _as_drawn(counts, mixes) if size else np.ones(len(holds), bool)
        dealt.append([offset + mine for mine in deal(counts, labels, setting.rng(side))])
    return list(zip(*dealt, strict=True))


def _own_test_parts(setting: _Setting, holds: NDArray[np.bool_]) -> list[Share]:
    """Divide training and test set together; `test_ratio` of each client's samples are its test set."""
    labels, train = np.concatenate([setting.y_train, setting.y_test]), setting.train_samples
    room = np.bincount(labels, minlength=setting.num_classes)
    size = round(train / (1 - setting.test_ratio))
    if size:
        counts = np.stack([allocate(h, size, room, spill=False) for h in holds.astype(np.float64)])
    elif setting.assignment == UNBALANCED:
        counts = uneven_shares(holds, room, setting.rng("sizes"))
    else:
        counts = even_shares(holds, room)
    sums = counts.sum(1)
    if len(short := np.flatnonzero(sums < max(size, 1))):
        raise _too_few(setting, holds, int(short[0]), "train", size, sums, "")
    rng, shares = setting.rng("test"), []
    for hand in deal(counts, labels, setting.rng("train")):
        num_test = len(hand) - train if train else min(round(len(hand) * setting.test_ratio), len(hand) - 1)
        mine = rng.permutation(hand)
        shares.append((mine[num_test:], mine[:num_test]))
    return shares


def _too_few(
    setting: _Setting, holds: NDArray[np.bool_], i: int, side: str, size: int, sums: NDArray[np.int64], where: str
) -> UserError:
    names = ", ".join(str(c) for c in np.flatnonzero(holds[i]))
    return UserError(
        key=f"{side}-samples",
        rule=f"client {i} needs {size or 'some'} samples but its classes ({names}) have {sums[i]} for "
        f"it in {where}{setting.dataset}",
    )


def _assigned(setting: _Setting) -> NDArray[np.bool_]:
    """Return which classes each client holds, bool [N, K]. Raises UserError if a client gets too few classes."""
    per_client, train_samples = setting.classes_per_client, setting.train_samples
    labels = np.concatenate([setting.y_train, setting.y_test]) if setting.test_samples < 0 else setting.y_train
    present = np.flatnonzero(np.bincount(labels, minlength=setting.num_classes))
    if per_client > len(present):
        raise DataError(
            key="classes-per-client", rule=f"must be at most the data set's {len(present)} classes", value=per_client
        )
    if 0 < train_samples < per_client:
        raise DataError(
            key="train-samples", rule=f"must be at least classes-per-client ({per_client})", value=train_samples
        )
    holds = assign_classes(
        present, setting.num_classes, setting.num_clients, per_client, setting.rng("classes"), setting.assignment
    )
    for i, num_held in enumerate(holds.sum(1)):
        if num_held < per_client:
            block = block_size(len(present), setting.num_clients, per_client)
            raise DataError(
                key="pathological-assignment",
                rule=f"{setting.assignment} leaves client {i} with {num_held} of classes-per-client ({per_client}) "
                f"classes; num-clients ({setting.num_clients}) should be a multiple of {block}, the "
                "clients of a block",
            )
    return holds


def _iid(setting: _Setting) -> list[Share]:
    num_clients = setting.num_clients
    dealt: list[list[Indices]] = []
    for (side, word, labels, offset), size in zip(setting.sides, setting.sizes, strict=True):
        need = size * num_clients
        if need > len(labels):
            raise DataError(
                key=f"{side}-samples",
                rule=f"{counted(num_clients, 'client')} with {size} each need {need} samples but the {word} "
                f"set of {setting.dataset} has {len(labels)}; {_EQUAL_SHARE}",
            )
        order = offset + setting.rng(side).permutation(len(labels))[: need or None]
        # with fewer test samples than clients some clients get none
        dealt.append(np.array_split(order, num_clients))
    return list(zip(*dealt, strict=True))


# All data, class by class ---------------------------------------------------------------------------------------------


def _dirichlet(setting: _Setting) -> list[Share]:
    extras.require("flwr_datasets", "partition: dirichlet")
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = _all_labels(setting)
    order = setting.rng("order").permutation(len(labels))
    # DirichletPartitioner gives up after eleven draws, too early for a small alpha and many clients
    seeds = seed_sequence(setting.seed, "partition-dirichlet").generate_state(DIRICHLET_RESTARTS)
    for seed in seeds:
        partitioner = DirichletPartitioner(
            setting.num_clients,
            "label",
            setting.alpha,
            setting.min_samples,
            self_balancing=setting.balance,
            shuffle=True,
            seed=int(seed),
        )
        try:
            parts = _run_partitioner(partitioner, order, labels[order])
            break
        except ValueError:
            continue
    else:
        raise _no_draw(setting, 11 * len(seeds))
    shares = []
    for part in parts:
        num_test = min(round(len(part) * setting.test_ratio), len(part) - 1)
        shares.append((part[num_test:], part[:num_test]))
    return shares


def _fl_bench(setting: _Setting) -> list[Share]:
    if setting.seed > fl_bench.LARGEST_SEED:
        raise DataError(
            key="partition-seed", rule=f"must be <= {fl_bench.LARGEST_SEED} with dirichlet-fl-bench", value=setting.seed
        )
    labels = _all_labels(setting)
    shares = fl_bench.split(
        labels,
        setting.num_classes,
        num_clients=setting.num_clients,
        seed=setting.seed,
        alpha=setting.alpha,
        min_samples=setting.min_samples,
        test_ratio=setting.test_ratio,
    )
    if not shares:
        raise _no_draw(setting, fl_bench.DRAWS)
    return shares


def _all_labels(setting: _Setting) -> Indices:
    """Return the labels of training and test set. Raises UserError if they are too few for `min_samples` per client."""
    labels = np.concatenate([setting.y_train, setting.y_test])
    need = setting.num_clients * setting.min_samples
    if need > len(labels):
        raise DataError(
            key="min-samples",
            rule=f"{counted(setting.num_clients, 'client')} with {setting.min_samples} each need {need} "
            f"samples but {setting.dataset} has {len(labels)}",
        )
    return labels


def _no_draw(setting: _Setting, draws: int) -> UserError:
    num_samples = len(setting.y_train) + len(setting.y_test)
    return UserError(
        key="min-samples",
        rule=f"no draw of {draws} gave each of {setting.num_clients} clients at least "
        f"{setting.min_samples} of the {num_samples} samples of {setting.dataset} with "
        f"dirichlet-alpha {setting.alpha:g}; lower min-samples or num-clients, or raise "
        "dirichlet-alpha",
    )


# By a column ----------------------------------------------------------------------------------------------------------


def _by_column(setting: _Setting) -> list[Share]:
    if setting.groups is None:
        raise DataError(
            key="client",
            rule=f"partition by-column needs the name of the column of {setting.dataset} that names each "
            "sample's client",
        )
    train, test, names = setting.groups
    if len(names) != setting.num_clients:
        raise DataError(
            key="num-clients",
            rule=f"must be {len(names)}, the values of the column client of {setting.dataset}",
            value=setting.num_clients,
        )
    shares = []
    for name, mine, tested in zip(names, _places_of(train, len(names)), _places_of(test, len(names)), strict=True):
        if not len(mine):
            raise DataError(key="client", rule=f"{name!r} has no training samples in {setting.dataset}")
        shares.append((mine, len(setting.y_train) + tested))
    return shares


def _places_of(values: Indices, count: int) -> list[Indices]:
    """Return the places of each value 0, 1, ... below `count`, in ascending order."""
    order = np.argsort(values, kind="stable")
    edges = np.searchsorted(values[order], np.arange(count + 1))
    return [order[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]


PARTITIONS: Mapping[str, Callable[[_Setting], list[Share]]] = {
    "dirichlet-client": _dirichlet_client,
    "dirichlet": _dirichlet,
    "dirichlet-fl-bench": _fl_bench,
    "pathological": _pathological,
    "iid": _iid,
    BY_COLUMN: _by_column,
}


def _run_partitioner(partitioner: Any, indices: Indices, labels: Indices) -> list[Indices]:
    """Run a flwr-datasets Partitioner over `indices` and their labels and return every partition's indices, int64."""
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"index": indices, "label": labels})
    with warnings.catch_warnings():
        # it warns of every draw below the minimum size; only a failure matters, and the caller reports it
        warnings.simplefilter("ignore")
        # loading the first partition divides the data; loading each would cost a millisecond and is not needed
        first = partitioner.load_partition(0)
        places = getattr(partitioner, "_partition_id_to_indices", None)
        if places is not None:
            return [indices[np.asarray(places[i], np.int64)] for i in range(partitioner.num_partitions)]
        parts = [first, *(partitioner.load_partition(i) for i in range(1, partitioner.num_partitions))]
    return [np.asarray(part.with_format("numpy")["index"][:], np.int64) for part in parts]
