"""Rules for means over clients that a few lying clients cannot shift far (key `robust`), one file each.

A rule is a file `<name>.py` here, with `RULE`, and its name in `Average` of fl_app/known_names.py. No other code knows its
name. strategies/kernels/robust.py applies it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.kernels.aggregate import Stack


@dataclass(frozen=True)
class ByColumn:
    """A rule for each parameter by itself.

    mean(block, rows, num_byzantine): returns the mean of the chosen rows of a block of columns, float32 [w]. block: float32
    [N, w]; rows: of the clients, at least one; num_byzantine: how many of them are assumed to lie. counts_byzantine: whether the
    rule reads `num_byzantine`.
    """

    mean: Callable[[Stack, NDArray[np.intp], int], NDArray[np.float32]]
    counts_byzantine: bool = False


@dataclass(frozen=True)
class ByDistance:
    """A rule that chooses or weights whole clients.

    weights(distances, num_byzantine): returns the clients' weights in a mean, float64 [n]. distances: squared, between their
    uploads, float64 [n, n]. num_byzantine, counts_byzantine: as for ByColumn.
    """

    weights: Callable[[NDArray[np.float64], int], NDArray[np.float64]]
    counts_byzantine: bool = False


RULES: frozenset[str] = frozenset(found.name.replace("_", "-") for found in pkgutil.iter_modules(__path__))
"""Names of the rules."""


@functools.cache
def rule_of(name: str) -> ByColumn | ByDistance:
    """Return the rule with a name, as the key `robust` has it."""
    rule: ByColumn | ByDistance = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").RULE
    return rule
