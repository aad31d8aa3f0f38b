"""Forecast of a sweep's duration from recorded rounds.

These are rounds of finished runs, interrupted runs, and runs started for this purpose.

A round of a setting takes the median time of its recorded rounds, without the first, which loads libraries and data. An
evaluation of all clients takes the median of recorded ones. Without any, it is estimated from the clients' times in a
round: their evaluation (two per round) and, for `finetune-epochs`, their training, scaled by the time of the whole
round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corolla.experiments.grouping import by_settings, settings
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import Point, identity
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.machine import cpu
from fl_app.metrics import Record
from fl_app.server.run_folder import MADE_WITH

# rounds run to measure a setting
FIRST = 2
# a setting is measured if it has at least this many times FIRST rounds left
WORTH = 20
# keys without effect on the work of a round
_SAME_WORK = ("seed", "num-server-rounds", "evaluate-every")


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds of a round, and of an evaluation of all clients."""

    round: float
    evaluation: float


def pace(run: RecordedRun, config: RunConfig) -> RoundSeconds | None:
    """Return a run's pace; None if it has fewer than FIRST rounds."""
    rounds = [record for record in run.rounds.values() if "round" in record.get("seconds", {})]
    if len(rounds) < FIRST:
        return None
    round = statistics.median(r["seconds"]["round"] - r["seconds"].get("evaluate", 0.0) for r in rounds[1:])
    known = [r["seconds"]["evaluate"] for r in rounds if "evaluate" in r["seconds"]]
    return RoundSeconds(round, statistics.median(known) if known else round * _evaluation_share(rounds[-1], config))


def _evaluation_share(record: Record, config: RunConfig) -> float:
    """Return the time of an evaluation of all clients in rounds, estimated from the clients' times in one round."""
    rows = [row["seconds"] for row in record.get("clients", {}).values() if row.get("seconds")]
    spent = sum(sum(row.values()) for row in rows)
    if not spent:
        return 0.0
    epochs = config.finetune_epochs / config.local_epochs
    tests = (2 if epochs else 1) / 2
    own = sum(row.get("merge", 0.0) + tests * row.get("evaluate", 0.0) + epochs * row.get("train", 0.0) for row in rows)
    return float(own / spent * config.num_clients / len(rows))


def seconds_of(config: RunConfig, pace: RoundSeconds, done: int = 0) -> float:
    """Return the seconds of a run after round `done` until the end."""
    return (config.num_server_rounds - done) * pace.round + evaluations(config, done) * pace.evaluation


class RecordedPaces:
    """Paces of runs recorded on this type of CPU, for runs whose rounds do the same work."""

    def __init__(self, runs: Iterable[RecordedRun]) -> None:
        self._paces: dict[tuple[tuple[str, str], ...], RoundSeconds] = {}
        for run in runs:
            try:
                found = pace(run, run.config) if run.about.get(MADE_WITH, [{}])[-1].get("cpu") == cpu() else None
            except UserError:
                continue
            if found is not None:
                self._paces[_work(run.config)] = found

    def of(self, config: RunConfig) -> RoundSeconds | None:
        """Return the pace of a run with this config; None if none is recorded."""
        return self._paces.get(_work(config))


def _work(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Return the settings that change the work of a round, as text."""
    own = settings(config.resolved)
    return tuple(sorted((name, repr(value)) for name, value in own.items() if name not in _SAME_WORK))


def evaluations(config: RunConfig, done: int) -> int:
    """Return the number of evaluations of all clients after round `done` until the end."""
    return sum(config.evaluates_after(t) for t in range(done + 1, config.num_server_rounds + 1))


class Forecast:
    """A sweep's remaining work and its pace. known: its runs in the directory, finished or not, by identity."""

    def __init__(self, points: Iterable[Point], known: Mapping[str, RecordedRun]) -> None:
        self._known = known
        self._groups = by_settings(points, lambda point: settings(point.parsed.resolved))
        self._paces = [self._pace(group) for group in self._groups]

    def _pace(self, group: Sequence[Point]) -> RoundSeconds | None:
        runs = [(run, point) for point in group if (run := self._known.get(identity(point.parsed))) is not None]
        return next((found for run, point in runs if (found := pace(run, point.parsed)) is not None), None)

    def _done(self, point: Point) -> int:
        run = self._known.get(identity(point.parsed))
        return 0 if run is None else max(run.rounds, default=0)

    def unmeasured(self) -> list[Point]:
        """Return one run of every setting without a known pace that has enough rounds left to be worth measuring."""
        groups = [group for group, known in zip(self._groups, self._paces, strict=True) if known is None]
        left = [sum(point.parsed.num_server_rounds - self._done(point) for point in group) for group in groups]
        return [group[0] for group, rounds in zip(groups, left, strict=True) if rounds >= WORTH * FIRST]

    def seconds(self, jobs: int) -> float | None:
        """Return the duration of all remaining work with `jobs` runs at a time; None if no pace is known.

        Settings without a pace get the mean of the others.
        """
        measured = [found for found in self._paces if found is not None]
        if not measured:
            return None
        usual = RoundSeconds(*map(statistics.fmean, zip(*map(dataclasses.astuple, measured), strict=True)))
        runs = [
            seconds_of(point.parsed, known or usual, self._done(point))
            for group, known in zip(self._groups, self._paces, strict=True)
            for point in group
        ]
        return max(sum(runs) / jobs, max(runs, default=0.0))


def duration(seconds: float) -> str:
    """Format a duration: 40 s, 25 min, 9 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
