"""Sweeps: many runs from one TOML file, resumable, ending in a table of mean ± std over seeds.

A sweep file has `preset` (a preset's name), `scale` ("small"), `[settings]` (keys of all runs), `[grid]` (key = list of
values; every combination is a run; `method`, `seed` and `preset` are keys like any other; several grids are each a `[[grid]]`) and
`[[variants]]` (tables of keys, with an optional `name`; each combination runs once per variant). Later ones win in this order,
then `scale`, then --set.
A method's own keys do not tell other methods' runs apart, nor a partition's those with another: a grid over methods and
`fedcac.tau` runs FedAvg once, one over partitions and `dirichlet-alpha` an even partition once.

A run is the same as another if their keys about data and training are; finished ones (with summary.json) under the sweep's
directory are not repeated, unfinished ones go on from their last checkpoint; without a sound one they are moved to its folder
`unfinished` and never counted. Runs made of data that have changed since are moved to `other-data` and done again. Unfinished
runs that are not asked for stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from corolla.experiments.grouping import tells_runs_apart
from corolla.experiments.runs import RecordedRun, inside
from corolla.presets import read_preset, small
from fl_app import data, plugins
from fl_app.checksums import DataHashes
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError
from fl_app.files import lock, make_directory
from fl_app.keys import Scalar, without_others
from fl_app.server.checkpoint import load_latest
from fl_app.server.run_folder import check_state
from fl_app.toml import flatten, read_toml, to_toml

UNFINISHED = "unfinished"
# for finished runs whose data have changed since
OTHER_DATA = "other-data"
# in the environment of every process a sweep starts: its directory
VARIABLE = "COROLLA_SWEEP"
MAX_NAME = 120

Raw = dict[str, Scalar]


@dataclass(frozen=True)
class Sweep:
    """A sweep file as read: flat settings, of every grid lists of values by key, flat variants."""

    path: Path
    preset: str = ""
    scale: str = "full"
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    grids: Sequence[Mapping[str, Sequence[Scalar]]] = ({},)
    variants: Sequence[Mapping[str, Scalar]] = ()


@dataclass(frozen=True)
class Point:
    """One run of a sweep. varying: what tells it apart from the others; config: flat, as `corolla run` takes it."""

    name: str
    varying: Mapping[str, Scalar]
    config: Mapping[str, Scalar]
    parsed: RunConfig


# The file -------------------------------------------------------------------------------------------------------------


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises UserError naming everything that is wrong with it."""
    content = read_toml(path)
    problems = []
    for key in content:
        if key not in ("preset", "scale", "settings", "grid", "variants"):
            problems.append(f"{key}: not a part of a sweep file (a run's keys go into [settings] or [grid])")
    if isinstance(content.get("grid"), dict):
        content["grid"] = [content["grid"]]
    for key, kind in (("preset", str), ("scale", str), ("settings", dict), ("grid", list), ("variants", list)):
        if not isinstance(content.get(key, kind()), kind):
            problems.append(
                f"{key}: expected a {'table' if kind is dict else 'string' if kind is str else '[[table]]'}"
            )
            content.pop(key)
    for key in ("grid", "variants"):
        problems += [f"{key}: must be tables, got {one!r}" for one in content.get(key, []) if not isinstance(one, dict)]
    scale, variants = (
        content.get("scale", "full"),
        [flatten(v) for v in content.get("variants", []) if isinstance(v, dict)],
    )
    if scale not in ("full", "small"):
        problems.append(f"scale: must be full or small, got {scale!r}")
    grids = [flatten(grid) for grid in content.get("grid", [{}]) if isinstance(grid, dict)]
    settings = flatten(content.get("settings", {}))
    for table in (settings, *variants):
        problems += [f"{key}: must be one value, got {value!r}" for key, value in table.items() if not _scalar(value)]
    for key, values in (pair for grid in grids for pair in grid.items()):
        if not isinstance(values, list) or not values or not all(map(_scalar, values)):
            problems.append(f"grid: {key}: must be a list of values, got {values!r}")
    for key in ("scale", "run-name", "output-dir"):
        if any(key in table for table in (settings, *grids, *variants)):
            problems.append(f"{key}: not a setting of single runs of a sweep")
    labels = [variant_label(variant) for variant in variants]
    problems += [f"variants: two are named {label!r}" for label in sorted({x for x in labels if labels.count(x) > 1})]
    if problems:
        raise UserError(f"{path}:\n" + "\n".join(f"  {p}" for p in problems))
    return Sweep(path, content.get("preset", ""), scale, settings, grids, variants)


def _scalar(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))


def expand(
    sweep: Sweep,
    methods: Mapping[str, type],
    directory: Path,
    overrides: Mapping[str, Scalar],
    finish: Callable[[Raw], Raw],
) -> list[Point]:
    """All runs of a sweep in the file's order, without duplicates.

    methods: parameter dataclasses; directory: of the run folders; overrides: keys that win over all others; finish: last
    touch on a flat config (absolute paths). Raises UserError with the problems of all combinations.
    """
    points: dict[str, Point] = {}
    named = _methods_named(sweep, overrides)
    problems = Problems()
    for varying, changes in _combinations(sweep):
        try:
            raw = without_others(_merge(sweep, changes, methods, overrides, named), named)
            parsed = parse(finish(raw), methods)
        except UserError as error:
            problems.add(error, _words(varying))
            continue
        key = identity(parsed)
        if key not in points:
            shown = {k: parsed.resolved.get(k, v) for k, v in varying.items() if tells_runs_apart(k, parsed.resolved)}
            name = f"{_words(shown)[:MAX_NAME] or parsed.method}-{hashlib.sha256(key.encode()).hexdigest()[:6]}"
            own = {"run-name": name, "output-dir": str(directory)}
            resolved = {**parsed.resolved, **own}
            parsed = dataclasses.replace(parsed, run_name=name, output_dir=str(directory), resolved=resolved)
            points[key] = Point(name, shown, finish({**raw, **own}), parsed)
    problems.complain()
    return list(points.values())


def _combinations(sweep: Sweep) -> Iterator[tuple[Raw, Raw]]:
    """Yield (varying, changes): what to call a combination, and its keys."""
    for chosen in (
        dict(zip(grid, values, strict=True)) for grid in sweep.grids for values in itertools.product(*grid.values())
    ):
        for variant in sweep.variants or [{}]:
            changes = {key: value for key, value in variant.items() if key != "name"}
            yield {**chosen, **({"variant": variant_label(variant)} if variant else {})}, {**chosen, **changes}


def variant_label(variant: Mapping[str, Scalar]) -> str:
    """Return a variant's name, or its keys and values."""
    return str(variant["name"]) if "name" in variant else _words(variant)


def _methods_named(sweep: Sweep, overrides: Mapping[str, Scalar]) -> list[str]:
    """Methods that any of a sweep's runs may have."""
    tables = (sweep.settings, overrides, *sweep.variants)
    listed = (name for grid in sweep.grids for name in grid.get("method", []))
    return [str(name) for name in [*listed, *(table["method"] for table in tables if "method" in table)]]


def _merge(
    sweep: Sweep, changes: Raw, methods: Mapping[str, type], overrides: Mapping[str, Scalar], named: Collection[str]
) -> Raw:
    preset = str(changes.pop("preset", sweep.preset))
    raw = {**(read_preset(preset) if preset else {}), **sweep.settings, **changes}
    raw["num-clients"] = raw.get("num-clients") or 10
    if sweep.scale == "small":
        raw |= small(parse(without_others(raw, named), methods))
    return raw | dict(overrides)


def _words(varying: Mapping[str, Scalar]) -> str:
    """Name a combination in characters a folder's name may have: fedcac,tau=0.3,seed=1."""
    words = []
    for key, value in varying.items():
        text = re.sub(r"[^\w.+=,@-]+", "-", str(value))
        words.append(text if key in ("method", "preset", "variant") else f"{key.rpartition('.')[2]}={text}")
    return ",".join(words)


class Problems:
    """What is wrong with which runs of a sweep, each problem said once."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, error: UserError, name: str) -> None:
        """Note the problems of one run."""
        first, *rest = str(error).splitlines()
        problems = [line.strip() for line in rest] if first == "invalid configuration:" else [str(error)]
        for problem in problems:
            self._names.setdefault(problem, []).append(name)

    def complain(self) -> None:
        """Raise UserError if there are any."""
        if self._names:
            lines = []
            for problem, names in self._names.items():
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                where = "; ".join(name for name in names[:3] if name)
                lines.append(f"  {problem}" + (f"\n    in {where}{more}" if where else ""))
            raise UserError("the sweep cannot run:\n" + "\n".join(lines))


def check_points(points: Sequence[Point], check_locally: Callable[[RunConfig], None]) -> None:
    """Check every run's data, partition and model on this machine. Raises UserError with the problems of all."""
    problems = Problems()
    seen: dict[tuple[Scalar, ...], UserError | None] = {}
    for point in points:
        key = tuple(value for spec, value in point.parsed.own_keys() if spec.checked or spec.about == "data")
        if key not in seen:
            seen[key] = None
            try:
                check_locally(point.parsed)
            except UserError as error:
                seen[key] = error
        if (found := seen[key]) is not None:
            problems.add(found, point.name)
    problems.complain()


# The directory --------------------------------------------------------------------------------------------------------


def identity(config: RunConfig) -> str:
    """What makes two runs the same, as text: the keys that tell runs apart; what has no effect on this one as its default."""
    own = [(key, value) for key, value in config.own_keys() if key.tells_runs_apart]
    return json.dumps(
        {key.name: value if tells_runs_apart(key.name, config.resolved) else key.default for key, value in own},
        sort_keys=True,
    )


@contextlib.contextmanager
def locked(directory: Path, shared: bool = False) -> Iterator[None]:
    """Hold a sweep's directory, created if needed. shared: with others that each do one run of it.

    Raises UserError if another sweep is running in it.
    """
    make_directory(directory)
    try:
        held = lock(directory / ".lock", wait=False, shared=shared)
    except BlockingIOError:
        raise UserError(f"another `corolla sweep` is running in {directory}") from None
    with held:
        yield


def end_leftovers(directory: Path) -> int:
    """End what a killed sweep left running in its directory (call while it is locked), and mark this process as the directory's.

    Returns how many processes those were.
    """
    from fl_app.processes import end_processes, processes_with

    left = processes_with(f"{VARIABLE}={directory}")
    end_processes(left)
    os.environ[VARIABLE] = str(directory)
    return len(left)


def scan(directory: Path, methods: Mapping[str, type]) -> tuple[dict[str, RecordedRun], dict[Path, str]]:
    """Return the finished runs by identity, and the identities of unfinished ones by folder, directly under a directory.

    A config that cannot be read, or is one of another version, is nobody's: its identity is "".
    """
    finished: dict[str, RecordedRun] = {}
    unfinished: dict[Path, str] = {}
    for run in inside(directory, methods):
        if run.path.name in (UNFINISHED, OTHER_DATA):
            continue
        try:
            whose = identity(run.config)
        except UserError:
            whose = ""
        if not run.finished:
            unfinished[run.path] = whose
        elif whose:
            finished[whose] = run
    return finished, unfinished


def resumable(folder: Path) -> int | None:
    """Return the round after which an unfinished run has a sound checkpoint to go on from; None if it has none, or its clients
    have removed their state.

    Raises UserError if another process runs it.
    """
    if RecordedRun(folder).state == "running":
        raise UserError(f"{folder} is being run by another process")
    try:
        check_state(folder)
        return int(load_latest(folder).meta["round"])
    except UserError:
        return None


def with_other_data(points: Sequence[Point], runs: Iterable[tuple[str, RecordedRun]]) -> list[RecordedRun]:
    """Return the runs of a sweep that were made of other data than are there now: files have changed in between.

    runs: with their identities. What is not known, of runs of earlier versions and of data that cannot be opened here, counts as
    the same.
    """
    wanted = {identity(point.parsed): point.parsed for point in points}
    opened: dict[tuple[Scalar, ...], DataHashes | None] = {}
    found = []
    for whose, run in runs:
        began, config = run.hashes.get(None), wanted.get(whose)
        if began is None or config is None:
            continue
        key = tuple(
            value for spec, value in config.own_keys() if spec.about == "data" or spec.name in ("seed", "data-dir")
        )
        if key not in opened:
            try:
                opened[key] = data.open_data(config, look=True).hashes
            except UserError:
                opened[key] = None
        if opened[key] not in (None, began):
            found.append(run)
    return found


def set_aside(folder: Path, where: str = UNFINISHED) -> Path:
    """Move a run's folder to one of that name, beside it; returns its new path."""
    target = folder.parent / where / folder.name
    make_directory(target.parent)
    for k in itertools.count(2):
        if not target.exists():
            break
        target = target.with_name(f"{folder.name}-{k}")
    folder.rename(target)
    return target


def run_parallel(
    points: Sequence[Point],
    directory: Path,
    jobs: int,
    options: Sequence[str],
    announce: Callable[[int, int, str], None],
    interrupted: Callable[[int], None] = lambda running: None,
) -> dict[str, str]:
    """Run `jobs` points at a time, each as its own `corolla run`; the ends of the logs of failed ones by name.

    Logs are under the directory's `logs`. An interrupt ends the runs in progress too; `interrupted` is told how many first.
    """
    logs = directory / "logs"
    make_directory(logs)
    failed: dict[str, str] = {}
    active: list[subprocess.Popen[bytes]] = []

    def run(k: int, point: Point) -> None:
        announce(k, len(points), point.name)
        config, log = logs / f"{point.name}.toml", logs / f"{point.name}.log"
        config.write_text(to_toml(point.config), encoding="utf-8")
        plugins.write(plugins.files(point.config), logs)
        with log.open("wb") as file:
            command = [sys.executable, "-P", "-m", "corolla", "run", str(config), *options]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            active.append(process)
            process.wait()
        if process.returncode:
            failed[point.name] = f"exit code {process.returncode}, {log}:\n{log.read_text(errors='replace')[-1000:]}"

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in [pool.submit(run, k, point) for k, point in enumerate(points, 1)]:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            running = [process for process in active if process.poll() is None]
            interrupted(len(running))
            for process in running:
                # at once: Ctrl-C would ask for the end of the round
                process.send_signal(signal.SIGTERM)
            raise
    return failed
