"""Uploads that lie far from all others: found, and left out by name (key `max-update-norm`).

How far an upload lies is its distance from the median of all uploads (per parameter), or from what its client was sent, if that
is less: what the server itself made of a client is not held against it. The bound is so many times what is usual.

Usual is the median of the distances from the median, or of those from what was sent, if that is more: where most clients have the
same data they agree, and one with other data, honest, is far from their median but has not moved farther than they have. It is at
least a tenth of the most it has been in the run, and a hundredth of the length of what was sent: where nearly all have
nothing left to learn, they do not move at all. For one client it is more, up to the most in the run:

- as much as that client's last accepted upload lay away: whom the others' model does not fit goes on moving when they have learned;
- the most since it was there last: a newcomer moves as far as all did when they began.

A client with more training samples than the median one may be farther, in proportion: it takes more steps. Of one or two uploads
nobody can say which is far; of three or four medians say less, and the bound is three times as wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.wire import WireError
from strategies.aggregate import Stack, squared_distance
from strategies.base.uploads import Intake
from strategies.robust import distances_to_median

# Times what is usual: an honest client is rarely farther away (docs/security.md).
USUAL = 3.0
# Uploads below which medians say less, and how much wider the bound is then.
_MANY, _FEW_FACTOR = 5, 3.0
# Median clients, as many as one client's samples count at most: they are its own word.
_LARGEST = 10.0
# Of the most there was, and of the length of what was sent: less is not usual.
_OF_MOST, _OF_LENGTH = 0.1, 0.01

Distances = dict[str, NDArray[np.float64]]
# What a client was sent of what is compared, by the same names.
Sent = Callable[[int], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Outlier:
    """How far a client's upload lies from the others: `what` of it, the farthest, in times what is usual, of which so many are
    allowed.
    """

    client_id: int
    what: str
    times: float
    allowed: float

    def __str__(self) -> str:
        """Return how far the upload lies, in words."""
        return f"its {self.what} lie {self.times:.3g} times as far from the others' as is usual"

    def refusal(self) -> WireError:
        """Return the cause why an upload is left out."""
        return WireError(f"{self}, allowed are {self.allowed:g} times (max-update-norm; 0 leaves nobody out)")


@dataclass
class Screening:
    """What is remembered of a run's uploads, by what they are of: `usual` distances by round, `last` those of every client's last
    accepted upload; and `seen`, the last round whose outcome for a client is known.
    """

    usual: dict[str, dict[int, float]] = field(default_factory=dict)
    last: dict[str, dict[int, float]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    _now: dict[str, dict[int, float]] = field(default_factory=dict, compare=False, repr=False)

    def measure(
        self, round: int, intake: Intake, stacks: Mapping[str, Stack], limit: float, sent: Sent
    ) -> list[Outlier]:
        """Note how far a round's uploads lie; return clients farther away than `limit` times what is usual, the farthest first.

        stacks: float32 [N, ...] by name, with a row for every row of the intake's. sent: rows like theirs; what has another
        size, or is not there, says nothing.
        """
        rows, ids = intake.rows, [intake.ids[row] for row in intake.rows]
        sizes = intake.sizes[rows]
        allowed = np.clip(sizes / np.median(sizes), 1, _LARGEST) if rows else sizes
        if len(rows) < _MANY:
            limit *= _FEW_FACTOR
        stacks = {what: stack.reshape(len(stack), -1) for what, stack in stacks.items() if stack.size and len(rows) > 2}
        moved, lengths = _moved(stacks, rows, ids, sent)
        found = dict[int, Outlier]()
        self._now = {}
        for what, stack in stacks.items():
            apart = distances_to_median(stack, rows)
            usual = self.usual.setdefault(what, {})
            least = max([_OF_MOST * m for r, m in usual.items() if r < round], default=0.0)
            medians = (
                float(np.median(of))
                for of in (apart, moved.get(what, 0.0), _OF_LENGTH * lengths.get(what, np.zeros(1)))
            )
            usual[round] = max(least, *medians)
            far = np.minimum(apart, moved.get(what, np.inf)) / allowed
            self._now[what] = dict(zip(ids, far.tolist(), strict=True))
            for client_id, distance in self._now[what].items():
                since = max(m for r, m in usual.items() if self.seen.get(client_id, 0) < r <= round)
                scale = max(since, min(self.last.get(what, {}).get(client_id, 0.0), max(usual.values())))
                if (
                    scale > 0
                    and distance > limit * scale
                    and distance / scale > getattr(found.get(client_id), "times", 0)
                ):
                    found[client_id] = Outlier(client_id, what, distance / scale, limit)
        return sorted(found.values(), key=lambda outlier: -outlier.times)

    def accept(self, round: int, client_ids: Iterable[int], refused: Iterable[int] = ()) -> None:
        """Remember whose uploads were used, and whose were too far."""
        used = list(client_ids)
        self.seen |= dict.fromkeys([*used, *refused], round)
        for what, distances in self._now.items():
            self.last.setdefault(what, {}).update({i: distances[i] for i in used if i in distances})

    def saved(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        by_name = {name: {what: _texts(of) for what, of in getattr(self, name).items()} for name in ("usual", "last")}
        return {**by_name, "seen": _texts(self.seen)}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Screening:
        """Take over what `saved` returned, from a checkpoint; {} if it holds nothing."""
        usual, last = ({what: _numbers(of) for what, of in saved.get(name, {}).items()} for name in ("usual", "last"))
        return cls(usual, last, _numbers(saved.get("seen", {})))


def _moved(stacks: Mapping[str, Stack], rows: list[int], ids: list[int], sent: Sent) -> tuple[Distances, Distances]:
    """Return the rows' distances from what their clients were sent, and the lengths of that, float64 [len(rows)] each; of those
    stacks where that can be said.
    """
    found: dict[str, list[tuple[float, float]]] = {what: [] for what in stacks}
    for row, client_id in zip(rows, ids, strict=True):
        starts = sent(client_id) if stacks else {}
        for what, stack in stacks.items():
            start = starts.get(what)
            if start is not None and start.size == stack.shape[1]:
                start = start.reshape(-1)
                zeros = np.broadcast_to(np.float32(0), start.shape)
                found[what].append((squared_distance(stack[row], start), squared_distance(start, zeros)))
    known = {what: np.sqrt(each).T for what, each in found.items() if each and len(each) == len(rows)}
    return {what: each[0] for what, each in known.items()}, {what: each[1] for what, each in known.items()}


def _texts(of: Mapping[int, Any]) -> dict[str, Any]:
    return {str(k): value for k, value in of.items()}


def _numbers(of: Mapping[str, Any]) -> dict[int, Any]:
    return {int(k): value for k, value in of.items()}
