"""`corolla run` and `corolla demo`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from corolla.api import settings
from corolla.api.checks import check_files, check_locally
from corolla.api.console import console
from corolla.api.one_run import AT_ONCE, CLIENTS, LaunchOptions, configure, simulating, start
from corolla.api.settings import Scale, read_preset, resolve
from corolla.cli.options import (
    BackendOption,
    CpusOption,
    EventsOption,
    GpusOption,
    LogFileOption,
    NoProgressOption,
    OpenOption,
    PresetArgument,
    QuietOption,
    ScaleOption,
    SetOption,
    VerboseOption,
    parse_set,
)
from corolla.cli.output import show_next, show_results
from corolla.experiments.runs import named
from fl_app import extras
from fl_app.config import RunConfig
from fl_app.errors import counted, size
from fl_app.sources import NODE
from fl_app.toml import to_toml
from strategies import METHODS


def run(
    preset: PresetArgument = None,
    set_: SetOption = None,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Simulation: virtual SuperNodes (default 10). Deployment: connected clients to wait for.",
            click_type=CLIENTS,
        ),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Deployment: name of a SuperLink connection in Flower's config file."),
    ] = None,
    output_dir: Annotated[str | None, typer.Option(help="Directory of run folders (default: runs).")] = None,
    cpus_per_client: CpusOption = 1,
    gpus_per_client: GpusOption = 0,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="For debugging: one process, without Ray and SuperLink.")
    ] = False,
    clients_at_once: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="With --in-process: K clients train together on one GPU; 0: as many as its memory holds.",
            click_type=AT_ONCE,
        ),
    ] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Simulation: use an existing Ray cluster; start the command on one of its machines.",
        ),
    ] = None,
    backend: BackendOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue an interrupted run in its folder, from its last checkpoint."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --resume: refuse to continue with other code or packages.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Repeat a run in simulation: each upload arrives in the round in which it arrived there (arrivals.jsonl).",
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Start a new run from a finished one: its clients go on from their own models and states, by name.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --resume, or --from and --superlink: go on without this client, which is gone for good. Repeatable.",
        ),
    ] = None,
    scale: ScaleOption = Scale.full,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run with this run-name, just before the new one starts.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the resolved config and the bytes of a round.")
    ] = False,
    verbose: VerboseOption = False,
    no_progress: NoProgressOption = False,
    quiet: QuietOption = False,
    events: EventsOption = False,
    open_: OpenOption = False,
    log_file: LogFileOption = None,
) -> None:
    """Run one experiment from a preset, a .toml file or --set. It is simulated unless --superlink is given."""
    how = LaunchOptions(
        clients,
        superlink,
        output_dir,
        cpus_per_client,
        gpus_per_client,
        in_process,
        None if resume is None else named(resume.expanduser()),
        scale,
        verbose,
        ray_address,
        clients_at_once,
        overwrite,
        backend,
        strict,
        None if replay is None else named(replay.expanduser()),
        None if from_run is None else named(from_run.expanduser()),
        tuple(without or ()),
    )
    if open_:
        extras.require_pictures("corolla run --open")
    config, parsed = configure(preset, parse_set(set_ or []), how)
    if dry_run:
        if superlink is None and parsed.dataset != NODE:
            # in a deployment these files are on other machines
            check_files(parsed)
        show_dry_run(parsed, preset or "")
        return
    finish([start(config, parsed, how)])


def show_dry_run(config: RunConfig, preset: str) -> None:
    """Print a config as TOML, with the bytes of a round in a comment. Only the user's own data must be present."""
    from corolla import presets
    from corolla.experiments import dry_run
    from fl_app import data

    source = presets.all_presets().get(preset)
    if source is not None and source.paper:
        published = f"published: {source.published} %, " if source.published else ""
        typer.echo(
            "\n".join(f"# {line}" for line in (f"{published}{source.paper}, {source.source}", *source.notes_on(config)))
        )
    typer.echo(to_toml({key.name: value for key, value in config.own_keys()}))
    shape = dry_run.known_shape(config)
    if shape is None and config.dataset != NODE:
        shape = data.check(config).model_arguments
    if shape is None or not config.num_clients:
        typer.echo("# bytes per round: unknown until the nodes have reported their number and their data")
        return
    cost = dry_run.round_bytes(config, METHODS[config.method], shape)
    n = cost.participants
    typer.echo(
        f"# bytes per round, {n} of {counted(config.num_clients, 'client')}: "
        f"up {n * cost.upload} ({size(n * cost.upload)}, {cost.upload} per client), "
        f"down {n * cost.download} ({size(n * cost.download)}, {cost.download} per client)"
    )
    if cost.kept_rounds:
        whole = cost.kept * cost.kept_rounds
        typer.echo(
            f"# bytes of kept uploads on the disk: at most {cost.kept} per round ({size(cost.kept)}), "
            f"{counted(cost.kept_rounds, 'round')}, {whole} in all ({size(whole)})"
        )


def finish(folders: Sequence[Path | None]) -> None:
    """Print the table of the runs with folders on this machine, and the paths of the others."""
    here = [f for f in folders if f is not None and f.is_dir()]
    if here:
        show_results(here)
        show_next(here, len(here) > 1)
    for folder in folders:
        if folder is not None and folder not in here:
            console.print(f"the run folder is on the SuperLink's machine: {folder}", soft_wrap=True)


def demo(
    output_dir: Annotated[str, typer.Option(help="Directory of run folders.")] = "runs",
    verbose: VerboseOption = False,
    no_progress: NoProgressOption = False,
    quiet: QuietOption = False,
    log_file: LogFileOption = None,
) -> None:
    """Compare FedCAC, FedAvg and Local on digits: 10 simulated clients, Dirichlet 0.1. `make run` calls this."""
    base = read_preset("demo") | {"output-dir": str(Path(output_dir).resolve())}
    parsed = resolve(base)
    check_locally(parsed)
    backend = settings.backend_of(None, None, 0, [parsed.device])
    folders: list[Path | None] = []
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with simulating(backend, parsed.num_clients, 1, 0) as simulate:
        for method in ("fedcac", "fedavg", "local"):
            config = {**base, "method": method, "run-name": f"demo-{stamp}-{method}"}
            folders.append(simulate(config, resolve(config), verbose))
    finish(folders)
