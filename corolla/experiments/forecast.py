"""How long a sweep will take, from rounds that are recorded: of finished runs, of interrupted ones, of runs begun for this.

A round of a setting takes the median of its recorded rounds without the first one, which loads libraries and data. An evaluation
of all clients takes what recorded ones took; where there is none, what the clients of a round spent on theirs (a client evaluates
twice in a round), and on training for `finetune-epochs`, at the pace of the whole round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corolla.experiments.grouping import by_settings, settings
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import Point, identity
from fl_app.config import RunConfig
from fl_app.metrics import Record

# rounds that are done to be measured
FIRST = 2
# times as many must be to do with a setting
WORTH = 20


@dataclass(frozen=True)
class Pace:
    """Seconds of a round and of an evaluation of all clients."""

    round: float
    evaluation: float


def pace(run: RecordedRun, config: RunConfig) -> Pace | None:
    """Return how fast a run went; None if it has fewer than FIRST rounds."""
    rounds = [record for record in run.rounds.values() if "round" in record.get("seconds", {})]
    if len(rounds) < FIRST:
        return None
    round = statistics.median(r["seconds"]["round"] - r["seconds"].get("evaluate", 0.0) for r in rounds[1:])
    known = [r["seconds"]["evaluate"] for r in rounds if "evaluate" in r["seconds"]]
    return Pace(round, statistics.median(known) if known else round * _evaluation_share(rounds[-1], config))


def _evaluation_share(record: Record, config: RunConfig) -> float:
    """Return how many rounds an evaluation of all clients is worth, from what a round's clients spent."""
    rows = [row["seconds"] for row in record.get("clients", {}).values() if row.get("seconds")]
    spent = sum(sum(row.values()) for row in rows)
    if not spent:
        return 0.0
    epochs = config.finetune_epochs / config.local_epochs
    tests = (2 if epochs else 1) / 2
    own = sum(row.get("merge", 0.0) + tests * row.get("evaluate", 0.0) + epochs * row.get("train", 0.0) for row in rows)
    return float(own / spent * config.num_clients / len(rows))


def evaluations(config: RunConfig, done: int) -> int:
    """Count the evaluations of all clients after a round until the end."""
    return sum(config.evaluates_after(t) for t in range(done + 1, config.num_server_rounds + 1))


class Forecast:
    """What is to do of a sweep, and how fast it goes. known: its runs in the directory, finished or not, by identity."""

    def __init__(self, points: Iterable[Point], known: Mapping[str, RecordedRun]) -> None:
        self._known = known
        self._groups = by_settings(points, lambda point: settings(point.parsed.resolved))
        self._paces = [self._pace(group) for group in self._groups]

    def _pace(self, group: Sequence[Point]) -> Pace | None:
        runs = [(run, point) for point in group if (run := self._known.get(identity(point.parsed))) is not None]
        return next((found for run, point in runs if (found := pace(run, point.parsed)) is not None), None)

    def _done(self, point: Point) -> int:
        run = self._known.get(identity(point.parsed))
        return 0 if run is None else max(run.rounds, default=0)

    def _left(self, group: Sequence[Point]) -> list[tuple[int, int]]:
        """Rounds and evaluations that are left of each of a group's runs."""
        done = [(point.parsed, self._done(point)) for point in group]
        return [(config.num_server_rounds - t, evaluations(config, t)) for config, t in done]

    def unmeasured(self) -> list[Point]:
        """Return a run of every setting of which no pace is known and so much is to do that measuring it is worth its time."""
        groups = [group for group, known in zip(self._groups, self._paces, strict=True) if known is None]
        return [group[0] for group in groups if sum(rounds for rounds, _ in self._left(group)) >= WORTH * FIRST]

    def seconds(self, jobs: int) -> float | None:
        """Return how long all that is to do takes, `jobs` runs at a time; settings without a pace go as the others do on average.

        None if no pace is known.
        """
        measured = [found for found in self._paces if found is not None]
        if not measured:
            return None
        usual = Pace(
            *(statistics.fmean(each) for each in ([p.round for p in measured], [p.evaluation for p in measured]))
        )
        runs = [
            rounds * (known or usual).round + tests * (known or usual).evaluation
            for group, known in zip(self._groups, self._paces, strict=True)
            for rounds, tests in self._left(group)
        ]
        return max(sum(runs) / jobs, max(runs, default=0.0))


def duration(seconds: float) -> str:
    """Write a duration for people: 40 s, 25 min, 9 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
