"""Dealing of classes to clients: class mixes, whole counts, samples from shuffled pools, the classes of each client.

Pure functions: equal arguments and an equal state of the generator give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fl_app.known_names import UNBALANCED
from fl_app.rng import generator

Indices = NDArray[np.int64]

FEWEST = 10
"""If its classes have too few test samples, a client keeps at least this many, or half of those asked for if fewer."""


def client_mixes(prior: NDArray[np.generic], alpha: float, num_clients: int, seed: int) -> NDArray[np.float64]:
    """Draw each client's class proportions q ~ Dir(alpha * prior), prior scaled to mean one over its positive entries.

    prior: [K], >= 0. Returns float64 [N, K]; rows sum to 1 and are zero where the prior is zero. Source: FedCAC §4.1.
    """
    present = np.flatnonzero(prior)
    weights = np.asarray(prior, np.float64)[present]
    mixes = np.zeros((num_clients, len(prior)))
    rng = generator(seed, "partition-mixes")
    mixes[:, present] = rng.dirichlet(alpha * weights / weights.mean(), size=num_clients)
    return mixes


def allocate(q: NDArray[np.float64], total: int, room: NDArray[np.int64], spill: bool = True) -> NDArray[np.int64]:
    """Return proportions as counts int64 [K] with the exact sum `total`, no class above its room.

    q: [K], >= 0. room: int64 [K]. Counts are rounded by largest remainder. The excess of a full class moves to the
    other classes by q and then, if spill, to any class by the room left. The sum is below `total` only if the allowed
    classes have too little room.
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
    """Return the fewest of `size` test samples that a client may keep: the smaller of FEWEST and half of them."""
    return min(FEWEST, -(-size // 2))


def keep_mix(mix: NDArray[np.float64], size: int, room: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return counts int64 [K] in a mix, rounded by largest remainder, each within its room; None if none fit.

    Their sum is the largest that fits, at most `size` and at least `fewest_kept`. mix: [K], >= 0, with a sum > 0. room:
    int64 [K].
    """
    mix = mix / mix.sum()
    held = mix > 0
    # rounding adds less than 1, so a class with room n fits shares below n + 1
    most = min(size, int(np.min((room[held] + 1) / mix[held])))
    for total in range(most, fewest_kept(size) - 1, -1):
        counts = largest_remainder(mix, total)
        if (counts <= room).all():
            return counts
    return None


def apart(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Return the total variation distance of two class mixes, in [0, 1]; NaN if one is empty.

    first, second: samples per class, int64 [K].
    """
    if not first.sum() or not second.sum():
        return math.nan
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def largest_remainder(weights: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return `total` times the weights' shares, rounded to counts int64 [K] with the sum `total`.

    The largest fractions are rounded up. A class without weight gets 0.
    """
    exact = weights / weights.sum() * total
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    fractions = np.where(weights > 0, exact - counts, -1.0)
    # floating-point errors can leave more counts than classes with weight: repeat the order of decreasing fractions
    order = np.argsort(-fractions, kind="stable")[: np.count_nonzero(weights)]
    np.add.at(counts, np.resize(order, max(0, total - int(counts.sum()))), 1)
    return counts


def deal(counts: NDArray[np.int64], labels: Indices, rng: np.random.Generator) -> list[Indices]:
    """Deal samples class by class from shuffled pools. An empty pool is reshuffled and dealt again.

    counts: int64 [N, K], none above the class's number of samples. labels: int64 [n]. Returns per client int64 indices
    into labels, without repetition.
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
                # samples that this client holds already go to the next clients
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
    """Return which classes each client holds, bool [N, K]: `per_client` distinct ones.

    `blocks` gives some clients fewer if the numbers do not divide. present: int64, the classes that have samples.
    assignment: one of ASSIGNMENTS.
    """
    holds = np.zeros((num_clients, num_classes), bool)
    hands = ASSIGNMENTS[assignment](len(present), num_clients, per_client, rng)
    for row, chosen in zip(holds, hands, strict=True):
        row[present[chosen]] = True
    return holds


def _balanced(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Draw each client's classes at random among the least used. Clients per class differ by at most one."""
    used = np.zeros(num_classes, np.int64)
    for _ in range(num_clients):
        tie = rng.permutation(num_classes)
        chosen = np.lexsort((tie, used))[:per_client]
        used[chosen] += 1
        yield chosen


def _random(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Draw each client's classes without replacement, independently of other clients (FedCAC's authors).

    Several clients may hold a class, or none.
    """
    for _ in range(num_clients):
        yield rng.choice(num_classes, per_client, replace=False)


def block_size(num_classes: int, num_clients: int, per_client: int) -> int:
    """Return the number of clients per class under `blocks`: ceil(N per_client / K)."""
    return -(-num_clients * per_client // num_classes)


def _blocks(num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Give each class to the first `block_size` clients that lack one (PFLlib): neighbours hold the same classes."""
    wanted = np.full(num_clients, per_client)
    hands: list[list[int]] = [[] for _ in range(num_clients)]
    for k in range(num_classes):
        block = np.flatnonzero(wanted)[: block_size(num_classes, num_clients, per_client)]
        wanted[block] -= 1
        for client_id in block:
            hands[client_id].append(k)
    return (np.array(hand, np.int64) for hand in hands)


def even_shares(holds: NDArray[np.bool_], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Divide every class evenly over the clients that hold it, int64 [N, K]; the first of them get one sample more.

    holds: bool [N, K]. room: samples of each class, int64 [K].
    """
    holders, turn = np.maximum(holds.sum(0), 1), np.cumsum(holds, 0) - 1
    counts: NDArray[np.int64] = holds * (room // holders + (turn < room % holders))
    return counts


def uneven_shares(holds: NDArray[np.bool_], room: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Divide every class unevenly over the clients that hold it, int64 [N, K] (PFLlib's separate_data, not balanced).

    Of a class with n samples and s clients, each client but the last gets a uniform integer in [low, high). Here high is
    n / s, and low is its tenth or 1 / K if that is more, both rounded down. The last client gets the rest. holds, room:
    as in `even_shares`.
    """
    counts = np.zeros(holds.shape, np.int64)
    for k in range(holds.shape[1]):
        clients = np.flatnonzero(holds[:, k])
        if len(clients):
            share = room[k] / len(clients)
            low, high = int(max(share / 10, 1 / holds.shape[1])), int(share)
            drawn = rng.integers(low, max(high, low + 1), len(clients) - 1)
            counts[clients, k] = [*drawn, room[k] - drawn.sum()]
    return counts


Assignment = Callable[[int, int, int, np.random.Generator], Iterator[Indices]]
ASSIGNMENTS: Mapping[str, Assignment] = {
    "balanced": _balanced,
    "random": _random,
    "blocks": _blocks,
    UNBALANCED: _blocks,
}
