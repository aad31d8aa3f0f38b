"""Run folders as results: where they are found, and what is read of them when it is asked for.

fl_app/server/run_folder.py writes these folders, and reads single files back to resume; whoever wants results comes here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_app import tasks
from fl_app.checksums import DataHashes
from fl_app.config import RunConfig, parse_recorded
from fl_app.config.rules import split_names
from fl_app.errors import UserError
from fl_app.files import lock
from fl_app.keys import Scalar, specs
from fl_app.metrics import UNSEEN, Metric, Record, moments, outcome
from fl_app.server.run_folder import (
    CONFIG,
    LOCK,
    METRICS,
    PACKED,
    PLUGINS,
    SUMMARY,
    TESTED,
    is_run,
    read_about,
    read_clients,
    read_config,
    read_hashes,
    read_metrics,
    read_summary,
)

WRITTEN = (CONFIG, METRICS, PACKED, SUMMARY)


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder records it, finished or not; its files are read once, when they are first needed.

    methods: parameter dataclass by method name; `config` alone needs them.
    """

    path: Path
    methods: Mapping[str, type] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def settings(self) -> dict[str, Scalar]:
        """Its resolved config, flat. Raises UserError if it has none that can be read."""
        return read_config(self.path)

    @cached_property
    def config(self) -> RunConfig:
        """Its config, parsed. Raises UserError if it is not one of this version."""
        return parse_recorded(self.settings, self.methods)

    @property
    def method(self) -> str:
        """Name of its method."""
        return str(self.settings.get("method", "?"))

    @property
    def planned(self) -> int:
        """Rounds it was to have."""
        return int(self.settings.get("num-server-rounds", 0))

    @property
    def finished(self) -> bool:
        """Whether it has its summary."""
        try:
            return bool(self.summary)
        except UserError:
            return False

    @property
    def state(self) -> str:
        """`running`, `finished`, or `interrupted`: it can be resumed."""
        if (self.path / LOCK).exists():
            try:
                lock(self.path / LOCK, wait=False).close()
            except OSError:  # another process has it, or it is not ours to open
                return "finished" if self.finished else "running"
        return "finished" if self.finished else "interrupted"

    @cached_property
    def summary(self) -> Record:
        """Its summary. Raises UserError if it is not finished."""
        return read_summary(self.path)

    @cached_property
    def rounds(self) -> dict[int, Record]:
        """Its rounds' records by number, ascending, as far as they can be read."""
        return dict(sorted((record["round"], record) for record in read_metrics(self.path)))

    @property
    def missing(self) -> list[int]:
        """Rounds without a readable record before the last one that has one."""
        return [t for t in range(1, max(self.rounds, default=0)) if t not in self.rounds]

    @property
    def evaluations(self) -> dict[int, Record]:
        """Its evaluations of all clients by round."""
        return {t: record["evaluation"] for t, record in self.rounds.items() if record.get("evaluation")}

    @property
    def last_evaluation(self) -> tuple[int, Record] | None:
        """Its last evaluation of all clients, with the round."""
        return next(reversed(self.evaluations.items()), None)

    @property
    def continued(self) -> dict[str, Scalar]:
        """Whether an earlier version continued it with more rounds although a key spans them (`schedule-rounds`); else empty.

        The value is `straight`, or the numbers of rounds it was planned for: an evaluation was due after the last of each.
        """
        spanning = [key for key in specs(RunConfig) if key.spans_run]
        if all(key.is_off(self.settings.get(key.name, key.default)) for key in spanning):
            return {}
        every = int(self.settings.get("evaluate-every", 0))
        ends = [t for t in self.evaluations if t < self.planned and not (every and t % every == 0)]
        return {"schedule-rounds": ", ".join(map(str, [*ends, self.planned])) if ends else "straight"}

    @property
    def coverage(self) -> tuple[int, int]:
        """Of how many clients the final figures are, and of how many they should be; clients that never train apart."""
        _, last = self.last_evaluation or (0, {})
        if "evaluated" in last:
            return last["evaluated"], last["expected"]
        # what earlier versions recorded
        evaluated = len(that_train(last))
        return evaluated, evaluated + len(last.get("absent") or [])

    @property
    def coverage_note(self) -> str:
        """`4 of 6 clients` where clients are missing from the final figures, else empty."""
        evaluated, expected = self.coverage
        return f"{evaluated} of {expected} clients" if evaluated < expected else ""

    @property
    def far(self) -> list[tuple[int, Record]]:
        """Its uploads that were used though they lay far from the others', with their rounds."""
        return [(t, outlier) for t, record in self.rounds.items() for outlier in record.get("far", [])]

    @property
    def failures(self) -> list[tuple[int, Record]]:
        """Clients that failed in a round or in the evaluation after it, with the round."""
        return [
            (t, failure)
            for t, record in self.rounds.items()
            for part in (record, record.get("evaluation") or {})
            for failure in part.get("failures", [])
        ]

    @cached_property
    def outcome(self) -> Record:
        """What its recorded rounds come to, by the names that summary.json has for it."""
        return outcome(list(self.rounds.values()), [self.headline])

    @cached_property
    def about(self) -> dict[str, Any]:
        """What run.json says of it: its experiment's id, its method's figures; empty if there is none that can be read."""
        return read_about(self.path)

    @cached_property
    def headline(self) -> Metric:
        """The metric its rounds were judged by."""
        return tasks.recorded_headline(self.about)

    @property
    def tested(self) -> str:
        """Which models were tested before and after training, if that needs saying."""
        return str(self.about.get(TESTED, ""))

    @cached_property
    def clients(self) -> dict[str, dict[str, Any]]:
        """Facts by client id; empty if there are none."""
        return read_clients(self.path)

    @cached_property
    def hashes(self) -> dict[int | None, DataHashes]:
        """Hashes of the data it started with: by client where each holds its own, else under None; empty if not recorded."""
        return read_hashes(self.path)

    @property
    def data_sha256(self) -> str:
        """Hash of the data set that its clients shared; empty if they did not, or if it is not recorded."""
        shared = self.hashes.get(None)
        return shared.data if shared else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in label order; empty if unknown."""
        told = self.about.get("classes")
        names = told if isinstance(told, list) else split_names(str(self.settings.get("classes", "")))
        return tuple(str(name).strip() for name in names)


def that_train(evaluation: Record) -> dict[str, Record]:
    """Return an evaluation's clients, by id, but for those that never train: those whose means it has."""
    apart = that_never_train(evaluation)
    return {i: row for i, row in evaluation.get("clients", {}).items() if i not in apart}


def that_never_train(evaluation: Record) -> dict[str, Record]:
    """Return an evaluation's clients, by id, that never train (`holdout-clients`)."""
    ids = {str(i) for i in evaluation.get(UNSEEN, {}).get("ids", [])}
    return {i: row for i, row in evaluation.get("clients", {}).items() if i in ids}


def find(paths: Iterable[Path], methods: Mapping[str, type] | None = None) -> list[RecordedRun]:
    """Return the runs at run folders and directly in folders of them (a sweep's), each once.

    Raises UserError naming every path that is neither, and every run without a readable config.
    """
    found: dict[Path, RecordedRun] = {}
    problems: list[str] = []
    for path in paths:
        folders = [path] if is_run(path) else run_folders(path, 1)
        if not folders:
            what = f"holds no run (no {CONFIG}), nor does a folder in it" if path.is_dir() else "does not exist"
            problems.append(f"{path}: this run folder {what}")
        for folder in folders:
            run = found.setdefault(folder.resolve(), RecordedRun(folder, methods or {}))
            try:
                run.settings  # noqa: B018 - read now, for its errors
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return list(found.values())


def by_experiment(root: Path) -> dict[str, RecordedRun]:
    """Return runs by their experiment's id: those directly under a directory, and those of sweeps in it."""
    found = [RecordedRun(path) for path in run_folders(root, 1, 2)]
    return {str(run.about["experiment"]): run for run in found if "experiment" in run.about}


def below(directory: Path) -> list[RecordedRun]:
    """Return the runs in a directory, in it and one level deeper (a sweep's), by path; it may be a run folder itself."""
    return [RecordedRun(path) for path in run_folders(directory, 0, 1, 2)]


def run_folders(directory: Path, *depths: int) -> list[Path]:
    """Return the run folders so many levels below a directory, by path. 0: the directory itself."""
    patterns = ["*/" * depth + name for depth in depths for name in (CONFIG, PACKED)]
    return sorted({path.parent for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def listing(found: Iterable[RecordedRun]) -> list[list[str]]:
    """Return runs as a table, header first: folder, state, rounds, method, data, seed, final accuracy (or what else they
    are judged by), when it was last written.
    """
    rows: list[list[str]] = []
    metrics: list[str] = []
    for run in found:
        try:
            settings = run.settings
        except UserError:
            rows.append([str(run.path), "unreadable", *[""] * 6])
            continue
        rounds = list(run.rounds.values())
        last = rounds[-1] if rounds else {}
        metric = run.headline
        metrics.append(metric.title)
        accuracy = last.get("evaluation", {}).get(metric.name) if run.finished else last.get(moments(metric.name)[0])
        words = [str(settings.get(key, "")) for key in ("method", "dataset", "seed")]
        done = f"{last.get('round', 0)}/{settings.get('num-server-rounds', '?')}"
        share = "" if accuracy is None else f"{metric.text(accuracy)} {'%' if metric.ratio else metric.title}"
        if run.finished and run.coverage_note:
            share += f" ({run.coverage_note})"
        written = max(path.stat().st_mtime for path in (run.path / name for name in WRITTEN) if path.exists())
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        rows.append([str(run.path), run.state, done, *words, share, when])
    judged = ", ".join(dict.fromkeys(metrics)) or "accuracy"
    return [["run", "state", "rounds", "method", "dataset", "seed", judged, "written"], *rows]


def inside(directory: Path, methods: Mapping[str, type] | None = None) -> list[RecordedRun]:
    """Return the runs directly in a directory, with what may be one whose process ended before its config was written."""

    def begun(folder: Path) -> bool:
        return all(inner.name.startswith(".") or inner.name == PLUGINS for inner in folder.iterdir())

    folders = sorted(p for p in directory.iterdir() if p.is_dir())
    return [RecordedRun(p, methods or {}) for p in folders if is_run(p) or begun(p)]
