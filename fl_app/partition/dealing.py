"""How classes are dealt to clients: class mixes, whole counts, hands from shuffled pools, which classes a client holds.

Pure functions: the same arguments, and the same state of a generator, give the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fl_app.rng import generator

Indices = NDArray[np.int64]

FEWEST = 10
"""Test samples that a client keeps where its classes have not enough for all that are asked, unless half of those are fewer."""


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
        counts += np.minimum(largest_remainder(weights, left), room - counts)
    return counts


def fewest_kept(size: int) -> int:
    """Return how few of `size` test samples a client may have so that their mix is kept: half of them, or FEWEST."""
    return min(FEWEST, -(-size // 2))


def keep_mix(mix: NDArray[np.float64], size: int, room: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return counts int64 [K] in a mix, each class by largest remainder and within its room; None if there are none.

    Their sum is `size`, or as near below it as the rooms allow, down to `fewest_kept`. mix: [K], not negative, of sum > 0.
    room: int64 [K].
    """
    mix = mix / mix.sum()
    held = mix > 0
    # a class of n samples has room for a share of it with less than one more
    most = min(size, int(np.min((room[held] + 1) / mix[held])))
    for total in range(most, fewest_kept(size) - 1, -1):
        counts = largest_remainder(mix, total)
        if (counts <= room).all():
            return counts
    return None


def apart(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Return how far apart two class mixes are, in [0, 1]: the total variation distance of their shares; NaN if one is empty.

    first, second: samples per class, int64 [K].
    """
    if not first.sum() or not second.sum():
        return math.nan
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def largest_remainder(weights: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Round `total` times the weights' shares to counts int64 [K] of that sum, the largest fractions up; no weight, no count."""
    exact = weights / weights.sum() * total
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    fractions = np.where(weights > 0, exact - counts, -1.0)
    # rounding can leave one more than there are classes with weight: the largest fractions get it in turn
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
                # what this client holds already goes to the next ones
                fresh = np.concatenate([fresh[~held], fresh[held]])
                more = count - len(mine)
                mine, pool = np.concatenate([mine, fresh[:more]]), fresh[more:]
            hand.append(mine)
    return [np.concatenate(hand) if hand else np.zeros(0, np.int64) for hand in hands]


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
    hands = ASSIGNMENTS[assignment](len(present), num_clients, per_client, rng)
    for row, chosen in zip(holds, hands, strict=True):
        row[present[chosen]] = True
    return holds


def _balanced(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Draw each client's classes at random among the least used, so that all are held equally often, up to one."""
    used = np.zeros(num_classes, np.int64)
    for _ in range(num_clients):
        tie = rng.permutation(num_classes)
        chosen = np.lexsort((tie, used))[:per_client]
        used[chosen] += 1
        yield chosen


def _random(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Let every client draw its own without replacement (FedCAC's authors): clients may share classes, some classes may be left."""
    for _ in range(num_clients):
        yield rng.choice(num_classes, per_client, replace=False)


def block_size(num_classes: int, num_clients: int, per_client: int) -> int:
    """Return how many clients hold a class under `blocks`: ceil(N per_client / K)."""
    return -(-num_clients * per_client // num_classes)


def _blocks(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Give each class to the first `block_size` clients that still want one (PFLlib): neighbours hold the same classes."""
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
