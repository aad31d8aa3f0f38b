"""Run folders as results: finding them, and reading their files lazily.

fl_app/server/run_folder.py writes these folders, and reads single files back to resume. All code that reads results
uses this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_app import tasks
from fl_app.checksums import DataHashes
from fl_app.config import RunConfig, parse_recorded
from fl_app.config.rules import split_names
from fl_app.errors import UserError, counted, plain
from fl_app.files import lock
from fl_app.keys import Scalar, nearest, specs
from fl_app.metrics import (
    LOSS,
    UNSEEN,
    VALIDATION,
    Metric,
    Record,
    kept,
    moments,
    outcome,
    undefined_note,
    why_undefined,
)
from fl_app.server.run_folder import (
    CONFIG,
    FROM,
    LOCK,
    METRICS,
    NAME,
    PACKED,
    PLUGINS,
    SUMMARY,
    TESTED,
    called_in,
    is_run,
    read_about,
    read_clients,
    read_config,
    read_hashes,
    read_metrics,
    read_summary,
)

WRITTEN = (CONFIG, METRICS, PACKED, SUMMARY)
RUNS = Path("runs")
"""Default parent directory of run folders (`output-dir`)."""


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder records it, finished or not. Each file is read once, on first use.

    methods: parameter dataclass by method name; only `config` needs them. judged_by: name of the metric that replaces
    the run's own headline; empty: the headline.
    """

    path: Path
    methods: Mapping[str, type] = field(default_factory=dict, compare=False, repr=False)
    judged_by: str = field(default="", compare=False, repr=False)

    @cached_property
    def settings(self) -> dict[str, Scalar]:
        """Resolved config, flat. Raises UserError if there is no readable one."""
        return read_config(self.path)

    @cached_property
    def config(self) -> RunConfig:
        """Resolved config, parsed. Raises UserError if this version does not accept it."""
        return parse_recorded(self.settings, self.methods)

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.settings.get("method", "?"))

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings.get("seed", 0))

    @property
    def planned(self) -> int:
        """Number of rounds configured."""
        return int(self.settings.get("num-server-rounds", 0))

    @property
    def finished(self) -> bool:
        """Whether the summary exists and can be read."""
        try:
            return bool(self.summary)
        except UserError:
            return False

    @property
    def state(self) -> str:
        """`running`, `finished` or `interrupted`; an interrupted run can be resumed."""
        if (self.path / LOCK).exists():
            try:
                lock(self.path / LOCK, wait=False).close()
            # another process holds the lock, or this user may not open it
            except OSError:
                return "finished" if self.finished else "running"
        return "finished" if self.finished else "interrupted"

    @property
    def stopped_early(self) -> str:
        """Reason why the run finished before its configured rounds (`stop-when`); empty if it did not."""
        return str(self.summary.get("stopped-early", "")) if self.finished else ""

    @cached_property
    def summary(self) -> Record:
        """Content of summary.json. Raises UserError if the run is not finished."""
        return read_summary(self.path)

    @cached_property
    def rounds(self) -> dict[int, Record]:
        """Readable records of rounds, by round number, ascending."""
        return dict(sorted((record["round"], record) for record in read_metrics(self.path)))

    @property
    def missing(self) -> list[int]:
        """Rounds without a readable record before the last recorded round."""
        return [t for t in range(1, max(self.rounds, default=0)) if t not in self.rounds]

    @property
    def evaluations(self) -> dict[int, Record]:
        """Evaluations of all clients, by round."""
        return {t: record["evaluation"] for t, record in self.rounds.items() if record.get("evaluation")}

    @property
    def last_evaluation(self) -> tuple[int, Record] | None:
        """Last evaluation of all clients as (round, evaluation), with `keep-best` the best; None if there is none."""
        record = kept(list(self.rounds.values()))
        return (record["round"], record["evaluation"]) if record else None

    @property
    def continued(self) -> dict[str, Scalar]:
        """Mark of a run that was extended although a key spans all rounds (`schedule-rounds`); else empty.

        Earlier versions allowed this.

        The value is `straight`, or the round counts that were configured in turn: an evaluation was due after the last
        round of each.
        """
        spanning = [key for key in specs(RunConfig) if key.schedule_dependent]
        if all(key.is_off(self.settings.get(key.name, key.default)) for key in spanning):
            return {}
        every = int(self.settings.get("evaluate-every", 0))
        ends = [t for t in self.evaluations if t < self.planned and not (every and t % every == 0)]
        return {"schedule-rounds": ", ".join(map(str, [*ends, self.planned])) if ends else "straight"}

    @property
    def coverage(self) -> tuple[int, int]:
        """(clients in the final figures, clients expected there); clients that never train are not counted."""
        _, last = self.last_evaluation or (0, {})
        if "evaluated" in last:
            return last["evaluated"], last["expected"]
        # runs of earlier versions do not record the counts
        evaluated = len(that_train(last))
        return evaluated, evaluated + len(last.get("absent") or [])

    @property
    def coverage_note(self) -> str:
        """`4 of 6 clients` where clients are missing from the final figures, else empty."""
        evaluated, expected = self.coverage
        return part_of_clients(evaluated, expected)

    @property
    def far(self) -> list[tuple[int, Record]]:
        """Far uploads that were used all the same, as (round, record)."""
        return [(t, outlier) for t, record in self.rounds.items() for outlier in record.get("far", [])]

    @property
    def failures(self) -> list[tuple[int, Record]]:
        """Client failures, in a round or in the evaluation after it, as (round, record)."""
        return [
            (t, failure)
            for t, record in self.rounds.items()
            for part in (record, record.get("evaluation") or {})
            for failure in part.get("failures", [])
        ]

    @cached_property
    def outcome(self) -> Record:
        """Summary of the recorded rounds, with the names of summary.json."""
        return outcome(list(self.rounds.values()), [self.headline, *self.others])

    @property
    def result(self) -> Record:
        """The summary; with another `judged_by` metric, also that metric's figures."""
        if self.headline == self.metrics[0]:
            return self.summary
        return {**self.outcome, **self.summary}

    @cached_property
    def about(self) -> dict[str, Any]:
        """Content of run.json: the experiment's id, the method's figures, ...; empty if it cannot be read."""
        return read_about(self.path)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics that the clients measured, the run's own headline first."""
        return tasks.recorded_metrics(self.about)

    @property
    def headline(self) -> Metric:
        """Metric the run is judged by: `judged_by` if it was measured, else the run's own headline."""
        return next((metric for metric in self.metrics if metric.name == self.judged_by), self.metrics[0])

    @property
    def others(self) -> tuple[Metric, ...]:
        """Metrics other than the headline."""
        return tuple(metric for metric in self.metrics if metric != self.headline)

    @property
    def is_validated(self) -> bool:
        """Whether the clients kept validation data."""
        return bool(self.settings.get("validation-ratio"))

    @property
    def stops_on_test_data(self) -> bool:
        """Whether `stop-when` watched a figure of the test data."""
        watched = str(self.settings.get("stop-when", "")).partition(":")[0].strip()
        return bool(watched) and not watched.startswith(VALIDATION) and watched != LOSS.name

    def covered(self, metric: Metric) -> tuple[int, int]:
        """Return (clients in a metric's final figure, clients expected there); clients that never train are not counted."""
        evaluated, expected = self.coverage
        _, last = self.last_evaluation or (0, {})
        having = sum(row.get(metric.name) is not None for row in that_train(last).values())
        return having or evaluated, expected

    def covered_note(self, metric: Metric) -> str:
        """Return `5 of 6 clients` where clients are missing from a metric's final figure, else ""."""
        return part_of_clients(*self.covered(metric))

    @property
    def undefined_notes(self) -> list[str]:
        """Notes on metrics that some clients' data do not define: `AUC: 5 of 6 clients (Chur: one class)`."""
        _, last = self.last_evaluation or (0, {})
        rows, measured = that_train(last), (self.headline, *self.others)
        notes = (undefined_note(rows, metric, called=self.client_name) for metric in measured)
        return [note for note in notes if note]

    @property
    def undefined(self) -> dict[str, list[Record]]:
        """Clients without a final figure, by metric: `client`, `name` if it has one, `reason`.

        Metrics that all or no clients have are left out.
        """
        _, last = self.last_evaluation or (0, {})
        rows = that_train(last)
        found = {metric.name: why_undefined(rows, metric) for metric in (self.headline, *self.others)}
        return {
            metric: [{"client": int(i), **self._named(i), "reason": why} for i, why in lacking.items()]
            for metric, lacking in found.items()
            if 0 < len(lacking) < len(rows)
        }

    def _named(self, client_id: str) -> Record:
        name = self.client_name(client_id)
        return {} if name == client_id else {NAME: name}

    @property
    def tested(self) -> str:
        """Note on which models were tested before and after training; empty in the usual case."""
        return str(self.about.get(TESTED, ""))

    @cached_property
    def clients(self) -> dict[str, dict[str, Any]]:
        """Facts by client id; empty if there are none."""
        return read_clients(self.path)

    @cached_property
    def called(self) -> Callable[[int | str], str]:
        """What gives a client's number, with its name if it has one: `3 (Bern)`."""
        return called_in(self.path)

    def client_name(self, client_id: int | str) -> str:
        """Return a client's name without control characters; its id if its data have no name."""
        return plain(str(self.clients.get(str(client_id), {}).get(NAME, client_id)))

    @cached_property
    def hashes(self) -> dict[int | None, DataHashes]:
        """Hashes of the data at the start: by client where each holds its own, else under None; empty if not recorded."""
        return read_hashes(self.path)

    @property
    def data_sha256(self) -> str:
        """Hash of the data set that all clients share; empty if they share none, or if it is not recorded."""
        shared = self.hashes.get(None)
        return shared.data if shared else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in label order; empty if unknown."""
        told = self.about.get("classes")
        names = told if isinstance(told, list) else split_names(str(self.settings.get("classes", "")))
        return tuple(str(name).strip() for name in names)


def part_of_clients(having: int, expected: int) -> str:
    """Return `4 of 6 clients` if clients are missing, else ""."""
    return f"{having} of {counted(expected, 'client')}" if having < expected else ""


def that_train(evaluation: Record) -> dict[str, Record]:
    """Return an evaluation's clients by id, without those that never train. The evaluation's means are over these."""
    apart = that_never_train(evaluation)
    return {i: row for i, row in evaluation.get("clients", {}).items() if i not in apart}


def that_never_train(evaluation: Record) -> dict[str, Record]:
    """Return the clients of an evaluation that never train (`holdout-clients`), by id."""
    ids = {str(i) for i in evaluation.get(UNSEEN, {}).get("ids", [])}
    return {i: row for i, row in evaluation.get("clients", {}).items() if i in ids}


def find(paths: Iterable[Path], methods: Mapping[str, type] | None = None, judged_by: str = "") -> list[RecordedRun]:
    """Return the runs at run folders and directly in folders of them (a sweep's), each once.

    judged_by: see RecordedRun. Raises UserError naming every path without a run, and every run without a readable
    config.
    """
    found: dict[Path, RecordedRun] = {}
    problems: list[str] = []
    for given in paths:
        path = named(given)
        folders = [path] if is_run(path) else run_folders(path, 1)
        if not folders:
            problems.append(without_run(path))
        for folder in folders:
            run = found.setdefault(folder.resolve(), RecordedRun(folder, methods or {}, judged_by))
            try:
                run.settings  # noqa: B018 - read now, for its errors
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return list(found.values())


def named(path: Path) -> Path:
    """Return the path of a run, or folder of runs, given as a path or as a name under RUNS.

    Return the argument itself if neither exists.
    """
    places = path, RUNS / path
    found = [place for place in places if is_run(place)] or [place for place in places if run_folders(place, 1)]
    return [*found, path][0]


def existing(path: Path) -> Path:
    """Return the path of a run, given as a path or as a name under RUNS. Raises UserError if there is no directory."""
    found = named(path)
    if not found.is_dir():
        raise UserError(without_run(found))
    return found


def without_run(path: Path) -> str:
    """Return the error about a path without a run, with the nearest known run."""
    if path.is_dir():
        return f"{path}: this run folder holds no run (no {CONFIG}), and neither do its folders{elsewhere(path)}"
    return f"{path}: no such file or directory{elsewhere(path)}"


def elsewhere(path: Path) -> str:
    """Return the end of an error about a path without a run: the other place searched, and the nearest known run."""
    if path.is_absolute() or path.parts[:1] == RUNS.parts:
        return nearest(path.name, [folder.name for folder in run_folders(path.parent, 1)])
    there = [str(folder.relative_to(RUNS)) for folder in run_folders(RUNS, 1, 2)]
    return f", and {RUNS / path} is not a run either{nearest(str(path), there)}"


def by_experiment(root: Path) -> dict[str, RecordedRun]:
    """Return runs by experiment id: the runs directly under a directory, and those of sweeps in it."""
    found = [RecordedRun(path) for path in run_folders(root, 1, 2)]
    return {str(run.about["experiment"]): run for run in found if "experiment" in run.about}


def below(directory: Path) -> list[RecordedRun]:
    """Return the runs in a directory and one level deeper (a sweep's), by path. The directory may itself be a run folder."""
    return [RecordedRun(path) for path in run_folders(directory, 0, 1, 2)]


def run_folders(directory: Path, *depths: int) -> list[Path]:
    """Return the run folders at the given depths below a directory, by path. Depth 0 is the directory itself."""
    patterns = ["*/" * depth + name for depth in depths for name in (CONFIG, PACKED)]
    return sorted({path.parent for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def in_tree(found: Iterable[RecordedRun]) -> list[tuple[RecordedRun, int]]:
    """Return each run behind the one that it goes on from, with its number of runs before it among those given."""
    runs = {run.path.resolve(): run for run in found}
    below: dict[Path | None, list[Path]] = {}
    for path, run in runs.items():
        before = run.about.get(FROM)
        origin = Path(str(before["run"])) if isinstance(before, dict) and "run" in before else None
        below.setdefault(origin if origin in runs and origin != path else None, []).append(path)
    ordered: list[tuple[RecordedRun, int]] = []
    left = [(path, 0) for path in reversed(below.get(None, []))]
    while left:
        path, level = left.pop()
        ordered.append((runs[path], level))
        left += [(child, level + 1) for child in reversed(below.get(path, []))]
    # a damaged chain may be a circle
    there = {run.path.resolve() for run, _ in ordered}
    return ordered + [(run, 0) for path, run in runs.items() if path not in there]


def listing(found: Iterable[RecordedRun]) -> list[list[str]]:
    """Return runs as a table, header first.

    Columns: folder, state, rounds, method, data set, seed, headline metric, other metrics, time of the last write.
    """
    several = list(found)
    rows: list[list[str]] = []
    others = list(dict.fromkeys(metric for run in several for metric in run.others))
    metrics: list[str] = []
    for run in several:
        try:
            settings = run.settings
        except UserError:
            rows.append([str(run.path), "unreadable", *[""] * (6 + len(others))])
            continue
        rounds = list(run.rounds.values())
        last = rounds[-1] if rounds else {}
        metric = run.headline
        metrics.append(metric.title)
        evaluation = kept(rounds).get("evaluation", {})
        accuracy = evaluation.get(metric.name) if run.finished else last.get(moments(metric.name)[0])
        words = [str(settings.get(key, "")) for key in ("method", "dataset", "seed")]
        done = f"{last.get('round', 0)}/{settings.get('num-server-rounds', '?')}"
        share = "" if accuracy is None else _figure(run, metric, accuracy)
        written = max(path.stat().st_mtime for path in (run.path / name for name in WRITTEN) if path.exists())
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        evaluation = last.get("evaluation", {})
        more = ["" if evaluation.get(m.name) is None else _figure(run, m, evaluation[m.name]) for m in others]
        state = "stopped early" if run.stopped_early else run.state
        rows.append([str(run.path), state, done, *words, share, *more, when])
    judged = ", ".join(dict.fromkeys(metrics)) or "accuracy"
    return [
        ["run", "state", "rounds", "method", "dataset", "seed", judged, *(metric.name for metric in others), "written"],
        *rows,
    ]


def _figure(run: RecordedRun, metric: Metric, value: float) -> str:
    """Format a figure with its unit, and with the number of clients if some are missing."""
    text = f"{metric.text(value)} {'%' if metric.ratio else metric.title}"
    note = run.covered_note(metric) if run.finished else ""
    return f"{text} ({note})" if note else text


def inside(directory: Path, methods: Mapping[str, type] | None = None) -> list[RecordedRun]:
    """Return the runs directly in a directory. A folder without config counts: its process may have ended early."""

    def begun(folder: Path) -> bool:
        return all(inner.name.startswith(".") or inner.name == PLUGINS for inner in folder.iterdir())

    folders = sorted(p for p in directory.iterdir() if p.is_dir())
    return [RecordedRun(p, methods or {}) for p in folders if is_run(p) or begun(p)]
