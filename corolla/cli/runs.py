"""`corolla run` and `corolla demo`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from corolla.api.checks import check_locally
from corolla.api.console import console
from corolla.api.runs import CLIENTS, How, configure, run_one, start
from corolla.api.settings import Scale, read_preset, resolve
from corolla.api.waiting import simulated
from corolla.cli.options import (
    CpusOption,
    GpusOption,
    PresetArgument,
    ScaleOption,
    SetOption,
    VerboseOption,
    parse_set,
)
from corolla.cli.tables import show_next, show_results, size
from fl_app.config import RunConfig
from fl_app.sources import NODE
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
        str | None, typer.Option(metavar="NAME", help="Deploy: a SuperLink connection of Flower's config file.")
    ] = None,
    output_dir: Annotated[str | None, typer.Option(help="Directory of run folders (default: runs).")] = None,
    cpus_per_client: CpusOption = 1,
    gpus_per_client: GpusOption = 0,
    in_process: Annotated[bool, typer.Option("--in-process", help="Debug: one process, no Ray, no SuperLink.")] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Simulation: on an existing Ray cluster, from one of its machines."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue an interrupted run in its folder, from its last checkpoint."),
    ] = None,
    scale: ScaleOption = Scale.full,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the bytes of a round, and do nothing.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Run one experiment, a preset, a .toml file or what --set says, in simulation unless --superlink is given."""
    how = How(
        clients,
        superlink,
        output_dir,
        cpus_per_client,
        gpus_per_client,
        in_process,
        resume,
        scale,
        verbose,
        ray_address,
    )
    config, parsed = configure(preset, parse_set(set_ or []), how)
    if dry_run:
        show_dry_run(parsed, preset or "")
        return
    finish([start(config, parsed, how)])


def show_dry_run(config: RunConfig, preset: str) -> None:
    """Print a config as TOML, with the bytes of a round in a comment; the data is not needed unless it is the user's own."""
    from corolla import presets
    from corolla.experiments import dry_run
    from fl_app import data

    source = presets.all_presets().get(preset)
    if source is not None and source.paper:
        published = f"published: {source.published} %, " if source.published else ""
        typer.echo("\n".join(f"# {line}" for line in (f"{published}{source.paper}, {source.source}", *source.notes)))
    typer.echo(dry_run.config_toml(config))
    shape = dry_run.known_shape(config)
    if shape is None and config.dataset != NODE:
        info = data.check(config)
        shape = info.model_arguments
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


def finish(folders: Sequence[Path | None]) -> None:
    """Show the table for the folders that lie on this machine."""
    here = [f for f in folders if f is not None and f.is_dir()]
    if here:
        show_results(here)
        show_next(here)
    for folder in folders:
        if folder is not None and folder not in here:
            console.print(f"the run folder is on the SuperLink's machine: {folder}", soft_wrap=True)


def demo(
    output_dir: Annotated[str, typer.Option(help="Directory of run folders.")] = "runs", verbose: VerboseOption = False
) -> None:
    """Compare FedCAC, FedAvg and Local on digits: 10 clients, Dirichlet 0.1, in simulation (what `make run` does)."""
    base = read_preset("demo") | {"output-dir": str(Path(output_dir).resolve())}
    check_locally(resolve(base))
    folders: list[Path | None] = []
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with simulated(console, resolve(base).num_clients, 1, 0) as submit:
        for method in ("fedcac", "fedavg", "local"):
            config = {**base, "method": method, "run-name": f"demo-{stamp}-{method}"}
            folders.append(run_one(config, submit, verbose))
    finish(folders)
