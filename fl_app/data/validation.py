"""A client's validation data: part of its training samples, kept out of training and used for choices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from fl_app.data.prepared import Targets
from fl_app.errors import DataError, listed
from fl_app.partition.dealing import Indices, largest_remainder

# validation samples of a client; a choice by fewer depends on chance
FEW = 10


def split(targets: Targets, ratio: float, *, seed: int, client_id: int, by_class: bool) -> tuple[Indices, Indices]:
    """Return (training, validation), the places of a client's samples, int64 [n - m] and [m], both ascending.

    targets: those of its training samples, [n] or [n, k]. by_class: targets are labels, and each class gives a share in
    proportion to its size, but never its last sample. m is `ratio` times n, rounded, at least 1. m is less if many
    classes have a single sample. The draw depends on seed and client id only. Raises UserError for a client with fewer
    than two samples.
    """
    n = len(targets)
    if n < 2:
        raise DataError(
            key="validation-ratio",
            rule=f"client {client_id} needs 2 training samples, one to train and one to validate",
            value=n,
        )
    wanted = min(n - 1, max(1, int(ratio * n + 0.5)))
    generator = rng.generator(seed, "validation", client_id=client_id)
    shuffled = generator.permutation(n)
    chosen = _stratified(shuffled, np.asarray(targets), wanted) if by_class else shuffled[:wanted]
    held_out = np.zeros(n, bool)
    held_out[chosen] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _stratified(shuffled: Indices, labels: NDArray[np.int64], wanted: int) -> Indices:
    """Return the first samples of each class, in proportion to its size, but never all of a class, int64 [m]."""
    classes, counts = np.unique(labels, return_counts=True)
    spare = counts - 1
    if not spare.any():
        # every class has one sample: no rule prefers a class that may be missing from training
        return shuffled[:1]
    shares = np.minimum(largest_remainder(counts / counts.sum() * wanted, wanted), spare)
    # classes with the most samples left replace the shares of classes that have a single sample
    while shares.sum() < min(wanted, spare.sum()):
        shares[np.argmax(spare - shares)] += 1
    drawn = labels[shuffled]
    return np.concatenate([shuffled[drawn == c][:k] for c, k in zip(classes, shares, strict=True)])


def remarks(sizes: Sequence[int]) -> list[str]:
    """Return a line naming clients with fewer than FEW validation samples. sizes: the clients' numbers, in order."""
    few = [f"client {i}: {size}" for i, size in enumerate(sizes) if size < FEW]
    return [f"validation: fewer than {FEW} samples, so choices depend on chance: {listed(few)}"] if few else []
