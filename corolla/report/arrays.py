"""What a report knows of its runs: run folders, and their records as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corolla.experiments import runs as run_folders
from fl_app.figures import Figure, from_json
from fl_app.keys import Scalar, show
from fl_app.tasks import ACCURACY, Metric

Record = dict[str, Any]
Floats = NDArray[np.float64]
LONG = 80  # curves of as many rounds are drawn as a running mean over a fortieth of them


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
class Run:
    """A run folder as read. rounds: records by round number, ascending; facts: clients.json; figures: what its method declared;
    classes: names in label order, empty if unknown; number, label: in the report; metric: the headline;
    tested: which models were, before and after training, if that needs saying.
    """

    path: Path
    config: dict[str, Scalar]
    rounds: dict[int, Record]
    facts: dict[str, dict[str, Any]]
    finished: bool
    figures: tuple[Figure, ...] = ()
    classes: tuple[str, ...] = ()
    number: str = "1"
    label: str = ""
    metric: Metric = ACCURACY
    tested: str = ""

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.config.get("method", "?"))

    @property
    def planned(self) -> int:
        """Rounds the run was to have."""
        return int(self.config.get("num-server-rounds", 0))

    @property
    def missing(self) -> list[int]:
        """Rounds without a readable record before the last one that has one."""
        return [t for t in range(1, max(self.rounds, default=0)) if t not in self.rounds]

    @property
    def evaluations(self) -> dict[int, Record]:
        """Evaluations of all clients by round."""
        return run_folders.evaluations(self.rounds)

    def value(self, name: str) -> str:
        """Return a setting as text, a partition with its parameter."""
        text = show(self.config.get(name, ""))
        parameter = {"pathological": "classes-per-client"}.get(
            text, "dirichlet-alpha" if text.startswith("dirichlet") else ""
        )
        if name == "partition" and parameter:
            return f"{text}, {parameter} {show(self.config.get(parameter, '?'))}"
        return text

    def total(self, name: str) -> int:
        """Sum of a count over the recorded rounds."""
        return sum(int(r.get(name) or 0) for r in self.rounds.values())

    def seconds(self) -> float:
        """Wall seconds of the recorded rounds."""
        return float(sum(r.get("seconds", {}).get("round", 0) for r in self.rounds.values()))

    def failures(self) -> list[tuple[int, Record]]:
        """Failed clients with the round."""
        return [(t, failure) for t, r in self.rounds.items() for failure in r.get("failures", [])]

    def best(self, name: str) -> float | None:
        """Best value of a round's metric."""
        values = [r[name] for r in self.rounds.values() if r.get(name) is not None]
        return self.metric.best(values) if values else None

    def key(self, name: str) -> str:
        """Return how a record names the headline metric `before` or `after` training or in an `evaluation`; others as they are."""
        metric = self.metric.name
        return {"before": f"{metric}-before", "after": f"{metric}-after", "evaluation": metric}.get(name, name)

    def final(self) -> tuple[int, Record] | None:
        """Return the last evaluation of all clients, and its round."""
        return next(reversed(self.evaluations.items()), None)


def read_runs(paths: Sequence[Path], declared: Mapping[str, Sequence[Figure]] | None = None) -> list[Run]:
    """Read run folders, or folders of run folders. Raises UserError naming every path that is neither.

    declared: figures by method, for runs of before these were kept in run.json.
    """
    return [read_run(run.path, declared) for run in run_folders.find(paths)]


def read_run(path: Path, declared: Mapping[str, Sequence[Figure]] | None = None) -> Run:
    """Read one run folder, finished or not. Raises UserError if it has no readable config."""
    run = run_folders.Run(path.resolve())
    config, about = run.settings, run.about
    known = tuple((declared or {}).get(str(config.get("method")), ()))
    figures = from_json(about["figures"]) if "figures" in about else known
    classes = about["classes"] if isinstance(about.get("classes"), list) else str(config.get("classes", "")).split(",")
    names = tuple(str(name).strip() for name in classes)
    return Run(
        run.path, config, run.rounds, run.clients, run.finished, figures, names, metric=run.headline, tested=run.tested
    )


# Arrays ---------------------------------------------------------------------------------------------------------------


def curve(runs: Sequence[Run], name: str) -> Curve | None:
    """Mean and quartiles of a metric of the runs' clients over the rounds; name: as `Run.key` takes it."""
    samples: dict[int, list[Floats]] = {}
    for run in runs:
        tables = {t: e["clients"] for t, e in run.evaluations.items()}
        if name != "evaluation":
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


def final_accuracies(run: Run) -> tuple[Floats, str]:
    """Each client's last known headline metric, sorted from worst to best, and where it comes from."""
    last, metric, before = run.final(), run.metric.name, run.key("before")
    if last and (run.finished or numbers(last[1]["clients"], metric).size):
        return ranked(numbers(last[1]["clients"], metric), run.metric), f"all clients, after round {last[0]}"
    latest: dict[str, float] = {}
    for record in run.rounds.values():
        latest |= {i: row[before] for i, row in record.get("clients", {}).items() if row.get(before) is not None}
    return ranked(np.array(list(latest.values()), np.float64), run.metric), "each client's last round, before training"


def ranked(values: Floats, metric: Metric) -> Floats:
    """Sort from worst to best."""
    return np.sort(values) if metric.higher_is_better else np.sort(values)[::-1]


def spent(run: Run) -> dict[int, tuple[float, float]]:
    """Bytes exchanged until the models of a round were with the clients, and the accuracy these had, by round."""
    out, total = {}, 0.0
    for t, record in run.rounds.items():
        total += record.get("download-bytes") or 0
        if (accuracy := record.get(run.key("before"))) is not None:
            out[t] = (total, float(accuracy))
        total += record.get("upload-bytes") or 0
    return out


def server_seconds(run: Run) -> dict[str, float]:
    """Wall seconds per round by phase, mean over the recorded rounds."""
    return _mean_seconds([r.get("seconds", {}) for r in run.rounds.values()], len(run.rounds))


def client_seconds(run: Run) -> dict[str, float]:
    """A client's seconds per round by phase, mean over rounds and clients."""
    rows = [row.get("seconds", {}) for r in run.rounds.values() for row in r.get("clients", {}).values()]
    return _mean_seconds(rows, len(rows))


def _mean_seconds(rows: list[dict[str, float]], count: int) -> dict[str, float]:
    phases = dict.fromkeys(phase for row in rows for phase in row if phase != "round")
    return {phase: sum(row.get(phase, 0.0) for row in rows) / count for phase in phases}
