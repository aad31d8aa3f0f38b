"""What a report knows of its runs: run folders, and their records as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corolla.experiments.runs import RecordedRun, find, that_never_train, that_train
from fl_app.figures import Figure, from_json
from fl_app.keys import show
from fl_app.metrics import Metric, Record, moments

Floats = NDArray[np.float64]
# curves of as many rounds are drawn as a running mean over a fortieth of them
LONG = 80
# of an evaluation's clients, those of a curve's name
EVALUATED = {"evaluation": that_train, "unseen": that_never_train}


@dataclass(frozen=True)
class Curve:
    """A metric over rounds: mean and quartiles over the clients, all [rounds]."""

    rounds: NDArray[np.int64]
    mean: Floats
    low: Floats
    high: Floats

    def smooth(self) -> Curve:
        """Return the curve as it is drawn."""
        return Curve(self.rounds, *(smooth(values) for values in (self.mean, self.low, self.high)))


@dataclass(frozen=True)
class ReportedRun(RecordedRun):
    """A run of a report. declared: figures by method, for runs that did not keep theirs; number, label: its names in the report."""

    declared: Mapping[str, Sequence[Figure]] = field(default_factory=dict, compare=False, repr=False)
    number: str = "1"
    label: str = ""

    @cached_property
    def finished(self) -> bool:
        """Whether it had its summary when it was read: a run that ends meanwhile stays as it was."""
        return super().finished

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """What its method declared."""
        return (
            from_json(self.about["figures"]) if "figures" in self.about else tuple(self.declared.get(self.method, ()))
        )

    def named(self, number: str, label: str) -> ReportedRun:
        """Return this run under other names; what has been read of it is not read again."""
        other = replace(self, number=number, label=label)
        for name, value in vars(self).items():
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
        """Return how a record names the headline metric `before` or `after` training, or in an evaluation (EVALUATED); others as
        they are.
        """
        before, after = moments(self.headline.name)
        return {"before": before, "after": after}.get(name, self.headline.name if name in EVALUATED else name)

    @property
    def has_unseen(self) -> bool:
        """Whether its evaluations are also of clients that never train."""
        return any(that_never_train(evaluation) for evaluation in self.evaluations.values())


def read_runs(paths: Sequence[Path], declared: Mapping[str, Sequence[Figure]] | None = None) -> list[ReportedRun]:
    """Read run folders, or folders of run folders. Raises UserError naming every path that is neither.

    declared: figures by method, for runs of before these were kept in run.json.
    """
    return [read_run(run.path, declared) for run in find(paths)]


def read_run(path: Path, declared: Mapping[str, Sequence[Figure]] | None = None) -> ReportedRun:
    """Read one run folder, finished or not. Raises UserError if it has no readable config."""
    run = ReportedRun(path.resolve(), declared=declared or {})
    run.settings  # noqa: B018 - read now, for its errors
    return run


# Arrays ---------------------------------------------------------------------------------------------------------------


def curve(runs: Sequence[ReportedRun], name: str) -> Curve | None:
    """Mean and quartiles of a metric of the runs' clients over the rounds; name: as `ReportedRun.key` takes it."""
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
    low, high = np.array([np.percentile(values, (25, 75)) for values in pooled]).T
    return Curve(np.array(sorted(samples), np.int64), np.array([values.mean() for values in pooled]), low, high)


def window(rounds: int) -> int:
    """Of how many rounds a point of a drawn curve is the mean; odd."""
    return 1 if rounds < LONG else 2 * rounds // LONG | 1


def smooth(values: Floats) -> Floats:
    """Running mean over `window`, centred; the first values over as many as there are before them, the last over what is left."""
    if len(values) < LONG:
        return values
    at = np.arange(len(values))
    reach = np.minimum(at, window(len(values)) // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start, stop = at - reach, np.minimum(at + reach + 1, len(values))
    means: Floats = (sums[stop] - sums[start]) / (stop - start)
    return means


def numbers(clients: dict[str, Record], name: str) -> Floats:
    """A metric of the clients that have it, [n]."""
    return np.array([row[name] for row in clients.values() if row.get(name) is not None], np.float64)


def final_accuracies(run: ReportedRun) -> tuple[Floats, str]:
    """Last known headline metric of each client that trains, sorted from worst to best, and where it comes from."""
    last, before = run.last_evaluation, run.key("before")
    if last and (run.finished or numbers(that_train(last[1]), run.headline.name).size):
        who = "all clients that train" if run.has_unseen else "all clients"
        return ranked(numbers(that_train(last[1]), run.headline.name), run.headline), f"{who}, after round {last[0]}"
    latest: dict[str, float] = {}
    for record in run.rounds.values():
        latest |= {i: row[before] for i, row in record.get("clients", {}).items() if row.get(before) is not None}
    return ranked(
        np.array(list(latest.values()), np.float64), run.headline
    ), "each client's last round, before training"


def unseen_accuracies(run: ReportedRun) -> tuple[Floats, str]:
    """Headline metric of each client that never trains in the last evaluation, worst to best, and where it comes from."""
    t, last = run.last_evaluation or (0, {})
    return ranked(numbers(that_never_train(last), run.headline.name), run.headline), f"after round {t}"


def ranked(values: Floats, metric: Metric) -> Floats:
    """Sort from worst to best."""
    return np.sort(values) if metric.higher_is_better else np.sort(values)[::-1]


def spent(run: ReportedRun) -> dict[int, tuple[float, float]]:
    """Bytes exchanged until the models of a round were with the clients, and the accuracy these had, by round."""
    out, total = {}, 0.0
    for t, record in run.rounds.items():
        total += record.get("download-bytes") or 0
        if (accuracy := record.get(run.key("before"))) is not None:
            out[t] = (total, float(accuracy))
        total += record.get("upload-bytes") or 0
    return out


def server_seconds(run: ReportedRun) -> dict[str, float]:
    """Wall seconds per round by phase, mean over the recorded rounds."""
    return _mean_seconds([r.get("seconds", {}) for r in run.rounds.values()], len(run.rounds))


def client_seconds(run: ReportedRun) -> dict[str, float]:
    """A client's seconds per round by phase, mean over rounds and clients."""
    rows = [row.get("seconds", {}) for r in run.rounds.values() for row in r.get("clients", {}).values()]
    return _mean_seconds(rows, len(rows))


def _mean_seconds(rows: list[dict[str, float]], count: int) -> dict[str, float]:
    phases = dict.fromkeys(phase for row in rows for phase in row if phase != "round")
    return {phase: sum(row.get(phase, 0.0) for row in rows) / count for phase in phases}
