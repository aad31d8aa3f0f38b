"""Uploads that lie far from all others: found, and left out by name (key `max-update-norm`).

How far is counted in medians: an upload's distance from the median of all uploads (per parameter), divided by the median of these
distances. For a client that was absent it is the largest such median since it last took part: a newcomer among clients that have
learned already moves as far as all did when they began. A client with more training samples than the median one may be farther, in
proportion: it takes more steps. Of one or two uploads nobody can say which is far; of three or four one is often far (the only
client without the others' one class), and only what is beyond all measure is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_app.wire import WireError
from strategies.aggregate import Stack
from strategies.base.uploads import Intake
from strategies.robust import distances_to_median

USUAL = 3.0  # medians: no honest client was ever seen farther away
_MANY = 5  # uploads, below which a median of distances says little
_FEW_ROOM = 1000.0
_LARGEST = 10.0  # median clients, that one's samples count: they are its own word


@dataclass(frozen=True)
class Stray:
    """How far a client's upload lies from the others: `what` of it, the farthest, in medians, of which so many are allowed."""

    client_id: int
    what: str
    medians: float
    allowed: float

    def __str__(self) -> str:
        """Say it of the upload."""
        return f"its {self.what} lie {self.medians:.3g} times as far from the median of all uploads as is usual"

    def refusal(self) -> WireError:
        """Return the cause why an upload is left out."""
        return WireError(f"{self}, allowed are {self.allowed:g} times (max-update-norm; 0 leaves nobody out)")


@dataclass
class Screening:
    """What is remembered of a run's uploads: `medians` of their distances by what they are of and round, `seen` the round of a
    client's last accepted upload.
    """

    medians: dict[str, dict[int, float]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def strays(self, round: int, intake: Intake, stacks: Mapping[str, Stack], limit: float) -> list[Stray]:
        """Find the clients that are farther than `limit` medians from the others, the farthest first.

        stacks: float32 [N, ...] by name, with a row for every row of the intake's.
        """
        rows = intake.rows
        sizes = intake.sizes[rows]
        room = np.clip(sizes / np.median(sizes), 1, _LARGEST) if rows else sizes
        if len(rows) < _MANY:
            limit *= _FEW_ROOM
        farthest: dict[int, Stray] = {}
        for what, stack in stacks.items():
            if not stack.size or len(rows) < 3:
                continue
            distances = distances_to_median(stack.reshape(len(stack), -1), rows)
            medians = self.medians.setdefault(what, {})
            medians[round] = float(np.median(distances))
            for row, distance in zip(rows, (distances / room).tolist(), strict=True):
                client_id = intake.ids[row]
                usual = max((m for r, m in medians.items() if self.seen.get(client_id, 0) < r <= round), default=0)
                if usual > 0 and distance > limit * usual and distance / usual > getattr(farthest.get(client_id), "medians", 0):
                    farthest[client_id] = Stray(client_id, what, distance / usual, limit)
        return sorted(farthest.values(), key=lambda stray: -stray.medians)

    def accept(self, round: int, client_ids: Iterable[int]) -> None:
        """Remember whose uploads were used."""
        self.seen |= dict.fromkeys(client_ids, round)

    def saved(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        medians = {what: {str(r): m for r, m in each.items()} for what, each in self.medians.items()}
        return {"medians": medians, "seen": {str(i): r for i, r in self.seen.items()}}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Screening:
        """Undo `saved`; {} for a run that began without."""
        medians = {what: {int(r): m for r, m in each.items()} for what, each in saved.get("medians", {}).items()}
        return cls(medians, {int(i): r for i, r in saved.get("seen", {}).items()})
