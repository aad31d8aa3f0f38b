"""Runs of a report: run folders, and their records as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corolla.experiments.runs import RecordedRun, find, that_never_train, that_train
from fl_app.errors import UserError
from fl_app.figures import Figure, from_json
from fl_app.keys import show
from fl_app.metrics import Metric, moments
from fl_app.server import arrivals, client_rows
from fl_app.server.client_rows import Rows
from fl_app.server.record import VIRTUAL

Floats = NDArray[np.float64]
# curves of at least this many rounds are drawn as a running mean over a fortieth of them
LONG = 80
# for more clients than this, pictures show quantiles, histograms and groups instead of single clients
MANY = 60
# function that selects an evaluation's clients, by name of the curve
EVALUATED = {"evaluation": that_train, "unseen": that_never_train}


@dataclass(frozen=True)
class Curve:
    """A metric over rounds: mean and quartiles over the clients, all float64 [rounds].

    tails: the 5 % and the 95 % quantile, if a round has more than MANY clients.
    """

    rounds: NDArray[np.int64]
    mean: Floats
    low: Floats
    high: Floats
    tails: tuple[Floats, Floats] | None = None

    def smooth(self) -> Curve:
        """Return the curve as drawn."""
        tails = (smooth(self.tails[0]), smooth(self.tails[1])) if self.tails else None
        return Curve(self.rounds, smooth(self.mean), smooth(self.low), smooth(self.high), tails)


@dataclass(frozen=True)
class ReportedRun(RecordedRun):
    """A run of a report. number, label: its names in the report."""

    number: str = "1"
    label: str = ""

    @cached_property
    def finished(self) -> bool:
        """Whether it had its summary when it was read. It is read once, so that a run that ends meanwhile does not change."""
        return super().finished

    @cached_property
    def paced(self) -> dict[int, float]:
        """Seconds of each round in simulated time, or in a deployment whose rounds may close early; {} of other runs."""
        return {t: record[VIRTUAL] for t, record in self.rounds.items() if VIRTUAL in record} or _real_seconds(self)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """Figures that its method declared."""
        return from_json(self.about.get("figures", []))

    def named(self, number: str, label: str) -> ReportedRun:
        """Return this run with another number and label. Data that were read already are shared."""
        other = replace(self, number=number, label=label)
        for name, value in vars(self).items():
            vars(other).setdefault(name, value)
        return other

    def judged(self, metric: str) -> ReportedRun:
        """Return this run judged by another of its metrics, given by name."""
        other = replace(self, judged_by=metric)
        for name, value in vars(self).items():
            # the outcome depends on the metric
            if name != "outcome":
                vars(other).setdefault(name, value)
        return other

    def setting(self, name: str) -> str:
        """Return a setting as text, a partition with its parameter."""
        text = show(self.settings.get(name, ""))
        parameter = {"pathological": "classes-per-client"}.get(
            text, "dirichlet-alpha" if text.startswith("dirichlet") else ""
        )
        if name == "partition" and parameter:
            return f"{text}, {parameter} {show(self.settings.get(parameter, '?'))}"
        return text

    def key(self, name: str) -> str:
        """Return the key of the headline metric in a record. Names other than those below are returned unchanged.

        name: `before` or `after` training, or an evaluation (EVALUATED).
        """
        before, after = moments(self.headline.name)
        return {"before": before, "after": after}.get(name, self.headline.name if name in EVALUATED else name)

    @property
    def has_unseen(self) -> bool:
        """Whether its evaluations include clients that never train."""
        return any(that_never_train(evaluation) for evaluation in self.evaluations.values())


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read run folders, or folders of run folders. Raises UserError naming every path that is neither."""
    return [read_run(run.path) for run in find(paths)]


def read_run(path: Path) -> ReportedRun:
    """Read one run folder, finished or not. Raises UserError if it has no readable config."""
    run = ReportedRun(path.resolve())
    run.settings  # noqa: B018 - read now, for its errors
    return run


# Arrays ---------------------------------------------------------------------------------------------------------------


def curve(runs: Sequence[ReportedRun], name: str) -> Curve | None:
    """Return mean and quartiles over the runs' clients of a metric, by round; None if it is not recorded.

    name: see `ReportedRun.key`.
    """
    samples: dict[int, list[Floats]] = {}
    for run in runs:
        if name in EVALUATED:
            tables = {t: EVALUATED[name](e) for t, e in run.evaluations.items()}
        else:
            tables = {t: r.get("clients", {}) for t, r in run.rounds.items()}
        for t, table in tables.items():
            if (values := numbers(table, run.key(name))).size:
                samples.setdefault(t, []).append(values)
    if not samples:
        return None
    pooled = [np.concatenate(samples[t]) for t in sorted(samples)]
    lowest, low, high, highest = np.array([np.percentile(values, (5, 25, 75, 95)) for values in pooled]).T
    means = np.array([values.mean() for values in pooled])
    many = any(values.size > MANY for found in samples.values() for values in found)
    return Curve(np.array(sorted(samples), np.int64), means, low, high, (lowest, highest) if many else None)


def window(rounds: int) -> int:
    """Return the number of rounds in a drawn curve's running mean; odd."""
    return 1 if rounds < LONG else 2 * rounds // LONG | 1


def smooth(values: Floats) -> Floats:
    """Return the running mean over `window`, centred.

    Near the start the window shrinks symmetrically; at the end it is cut off.
    """
    if len(values) < LONG:
        return values
    at = np.arange(len(values))
    reach = np.minimum(at, window(len(values)) // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start, stop = at - reach, np.minimum(at + reach + 1, len(values))
    means: Floats = (sums[stop] - sums[start]) / (stop - start)
    return means


def numbers(clients: Rows, name: str) -> Floats:
    """Return a metric of the clients that have it, [n]."""
    values = client_rows.numbers(clients, name)
    return values[~np.isnan(values)]


def last_known(run: ReportedRun) -> tuple[dict[str, float], str]:
    """Return the last known headline metric of each client that trains, by id, and its source as text."""
    last, before = run.last_evaluation, run.key("before")
    if last and (run.finished or numbers(that_train(last[1]), run.headline.name).size):
        who = "all clients that train" if run.has_unseen else "all clients"
        return _having(that_train(last[1]), run.headline.name), f"{who}, after round {last[0]}"
    latest: dict[str, float] = {}
    for record in run.rounds.values():
        latest |= _having(record.get("clients", {}), before)
    return latest, "each client's last round, before training"


def _having(clients: Rows, name: str) -> dict[str, float]:
    """Return a metric of the clients that have it, by id."""
    values = zip(client_rows.ids(clients), client_rows.numbers(clients, name), strict=True)
    return {str(i): float(value) for i, value in values if not np.isnan(value)}


def unseen_accuracies(run: ReportedRun) -> tuple[dict[str, float], str]:
    """Return the final headline metric of clients that never train, by id, and its source as text."""
    t, last = run.last_evaluation or (0, {})
    return _having(that_never_train(last), run.headline.name), f"after round {t}"


def ranked(values: Floats, metric: Metric) -> Floats:
    """Return values sorted from worst to best."""
    return np.sort(values) if metric.higher_is_better else np.sort(values)[::-1]


def until(run: ReportedRun) -> dict[int, tuple[float, float]]:
    """Return (bytes exchanged until the clients had a round's models, seconds until the round began) by round.

    The seconds are simulated ones, or wall time.
    """
    out, sent, elapsed = {}, 0.0, 0.0
    lasted = run.paced or {t: record.get("seconds", {}).get("round") for t, record in run.rounds.items()}
    for t, record in run.rounds.items():
        sent += record.get("download-bytes") or 0
        out[t] = (sent, elapsed)
        sent += record.get("upload-bytes") or 0
        elapsed += lasted.get(t) or 0.0
    return out


def spent(run: ReportedRun) -> dict[int, tuple[float, float]]:
    """Return (bytes exchanged until the clients had a round's models, headline metric of these models) by round."""
    values = ((t, bytes_sent, run.rounds[t].get(run.key("before"))) for t, (bytes_sent, _) in until(run).items())
    return {t: (bytes_sent, float(value)) for t, bytes_sent, value in values if value is not None}


def timed(run: ReportedRun) -> dict[int, tuple[float, float]]:
    """Return (seconds until a round began, headline metric of its models before training) by round.

    The seconds are simulated ones, or those of a deployment whose rounds may close early. Other runs have none.
    """
    values = ((t, seconds, run.rounds[t].get(run.key("before"))) for t, (_, seconds) in until(run).items())
    return {t: (seconds, float(value)) for t, seconds, value in values if t in run.paced and value is not None}


def _real_seconds(run: ReportedRun) -> dict[int, float]:
    """Return the seconds of each round that a run recorded with its arrivals; {} if it recorded none."""
    try:
        return {int(line["round"]): float(line["seconds"]) for line in arrivals.read(run.path)}
    except UserError:
        return {}


def server_seconds(run: ReportedRun) -> dict[str, float]:
    """Return wall seconds per round by phase, as the mean over the recorded rounds."""
    return _mean_seconds([r.get("seconds", {}) for r in run.rounds.values()], len(run.rounds))


def client_seconds(run: ReportedRun) -> dict[str, float]:
    """Return a client's seconds per round by phase, as the mean over rounds and clients."""
    rows = [row.get("seconds", {}) for r in run.rounds.values() for row in r.get("clients", {}).values()]
    return _mean_seconds(rows, len(rows))


def _mean_seconds(rows: list[dict[str, float]], count: int) -> dict[str, float]:
    phases = dict.fromkeys(phase for row in rows for phase in row if phase != "round")
    return {phase: sum(row.get(phase, 0.0) for row in rows) / count for phase in phases}
