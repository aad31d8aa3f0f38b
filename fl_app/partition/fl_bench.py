"""FL-bench's Dirichlet partition, draw for draw as in its generate_data.py (KarhouTam/FL-bench, early 2025).

With FL-bench's default seed, 42, it equals the split of any FL-bench run with the same data set, number of clients and
concentration. FedOBP's stored log of Local on Fashion-MNIST confirms it: 54 accuracies of 19 clients are all fractions
with the sizes of these clients' test sets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

DRAWS = 1000
"""Draws after which `split` gives up; FL-bench never does."""

LARGEST_SEED = 2**32 - 1
"""Largest seed of numpy's legacy generator. FL-bench draws with this generator."""


def split(
    labels: Indices, num_classes: int, *, num_clients: int, seed: int, alpha: float, min_samples: int, test_ratio: float
) -> list[tuple[Indices, Indices]]:
    """Return per client (train, test), int64 indices in the order drawn; [] if no draw gave every client `min_samples`.

    Each class is shuffled and cut at the cumulative shares of a Dirichlet(alpha) draw, rounded down. All classes are
    drawn again while a client has fewer than `min_samples`. Then each client's n samples are shuffled; the first
    n * test_ratio of them, rounded down, are its test set. labels: int64, training set first.
    """
    rng = np.random.RandomState(seed)
    of_class = [np.flatnonzero(labels == k) for k in range(num_classes)]
    for _ in range(DRAWS):
        pieces = []
        for indices in of_class:
            rng.shuffle(indices)
            # for a tiny alpha all shares underflow, and their quotients are NaN
            shares = np.nan_to_num(rng.dirichlet(np.full(num_clients, alpha)), posinf=0.0)
            ends = (np.cumsum(shares) * len(indices)).astype(int)
            pieces.append(np.split(indices, ends[:-1]))
        parts = [np.concatenate(part) for part in zip(*pieces, strict=True)]
        if min(map(len, parts)) >= min_samples:
            break
    else:
        return []
    out = []
    for part in parts:
        rng.shuffle(part)
        tested = int(len(part) * test_ratio)
        out.append((part[tested:], part[:tested]))
    return out
