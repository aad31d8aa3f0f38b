"""Who holds which samples: seeded partitions, the same in every process.

All indices point into the concatenation [train; test] of a data set: sample i < num_train is x_train[i], any other is
x_test[i - num_train]. The partitions:

- `dirichlet-client` (FedCAC, ICCV 2023, after Hsu et al. 2019): client i draws q_i ~ Dir(alpha * prior) over the
  classes and holds exactly `train_samples` training and `test_samples` test samples with these proportions. `prior` is
  the training set's class frequencies scaled to mean one over its classes, so alpha is the concentration per class. Counts
  are rounded by largest remainder; the FedCAC authors' code gives what rounding down leaves to the last class.
- `dirichlet` (Li et al. 2022; flwr-datasets' DirichletPartitioner): each class of all data is divided over the clients
  by Dir(alpha); `test_ratio` of each client's samples, drawn at random, are its test set. `balance`: a client that has more
  than an equal share gets nothing of the classes that follow (flwr-datasets' self_balancing, PFLlib's and Li's code).
- `dirichlet-fl-bench`: the same, draw for draw as FL-bench's generate_data.py: with its seed, 42 unless it is told otherwise, its
  very split. Its test sets are rounded down.
- `pathological` (McMahan et al. 2017): `classes_per_client` classes per client, the same for training and test; which, says
  `assignment`, see ASSIGNMENTS. Not flwr-datasets' PathologicalPartitioner, which does not fix sizes.
- `iid`: disjoint uniform shares (those of flwr-datasets' IidPartitioner on shuffled data).
- `by-column`: client i holds the samples of the i-th value, sorted, of a column of the data: a hospital's, a device's.
- `file:/path.npz`: the user's own.

`dirichlet-client` and `pathological` deal each class from a shuffled pool, disjointly over clients while it lasts; then
it is reshuffled and dealt again, so clients may share samples but none holds one twice. (In the FedCAC authors' code every
client draws from all samples of a class, so clients may share samples at any time.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import extras
from fl_app.errors import UserError
from fl_app.partition import fl_bench, own_file
from fl_app.rng import generator, seed_sequence

Indices = NDArray[np.int64]
Share = tuple[Indices, Indices]
Column = tuple[Indices, Indices, tuple[str, ...]]  # whose each training and test sample is, a place in the names
DIRICHLET_RESTARTS = 10
_EQUAL_SHARE = "train-samples and test-samples can be 0, an equal share of all"


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
    """Divide a data set over clients; a pure function of its arguments (and of the file named by `file:`).

    name: one of config.PARTITIONS or `file:/path.npz`. y_train, y_test: int64 [n], [m] in [0, num_classes); `iid`
    and `by-column` ask for their lengths alone.
    train_samples, test_samples: per client, 0 for an equal share. assignment: of classes to clients, one of ASSIGNMENTS.
    balance: of `dirichlet`. dataset: its name in errors. groups: of `by-column`. Returns per client (train, test): int64 indices
    into [train; test], sorted (as in the file for `file:`). Raises UserError naming the key, the rule and the value where the data
    cannot be divided so.
    """
    task = _Task(np.asarray(y_train), np.asarray(y_test), num_classes, num_clients, seed, dataset)
    if num_clients < 1:
        raise UserError(f"num-clients: must be >= 1, got {num_clients}")
    if name.startswith("file:"):
        return own_file.read(Path(name.removeprefix("file:")).expanduser(), task.sides, num_clients, dataset)
    if name == "by-column":
        return _by_column(groups, num_clients, len(y_train), dataset)
    if len(y_train) < num_clients:
        raise UserError(f"num-clients: must be <= {len(y_train)}, the training samples of {dataset}, got {num_clients}")
    sizes = (train_samples, test_samples)
    if name == "dirichlet-client":
        shares = _dirichlet_client(task, alpha, sizes)
    elif name == "dirichlet":
        shares = _dirichlet(task, alpha, min_samples, test_ratio, balance)
    elif name == "dirichlet-fl-bench":
        shares = _fl_bench(task, alpha, min_samples, test_ratio)
    elif name == "pathological":
        shares = _pathological(task, classes_per_client, assignment, sizes)
    elif name == "iid":
        shares = _iid(task, sizes)
    else:
        raise UserError(f"partition: unknown {name!r}")
    return [(np.sort(train), np.sort(test)) for train, test in shares]


@dataclass(frozen=True)
class _Task:
    y_train: Indices
    y_test: Indices
    num_classes: int
    num_clients: int
    seed: int
    dataset: str

    @property
    def sides(self) -> tuple[tuple[str, str, Indices, int], ...]:
        """(key prefix, word in errors, labels, offset into the concatenation) of training and test set."""
        return ("train", "training", self.y_train, 0), ("test", "test", self.y_test, len(self.y_train))

    def rng(self, what: str) -> np.random.Generator:
        return generator(self.seed, f"partition-{what}")


def _dirichlet_client(task: _Task, alpha: float, sizes: tuple[int, int]) -> list[Share]:
    prior = np.bincount(task.y_train, minlength=task.num_classes)
    mixes = client_mixes(prior, alpha, task.num_clients, task.seed)
    dealt = []
    for (side, word, labels, offset), asked in zip(task.sides, sizes, strict=True):
        size = asked or len(labels) // task.num_clients
        if size > len(labels):
            raise UserError(
                f"{side}-samples: every client needs {size} samples but the {word} set of {task.dataset} has "
                f"{len(labels)}; {_EQUAL_SHARE}"
            )
        room = np.bincount(labels, minlength=task.num_classes)
        counts = np.stack([allocate(q, size, room) for q in mixes])
        dealt.append([offset + mine for mine in deal(counts, labels, task.rng(side))])
    return list(zip(*dealt, strict=True))


def client_mixes(prior: NDArray[np.generic], alpha: float, num_clients: int, seed: int) -> NDArray[np.float64]:
    """Draw each client's class proportions q ~ Dir(alpha * prior), prior scaled to mean one over its positive entries.

    prior: [K], not negative. Returns float64 [N, K], rows summing to 1, zero where the prior is. Source: FedCAC §4.1.
    """
    present = np.flatnonzero(prior)
    weights = np.asarray(prior, np.float64)[present]
    mixes = np.zeros((num_clients, len(prior)))
    rng = generator(seed, "partition-mixes")
    mixes[:, present] = rng.dirichlet(alpha * weights / weights.mean(), size=num_clients)
    return mixes


def allocate(q: NDArray[np.float64], total: int, room: NDArray[np.int64], spill: bool = True) -> NDArray[np.int64]:
    """Turn proportions into counts with the exact sum `total`, no class above its room.

    q: [K], not negative. room: int64 [K]. Rounding by largest remainder; what a full class cannot give moves to the
    other classes by q and then, if spill, to any class by the room left. Returns int64 [K]; its sum falls short of
    `total` only where the classes allowed have no more.
    """
    counts = np.zeros(len(q), np.int64)
    while (left := total - int(counts.sum())) > 0:
        weights = np.where(counts < room, q, 0.0)
        if weights.sum() == 0:
            if not spill or not np.any(counts < room):
                break
            weights = (room - counts).astype(np.float64)
        counts += np.minimum(_largest_remainder(weights, left), room - counts)
    return counts


def _largest_remainder(weights: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    exact = weights / weights.sum() * total
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    fractions = np.where(weights > 0, exact - counts, -1.0)
    # rounding can leave one more than there are classes with weight: cycle over them, largest fraction first
    order = np.argsort(-fractions, kind="stable")[: np.count_nonzero(weights)]
    np.add.at(counts, np.resize(order, max(0, total - int(counts.sum()))), 1)
    return counts


def deal(counts: NDArray[np.int64], labels: Indices, rng: np.random.Generator) -> list[Indices]:
    """Deal samples class by class from shuffled pools; a pool that is used up is reshuffled and dealt again.

    counts: int64 [N, K], none above the class's number of samples. labels: int64 [n]. Returns per client int64 indices
    into labels, none twice.
    """
    hands: list[list[Indices]] = [[] for _ in counts]
    for k in range(counts.shape[1]):
        if not counts[:, k].any():
            continue
        samples = np.flatnonzero(labels == k)
        pool = rng.permutation(samples)
        for hand, count in zip(hands, counts[:, k], strict=True):
            mine, pool = pool[:count], pool[count:]
            if len(mine) < count:
                fresh = rng.permutation(samples)
                held = np.isin(fresh, mine)
                fresh = np.concatenate([fresh[~held], fresh[held]])  # what this client holds goes to the next ones
                more = count - len(mine)
                mine, pool = np.concatenate([mine, fresh[:more]]), fresh[more:]
            hand.append(mine)
    return [np.concatenate(hand) if hand else np.zeros(0, np.int64) for hand in hands]


def _pathological(task: _Task, classes_per_client: int, assignment: str, sizes: tuple[int, int]) -> list[Share]:
    present = np.flatnonzero(np.bincount(task.y_train, minlength=task.num_classes))
    if classes_per_client > len(present):
        raise UserError(
            f"classes-per-client: must be at most the data set's {len(present)} classes, got {classes_per_client}"
        )
    if 0 < sizes[0] < classes_per_client:
        raise UserError(f"train-samples: must be at least classes-per-client ({classes_per_client}), got {sizes[0]}")
    holds = assign_classes(
        present, task.num_classes, task.num_clients, classes_per_client, task.rng("classes"), assignment
    )
    for i, num_held in enumerate(holds.sum(1)):
        if num_held < classes_per_client:
            raise UserError(
                f"pathological-assignment: {assignment} leaves client {i} with {num_held} of classes-per-client "
                f"({classes_per_client}) classes; num-clients ({task.num_clients}) should be a multiple of "
                f"{block_size(len(present), task.num_clients, classes_per_client)}, the clients of a block"
            )
    dealt = []
    for (side, word, labels, offset), size in zip(task.sides, sizes, strict=True):
        room = np.bincount(labels, minlength=task.num_classes)
        if size:
            counts = np.stack([allocate(h.astype(np.float64), size, room, spill=False) for h in holds])
        else:  # every class divided evenly over its holders, the first ones getting one more
            holders, turn = np.maximum(holds.sum(0), 1), np.cumsum(holds, 0) - 1
            counts = holds * (room // holders + (turn < room % holders))
        sums = counts.sum(1)
        short = np.flatnonzero((sums < size) | ((sums == 0) & (side == "train")))
        if len(short):
            i = int(short[0])
            names = ", ".join(str(c) for c in np.flatnonzero(holds[i]))
            raise UserError(
                f"{side}-samples: client {i} needs {size or 'some'} samples but its classes ({names}) have "
                f"{sums[i]} for it in the {word} set of {task.dataset}"
            )
        dealt.append([offset + mine for mine in deal(counts, labels, task.rng(side))])
    return list(zip(*dealt, strict=True))


def assign_classes(
    present: NDArray[np.int64],
    num_classes: int,
    num_clients: int,
    per_client: int,
    rng: np.random.Generator,
    assignment: str = "balanced",
) -> NDArray[np.bool_]:
    """Give each client `per_client` distinct classes (with `blocks` fewer, where the numbers do not divide).

    present: int64, the classes that have samples. assignment: one of ASSIGNMENTS. Returns bool [N, K].
    """
    holds = np.zeros((num_clients, num_classes), bool)
    for row, chosen in zip(holds, ASSIGNMENTS[assignment](len(present), num_clients, per_client, rng), strict=True):
        row[present[chosen]] = True
    return holds


def _balanced(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Every class equally often up to one, drawn at random among the least used."""
    used = np.zeros(num_classes, np.int64)
    for _ in range(num_clients):
        tie = rng.permutation(num_classes)
        chosen = np.lexsort((tie, used))[:per_client]
        used[chosen] += 1
        yield chosen


def _random(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Every client draws its own without replacement (FedCAC's authors): some share classes, some classes are nobody's."""
    for _ in range(num_clients):
        yield rng.choice(num_classes, per_client, replace=False)


def block_size(num_classes: int, num_clients: int, per_client: int) -> int:
    """Return how many clients hold a class under `blocks`: ceil(N per_client / K)."""
    return -(-num_clients * per_client // num_classes)


def _blocks(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Class after class to the first `block_size` clients that still want one (PFLlib): neighbours hold the same."""
    wanted = np.full(num_clients, per_client)
    hands: list[list[int]] = [[] for _ in range(num_clients)]
    for k in range(num_classes):
        block = np.flatnonzero(wanted)[: block_size(num_classes, num_clients, per_client)]
        wanted[block] -= 1
        for client_id in block:
            hands[client_id].append(k)
    return (np.array(hand, np.int64) for hand in hands)


Assignment = Callable[[int, int, int, np.random.Generator], Iterator[Indices]]
ASSIGNMENTS: Mapping[str, Assignment] = {"balanced": _balanced, "random": _random, "blocks": _blocks}


def _iid(task: _Task, sizes: tuple[int, int]) -> list[Share]:
    dealt: list[list[Indices]] = []
    for (side, word, labels, offset), size in zip(task.sides, sizes, strict=True):
        need = size * task.num_clients
        if need > len(labels):
            raise UserError(
                f"{side}-samples: {task.num_clients} clients with {size} each need {need} samples but the {word} set "
                f"of {task.dataset} has {len(labels)}; {_EQUAL_SHARE}"
            )
        order = offset + task.rng(side).permutation(len(labels))[: need or None]
        # Where there are fewer test samples than clients, some have none.
        dealt.append(np.array_split(order, task.num_clients))
    return list(zip(*dealt, strict=True))


def _by_column(groups: Column | None, num_clients: int, num_train: int, dataset: str) -> list[Share]:
    if groups is None:
        raise UserError(
            f"client: partition by-column needs the name of the column of {dataset} that says whose a sample is"
        )
    train, test, names = groups
    if len(names) != num_clients:
        raise UserError(
            f"num-clients: must be {len(names)}, the values of the column client of {dataset}, got {num_clients}"
        )
    shares = [(np.flatnonzero(train == k), num_train + np.flatnonzero(test == k)) for k in range(num_clients)]
    for k, (mine, _) in enumerate(shares):
        if not len(mine):
            raise UserError(f"client: {names[k]!r} has no training samples in {dataset}")
    return shares


def _dirichlet(task: _Task, alpha: float, min_samples: int, test_ratio: float, balance: bool) -> list[Share]:
    extras.require("flwr_datasets", "partition: dirichlet")
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = _all_labels(task, min_samples)
    order = task.rng("order").permutation(len(labels))
    seeds = seed_sequence(task.seed, "partition-dirichlet").generate_state(DIRICHLET_RESTARTS)
    for seed in seeds:  # it gives up after eleven draws, too early for small alpha and many clients
        partitioner = DirichletPartitioner(
            task.num_clients, "label", alpha, min_samples, self_balancing=balance, shuffle=True, seed=int(seed)
        )
        try:
            parts = _parts(partitioner, order, labels[order])
            break
        except ValueError:
            continue
    else:
        raise _no_draw(task, 11 * len(seeds), alpha, min_samples)
    shares = []
    for part in parts:
        num_test = min(round(len(part) * test_ratio), len(part) - 1)
        shares.append((part[num_test:], part[:num_test]))
    return shares


def _fl_bench(task: _Task, alpha: float, min_samples: int, test_ratio: float) -> list[Share]:
    if task.seed > fl_bench.LARGEST_SEED:
        raise UserError(f"partition-seed: must be <= {fl_bench.LARGEST_SEED} with dirichlet-fl-bench, got {task.seed}")
    labels = _all_labels(task, min_samples)
    shares = fl_bench.split(
        labels,
        task.num_classes,
        num_clients=task.num_clients,
        seed=task.seed,
        alpha=alpha,
        min_samples=min_samples,
        test_ratio=test_ratio,
    )
    if not shares:
        raise _no_draw(task, fl_bench.DRAWS, alpha, min_samples)
    return shares


def _all_labels(task: _Task, min_samples: int) -> Indices:
    labels = np.concatenate([task.y_train, task.y_test])
    need = task.num_clients * min_samples
    if need > len(labels):
        raise UserError(
            f"min-samples: {task.num_clients} clients with {min_samples} each need {need} samples but {task.dataset} "
            f"has {len(labels)}"
        )
    return labels


def _no_draw(task: _Task, draws: int, alpha: float, min_samples: int) -> UserError:
    return UserError(
        f"min-samples: no draw of {draws} gave each of {task.num_clients} clients at least {min_samples} of the "
        f"{len(task.y_train) + len(task.y_test)} samples of {task.dataset} with dirichlet-alpha {alpha:g}; lower min-samples or "
        "num-clients, or raise dirichlet-alpha"
    )


def _parts(partitioner: Any, indices: Indices, labels: Indices) -> list[Indices]:
    """Run a flwr-datasets Partitioner over `indices` and their labels; return every partition's indices, int64."""
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"index": indices, "label": labels})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for every draw below the minimum size; we report the outcome
        parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    return [np.asarray(part.with_format("numpy")["index"][:], np.int64) for part in parts]
