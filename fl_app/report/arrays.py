"""What a report knows of its runs: records of run folders as arrays, and how the runs are told apart. Imports no matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar, bears_on, specs
from fl_app.report.kinds import Figure, from_json
from fl_app.server.run_folder import CONFIG, read_about, read_clients, read_config, read_metrics, read_summary

Record = dict[str, Any]
Floats = NDArray[np.float64]

LABEL_LENGTH = 40
NOT_SETTINGS = frozenset(key.name for key in specs(RunConfig) if not key.tells_runs_apart)
KEY_SETTINGS = tuple(key.name for key in specs(RunConfig) if key.headline)
DATA_KEYS = frozenset(key.name for key in specs(RunConfig) if key.about == "data")


@dataclass(frozen=True)
class Curve:
    """A metric over rounds: mean and quartiles over the clients, all [rounds]."""

    rounds: NDArray[np.int64]
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Run:
    """A run folder as read. rounds: records by round number, ascending; facts: clients.json; figures: what its method declared;
    number, label: in the report.
    """

    path: Path
    config: dict[str, Scalar]
    rounds: dict[int, Record]
    facts: dict[str, dict[str, Any]]
    finished: bool
    figures: tuple[Figure, ...] = ()
    number: int = 1
    label: str = ""
    settings: dict[str, Scalar] = field(default_factory=dict)

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
        return {t: r["evaluation"] for t, r in self.rounds.items() if r.get("evaluation")}

    def value(self, name: str) -> str:
        """Return a setting as text, a partition with its parameter."""
        text = show(self.config.get(name, ""))
        parameter = {"pathological": "classes-per-client"}.get(text, "dirichlet-alpha" if text.startswith("dirichlet") else "")
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
        """Highest value of a round's metric."""
        return max((r[name] for r in self.rounds.values() if r.get(name) is not None), default=None)

    def final(self) -> tuple[int, Record] | None:
        """Return the last evaluation of all clients, and its round."""
        return next(reversed(self.evaluations.items()), None)


def read_runs(paths: Sequence[Path], declared: Mapping[str, Sequence[Figure]] | None = None) -> list[Run]:
    """Read run folders, or folders of run folders, and label them. Raises UserError naming every path that is neither.

    declared: figures by method, for runs of before these were kept in run.json.
    """
    problems: list[str] = []
    found: dict[Path, Run] = {}
    for path in paths:
        folders = [path] if (path / CONFIG).is_file() else sorted(p.parent for p in path.glob(f"*/{CONFIG}"))
        if not folders:
            what = "holds no run (no config.toml)" if path.is_dir() else "does not exist"
            problems.append(f"{path}: this run folder {what}")
        for folder in folders:
            try:
                found.setdefault(folder.resolve(), read_run(folder, declared))
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return labelled(list(found.values()))


def read_run(path: Path, declared: Mapping[str, Sequence[Figure]] | None = None) -> Run:
    """Read one run folder, finished or not. Raises UserError if it has no readable config."""
    config, about = read_config(path), read_about(path)
    rounds = {record["round"]: record for record in read_metrics(path)}
    try:
        finished = bool(read_summary(path))
    except UserError:
        finished = False
    known = tuple((declared or {}).get(str(config.get("method")), ()))
    figures = from_json(about["figures"]) if "figures" in about else known
    return Run(path.resolve(), config, dict(sorted(rounds.items())), read_clients(path), finished, figures)


def labelled(runs: list[Run]) -> list[Run]:
    """Number the runs and name them by method and the settings in which they differ."""
    keys = differences(runs)
    out = []
    for number, run in enumerate(runs, 1):
        settings = {key: run.config[key] for key in keys if key in run.config and relevant(key, run)}
        words = [f"{key.rpartition('.')[2]} {show(value)}" for key, value in settings.items()]
        label = ", ".join([run.method, *words])
        out.append(replace(run, number=number, label=f"{number} {label}" if len(runs) > 1 else label, settings=settings))
    return out


def short(label: str, length: int = LABEL_LENGTH) -> str:
    """Cut a label to a length, after a comma if it can be; its number stays."""
    if len(label) <= length:
        return label
    whole = label[: length - 1].rpartition(", ")[0]
    return f"{whole}, …" if whole else label[: length - 1] + "…"


def relevant(key: str, run: Run) -> bool:
    """Tell whether a key tells a run from others of its method."""
    return key != "method" and key not in NOT_SETTINGS and bears_on(key, run.method)


def differences(runs: Sequence[Run]) -> list[str]:
    """Keys that do not have one value in all runs on which they bear: methods' own first, then by importance."""
    keys = dict.fromkeys(key for run in runs for key in run.config if relevant(key, run))
    differ = [k for k in keys if len({show(r.config[k]) for r in runs if k in r.config and relevant(k, r)}) > 1]
    order = dict(zip(KEY_SETTINGS, range(len(KEY_SETTINGS)), strict=True))
    return sorted(differ, key=lambda k: (-1 if "." in k else order.get(k, len(order))))


def show(value: Scalar) -> str:
    """Return a value as one writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


# Arrays ---------------------------------------------------------------------------------------------------------------


def curve(run: Run, name: str) -> Curve | None:
    """Mean and quartiles of a client metric over the rounds; `evaluation`: accuracy in evaluations of all clients."""
    if name == "evaluation":
        samples = {t: numbers(e["clients"], "accuracy") for t, e in run.evaluations.items()}
    else:
        samples = {t: numbers(r.get("clients", {}), name) for t, r in run.rounds.items()}
    samples = {t: values for t, values in samples.items() if values.size}
    if not samples:
        return None
    low, high = np.array([np.percentile(v, (25, 75)) for v in samples.values()]).T
    return Curve(np.array(list(samples), np.int64), np.array([v.mean() for v in samples.values()]), low, high)


def numbers(clients: dict[str, Record], name: str) -> Floats:
    """A metric of the clients that have it, [n]."""
    return np.array([row[name] for row in clients.values() if row.get(name) is not None], np.float64)


def final_accuracies(run: Run) -> tuple[Floats, str]:
    """Each client's last known accuracy, sorted, and where it comes from."""
    last = run.final()
    if last and (run.finished or numbers(last[1]["clients"], "accuracy").size):
        return np.sort(numbers(last[1]["clients"], "accuracy")), f"all clients, after round {last[0]}"
    latest: dict[str, float] = {}
    for record in run.rounds.values():
        latest |= {i: row["accuracy-before"] for i, row in record.get("clients", {}).items()
                   if row.get("accuracy-before") is not None}  # fmt: skip
    return np.sort(np.array(list(latest.values()), np.float64)), "each client's last round, before training"


def spent(run: Run) -> tuple[Floats, Floats]:
    """Bytes exchanged until the models of a round were with the clients, and the accuracy these had; both [rounds]."""
    up = np.array([r.get("upload-bytes") or 0 for r in run.rounds.values()], np.float64)
    down = np.array([r.get("download-bytes") or 0 for r in run.rounds.values()], np.float64)
    values = [r.get("accuracy-before") for r in run.rounds.values()]
    accuracy = np.array([np.nan if v is None else v for v in values], np.float64)
    known = ~np.isnan(accuracy)
    return (np.cumsum(up + down) - up)[known], accuracy[known]


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
