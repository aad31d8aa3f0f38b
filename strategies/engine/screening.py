"""Screening: far uploads are found, and dropped by name (key `max-update-norm`).

The distance of an upload is the smaller of two: to the median of all uploads (per parameter), and to the model that its
client was sent. So the server's own changes to a client's model do not count. The bound is a multiple of the usual
distance.

The usual distance is the larger of two medians over clients: distance to the median upload, and distance to the model
that the client was sent. The second protects honest clients with unusual data. If most clients have the same data,
their uploads agree. An honest client with other data lies far from their median, but it has not moved farther than they
have.

The usual distance is at least a tenth of its maximum in the run, and at least a hundredth of the length of the model
that was sent. The reason: clients do not move at all when nearly all have nothing left to learn.

For a single client the usual distance is larger in two cases, up to the maximum in the run:

- It is at least the distance of the client's last accepted upload. A client that the others' model does not fit still
  moves when the others have learned.
- It is at least the maximum since the client's last round. A new client moves as far as all clients did when they
  began.

A client with more training samples than the median client may lie farther, in proportion, because it takes more steps.
With one or two uploads neither is far. With three or four, medians are less reliable, and the bound is three times as
wide.

If uploads are added up as they come (streaming.py), no median is known. The distance is then that to the model that was
sent.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.server import client_arrays
from fl_app.server.run_folder import called
from fl_app.transport.wire import WireError
from strategies.base.declared import PARAMETERS, STATISTICS, Outliers
from strategies.base.server_half import ServerHalf, Turn
from strategies.base.state import Sent, UploadBuffer
from strategies.engine.attempt import RoundAttempt
from strategies.engine.streaming import RunningMean
from strategies.kernels import Stack, distances_of_pairs, distances_to_median, masks

# the bound, in usual distances: an honest client is rarely farther away (docs/security.md)
USUAL = 3.0
# with fewer uploads medians are less reliable, and the bound is wider by the factor
_MANY, _FEW_FACTOR = 5, 3.0
# the most that a client's samples count, as a multiple of the median client's: the client itself reports them
_LARGEST = 10.0
# The usual distance is at least these parts: of its maximum so far, and of the length of the sent model.
_OF_MOST, _OF_LENGTH = 0.1, 0.01

Distances = dict[str, NDArray[np.float64]]
Squares = Mapping[str, Mapping[int, float]]
Reference = Callable[[int], Mapping[str, NDArray[Any]]]
"""Returns the values that a client's upload is compared with, by the names of the compared stacks."""


@dataclass(frozen=True)
class Outlier:
    """A far upload.

    what: its farthest part, in the plural. times: its distance in usual distances. allowed: the bound, likewise.
    origin: the values that the distance is from, in words.
    """

    client_id: int
    what: str
    times: float
    allowed: float
    origin: str = "the others'"

    def __str__(self) -> str:
        """Return the distance of the upload in words."""
        return f"its {self.what} lie {self.times:.3g} times as far from {self.origin} as is usual"

    def refusal(self) -> WireError:
        """Return the error that drops the upload."""
        return WireError(f"{self}, allowed are {self.allowed:g} times (max-update-norm; 0 leaves nobody out)")


@dataclass
class Screening:
    """The distances of a run's uploads so far, by the name of the compared stack.

    usual: the usual distance by round. last: the distance of every client's last accepted upload. seen: by client, the
    last round with a known outcome.
    """

    usual: dict[str, dict[int, float]] = field(default_factory=dict)
    last: dict[str, dict[int, float]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    _now: dict[str, dict[int, float]] = field(default_factory=dict, compare=False, repr=False)

    def measure(
        self, round: int, buffer: UploadBuffer, stacks: Mapping[str, Stack], limit: float, sent: Reference
    ) -> list[Outlier]:
        """Note the distances of a round's uploads. Return those beyond `limit` usual distances, the farthest first.

        stacks: float32 [N, ...] by name, with the buffer's rows. sent: returns the values that a client was sent, sized
        like rows. If one client's values for a stack are missing or have another size, only distances from the median
        count in that stack.
        """
        rows, ids = buffer.rows, [buffer.ids[row] for row in buffer.rows]
        stacks = {what: stack.reshape(len(stack), -1) for what, stack in stacks.items() if stack.size and len(rows) > 2}
        moved, lengths = _moved(stacks, rows, ids, sent)
        apart = {what: distances_to_median(stack, rows) for what, stack in stacks.items()}
        return self._judge(round, ids, buffer.sizes[rows], apart, moved, lengths, limit)

    def measure_moves(
        self, round: int, buffer: UploadBuffer, moved: Squares, lengths: Squares, limit: float
    ) -> list[Outlier]:
        """Do as `measure` for uploads that are not kept. The only distances are those from the model that was sent.

        moved, lengths: by compared name and by client, the squares of these distances, and of the lengths of the sent
        vectors.
        """
        rows, ids = buffer.rows, [buffer.ids[row] for row in buffer.rows]
        known = [what for what, of in moved.items() if len(rows) > 2 and all(i in of for i in ids)]
        far, long = ({what: np.sqrt([of[what][i] for i in ids]) for what in known} for of in (moved, lengths))
        found = self._judge(round, ids, buffer.sizes[rows], far, far, long, limit)
        return [replace(outlier, origin="what it was sent") for outlier in found]

    def _judge(
        self,
        round: int,
        ids: list[int],
        sizes: NDArray[np.float64],
        away: Distances,
        moved: Distances,
        lengths: Distances,
        limit: float,
    ) -> list[Outlier]:
        """Note distances, float64 [n] by compared name, and return the far uploads. away: distances from the median."""
        allowed = np.clip(sizes / np.median(sizes), 1, _LARGEST) if ids else sizes
        if len(ids) < _MANY:
            limit *= _FEW_FACTOR
        found = dict[int, Outlier]()
        self._now = {}
        for what, apart in away.items():
            usual = self.usual.setdefault(what, {})
            # of an attempt that did not count
            usual.pop(round, None)
            least = _OF_MOST * max(usual.values(), default=0.0)
            medians = (
                float(np.median(of))
                for of in (apart, moved.get(what, 0.0), _OF_LENGTH * lengths.get(what, np.zeros(1)))
            )
            usual[round] = max(least, *medians)
            far = np.minimum(apart, moved.get(what, np.inf)) / allowed
            self._now[what] = dict(zip(ids, far.tolist(), strict=True))
            rounds, last = sorted(usual), self.last.get(what, {})
            # the largest usual distance from each of these rounds on
            maxima = list(accumulate((usual[r] for r in reversed(rounds)), max))[::-1]
            for client_id, distance in self._now[what].items():
                since = maxima[bisect_right(rounds, self.seen.get(client_id, 0))]
                scale = max(since, min(last.get(client_id, 0.0), maxima[0]))
                if (
                    scale > 0
                    and distance > limit * scale
                    and distance / scale > getattr(found.get(client_id), "times", 0)
                ):
                    found[client_id] = Outlier(client_id, what, distance / scale, limit)
        return sorted(found.values(), key=lambda outlier: -outlier.times)

    def accept(self, round: int, client_ids: Iterable[int], refused: Iterable[int] = ()) -> None:
        """Remember the clients with used uploads, and those with refused ones."""
        used = list(client_ids)
        self.seen |= dict.fromkeys([*used, *refused], round)
        for what, distances in self._now.items():
            self.last.setdefault(what, {}).update({i: distances[i] for i in used if i in distances})

    def saved(self) -> dict[str, Any]:
        """Return the screening as JSON can hold it."""
        by_name = {name: {what: _texts(of) for what, of in getattr(self, name).items()} for name in ("usual", "last")}
        return {**by_name, "seen": _texts(self.seen)}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Screening:
        """Return the screening that `saved` described, from a checkpoint. {}: there is none."""
        usual, last = ({what: _numbers(of) for what, of in saved.get(name, {}).items()} for name in ("usual", "last"))
        return cls(usual, last, _numbers(saved.get("seen", {})))


def reference(outliers: Outliers, sent: Sent) -> dict[str, NDArray[Any]]:
    """Return the values that a client's upload is compared with, by the names of the compared stacks."""
    model = {PARAMETERS: sent.model.params, STATISTICS: sent.model.buffers} if outliers.models else {}
    extras = {what: sent.extras.get(name, sent.model.params) for what, name in outliers.extras.items()}
    return {**model, **extras, **sent.reference}


def compared(server: ServerHalf[Any], buffer: UploadBuffer, sent: Reference) -> dict[str, Stack]:
    """Return the stacks in which uploads must not lie far apart, [N, ...] by a plural name.

    It overwrites elements of `buffer.W` that are not compared (`Outliers.unmasked`).
    """
    outliers = server.outliers
    stacks: dict[str, Stack] = {PARAMETERS: buffer.W, STATISTICS: buffer.B} if outliers.models else {}
    stacks |= {what: buffer.extras[name] for what, name in outliers.extras.items() if name in buffer.extras}
    if outliers.unmasked and buffer.bits is not None:
        for row in buffer.rows:
            own = masks.unpack(buffer.bits[row], buffer.W.shape[1])
            buffer.W[row, own] = sent(buffer.ids[row])[PARAMETERS][own]
    if outliers.comparable is not None:
        for what in outliers.extras.keys() & stacks.keys():
            stacks[what] = server.stack_like(stacks[what])
            for row in buffer.rows:
                extras = {name: stack[row] for name, stack in buffer.extras.items()}
                stacks[what][row] = outliers.comparable(extras, sent(buffer.ids[row])[what])
    return stacks


def _moved(
    stacks: Mapping[str, Stack], rows: list[int], ids: list[int], sent: Reference
) -> tuple[Distances, Distances]:
    """Return the rows' distances from the values that their clients were sent, and the lengths of these values.

    Both are float64 [len(rows)] by stack. A stack is left out if a client's values are missing or have another size.
    """
    pairs: dict[str, list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = {what: [] for what in stacks}
    for row, client_id in zip(rows, ids, strict=True):
        starts = sent(client_id) if stacks else {}
        for what, stack in stacks.items():
            start = starts.get(what)
            if start is not None and start.size == stack.shape[1]:
                pairs[what].append((stack[row], start.reshape(-1)))
    moved: Distances = {}
    lengths: Distances = {}
    for what, known in pairs.items():
        if known and len(known) == len(rows):
            moved[what] = np.sqrt(distances_of_pairs(known))
            lengths[what] = np.sqrt(
                distances_of_pairs([(start, np.broadcast_to(np.float32(0), start.shape)) for _, start in known])
            )
    return moved, lengths


def _texts(of: Mapping[int, Any]) -> dict[str, Any]:
    return {str(k): value for k, value in of.items()}


def _numbers(of: Mapping[str, Any]) -> dict[int, Any]:
    return {int(k): value for k, value in of.items()}


# rounds whose usual distances count
_ROUNDS = 5
# with fewer sums in a round their median is no measure of it
_MANY_SUMS = 3


@dataclass
class SumDistances:
    """usual: the usual distance of the rounds so far, by round."""

    usual: dict[int, float] = field(default_factory=dict)

    def far(self, round: int, apart: Mapping[int, float], limit: float) -> dict[int, float]:
        """Return the sums that are far, each with its distance in usual distances.

        apart: each sum's distance, by its number. limit: the multiple beyond which a sum is far.
        """
        known = [self.usual[r] for r in sorted(self.usual) if r < round][-_ROUNDS:]
        if len(apart) >= _MANY_SUMS:
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


log = logging.getLogger("corolla")


class OutlierStep:
    """The screening of a run's rounds.

    - `screening`: the distances of the run's uploads so far, which a checkpoint has.
    - `used`: far uploads of the last round that were used.
    - `warns`: whether uploads are compared also if no far one is dropped.
    """

    def __init__(self, server: ServerHalf[Any], warns: bool = True) -> None:
        self.server, self.screening, self.warns = server, Screening(), warns
        self.used: list[Outlier] = []

    def references(self, turn: Turn) -> Reference | None:
        """Return what a round's uploads are compared with, by client; None if they are not compared.

        Values on the disk are read again when needed.
        """
        if math.isinf(self.server.outliers.tolerance) or not (self.warns or self.server.config.max_update_norm):
            return None

        def of(client_id: int) -> Mapping[str, NDArray[Any]]:
            values = reference(self.server.outliers, turn.sent_to(client_id))
            client_arrays.release(self.server.state.clients.get(client_id, {}))
            return values

        return of

    def __call__(self, attempt: RoundAttempt, buffer: UploadBuffer) -> list[Outlier]:
        """Return the far uploads. They are dropped by name if `max-update-norm` is set, else noted and logged."""
        sent = self.references(attempt)
        if sent is None:
            return []
        tolerance = self.server.outliers.tolerance
        limit, usual = self.server.config.max_update_norm * tolerance, USUAL * tolerance
        if isinstance(buffer, RunningMean):
            found = self.screening.measure_moves(attempt.round, buffer, buffer.moved, buffer.lengths, usual)
        else:
            stacks = compared(self.server, buffer, sent)
            found = self.screening.measure(attempt.round, buffer, stacks, limit or usual, sent)
        for outlier in found:
            who = outlier.client_id
            if limit:
                buffer.reject(who)
                attempt.fail(who, f"round {attempt.round}", "dropped", outlier.refusal())
            else:
                attempt.outliers.append({"client": who, "cause": str(outlier)})
                cause = "round %d: client %s is used (max-update-norm is 0), but %s"
                log.warning(cause, attempt.round, attempt.called(who), outlier)
        return found

    def accept(self, attempt: RoundAttempt, found: list[Outlier]) -> None:
        """Remember a round that counts: its used uploads, and its far ones."""
        known = attempt.buffer.metrics
        self.used = [outlier for outlier in found if outlier.client_id in known]
        refused = [outlier.client_id for outlier in found if outlier.client_id not in known]
        self.screening.accept(attempt.round, known, refused)

    def suspects(self, turn: Turn) -> list[str]:
        """Return a line for each far upload of the last round that was used: it may be why no client can train."""
        return [
            f"client {called(outlier.client_id, turn.declared)} was used though {outlier}: it is the likely cause, and "
            f"max-update-norm = {USUAL:g} drops such uploads"
            for outlier in self.used
        ]
