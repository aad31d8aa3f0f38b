"""Distances of a private round's sums from the models that were sent: a client that sends a far model moves its sum.

The server sees no single upload. It sees how far the mean of each sum lies from what its clients were sent. The usual
distance is the median over a round's sums. A sum is far if its distance is more than a multiple of two values: the
largest usual distance of the last `_ROUNDS` rounds, and of this one if it has three sums or more. In a first round with
one or two sums nothing is known, and none is far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# rounds whose usual distances count
_ROUNDS = 5
# with fewer sums in a round their median is no measure of it
_MANY = 3


@dataclass
class SumDistances:
    """usual: the usual distance of the rounds so far, by round."""

    usual: dict[int, float] = field(default_factory=dict)

    def far(self, round: int, apart: Mapping[int, float], limit: float) -> dict[int, float]:
        """Return the sums that are far, each with its distance in usual distances.

        apart: each sum's distance, by its number. limit: the multiple beyond which a sum is far.
        """
        known = [self.usual[r] for r in sorted(self.usual) if r < round][-_ROUNDS:]
        if len(apart) >= _MANY:
            known.append(float(np.median(list(apart.values()))))
        usual = max(known, default=0.0)
        return {label: distance / usual for label, distance in apart.items() if 0 < limit * usual < distance}

    def note(self, round: int, apart: Mapping[int, float]) -> None:
        """Note the distances of a round that counts."""
        self.usual[round] = float(np.median(list(apart.values())))

    def saved(self) -> dict[str, Any]:
        """Return the distances as JSON can hold them."""
        return {str(round): usual for round, usual in self.usual.items()}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> SumDistances:
        """Return the distances that `saved` described, from a checkpoint. {}: there are none."""
        return cls({int(round): float(usual) for round, usual in saved.items()})
