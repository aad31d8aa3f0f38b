"""Sweeps: many runs from one TOML file, resumable, summarized as mean ± std over seeds.

A sweep file has these parts, all optional:

- `preset`: a preset's name.
- `presets`: a preset's name or a pattern of names, or a list of them. Every match is a value of the axis `preset`. At the
  top it is an axis of every grid that does not name presets itself, in `[grid]` of that grid.
- `scale`: "small" cuts every run, as `--scale small` does.
- `[settings]`: keys of all runs.
- `[grid]`: a value or a list of values per key; every combination is a run. `method`, `seed` and `preset` are keys like
  any other. Several grids are each a `[[grid]]`.
- `[search]`: keys whose values `--optuna` chooses (corolla/experiments/search.py): a list of values, or a table with `low`,
  `high` and perhaps `log = true`.
- `[[variants]]`: tables of keys, with an optional `name`; each combination runs once per variant.

Paths are relative to the file. Later parts win in this order: preset, settings, grid, variants, `scale`, --set.

A key that has no effect on a run does not make it a different run. This holds for keys of other methods and of other
partitions. A grid over methods and `fedcac.tau` runs FedAvg once; a grid over partitions and `dirichlet-alpha` runs an
even partition once.

Two runs are the same if their keys about data and training are equal. A finished run (with summary.json) in the sweep's
directory is not repeated. An unfinished run resumes from its last checkpoint; without a sound one it moves to the
folder `unfinished` and never counts. A run whose data files have changed moves to `other-data` and runs again.
Unfinished runs that are not part of the sweep stay as they are.
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
from typing import Any

from corolla.experiments.grouping import tells_runs_apart
from corolla.experiments.runs import RecordedRun, inside
from corolla.presets import cut, named, read_preset
from fl_app import data, plugins
from fl_app.checksums import DataHashes
from fl_app.config import RunConfig, parse
from fl_app.config.earlier_keys import current
from fl_app.errors import ConfigurationError, UserError
from fl_app.files import lock, make_directory, nearest_path, no_such, opener, publish_text
from fl_app.keys import Scalar, nearest, without_others
from fl_app.paths import anchored
from fl_app.server.checkpoint import load_latest
from fl_app.server.run_folder import check_state
from fl_app.sources import NODE
from fl_app.toml import flatten, read_toml, to_toml
from fl_app.transport.app_bundle import APP_DIRECTORY

UNFINISHED = "unfinished"
# folder of finished runs whose data have changed since
OTHER_DATA = "other-data"
# environment variable of every process that a sweep starts; its value is the sweep's directory
VARIABLE = "COROLLA_SWEEP"
MAX_NAME = 120

Raw = dict[str, Scalar]


@dataclass(frozen=True)
class Range:
    """Numbers of a search: whole ones if both ends are. log: drawn evenly by their logarithms."""

    low: int | float
    high: int | float
    log: bool = False


@dataclass(frozen=True)
class Sweep:
    """A sweep file as read: flat settings, grids with a list of values per key, flat variants, the space of a search."""

    preset: str = ""
    scale: str = "full"
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    grids: Sequence[Mapping[str, Sequence[Scalar]]] = ({},)
    variants: Sequence[Mapping[str, Scalar]] = ()
    search: Mapping[str, Range | Sequence[Scalar]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One run of a sweep. varying: keys that differ between the sweep's runs. config: flat, as `corolla run` takes it."""

    name: str
    varying: Mapping[str, Scalar]
    config: Mapping[str, Scalar]
    parsed: RunConfig


# The file -------------------------------------------------------------------------------------------------------------


def bundled() -> dict[str, Path]:
    """Return the sweep files that come with Corolla, by name.

    A clone has them beside its packages, a wheel within `corolla`.
    """
    places = APP_DIRECTORY / "sweeps", APP_DIRECTORY / "corolla" / "sweeps"
    return {path.stem: path for place in places for path in sorted(place.glob("*.toml"))}


def sweep_file(given: Path) -> Path:
    """Return a sweep file, given its path or the name of a bundled one. Raises UserError if there is none."""
    if given.is_file():
        return given
    known = bundled()
    if str(given) in known:
        return known[str(given)]
    if given.stem in known:
        raise UserError(
            key=given,
            rule=f"no such file or directory; `corolla sweep {given.stem}` runs the one that comes with Corolla",
        )
    hint = nearest(given.stem, known)
    raise UserError(no_such(given) if nearest_path(given) or not hint else f"{given}: no such file or directory{hint}")


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises UserError naming every problem in it."""
    content = read_toml(path)
    problems = []
    if "extends" in content:
        problems.append(
            'extends: a sweep file has no such part; preset = "base.toml" starts all its runs from a run file'
        )
    for key in content:
        if key not in ("extends", "preset", "presets", "scale", "settings", "grid", "variants", "search"):
            problems.append(f"{key}: not a part of a sweep file (keys of runs belong in [settings] or [grid])")
    if "preset" in content and "presets" in content:
        problems.append("preset, presets: exclude each other")
    if isinstance(content.get("grid"), dict):
        content["grid"] = [content["grid"]]
    for key, kind in (
        ("preset", str),
        ("scale", str),
        ("settings", dict),
        ("grid", list),
        ("variants", list),
        ("search", dict),
    ):
        if not isinstance(content.get(key, kind()), kind):
            problems.append(
                f"{key}: expected a {'table' if kind is dict else 'string' if kind is str else '[[table]]'}"
            )
            content.pop(key)
    for key in ("grid", "variants"):
        problems += [f"{key}: must be tables, got {one!r}" for one in content.get(key, []) if not isinstance(one, dict)]
    scale, variants = (
        content.get("scale", "full"),
        [current(flatten(v), warn=True) for v in content.get("variants", []) if isinstance(v, dict)],
    )
    if scale not in ("full", "small"):
        problems.append(f"scale: must be full or small, got {scale!r}")
    grids = []
    for grid in content.get("grid", [{}]):
        if isinstance(grid, dict):
            flat = current(flatten(grid), warn=True)
            grids.append({key: [value] if _scalar(value) else value for key, value in flat.items()})
    grids = _with_presets(content.get("presets"), grids, problems)
    settings = current(flatten(content.get("settings", {})), warn=True)
    for table in (settings, *variants):
        problems += [f"{key}: must be one value, got {value!r}" for key, value in table.items() if not _scalar(value)]
    for key, values in (pair for grid in grids for pair in grid.items()):
        if not isinstance(values, list) or not values or not all(map(_scalar, values)):
            problems.append(f"grid: {key}: must be a value or a list of values, got {values!r}")
        elif len({repr(value) for value in values}) < len(values):
            problems.append(f"grid: {key}: must name every value once, got {values!r}")
    for key in settings:
        for part, tables in (("grid", grids), ("variants", variants)):
            if tables and all(key in table for table in tables):
                problems.append(
                    f"settings: {key}: {part} sets it in every run, so this value has no effect; remove one"
                )
    search = _spaces(current(flatten(content.get("search", {})), warn=True))
    problems += _search_problems(search, [settings, *grids, *variants])
    if not content:
        problems.append("must have a preset, presets, settings, a grid or variants, and has nothing")
    for key in ("scale", "run-name", "output-dir"):
        if any(key in table for table in (settings, *grids, *variants)):
            problems.append(f"{key}: cannot be set for single runs of a sweep")
    labels = [variant_label(variant) for variant in variants]
    problems += [f"variants: two are named {label!r}" for label in sorted({x for x in labels if labels.count(x) > 1})]
    if problems:
        raise UserError(f"{path}:\n" + "\n".join(f"  {p}" for p in problems))
    return Sweep(
        _beside(path, "preset", content.get("preset", "")),
        scale,
        {key: _beside(path, key, value) for key, value in settings.items()},
        [{key: [_beside(path, key, value) for value in values] for key, values in grid.items()} for grid in grids],
        [{key: _beside(path, key, value) for key, value in variant.items()} for variant in variants],
        search,
    )


def _spaces(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat search with ranges in place of the keys KEY.low, KEY.high and KEY.log."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        key, _, end = name.rpartition(".")
        if end in ("low", "high", "log"):
            found.setdefault(key, {})[end] = value
        else:
            found[name] = value
    return {
        key: Range(**space) if isinstance(space, dict) and {"low", "high"} <= space.keys() else space
        for key, space in found.items()
    }


def _search_problems(search: Mapping[str, Any], elsewhere: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with a file's search. elsewhere: its other tables of keys."""
    found = []
    for key, space in search.items():
        if key in ("seed", "preset", "presets") or any(key in table for table in elsewhere):
            found.append(
                f"search: {key}: belongs in one part of the file"
                if key != "seed"
                else "search: seed: belongs in [grid]"
            )
        elif isinstance(space, Range):
            numbers = all(
                isinstance(end, (int, float)) and not isinstance(end, bool) for end in (space.low, space.high)
            )
            if not numbers or not space.low < space.high or (space.log and space.low <= 0):
                found.append(
                    f"search: {key}: must have low < high, both above 0 with log, got {space.low!r} and {space.high!r}"
                )
        elif (
            not isinstance(space, list)
            or len(space) < 2
            or not all(isinstance(v, (bool, int, float, str)) for v in space)
        ):
            found.append(
                f"search: {key}: must be a list of values, or a table with low, high and perhaps log, got {space!r}"
            )
    return found


def _with_presets(shared: object, grids: Sequence[Mapping[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """Return grids with the axis `preset` in place of `presets`. shared: `presets` of the file, None if it has none."""
    out = []
    for grid in grids:
        if "preset" in grid and "presets" in grid:
            problems.append("grid: preset, presets: exclude each other")
        elif shared is not None and "preset" not in grid:
            grid = {"presets": shared, **grid}
        out.append(
            {("preset" if key == "presets" else key): _matches(key, value, problems) for key, value in grid.items()}
        )
    return out


def _matches(key: str, value: Any, problems: list[str]) -> Any:
    """Return the values of a grid's axis: of `presets` the presets that it names, of any other key the values as given."""
    if key != "presets":
        return value
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not patterns or not all(isinstance(one, str) for one in patterns):
        problems.append(f"presets: must be a preset's name or a pattern, or a list of them, got {value!r}")
        return ["?"]
    try:
        return named(patterns)
    except UserError as error:
        problems.append(f"presets: {str(error).removeprefix('preset: ')}")
        return ["?"]


def of_presets(pattern: str, seeds: Sequence[int] = ()) -> Sweep:
    """Return the sweep of all presets that a pattern names, each with these seeds; without any, with the preset's own.

    Raises UserError if no preset matches.
    """
    grid: dict[str, Sequence[Scalar]] = {"preset": named([pattern])}
    return Sweep(grids=[grid | ({"seed": seeds} if seeds else {})])


def title_of(pattern: str) -> str:
    """Return a pattern of presets as a name that a folder may have: `fedobp-fashion-mnist-dirichlet-0.1`."""
    return re.sub(r"[^\w.]+", "-", pattern).strip("-.") or "presets"


def _beside(file: Path, key: str, value: Any) -> Any:
    """Return a value; a path in it is taken as relative to the sweep file."""
    if key == "preset" and str(value).endswith(".toml"):
        return str(file.parent / value)
    return anchored({key: value}, file.parent)[key]


def _scalar(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))


def expand(
    sweep: Sweep,
    methods: Mapping[str, type],
    directory: Path,
    overrides: Mapping[str, Scalar],
    finish: Callable[[Raw], Raw],
) -> list[Point]:
    """Return all runs of a sweep in the file's order, without duplicates.

    methods: parameter dataclass by method name. directory: parent of the run folders. overrides: keys that win over all
    others. finish: last change of a flat config (absolute paths). Raises UserError with the problems of all
    combinations.
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
            parsed = dataclasses.replace(
                parsed, run_name=name, output_dir=str(directory), resolved={**parsed.resolved, **own}
            )
            points[key] = Point(name, shown, finish({**raw, **own}), parsed)
    problems.complain()
    return list(points.values())


def _combinations(sweep: Sweep) -> Iterator[tuple[Raw, Raw]]:
    """Yield (varying, changes) per combination: the keys that name it, and the keys that it sets."""
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
    """Return every method that a run of the sweep may have."""
    tables = (sweep.settings, overrides, *sweep.variants)
    listed = (name for grid in sweep.grids for name in grid.get("method", []))
    return [str(name) for name in [*listed, *(table["method"] for table in tables if "method" in table)]]


def _merge(
    sweep: Sweep, changes: Raw, methods: Mapping[str, type], overrides: Mapping[str, Scalar], named: Collection[str]
) -> Raw:
    preset = str(changes.pop("preset", sweep.preset))
    raw = {**(read_preset(preset) if preset else {}), **sweep.settings, **changes}
    asked = raw.get("num-clients") or overrides.get("num-clients")
    raw["num-clients"] = raw.get("num-clients") or 10
    if sweep.scale == "small":
        raw = cut(raw, parse(without_others(raw, named), methods))
    raw |= overrides
    if raw.get("client") and not asked:
        raw["num-clients"] = data.count_clients(parse(without_others(raw, named), methods)) or raw["num-clients"]
    return raw


def _words(varying: Mapping[str, Scalar]) -> str:
    """Return a combination's name in characters that a folder's name may have: fedcac,tau=0.3,seed=1."""
    words = []
    for key, value in varying.items():
        text = re.sub(r"[^\w.+=,@-]+", "-", str(value))
        words.append(text if key in ("method", "preset", "variant") else f"{key.rpartition('.')[2]}={text}")
    return ",".join(words)


class Problems:
    """Problems of a sweep's runs. Each problem is listed once, with the runs it concerns."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, error: UserError, name: str) -> None:
        """Add the problems of one run."""
        for problem in error.problems if isinstance(error, ConfigurationError) and error.problems else (error,):
            self._names.setdefault(str(problem), []).append(name)

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
    """Check every run's data, partition and model on this machine. Raises UserError with the problems of all runs."""
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
    """Return a run's identity as JSON text: its keys about data and training.

    A key without effect on this run has its default, so that it does not make runs differ.
    """
    own = [(key, value) for key, value in config.own_keys() if key.tells_runs_apart]
    return json.dumps(
        {key.name: value if tells_runs_apart(key.name, config.resolved) else key.default for key, value in own},
        sort_keys=True,
    )


@contextlib.contextmanager
def locked(directory: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a sweep's directory; the directory is created if needed.

    shared: with other processes that each do one run of it. Raises UserError if another sweep is running there.
    """
    make_directory(directory)
    try:
        held = lock(directory / ".lock", wait=False, shared=shared)
    except BlockingIOError:
        raise UserError(f"another `corolla sweep` is running in {directory}") from None
    with held:
        yield


def end_leftovers(directory: Path) -> int:
    """End processes that a killed sweep left running in its directory, and return their number.

    Call it while the directory is locked. It also marks this process as a process of that directory.
    """
    from fl_app.processes import end_processes, processes_with

    left = processes_with(f"{VARIABLE}={directory}")
    end_processes(left)
    os.environ[VARIABLE] = str(directory)
    return len(left)


def scan(directory: Path, methods: Mapping[str, type]) -> tuple[dict[str, RecordedRun], dict[Path, str]]:
    """Return finished runs by identity, and identities of unfinished runs by folder, directly under a directory.

    The identity is "" if a run's config cannot be read, or is of another version.
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
    """Return the round of an unfinished run's last sound checkpoint; None if the run cannot be resumed.

    That is so without a sound checkpoint, and after clients have removed their state. Raises UserError if another
    process runs it.
    """
    if RecordedRun(folder).state == "running":
        raise UserError(f"another process is running {folder}")
    try:
        check_state(folder)
        return int(load_latest(folder).meta["round"])
    except UserError:
        return None


def with_other_data(points: Sequence[Point], runs: Iterable[tuple[str, RecordedRun]]) -> list[RecordedRun]:
    """Return the runs whose data files have changed since they started.

    runs: (identity, run) pairs. Unknown data count as unchanged: those of runs of earlier versions, and those that
    cannot be opened here.
    """
    wanted = {identity(point.parsed): point.parsed for point in points}
    opened: dict[tuple[Scalar, ...], DataHashes | None] = {}
    found = []
    for whose, run in runs:
        config, began = wanted.get(whose), _told_of_data(run)
        if began is None or config is None:
            continue
        # clients that share a data set and hide it send one keyed hash
        hidden = None not in run.hashes
        names = (*data.READ_BY, "data-dir")
        key = (hidden, *(value for spec, value in config.own_keys() if spec.about == "data" or spec.name in names))
        if key not in opened:
            try:
                here = data.open_data(config, look=True)
                opened[key] = here.hidden_hashes if hidden else here.hashes
            except (UserError, OSError):
                opened[key] = None
        now = opened[key]
        if now is not None and began.difference(now):
            found.append(run)
    return found


def _told_of_data(run: RecordedRun) -> DataHashes | None:
    """Return the hashes of the data set that a run's clients share; None if unknown.

    They are keyed if the clients hide the data set.
    """
    # the run may have moved to another folder since
    if not run.hashes:
        return None
    if None in run.hashes:
        return run.hashes[None]
    shared = set() if run.settings.get("dataset") == NODE else set(run.hashes.values())
    return shared.pop() if len(shared) == 1 else None


def set_aside(folder: Path, where: str = UNFINISHED) -> Path:
    """Move a run folder into the folder `where` beside it, and return its new path. A taken name gets a number."""
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
    """Run `jobs` points at a time, each as its own `corolla run`.

    Return the exit code and end of the log of failed ones, by name. Logs are in the directory's `logs`. An interrupt
    also ends the runs in progress; `interrupted` first gets their number.
    """
    logs = directory / "logs"
    make_directory(logs)
    failed: dict[str, str] = {}
    active: list[subprocess.Popen[bytes]] = []

    def run(k: int, point: Point) -> None:
        announce(k, len(points), point.name)
        config, log = logs / f"{point.name}.toml", logs / f"{point.name}.log"
        publish_text(config, to_toml(point.config))
        plugins.write(plugins.files(point.config), logs)
        with open(log, "wb", opener=opener) as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "corolla", "run", str(config), *options],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
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
                # end it immediately: SIGINT would let it finish its round
                process.send_signal(signal.SIGTERM)
            raise
    return failed
