"""Counts over clients' Micro-Classes, small numbers per client and parameter (FedPake Eq. 8-9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.kernels.blocks import blocks

# uint64 words of a plane, of all clients: all rows that a client is compared with stay in the cache
_BLOCK_WORDS = 262_144


def num_differing(classes: NDArray[np.uint8], highest: int) -> NDArray[np.int64]:
    """Return the number of columns in which each pair of rows differs (Eq. 8), int64 [N, N].

    classes: uint8 [N, M], at most `highest`. Works on one packed plane of bits per binary digit.
    """
    n, m = classes.shape
    planes = np.zeros((highest.bit_length(), n, -(-m // 64)), np.uint64)
    for digit, plane in enumerate(planes):
        plane.view(np.uint8)[:, : -(-m // 8)] = np.packbits(classes & (1 << digit), axis=1)
    upper = np.zeros((n, n), np.int64)
    for start, stop in blocks(0, planes.shape[2], max(128, _BLOCK_WORDS // n)):
        words = np.ascontiguousarray(planes[:, :, start:stop])
        for i in range(n - 1):
            differ = np.bitwise_or.reduce(words[:, i, None] ^ words[:, i + 1 :], axis=0)
            upper[i, i + 1 :] += np.bitwise_count(differ).sum(axis=1, dtype=np.uint32)
    return upper + upper.T


def most_frequent(classes: NDArray[np.uint8], members: Sequence[NDArray[np.intp]], highest: int) -> NDArray[np.uint8]:
    """Return the most frequent of the classes 1..highest, per column and group of rows (Eq. 9), uint8 [groups, M].

    classes: uint8 [N, M]. Ties go to the smaller class. The result is 0 if all of a group's classes are 0.
    """
    kind = np.min_scalar_type(len(classes))
    winner = np.zeros((len(members), classes.shape[1]), np.uint8)
    for start, stop in blocks(0, classes.shape[1]):
        part, best = classes[:, start:stop], winner[:, start:stop]
        most = np.zeros(best.shape, kind)
        for c in range(1, highest + 1):
            equal = part == c
            for j, rows in enumerate(members):
                count = np.add.reduce(equal if len(rows) == len(equal) else equal[rows], axis=0, dtype=kind)
                won = (count > most[j]).view(np.uint8)
                # classes come in increasing order: a later winner is the larger number
                won *= np.uint8(c)
                np.maximum(best[j], won, out=best[j])
                np.maximum(most[j], count, out=most[j])
    return winner
