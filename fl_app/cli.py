"""The `corolla` command."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import deploy.cli
from fl_app.config import PATH_DATASETS, RunConfig, Scalar, class_names, parse, specs
from fl_app.errors import UserError
from fl_app.results import SUMMARY, check_unchanged, read_config, read_summary

if TYPE_CHECKING:
    from fl_app.sweep import Point

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=__doc__)
data_app = typer.Typer(no_args_is_help=True, help="Prepared data sets.")
state_app = typer.Typer(no_args_is_help=True, help="Client state left on this machine's disk.")
app.add_typer(data_app, name="data")
app.add_typer(state_app, name="state")
app.add_typer(deploy.cli.app, name="cluster")
console = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, emoji=False)

SET_HELP = "A config key, e.g. --set fedcac.tau=0.3; the value is TOML, a bare word is a string. Repeatable."
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)]


def main() -> None:
    """Run the command; bad input ends with a message and exit code 2, a failed run with 1."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # end what we started, as Ctrl-C does
    try:
        app()
    except UserError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


# Configuration from the command line ----------------------------------------------------------------------------------


def parse_set(pairs: list[str]) -> dict[str, Scalar]:
    """Turn KEY=VALUE words into a flat run config. Raises UserError naming every word that is not one."""
    out: dict[str, Scalar] = {}
    problems = []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            problems.append(f"--set {pair}: expected KEY=VALUE")
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        if not isinstance(value, (bool, int, float, str)):
            problems.append(f"--set {pair}: the value must be a string, a number, true or false")
            continue
        out[name.strip()] = value
    if problems:
        raise UserError("\n".join(problems))
    return out


def read_preset(name: str) -> dict[str, Scalar]:
    """Read a preset by name, or a TOML file by path, as a flat run config."""
    from fl_app import presets
    from strategies import METHODS

    return presets.read_preset(name, METHODS)


class Scale(StrEnum):
    """How large a run is: as configured, or cut to what a laptop does."""

    full = "full"
    small = "small"


ScaleOption = Annotated[
    Scale, typer.Option(help="small: cut clients, rounds and samples to what a laptop does; --set still wins.")
]


def scaled(config: dict[str, Scalar], scale: Scale) -> dict[str, Scalar]:
    """Cut a config by --scale small."""
    from fl_app.presets import small

    return config | small(resolve(config).resolved) if scale is Scale.small else config


def absolute_paths(config: dict[str, Scalar]) -> dict[str, Scalar]:
    """Make the paths in a config absolute: the ServerApp and the clients have other working directories."""
    out = dict(config)
    for name in ("output-dir", "data-dir", "state-dir", "initial-weights"):
        if out.get(name):
            out[name] = str(Path(str(out[name])).expanduser().resolve())
    for name, prefixes in (("dataset", PATH_DATASETS), ("partition", ("file:",))):
        kind, colon, path = str(out.get(name, "")).partition(":")
        if f"{kind}:" in prefixes and colon and path:
            out[name] = f"{kind}:{Path(path).expanduser().resolve()}"
    return out


def check_locally(config: RunConfig) -> None:
    """Everything that can be wrong on this machine, before a simulation starts: data, partition, model, device."""
    from client_app.train import resolve_device
    from fl_app import data, events, models

    if config.tensorboard:
        events.require_tensorboard()
    if config.dataset == "node":
        raise UserError("dataset: node is for deployments, where every SuperNode has its own data-path; got a simulation")
    resolve_device(config.device)
    info = data.check(config)
    module = models.build(
        config.model, in_channels=info.in_channels, num_classes=info.num_classes, image_size=info.image_size,
        norm=config.norm, seed=config.seed,
    )  # fmt: skip
    if config.initial_weights:
        models.initial_model(module, config.initial_weights)


# Display --------------------------------------------------------------------------------------------------------------


class Display:
    """Shows a run's log lines: a progress bar and round lines on a terminal, round lines alone elsewhere."""

    def __init__(self, title: str, verbose: bool = False) -> None:
        self.folder: Path | None = None
        self.errors: list[str] = []
        self.lines: list[str] = []
        self._verbose = verbose
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task(f"{title}: starting", total=None)

    def __enter__(self) -> Display:
        """Start the bar on a terminal."""
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def raw(self, line: str) -> None:
        """Take a line of Flower's stream; only ours, marked ones are shown unless verbose."""
        from fl_app.server_app import LOG_MARK

        self.lines.append(line)
        if line.startswith(LOG_MARK):
            self.line(line.removeprefix(LOG_MARK))
        elif self._verbose:
            console.print(escape(line), soft_wrap=True)

    def line(self, text: str) -> None:
        """Take one of our log lines."""
        from fl_app.server_app import ERROR_MARK, FOLDER_MARK

        if text.startswith(FOLDER_MARK):
            self.folder = Path(text.removeprefix(FOLDER_MARK))
        elif text.startswith(ERROR_MARK):
            self.errors.append(text.removeprefix(ERROR_MARK))
        else:
            what, _, count = text.rpartition(": ")
            done, _, total = count.partition("/")
            if done.isdigit() and total.isdigit():
                self.progress(what, int(done), int(total))
            else:
                console.print(escape(text), soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=what, completed=done, total=total)


@contextlib.contextmanager
def log_to(display: Display) -> Iterator[None]:
    """Send our log lines to a display instead of standard error (in-process mode)."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            display.line(record.getMessage())

    log = logging.getLogger("corolla")
    before, log.handlers, propagate = log.handlers, [Handler()], log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.handlers, log.propagate = before, propagate


def show_results(folders: list[Path]) -> None:
    """End with a table of the runs and the folders' paths."""
    table = Table("method", "final", "pooled", "best", "upload", "download", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    for folder in folders:
        s = read_summary(folder)
        table.add_row(
            s["method"], percent(s["final-accuracy"]), percent(s["final-accuracy-pooled"]), percent(s["best-accuracy"]),
            size(s["upload-bytes"]), size(s["download-bytes"]), f"{s['seconds']:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "accuracy. final: mean over all clients after the last round, each on its own test data; pooled: over all samples;\n"
        "best: highest mean before training, over the rounds"
    )
    if any(read_summary(folder).get("scale") == "small" for folder in folders):
        console.print("cut by --scale small: not comparable with the papers' figures")
    for folder in folders:
        console.print(f"{folder}", soft_wrap=True)


def percent(value: float | None) -> str:
    """Format a ratio as a percentage."""
    return "n/a" if value is None else f"{100 * value:.2f} %"


def size(nbytes: float) -> str:
    """Format bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"


# Runs -----------------------------------------------------------------------------------------------------------------

Submit = Callable[[Mapping[str, Scalar], Callable[[str], None]], str]


def run_one(config: Mapping[str, Scalar], submit: Submit, verbose: bool) -> Path | None:
    """Submit one run and show it; the folder's path if it lies on this machine. Exits with 1 if the run failed."""
    from fl_app.launch import COMPLETED

    display = Display(str(config.get("method", "run")), verbose)
    try:
        with display:
            status = submit(config, display.raw)
    except KeyboardInterrupt:
        if display.folder:
            errors.print(f"stopped; continue with: corolla run --resume {display.folder}", soft_wrap=True)
        raise
    if display.errors:
        raise UserError("\n".join(display.errors))
    if status != COMPLETED:
        if not verbose:
            console.print(escape("\n".join(display.lines[-40:])), soft_wrap=True)
        errors.print(f"[bold red]error:[/] the run ended as {escape(status)}; the end of its log is above")
        raise typer.Exit(1)
    return display.folder


def run_in_process(config: Mapping[str, Scalar], parsed: RunConfig) -> Path:
    """Run without Ray or SuperLink."""
    from client_app.client_app import app as client_app
    from fl_app.inprocess import InProcessGrid
    from fl_app.server_app import run

    display = Display(parsed.method)
    with display, log_to(display):
        return run(InProcessGrid(client_app, config, parsed.num_clients), parsed, display.progress).path


def resolve(config: Mapping[str, Scalar]) -> RunConfig:
    """Parse a config with all registered methods."""
    from strategies import METHOD_PARAMS

    return parse(config, METHOD_PARAMS)


@app.command("run")
def run_command(
    preset: Annotated[str | None, typer.Argument(help="A preset's name or a .toml file with config keys.")] = None,
    set_: SetOption = None,
    clients: Annotated[
        int | None,
        typer.Option(help="Simulation: virtual SuperNodes (default 10). Deployment: connected clients to wait for.", min=1),
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="NAME", help="Deploy: a SuperLink connection of Flower's config file.")
    ] = None,
    output_dir: Annotated[str | None, typer.Option(help="Directory of run folders (default: runs).")] = None,
    cpus_per_client: Annotated[float, typer.Option(help="Simulation: CPU cores per client.", min=0.1)] = 1,
    gpus_per_client: Annotated[float, typer.Option(help="Simulation: GPUs per client, may be a fraction.", min=0)] = 0,
    in_process: Annotated[bool, typer.Option("--in-process", help="Debug: one process, no Ray, no SuperLink.")] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue an interrupted run in its folder, from its last checkpoint.")
    ] = None,
    scale: ScaleOption = Scale.full,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the bytes of a round, and do nothing.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Flower's and Ray's log lines too.")] = False,
) -> None:
    """Run one experiment, in simulation unless --superlink is given."""
    if resume and (preset or output_dir is not None or scale is Scale.small):
        raise UserError("--resume takes its configuration from the run folder: no preset, no --output-dir, no --scale")
    config = saved_config(resume) if resume else scaled(read_preset(preset) if preset else {}, scale)
    config |= parse_set(set_ or [])
    if clients is not None and config.get("num-clients", clients) != clients and "num-clients" in parse_set(set_ or []):
        raise UserError(f"--clients {clients} and --set num-clients={config['num-clients']} contradict each other")
    if clients is not None:
        config["num-clients"] = clients
    if output_dir is not None:
        config["output-dir"] = output_dir
    if superlink and in_process:
        raise UserError("--superlink and --in-process exclude each other")
    if superlink is None:
        config["num-clients"] = config.get("num-clients") or 10
    config = absolute_paths({"output-dir": "runs", **config})
    parsed = resolve(config)
    if dry_run:
        show_dry_run(parsed, preset or "")
        return
    if resume:
        check_unchanged(resume, parsed)
    if resume and is_finished(resume, parsed):
        console.print("this run is complete; there is nothing to resume")
        finish([resume])
        return
    if superlink is not None:
        from fl_app.launch import flower_environment, flwr_run

        environment = flower_environment()
        folder = run_one(config, lambda c, on_line: flwr_run(superlink, c, environment, on_line), verbose)
    else:
        check_locally(parsed)
        if in_process:
            folder = run_in_process(config, parsed)
        else:
            check_resources(cpus_per_client, gpus_per_client)
            from fl_app.launch import simulation

            with simulation(parsed.num_clients, cpus_per_client, gpus_per_client) as submit:
                folder = run_one(config, submit, verbose)
    finish([folder])


def show_dry_run(config: RunConfig, preset: str) -> None:
    """Print a config as TOML, with the bytes of a round in a comment; the data is not needed unless it is the user's own."""
    from fl_app import data, dry_run, presets
    from strategies import METHODS

    source = presets.all_presets().get(preset)
    if source is not None and source.paper:
        published = f"published: {source.published} %, " if source.published else ""
        typer.echo("\n".join(f"# {line}" for line in (f"{published}{source.paper}, {source.source}", *source.notes)))
    typer.echo(dry_run.config_toml(config))
    shape = dry_run.known_shape(config)
    if shape is None and config.dataset != "node":
        info = data.check(config)
        shape = (info.in_channels, info.num_classes, info.image_size)
    if shape is None or not config.num_clients:
        typer.echo("# bytes per round: known when the nodes have said how many they are and what data they have")
        return
    cost = dry_run.round_bytes(config, METHODS[config.method], shape)
    n = cost.participants
    typer.echo(
        f"# bytes per round, {n} of {config.num_clients} clients: "
        f"up {n * cost.upload} ({size(n * cost.upload)}, {cost.upload} per client), "
        f"down {n * cost.download} ({size(n * cost.download)}, {cost.download} per client)"
    )


def saved_config(run: Path) -> dict[str, Scalar]:
    """Read the config an interrupted run is continued with."""
    return read_config(run) | {"resume": str(run.resolve())}


def is_finished(run: Path, config: RunConfig) -> bool:
    """Tell whether a run has all its rounds and its summary."""
    return (run / SUMMARY).is_file() and read_summary(run)["rounds"] >= config.num_server_rounds


def finish(folders: list[Path | None]) -> None:
    """Show the table for the folders that lie on this machine."""
    here = [f for f in folders if f is not None and f.is_dir()]
    if here:
        show_results(here)
    for folder in folders:
        if folder is not None and folder not in here:
            console.print(f"the run folder is on the SuperLink's machine: {folder}", soft_wrap=True)


def check_resources(cpus_per_client: float, gpus_per_client: float) -> None:
    """Refuse what Ray would wait for forever. Raises UserError naming the option."""
    cores = os.cpu_count() or 1
    if cpus_per_client > cores:
        raise UserError(f"--cpus-per-client: this machine has {cores} cores, got {cpus_per_client:g}")
    if gpus_per_client:
        import torch

        if gpus_per_client > torch.cuda.device_count():
            raise UserError(f"--gpus-per-client: this machine has {torch.cuda.device_count()} GPUs, got {gpus_per_client:g}")


@app.command()
def demo(
    output_dir: Annotated[str, typer.Option(help="Directory of run folders.")] = "runs",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Flower's and Ray's log lines too.")] = False,
) -> None:
    """Compare FedCAC, FedAvg and Local on digits: 10 clients, Dirichlet 0.1, in simulation (what `make run` does)."""
    from fl_app.launch import simulation

    base = read_preset("demo") | {"output-dir": str(Path(output_dir).resolve())}
    check_locally(resolve(base))
    folders: list[Path | None] = []
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with simulation(resolve(base).num_clients, 1, 0) as submit:
        for method in ("fedcac", "fedavg", "local"):
            config = {**base, "method": method, "run-name": f"demo-{stamp}-{method}"}
            folders.append(run_one(config, submit, verbose))
    finish(folders)


# Sweeps and comparison ------------------------------------------------------------------------------------------------


@app.command("sweep")
def sweep_command(
    file: Annotated[Path, typer.Argument(help="A sweep file; docs/experiments.md says what it holds.")],
    set_: SetOption = None,
    jobs: Annotated[int, typer.Option(help="Runs at the same time, each in its own processes.", min=1)] = 1,
    in_process: Annotated[bool, typer.Option("--in-process", help="No Ray, no SuperLink: fast for small models.")] = False,
    output_dir: Annotated[Path | None, typer.Option(help="The sweep's directory (default: runs/<file's name>).")] = None,
    scale: ScaleOption = Scale.full,
    cpus_per_client: Annotated[float, typer.Option(help="Simulation: CPU cores per client.", min=0.1)] = 1,
    gpus_per_client: Annotated[float, typer.Option(help="Simulation: GPUs per client, may be a fraction.", min=0)] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and do nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Flower's and Ray's log lines too.")] = False,
) -> None:
    """Run all combinations of a sweep file; started again, it does only what is not finished."""
    import dataclasses

    from fl_app import sweep, sweep_table
    from strategies import METHOD_PARAMS

    plan = sweep.read(file)
    if scale is Scale.small:
        plan = dataclasses.replace(plan, scale=scale.value)
    directory = (output_dir or Path("runs") / file.stem).expanduser().resolve()
    points = sweep.expand(plan, METHOD_PARAMS, directory, parse_set(set_ or []), absolute_paths)
    if dry_run:
        typer.echo("\n".join(point.name for point in points))
        return
    if not in_process:
        check_resources(cpus_per_client, gpus_per_client)
    sweep.check(points, check_locally)
    options = [f"--cpus-per-client={cpus_per_client:g}", f"--gpus-per-client={gpus_per_client:g}"]
    with sweep.locked(directory):
        todo = unfinished_points(directory, points)
        if jobs > 1:
            failed = sweep.run_parallel(todo, directory, jobs, ["--in-process"] if in_process else options, announce)
        else:
            failed = run_points(todo, in_process, cpus_per_client, gpus_per_client, verbose)
        finished, _ = sweep.scan(directory, METHOD_PARAMS)
        rows = sweep_table.tabulate(points, finished)
        remarks = ["`--scale small`: cut to what a laptop does, not the papers' figures."] if plan.scale == "small" else []
        sweep_table.write_results(directory, rows, file.stem, remarks + [f"{len(failed)} runs failed."] * bool(failed))
    show_table(sweep_table.table(rows))
    caption = "accuracies in per cent, mean ± standard deviation over the seeds; n: finished runs"
    console.print("\n".join([caption, *remarks]), soft_wrap=True)
    console.print(f"{directory / 'results.csv'}\n{directory / 'results.md'}", soft_wrap=True)
    if failed:
        for name, message in failed.items():
            errors.print(f"[bold red]failed:[/] {escape(name)}: {escape(message)}", soft_wrap=True)
        raise typer.Exit(1)


def unfinished_points(directory: Path, points: Sequence[Point]) -> list[Point]:
    """Tidy up after a sweep that was killed, and return the runs that are left to do."""
    from fl_app import sweep
    from strategies import METHOD_PARAMS

    if count := sweep.end_leftovers(directory):
        console.print(f"ended {count} processes that an interrupted sweep had left running")
    finished, unfinished = sweep.scan(directory, METHOD_PARAMS)
    for folder in unfinished:
        console.print(f"unfinished, set aside: {sweep.set_aside(folder)}", soft_wrap=True)
    todo = [point for point in points if sweep.identity(point.parsed) not in finished]
    console.print(f"{len(points)} runs, {len(points) - len(todo)} finished before, {len(todo)} to do")
    return todo


def announce(k: int, total: int, name: str) -> None:
    """Say which run of a sweep starts."""
    console.print(f"[bold]{k}/{total}[/] {escape(name)}", soft_wrap=True)


def run_points(
    points: Sequence[Point], in_process: bool, cpus_per_client: float, gpus_per_client: float, verbose: bool
) -> dict[str, str]:
    """Run one after the other, those with equally many clients on one SuperLink; messages of failed ones by name."""
    from fl_app.launch import simulation

    failed: dict[str, str] = {}
    started = 0
    for num_clients in dict.fromkeys(point.parsed.num_clients for point in points):
        same = [point for point in points if point.parsed.num_clients == num_clients]
        with contextlib.ExitStack() as stack:
            submit = None if in_process else stack.enter_context(simulation(num_clients, cpus_per_client, gpus_per_client))
            for point in same:
                started += 1
                announce(started, len(points), point.name)
                try:
                    if submit is None:
                        run_in_process(point.config, point.parsed)
                    else:
                        run_one(point.config, submit, verbose)
                except typer.Exit:
                    failed[point.name] = "the run failed; the end of its log is above"
                except Exception as error:  # one bad run must not end a night's sweep
                    failed[point.name] = f"{type(error).__name__}: {error}"
                    errors.print(f"[bold red]failed:[/] {escape(failed[point.name])}", soft_wrap=True)
    return failed


def show_table(lines: Sequence[Sequence[str]]) -> None:
    """Print a table whose first line is the header; plain columns when output is not a terminal."""
    header, *body = lines
    if not console.is_terminal:
        widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
        for line in lines:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(*header)
    for line in body:
        table.add_row(*map(escape, line))
    console.print(table)


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them (a sweep's).")],
    paper: Annotated[bool, typer.Option("--paper", help="Beside the papers' figures.")] = False,
    dataset: Annotated[str, typer.Option(help="What the runs' own data set is to count as, e.g. cifar10.")] = "",
) -> None:
    """Put runs beside each other, or, with --paper, beside the published figures, with the settings that differ."""
    from fl_app import compare
    from strategies import METHOD_PARAMS

    found, unfinished = compare.load(runs, METHOD_PARAMS)
    for folder in unfinished:
        errors.print(f"skipped, not finished: {escape(str(folder))}", soft_wrap=True)
    groups = compare.group(found)
    if not paper:
        show_table(compare.side_by_side(groups))
        return
    lines = [line for group in groups for line in compare.beside(group, METHOD_PARAMS, dataset)]
    if lines:
        show_table(compare.table(lines))
        typer.echo("accuracies in per cent; ours: mean ± standard deviation over n seeds")
    for line in lines:
        typer.echo("\n".join([f"\n{line.preset.name}", *(f"  {text}" for text in compare.describe(line))]))
    matched = {id(run) for line in lines for run in line.runs}
    for run in found:
        if id(run) not in matched:
            typer.echo(f"no published counterpart: {run.folder} ({compare.kind(run.config)})")


# Information ----------------------------------------------------------------------------------------------------------


@app.command("presets")
def presets_command(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Also those that Corolla cannot run, with the reason.")] = False,
) -> None:
    """List presets, with the published figures; one name a line when piped."""
    from fl_app import presets
    from strategies import METHODS

    found = [(preset, preset.unavailable(METHODS)) for preset in presets.find(pattern)]
    shown = [(preset, why) for preset, why in found if all_ or not why]
    width = max((len(preset.name) for preset, _ in shown), default=0)
    for preset, why in shown:
        if not console.is_terminal:
            typer.echo(f"{preset.name}\tunavailable: {why}" if why else preset.name)
            continue
        note = f"[red]unavailable:[/] {escape(why)}" if why else escape(preset.source)
        console.print(f"[bold]{preset.name:{width}}[/]  {preset.published or '':12}  {note}", soft_wrap=True)
    if hidden := len(found) - len(shown):
        errors.print(f"{hidden} more that Corolla cannot run; --all lists them with the reason")


@app.command("methods")
def methods_command() -> None:
    """List the methods and their parameters."""
    from strategies import METHODS, SUMMARIES

    for name, method in METHODS.items():
        console.print(f"[bold]{name}[/]  {escape(SUMMARIES[name])}")
        for spec in specs(method.params, name):
            console.print(f"    {escape(spec.name)} = {escape(repr(spec.default))}  ({escape(spec.range)})", soft_wrap=True)


@data_app.command("prepare")
def data_prepare(
    set_: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Convert again.")] = False,
) -> None:
    """Download and convert a data set, and make its partition, ahead of a run."""
    show_data(set_ or [], force)


@data_app.command("show")
def data_show(set_: SetOption = None) -> None:
    """Show the data set and who gets how much of which class."""
    show_data(set_ or [], force=False, table=True)


def show_data(pairs: list[str], force: bool, table: bool = False) -> None:
    """Prepare what a config asks for and describe it."""
    from fl_app import data

    config = resolve(absolute_paths({"num-clients": 10, **parse_set(pairs)}))
    if config.dataset == "node":
        raise UserError("dataset: node data is prepared on its own SuperNode")
    if force:
        data.prepare(config.dataset, data.data_root(config), classes=class_names(config.classes), image_size=config.image_size,
                     force=True)  # fmt: skip
    info = data.check(config)
    console.print(
        f"{escape(config.dataset)}: {info.num_train} training and {info.num_test} test images, {info.in_channels} x "
        f"{info.image_size} x {info.image_size}, {info.num_classes} classes, under {data.data_root(config)}",
        soft_wrap=True,
    )
    if table:
        rows = Table("client", "train", "test", "training samples per class")
        for client_id in range(config.num_clients):
            part = data.open_client(config, client_id)
            counts = [int((part.y_train == c).sum()) for c in range(info.num_classes)]
            held = ", ".join(f"{info.classes[c]}: {n}" for c, n in enumerate(counts) if n)
            rows.add_row(str(client_id), str(len(part.y_train)), str(len(part.y_test)), escape(held))
        console.print(rows)


@state_app.command("list")
def state_list(state_dir: Annotated[str, typer.Option(help="State directory.")] = "") -> None:
    """List the experiments with client state on this machine."""
    from client_app.state import state_root, stored

    root = state_root(state_dir)
    found = stored(root)
    console.print(f"client state under {root}: {len(found)} experiments", soft_wrap=True)
    for e in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.modified))
        console.print(f"{e.experiment}  {when}  {e.clients} clients  {size(e.nbytes)}")


@state_app.command("remove")
def state_remove(
    experiment: Annotated[str, typer.Argument(help="Experiment id, as `corolla state list` prints it.")],
    state_dir: Annotated[str, typer.Option(help="State directory.")] = "",
) -> None:
    """Delete one experiment's client state from this machine."""
    from client_app.state import remove, state_root

    remove(state_root(state_dir), experiment)
    console.print(f"removed the client state of {experiment}")


@app.command(hidden=True)
def reference(root: Annotated[Path, typer.Argument(help="A clone's root.")] = Path(".")) -> None:
    """Rewrite docs/config.md and the defaults in pyproject.toml from the declared keys (`make docs`)."""
    from fl_app.reference import write
    from strategies import METHOD_PARAMS

    write(root, METHOD_PARAMS)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    client: Annotated[int | None, typer.Option(help="Client id; without it the global model.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write (default: in the current directory).")] = None,
) -> None:
    """Write one of a run's final models as a PyTorch state dict."""
    from fl_app.export import export_state_dict

    path = export_state_dict(run, client, output)
    console.print(f"{path}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    output: Annotated[Path, typer.Option(help="Directory for report.html and report-figures/.")] = Path("."),
) -> None:
    """Write a page with tables and pictures of one or more runs, and the pictures as PNG."""
    from fl_app.report import write_report

    for path in write_report(runs, output):
        console.print(f"{path}", soft_wrap=True)


if __name__ == "__main__":
    main()
