"""`corolla sweep`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from corolla.api import runs
from corolla.api.checks import check_locally, check_resources, warn_of_settings
from corolla.api.console import console, errors
from corolla.api.settings import Scale, look_for_plugins, name_plugins, ready, resolve
from corolla.api.waiting import simulated
from corolla.cli.options import CpusOption, GpusOption, ScaleOption, SetOption, VerboseOption, parse_set
from corolla.cli.tables import show_next, show_table
from corolla.experiments import forecast as forecasting
from corolla.experiments import sweep as sweeping
from corolla.experiments import table as sweep_table
from corolla.experiments.forecast import Forecast
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import Point
from fl_app.errors import RunFailed, UserError
from fl_app.server.run_folder import check_unchanged
from strategies import METHOD_PARAMS


def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file; docs/experiments.md says what it holds.")],
    set_: SetOption = None,
    jobs: Annotated[int, typer.Option(help="Runs at the same time, each in its own processes.", min=1)] = 1,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="No Ray, no SuperLink: fast for small models.")
    ] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="The sweep's directory (default: runs/<file's name>).")
    ] = None,
    scale: ScaleOption = Scale.full,
    cpus_per_client: CpusOption = 1,
    gpus_per_client: GpusOption = 0,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Write a Slurm job array, a task for every run; sbatch submits it.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="RUN", help="That run alone, from its last checkpoint if it was cut off.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and do nothing.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Run all combinations of a sweep file; started again, it does only what is not finished."""
    look_for_plugins(file.parent)
    given = parse_set(set_ or [])
    plan = sweeping.read_sweep(file)
    if scale is Scale.small:
        plan = dataclasses.replace(plan, scale=scale.value)
    directory = (output_dir or Path("runs") / file.stem).expanduser().resolve()
    points = sweeping.expand(plan, METHOD_PARAMS, directory, given, ready)
    warn_of_settings(given, [(point.parsed, point.config) for point in points])
    name_plugins(point.config for point in points)
    if dry_run:
        typer.echo("\n".join(point.name for point in points))
        return
    options = [f"--cpus-per-client={cpus_per_client:g}", f"--gpus-per-client={gpus_per_client:g}"]
    if slurm:
        sets = [word for pair in set_ or [] for word in ("--set", pair)]
        words = [str(file.resolve()), f"--output-dir={directory}", f"--scale={scale.value}", *sets]
        words += ["--in-process"] if in_process else options
        cpus = 1 if in_process else max(2, math.ceil(cpus_per_client))
        write_array(
            points, directory, file, words, at_once=jobs if jobs > 1 else 0, cpus=cpus, gpus=math.ceil(gpus_per_client)
        )
        return
    if not in_process:
        check_resources(cpus_per_client, gpus_per_client)
    if only is not None:
        with sweeping.locked(directory, shared=True):
            run_alone(directory, chosen(points, only, file), in_process, cpus_per_client, gpus_per_client, verbose)
            finished, _ = sweeping.scan(directory, METHOD_PARAMS)
            if all(sweeping.identity(point.parsed) in finished for point in points):
                show_sweep(directory, points, file.stem, plan.scale, {})
        return
    sweeping.check_points(points, check_locally)
    with sweeping.locked(directory):
        todo = unfinished_points(directory, points)
        try:
            todo = say_how_long(
                directory,
                points,
                todo,
                jobs,
                lambda first: run_points(
                    first, in_process, cpus_per_client, gpus_per_client, verbose, forecasting.FIRST
                ),
            )
            if jobs > 1:
                how = ["--in-process"] if in_process else options
                failed = sweeping.run_parallel(todo, directory, jobs, how, announce, interrupted)
            else:
                failed = run_points(todo, in_process, cpus_per_client, gpus_per_client, verbose)
        except KeyboardInterrupt:
            errors.print("the sweep goes on with the same command, unfinished runs from their checkpoints")
            raise
        show_sweep(directory, points, file.stem, plan.scale, failed)
    if failed:
        for name, message in failed.items():
            errors.print(f"[bold red]failed:[/] {escape(name)}: {escape(message)}", soft_wrap=True)
        raise typer.Exit(1)


def write_array(
    points: Sequence[Point], directory: Path, file: Path, words: Sequence[str], *, at_once: int, cpus: int, gpus: int
) -> None:
    """Write a sweep's Slurm script, once all that can be wrong with its runs here is known not to be; GPUs are elsewhere."""
    from corolla.experiments import slurm

    anywhere = [dataclasses.replace(p, parsed=dataclasses.replace(p.parsed, device="cpu")) for p in points]
    sweeping.check_points(anywhere, check_locally)
    path = slurm.write_array(points, directory, file.name, words, at_once=at_once, cpus=cpus, gpus=gpus)
    console.print(
        f"{len(points)} runs, a task each; now, and again to go on: sbatch {escape(str(path))}", soft_wrap=True
    )


def chosen(points: Sequence[Point], name: str, file: Path) -> Point:
    """Return the run of a name. Raises UserError if the sweep has none."""
    found = [point for point in points if point.name == name]
    if not found:
        raise UserError(
            f"--only: {file} has no run {name!r}; --dry-run lists them, --slurm writes a script of what it has now"
        )
    return found[0]


def run_alone(
    directory: Path, point: Point, in_process: bool, cpus_per_client: float, gpus_per_client: float, verbose: bool
) -> None:
    """Do one of a sweep's runs, from its last checkpoint if it was cut off, unless it is finished. Raises as `corolla run`."""
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
    if in_process:
        runs.run_in_process(point.config, point.parsed)
        return
    with simulated(console, point.parsed.num_clients, cpus_per_client, gpus_per_client) as submit:
        runs.run_one(point.config, submit, verbose)


def prepare_to_resume(point: Point, folder: Path, begun_now: bool = False) -> Point | None:
    """Return a run of a sweep as it goes on from its last checkpoint; None, its folder set aside, if it has no sound one.

    begun_now: by this command, which says nothing of it. Raises UserError if another process runs it, or its settings are others.
    """
    if (round := sweeping.resumable(folder)) is None:
        set_aside(folder)
        return None
    # how it runs, and where its data lie, is what this command says; its state lies where it was left
    now = {
        spec.name: value
        for spec, value in point.parsed.own_keys()
        if spec.about == "running" or spec.name == "data-dir"
    }
    config = ready(RecordedRun(folder).settings | now | {"resume": str(folder)})
    parsed = resolve(config)
    check_unchanged(folder, parsed)
    if not begun_now:
        console.print(f"goes on with {folder} after round {round}", soft_wrap=True)
    return dataclasses.replace(point, config=config, parsed=parsed)


def set_aside(folder: Path) -> None:
    """Move an unfinished run's folder out of the way."""
    console.print(f"unfinished, set aside: {sweeping.set_aside(folder)}", soft_wrap=True)


def scan(directory: Path, points: Sequence[Point]) -> tuple[dict[str, RecordedRun], dict[Path, str]]:
    """Scan a sweep's directory, once the runs of some points that were made of other data than are there now are out of the way."""
    finished, unfinished = sweeping.scan(directory, METHOD_PARAMS)
    begun = [(whose, RecordedRun(folder)) for folder, whose in unfinished.items()]
    changed = sweeping.with_other_data(points, [*finished.items(), *begun])
    for run in changed:
        aside = sweeping.set_aside(run.path, sweeping.OTHER_DATA)
        console.print(f"the data have changed since this run, set aside: {aside}", soft_wrap=True)
    return sweeping.scan(directory, METHOD_PARAMS) if changed else (finished, unfinished)


def unfinished_points(directory: Path, points: Sequence[Point]) -> list[Point]:
    """Tidy up after a sweep that was killed, and return the runs that are left to do."""
    if count := sweeping.end_leftovers(directory):
        console.print(f"ended {count} processes that an interrupted sweep had left running")
    finished, unfinished = scan(directory, points)
    todo = prepare_remaining(points, finished, unfinished)
    console.print(f"{len(points)} runs, {len(points) - len(todo)} finished before, {len(todo)} to do")
    return todo


def prepare_remaining(
    points: Sequence[Point],
    finished: Mapping[str, RecordedRun],
    unfinished: Mapping[Path, str],
    begun_now: bool = False,
) -> list[Point]:
    """Return the runs that are left to do, those with a checkpoint as they go on from it; what is in their way is set aside."""
    todo = {key: point for point in points if (key := sweeping.identity(point.parsed)) not in finished}
    names = {point.name for point in todo.values()}
    begun: dict[str, Point] = {}
    for folder, key in unfinished.items():
        if key not in todo and folder.name not in names:
            # It belongs to no run that is wanted now, or is no run at all.
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
    run_first: Callable[[Sequence[Point]], object],
) -> list[Point]:
    """Say how long a sweep takes, and return the runs that are left to do.

    Of settings of which no rounds are recorded `run_first` does the first ones, of one run each, unless all of it is over before
    that is worth its time; these runs go on from there.
    """

    def known() -> tuple[dict[str, RecordedRun], dict[Path, str], Forecast]:
        finished, unfinished = sweeping.scan(directory, METHOD_PARAMS)
        runs = finished | {key: RecordedRun(folder) for folder, key in unfinished.items()}
        return finished, unfinished, Forecast(points, runs)

    unmeasured = {sweeping.identity(point.parsed) for point in known()[2].unmeasured()}
    if first := [point for point in todo if sweeping.identity(point.parsed) in unmeasured]:
        console.print(
            f"to say how long it takes, first {forecasting.FIRST} rounds of {len(first)} runs, which go on later:"
        )
        run_first(first)
    finished, unfinished, forecast = known()
    if first:
        todo = prepare_remaining(points, finished, unfinished, begun_now=True)
    if todo and (seconds := forecast.seconds(jobs)) is not None:
        at_once = f", {jobs} at a time if they do not slow each other down" if jobs > 1 else ""
        console.print(
            f"about {forecasting.duration(seconds)} for {len(todo)} runs{at_once}, at the pace of the rounds so far"
        )
    return todo


def announce(k: int, total: int, name: str) -> None:
    """Say which run of a sweep starts."""
    console.print(f"[bold]{k}/{total}[/] {escape(name)}", soft_wrap=True)


def interrupted(running: int) -> None:
    """Answer Ctrl-C at once: the end of runs in progress takes a while."""
    errors.print(f"stopping {running} runs")


def run_points(
    points: Sequence[Point],
    in_process: bool,
    cpus_per_client: float,
    gpus_per_client: float,
    verbose: bool,
    until: int = 0,
) -> dict[str, str]:
    """Run one after the other, those with equally many clients on one SuperLink; messages of failed ones by name.

    until: the round after which each ends, to be continued; 0: the last.
    """
    failed: dict[str, str] = {}
    started = 0
    for num_clients in dict.fromkeys(point.parsed.num_clients for point in points):
        same = [point for point in points if point.parsed.num_clients == num_clients]
        with contextlib.ExitStack() as stack:
            submit = (
                None
                if in_process
                else stack.enter_context(simulated(console, num_clients, cpus_per_client, gpus_per_client))
            )
            for point in same:
                started += 1
                announce(started, len(points), point.name)
                try:
                    if submit is None:
                        runs.run_in_process(point.config, point.parsed, until)
                    else:
                        runs.run_one(point.config, submit, verbose, until=until)
                except RunFailed:
                    failed[point.name] = "the run failed; the end of its log is above"
                except Exception as error:  # one bad run must not end a night's sweep
                    failed[point.name] = f"{type(error).__name__}: {error}"
                    errors.print(f"[bold red]failed:[/] {escape(failed[point.name])}", soft_wrap=True)
    return failed


def show_sweep(directory: Path, points: Sequence[Point], title: str, scale: str, failed: dict[str, str]) -> None:
    """End a sweep with its table, on the terminal and in its directory."""
    finished, _ = sweeping.scan(directory, METHOD_PARAMS)
    rows = sweep_table.sweep_rows(points, finished)
    remarks = ["`--scale small`: cut to what a laptop does, not the papers' figures."] if scale == "small" else []
    sweep_table.write_results(directory, rows, title, remarks + [f"{len(failed)} runs failed."] * bool(failed))
    show_table(sweep_table.text_table(rows))
    console.print("\n".join([sweep_table.caption(rows), *remarks]))
    console.print(f"{directory / 'results.csv'}\n{directory / 'results.md'}", soft_wrap=True)
    if finished:
        show_next([directory])
