"""`corolla sweep`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from corolla.api import one_run, settings
from corolla.api.checks import check_locally, check_resources, warn_of_settings
from corolla.api.console import console, errors, same_without
from corolla.api.settings import Backend, Scale, look_for_plugins, name_plugins, ready, resolve
from corolla.cli.completion import columns_of
from corolla.cli.options import (
    BackendOption,
    CpusOption,
    GpusOption,
    LogFileOption,
    NoProgressOption,
    QuietOption,
    ScaleOption,
    SetOption,
    VerboseOption,
    parse_set,
)
from corolla.cli.output import show_next, show_table
from corolla.experiments import forecast as forecasting
from corolla.experiments import result_table as sweep_table
from corolla.experiments import search as searching
from corolla.experiments import significance
from corolla.experiments import sweep as sweeping
from corolla.experiments.forecast import Forecast
from corolla.experiments.runs import RecordedRun
from corolla.experiments.search import Drawn
from corolla.experiments.sweep import Point, Range
from fl_app import debugging, exit_codes, shell
from fl_app.errors import RunFailed, UserError, counted
from fl_app.files import make_directory, publish_text
from fl_app.keys import Scalar
from fl_app.server.run_folder import check_unchanged
from strategies import METHOD_PARAMS

SCRIPT = "array.sbatch"  # in the sweep's directory
_ARRAY = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}{limit}
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --signal=B:TERM@60
#SBATCH --output={log}
#
# {title}: one run per task, in the folder of its name. Submitted again, it resumes interrupted runs from their last checkpoints,
# and skips finished ones. Set memory, time and partition by options of sbatch, or by more #SBATCH lines.
set -eu
runs=(
{runs}
)
cd {here}
exec {command} "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Backend and resources of a sweep's simulations."""

    backend: Backend
    cpus_per_client: float
    gpus_per_client: float

    def of(self, num_clients: int) -> AbstractContextManager[one_run.Simulate]:
        """Return a context that yields a function to run simulations of `num_clients` clients."""
        return one_run.simulating(self.backend, num_clients, self.cpus_per_client, self.gpus_per_client)


class BestBy(Enum):
    """Data that choose a sweep's best row."""

    validation = "validation"
    test = "test"


def sweep(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A sweep file (format: docs/experiments.md), or the name of one that comes with Corolla, e.g. digits.",
            autocompletion=lambda incomplete: [name for name in sweeping.bundled() if name.startswith(incomplete)],
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Instead of a file: a preset's whole name, or all presets that match; COLUMN/* is a column.",
            autocompletion=columns_of,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0,1,2", help="With --preset: the seeds of every run (default: the preset's own)."),
    ] = None,
    set_: SetOption = None,
    jobs: Annotated[int, typer.Option(help="Runs at the same time, each in its own processes.", min=1)] = 1,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="One process, without Ray and SuperLink: fast for small models.")
    ] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="The sweep's directory (default: runs/<name of the file or of the pattern>).")
    ] = None,
    scale: ScaleOption = Scale.full,
    cpus_per_client: CpusOption = 1,
    gpus_per_client: GpusOption = 0,
    backend: BackendOption = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Only write a Slurm job array with one task per run; sbatch submits it.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Do only this run, from its last checkpoint if it was interrupted."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the runs.")] = False,
    forecast: Annotated[
        bool,
        typer.Option(
            "--forecast", help="Only estimate the duration: the first rounds of new settings run, and count later."
        ),
    ] = False,
    optuna: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Search the file's [search] in N trials, by validation data; the same command continues (docs/experiments.md).",
        ),
    ] = None,
    best_by: Annotated[
        BestBy | None,
        typer.Option(
            help="Data that choose the best row (default: validation data, if all runs have some, else test data)."
        ),
    ] = None,
    verbose: VerboseOption = False,
    no_progress: NoProgressOption = False,
    quiet: QuietOption = False,
    log_file: LogFileOption = None,
) -> None:
    """Run all combinations of a sweep file, or all presets that match. Started again, it does only the unfinished runs."""
    others = {"--slurm": slurm, "--only": only is not None, "--dry-run": dry_run}
    if forecast:
        _refuse_beside("--forecast", others)
    if optuna:
        _refuse_beside("--optuna", {**others, "--forecast": forecast, "--best-by": best_by is not None})
    given = parse_set(set_ or [])
    asked = planned(file, preset, seeds, given)
    plan, title = asked.plan, asked.title
    if bool(plan.search) != bool(optuna):
        why = f"{asked.given} has no [search]" if optuna else f"{asked.given} has a [search]: give the number of trials"
        raise UserError(key="--optuna", rule=f"{why} (docs/experiments.md)")
    if scale is Scale.small:
        plan = dataclasses.replace(plan, scale=scale.value)
    directory = (output_dir or Path("runs") / title).expanduser().resolve()
    if optuna:
        first = Drawn(
            0, {key: space[0] if not isinstance(space, Range) else space.low for key, space in plan.search.items()}
        )
        points = sweeping.expand(first.plan(plan), METHOD_PARAMS, directory, given, ready)
    else:
        points = sweeping.expand(plan, METHOD_PARAMS, directory, given, ready)
    by = best_by.value if best_by else ""
    significance.check_choice(points, by)
    warn_of_settings(given, [(point.parsed, point.config) for point in points])
    name_plugins(point.config for point in points)
    if only is not None:
        one = chosen(points, only, asked.given)
        points = [one] if dry_run else points
    if dry_run:
        typer.echo("\n".join(point.name for point in points))
        return
    options = [f"--cpus-per-client={cpus_per_client:g}", f"--gpus-per-client={gpus_per_client:g}"]
    options += [f"--backend={backend.value}"] if backend else []
    settings.refuse_unable(backend, None, gpus_per_client)
    if in_process:
        settings.refuse_beside("--in-process", backend)
    if slurm:
        sets = [word for pair in set_ or [] for word in ("--set", pair)]
        words = [*asked.words, f"--output-dir={directory}", f"--scale={scale.value}", *sets]
        words += [f"--best-by={by}"] if by else []
        words += ["--in-process"] if in_process else options
        write_array(
            points,
            directory,
            title,
            words,
            at_once=jobs if jobs > 1 else 0,
            cpus=1 if in_process else max(2, math.ceil(cpus_per_client)),
            gpus=math.ceil(gpus_per_client),
        )
        return
    how = None
    if not in_process:
        check_resources(cpus_per_client, gpus_per_client)
        found = settings.backend_of(backend, None, gpus_per_client, [point.parsed.device for point in points])
        how = Simulation(found, cpus_per_client, gpus_per_client)
    if only is not None:
        with sweeping.locked(directory, shared=True):
            run_alone(directory, one, how, verbose)
            finished, _ = sweeping.scan(directory, METHOD_PARAMS)
            if all(sweeping.identity(point.parsed) in finished for point in points):
                show_sweep(directory, points, title, plan.scale, {}, by)
        return
    if optuna:
        words = ["--in-process"] if in_process else options
        search(
            plan,
            directory,
            given,
            optuna,
            lambda todo: run_all(todo, directory, jobs, words, how, verbose),
            points,
            title,
        )
        return
    sweeping.check_points(points, check_locally)
    with sweeping.locked(directory):
        todo = unfinished_points(directory, points)
        try:
            todo, failed = say_how_long(
                directory,
                points,
                todo,
                jobs,
                lambda first: run_points(first, how, verbose, forecasting.FIRST),
                needed=forecast,
            )
            if not forecast:
                words = ["--in-process"] if in_process else options
                failed = run_all(todo, directory, jobs, words, how, verbose)
        except KeyboardInterrupt:
            errors.print("the same command continues the sweep, unfinished runs from their checkpoints")
            raise
        if not forecast:
            show_sweep(directory, points, title, plan.scale, failed, by)
        elif todo and not failed:
            left = f"{counted(len(todo), 'run is', 'runs are')} not finished"
            console.print(f"\nnext: {escape(same_without('--forecast'))}    # {left}: does them", soft_wrap=True)
    if failed:
        for name, message in failed.items():
            errors.print(f"[bold red]failed:[/] {escape(name)}: {escape(message)}", soft_wrap=True)
        raise typer.Exit(exit_codes.FAILED)


def _refuse_beside(option: str, others: Mapping[str, bool]) -> None:
    """Raise UserError if another option is given. others: whether each is given, by name."""
    if given := [name for name, is_given in others.items() if is_given]:
        raise UserError(f"{option} and {given[0]} exclude each other")


def run_all(
    todo: Sequence[Point], directory: Path, jobs: int, words: Sequence[str], how: Simulation | None, verbose: bool
) -> dict[str, str]:
    """Run points, `jobs` at a time. Return the messages of failed ones by name. words: options of `corolla run`."""
    if jobs > 1:
        return sweeping.run_parallel(todo, directory, jobs, words, announce, interrupted)
    return run_points(todo, how, verbose)


def search(
    plan: sweeping.Sweep,
    directory: Path,
    given: Mapping[str, Scalar],
    trials: int,
    run: Callable[[Sequence[Point]], dict[str, str]],
    first: Sequence[Point],
    title: str,
) -> None:
    """Run the trials of a search that are left, and print the table of all. first: the runs of a trial, for checks.

    A trial with a failed run counts, and has no figure. Raises UserError if no trial has a figure.
    """
    higher = searching.higher_is_better(first)
    sweeping.check_points(first, check_locally)

    def points_of(drawn: Drawn) -> list[Point]:
        return sweeping.expand(drawn.plan(plan), METHOD_PARAMS, directory, given, ready)

    with sweeping.locked(directory):
        study, failed = searching.Study(directory, plan, given), dict[str, str]()
        while len(study.trials) < trials:
            drawn = study.ask()
            points = points_of(drawn)
            told = ", ".join(f"{key} {sweep_table.setting(value)}" for key, value in drawn.values.items())
            console.print(f"trial {drawn.number} of {trials}: {escape(told)}", soft_wrap=True)
            failed |= run(unfinished_points(directory, points))
            study.tell(drawn, searching.figure_of(points, scan(directory, points)[0]), higher)
        every = {point.name: point for drawn in study.trials for point in points_of(drawn)}
        for name, message in failed.items():
            errors.print(f"[bold red]failed:[/] {escape(name)}: {escape(message)}", soft_wrap=True)
        show_sweep(directory, [*every.values()], title, plan.scale, failed, "validation")
    finished, _ = sweeping.scan(directory, METHOD_PARAMS)
    if all(searching.figure_of(points_of(drawn), finished) is None for drawn in study.trials):
        raise UserError(key="--optuna", rule="no trial has a figure on validation data")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A sweep as the command names it.

    given: the file or the pattern. title: name of its folder and its table. words: those that name it in a Slurm task.
    """

    plan: sweeping.Sweep
    given: str
    title: str
    words: Sequence[str]


def planned(file: Path | None, preset: str | None, seeds: str | None, given: Mapping[str, Scalar]) -> Planned:
    """Return the sweep of a file, or of a pattern of presets with seeds. given: the keys of --set.

    Raises UserError if both or neither are given, and for seeds without a pattern.
    """
    if file is not None and preset is not None:
        raise UserError(f"FILE and --preset exclude each other: got {file} and {preset}")
    if preset is None:
        if seeds is not None:
            raise UserError(key="--seeds", rule="needs --preset; a sweep file names its seeds in [grid]")
        if file is None:
            raise UserError("name a sweep file, or presets with --preset PATTERN; `corolla presets` lists them")
        file = sweeping.sweep_file(file)
        look_for_plugins(file.parent)
        return Planned(sweeping.read_sweep(file), str(file), file.stem, [str(file.resolve())])
    if seeds is not None and "seed" in given:
        raise UserError("--seeds and --set seed exclude each other")
    return Planned(
        sweeping.of_presets(preset, parse_seeds(seeds)),
        preset,
        sweeping.title_of(preset),
        [f"--preset={preset}", *([f"--seeds={seeds}"] if seeds is not None else [])],
    )


def parse_seeds(text: str | None) -> list[int]:
    """Return the seeds of --seeds, as in 0,1,2. Raises UserError unless they are distinct integers >= 0."""
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words) or len(set(map(int, words))) < len(words):
        raise UserError(
            key="--seeds", rule="must be distinct integers >= 0 with commas between them, as in 0,1,2", value=text
        )
    return [int(word) for word in words]


def write_array(
    points: Sequence[Point], directory: Path, title: str, words: Sequence[str], *, at_once: int, cpus: int, gpus: int
) -> None:
    """Write a sweep's Slurm job array into its directory: a script with one run per task, which resumes when it is restarted.

    The runs are checked on this machine as far as possible: GPUs are not checked here. words: of the `corolla sweep` that a
    task calls, except the option that names its run. at_once: tasks at the same time; 0: as many as Slurm has room for.
    cpus, gpus: per task.
    """
    sweeping.check_points(
        [dataclasses.replace(p, parsed=dataclasses.replace(p.parsed, device="cpu")) for p in points], check_locally
    )
    path, logs = directory / SCRIPT, directory / "logs"
    make_directory(logs)
    text = _ARRAY.format(
        name=shell.word(f"corolla-{directory.name}"),
        last=len(points) - 1,
        limit=f"%{at_once}" if at_once else "",
        cpus=cpus,
        gpus=f"#SBATCH --gpus-per-task={gpus}\n" if gpus else "",
        log=shell.word(f"{logs}/%a.log"),
        title=title,
        runs="\n".join(f"  {shell.word(point.name)}" for point in points),
        here=shell.word(str(Path.cwd())),
        command=shell.line([sys.executable, "-P", "-m", "corolla", "sweep", *words, "--only"]),
    )
    publish_text(path, text)
    console.print(
        f"{counted(len(points), 'run')}, one task each; to start, and to continue later: sbatch {escape(str(path))}",
        soft_wrap=True,
    )


def chosen(points: Sequence[Point], name: str, given: str) -> Point:
    """Return the run with a name. Raises UserError if the sweep has none."""
    found = [point for point in points if point.name == name]
    if not found:
        raise UserError(
            key="--only", rule=f"{given} has no run {name!r}; --dry-run lists its runs, --slurm writes a new script"
        )
    return found[0]


def run_alone(directory: Path, point: Point, how: Simulation | None, verbose: bool) -> None:
    """Run one of a sweep's runs, unless it is finished; an interrupted one resumes from its last checkpoint.

    Raises as `corolla run`. how: None for a run in this process.
    """
    finished, unfinished = scan(directory, [point])
    key = sweeping.identity(point.parsed)
    if (before := finished.get(key)) is not None:
        console.print(f"finished before: {before.path}", soft_wrap=True)
        return
    for folder in (folder for folder, whose in unfinished.items() if whose == key or folder.name == point.name):
        if (begun := prepare_to_resume(point, folder)) is not None:
            point = begun
            break
    check_locally(point.parsed)
    if how is None:
        one_run.run_in_process(point.config, point.parsed)
        return
    with how.of(point.parsed.num_clients) as simulate:
        simulate(point.config, point.parsed, verbose)


def prepare_to_resume(point: Point, folder: Path, begun_now: bool = False) -> Point | None:
    """Return a run of a sweep, prepared to resume from its last checkpoint.

    Without a sound one, set its folder aside and return None. begun_now: this command began the run, so it prints no
    message. Raises UserError if another process runs it, or if its settings differ.
    """
    if (round := sweeping.resumable(folder)) is None:
        set_aside(folder)
        return None
    # This command determines how the run runs and where its data lie. Its state stays where it is.
    now = {
        spec.name: value
        for spec, value in point.parsed.own_keys()
        if spec.about == "running" or spec.name == "data-dir"
    }
    config = ready(RecordedRun(folder).settings | now | {"resume": str(folder)})
    parsed = resolve(config)
    check_unchanged(folder, parsed)
    if not begun_now:
        console.print(f"resumes {folder} after round {round}", soft_wrap=True)
    return dataclasses.replace(point, config=config, parsed=parsed)


def set_aside(folder: Path) -> None:
    """Move an unfinished run's folder out of the way."""
    console.print(f"unfinished, set aside: {sweeping.set_aside(folder)}", soft_wrap=True)


def scan(directory: Path, points: Sequence[Point]) -> tuple[dict[str, RecordedRun], dict[Path, str]]:
    """Scan a sweep's directory, after setting aside runs with data that have changed since they started."""
    finished, unfinished = sweeping.scan(directory, METHOD_PARAMS)
    begun = [(whose, RecordedRun(folder)) for folder, whose in unfinished.items()]
    changed = sweeping.with_other_data(points, [*finished.items(), *begun])
    for run in changed:
        aside = sweeping.set_aside(run.path, sweeping.OTHER_DATA)
        console.print(f"the data have changed since this run started; set aside: {aside}", soft_wrap=True)
    return sweeping.scan(directory, METHOD_PARAMS) if changed else (finished, unfinished)


def unfinished_points(directory: Path, points: Sequence[Point]) -> list[Point]:
    """Clean up after a killed sweep, and return the runs left to do."""
    if count := sweeping.end_leftovers(directory):
        console.print(f"ended {counted(count, 'process', 'processes')} left running by an interrupted sweep")
    finished, unfinished = scan(directory, points)
    todo = prepare_remaining(points, finished, unfinished)
    console.print(f"{counted(len(points), 'run')}, {len(points) - len(todo)} finished before, {len(todo)} to do")
    return todo


def prepare_remaining(
    points: Sequence[Point],
    finished: Mapping[str, RecordedRun],
    unfinished: Mapping[Path, str],
    begun_now: bool = False,
) -> list[Point]:
    """Return the runs left to do; those with a checkpoint are prepared to resume. Folders in their way are set aside."""
    todo = {key: point for point in points if (key := sweeping.identity(point.parsed)) not in finished}
    names = {point.name for point in todo.values()}
    begun: dict[str, Point] = {}
    for folder, key in unfinished.items():
        if key not in todo and folder.name not in names:
            # a run of another sweep, or no run at all
            continue
        if key not in todo or key in begun:
            set_aside(folder)
        elif (point := prepare_to_resume(todo[key], folder, begun_now)) is not None:
            begun[key] = point
    return [*(todo | begun).values()]


def say_how_long(
    directory: Path,
    points: Sequence[Point],
    todo: list[Point],
    jobs: int,
    run_first: Callable[[Sequence[Point]], dict[str, str]],
    needed: bool = False,
) -> tuple[list[Point], dict[str, str]]:
    """Print a forecast of the sweep's duration. Return the runs left to do, and the errors of those that it began.

    Settings without recorded rounds are measured first: `run_first` runs the first rounds of one run each, unless the
    sweep is too short to bother. These runs resume from there. needed: also print that no estimate is possible.
    """

    def known() -> tuple[dict[str, RecordedRun], dict[Path, str], Forecast]:
        finished, unfinished = sweeping.scan(directory, METHOD_PARAMS)
        return (
            finished,
            unfinished,
            Forecast(points, finished | {key: RecordedRun(folder) for folder, key in unfinished.items()}),
        )

    failed: dict[str, str] = {}
    unmeasured = {sweeping.identity(point.parsed) for point in known()[2].unmeasured()}
    if first := [point for point in todo if sweeping.identity(point.parsed) in unmeasured]:
        console.print(
            f"to estimate the duration, first {forecasting.FIRST} rounds of {counted(len(first), 'run')}, which resume later:"
        )
        failed = run_first(first)
    finished, unfinished, forecast = known()
    if first:
        todo = prepare_remaining(points, finished, unfinished, begun_now=True)
    if todo and (seconds := forecast.seconds(jobs)) is not None:
        at_once = f", {jobs} at a time if they do not slow each other down" if jobs > 1 else ""
        console.print(
            f"about {forecasting.duration(seconds)} for {counted(len(todo), 'run')}{at_once}, at the speed of the rounds so far"
        )
    elif needed and not todo:
        console.print("all runs are finished")
    elif needed and not failed:
        console.print(
            f"no estimate: no round is recorded, and fewer than {forecasting.WORTH * forecasting.FIRST} are left of each setting"
        )
    return todo, failed


def announce(k: int, total: int, name: str) -> None:
    """Print the run that starts."""
    console.print(f"[bold]{k}/{total}[/] {escape(name)}", soft_wrap=True)


def interrupted(running: int) -> None:
    """Answer Ctrl-C immediately, since ending the runs in progress takes a while."""
    errors.print(f"stopping {counted(running, 'run')}")


def run_points(points: Sequence[Point], how: Simulation | None, verbose: bool, until: int = 0) -> dict[str, str]:
    """Run points one after the other, those with equal numbers of clients on one backend.

    Return the messages of failed ones by name. how: None for runs in this process. until: the round after which each
    run ends, to be resumed later; 0: the last.
    """
    failed: dict[str, str] = {}
    started = 0
    for num_clients in dict.fromkeys(point.parsed.num_clients for point in points):
        same = [point for point in points if point.parsed.num_clients == num_clients]
        with contextlib.ExitStack() as stack:
            simulate = None if how is None else stack.enter_context(how.of(num_clients))
            for point in same:
                started += 1
                if until:
                    # not one of the sweep's runs yet
                    console.print(f"first rounds: {escape(point.name)}", soft_wrap=True)
                else:
                    announce(started, len(points), point.name)
                try:
                    if simulate is None:
                        one_run.run_in_process(point.config, point.parsed, until)
                    else:
                        simulate(point.config, point.parsed, verbose, "", until)
                except RunFailed:
                    failed[point.name] = "the run failed; the end of its log is above"
                # one bad run must not end a whole sweep
                except Exception as error:
                    failed[point.name] = f"{type(error).__name__}: {error}"
                    if place := debugging.place_of(error):
                        failed[point.name] += f" ({place})"
                        errors.print(escape(debugging.trace_of(error)), soft_wrap=True)
                    errors.print(f"[bold red]failed:[/] {escape(failed[point.name])}", soft_wrap=True)
    return failed


def show_sweep(
    directory: Path, points: Sequence[Point], title: str, scale: str, failed: dict[str, str], by: str
) -> None:
    """Write and print a sweep's table, with the best rows. by: data that choose these."""
    finished, _ = sweeping.scan(directory, METHOD_PARAMS)
    rows = sweep_table.sweep_rows(points, finished)
    remarks = ["Cut by `--scale small`: not comparable with the papers' figures."] if scale == "small" else []
    best = significance.best_lines(rows, by)
    lost = [f"{counted(len(failed), 'run')} failed."] * bool(failed)
    sweep_table.write_results(directory, rows, title, [*remarks, *lost, *best])
    show_table(sweep_table.text_table(rows))
    notes = sweep_table.undefined_notes(run for row in rows for run in row.runs)
    console.print(escape("\n".join([sweep_table.caption(rows), *notes, *best, *remarks])))
    console.print(f"{directory / 'results.csv'}\n{directory / 'results.md'}", soft_wrap=True)
    if finished:
        show_next([directory], len(rows) > 1)
