"""Commands that tell what there is: presets, methods, prepared data, client state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from corolla.api.checks import warn_of_data
from corolla.api.console import console
from corolla.api.runs import CLIENTS
from corolla.api.settings import DEFAULT_CLIENTS, Scale, absolute_paths, read_preset, resolve, scaled, with_clients
from corolla.api.waiting import waiting
from corolla.cli.options import PresetArgument, ScaleOption, SetOption, parse_set
from corolla.cli.tables import size
from corolla.experiments.runs import by_experiment
from fl_app import plugins
from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.keys import nearest, specs, without_others
from fl_app.known_names import BY_COLUMN
from fl_app.sources import NODE
from fl_app.toml import value_to_toml
from strategies import METHOD_PARAMS, METHODS, overview

if TYPE_CHECKING:
    from fl_app.data import ClientData, DatasetInfo

data_app = typer.Typer(no_args_is_help=True, help="Prepared data sets.")
state_app = typer.Typer(help="Client state left on this machine's disk, with its size; without a command: the list.")

TARGETS = "training targets, mean ± standard deviation"
ClientsOption = Annotated[
    int | None, typer.Option(help="Clients the data is divided over (default 10).", click_type=CLIENTS)
]
StateDirOption = Annotated[str, typer.Option(help="State directory.")]


def show_version(asked: bool) -> None:
    """Print the versions of Corolla and Flower, and end."""
    if asked:
        typer.echo(f"corolla {metadata.version('corolla')} (flwr {metadata.version('flwr')})")
        raise typer.Exit


def about(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Personalized federated learning: runs, their results, and what there is to run."""


def presets(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="No effect any more: Corolla can run every one.")] = False,
) -> None:
    """List presets, with the published figures; one name a line when piped."""
    from corolla.presets import find

    found = find(pattern)
    width = max(len(preset.name) for preset in found)
    for preset in found:
        if not console.is_terminal:
            typer.echo(preset.name)
            continue
        console.print(
            f"[bold]{preset.name:{width}}[/]  {preset.published or '':12}  {escape(preset.source)}", soft_wrap=True
        )


def methods(
    name: Annotated[
        str,
        typer.Argument(
            help="One of them, with what its parameters mean; your own as module:METHOD.",
            autocompletion=lambda incomplete: [name for name in METHODS if name.startswith(incomplete)],
        ),
    ] = "",
    table: Annotated[
        bool, typer.Option("--table", help="What each shares, keeps and costs, and when to use it.")
    ] = False,
) -> None:
    """List the methods and their parameters."""
    if table:
        typer.echo(overview.methods_table())
        return
    if name and not plugins.is_reference(name) and name not in METHODS:
        raise UserError(
            f"method: must be one of {', '.join(METHODS)} or module:METHOD, got {name!r}{nearest(name, METHODS)}"
        )
    for each in [name] if name else METHODS:
        method = METHODS[each]
        console.print(f"[bold]{each}[/]  {escape(METHODS.summary(each))}", soft_wrap=True)
        for spec in specs(method.params, method.name):
            meaning = f"  {spec.doc}" if name else ""
            words = f"    {spec.name} = {value_to_toml(spec.default)}  ({spec.range.replace('`', '')}){meaning}"
            console.print(escape(words), soft_wrap=True)


def reference(root: Annotated[Path, typer.Argument(help="A clone's root.")] = Path(".")) -> None:
    """Rewrite docs/config.md and the defaults in pyproject.toml from the declared keys (`make docs`)."""
    from corolla.cli.reference import write

    write(root, METHOD_PARAMS)


# Data -----------------------------------------------------------------------------------------------------------------


@data_app.command("prepare")
def data_prepare(
    preset: PresetArgument = None,
    set_: SetOption = None,
    clients: ClientsOption = None,
    scale: ScaleOption = Scale.full,
    force: Annotated[bool, typer.Option("--force", help="Convert again.")] = False,
) -> None:
    """Download and convert the data set of a preset, a .toml file or --set, and make its partition, ahead of a run."""
    prepared(data_config(preset, set_ or [], clients, scale), force)


@data_app.command("show")
def data_show(
    preset: PresetArgument = None,
    set_: SetOption = None,
    clients: ClientsOption = None,
    scale: ScaleOption = Scale.full,
) -> None:
    """Show the data set of a preset, a .toml file or --set, and who gets how much of which class."""
    from fl_app import data, tasks

    config = data_config(preset, set_ or [], clients, scale)
    info = prepared(config, force=False)
    of_classes = tasks.of(config).has_classes
    if info.facts.columns:
        columns = Table("column", "is", "how")
        for column in info.facts.columns:
            columns.add_row(*map(escape, column))
        console.print(columns)
    headings = ("training / test samples per class", "apart") if of_classes else (TARGETS,)
    rows = Table("client", "train", "test", *headings)
    for client_id in range(config.num_clients):
        part = data.open_client(config, client_id)
        if of_classes:
            held = class_mixes(info.classes, part)
        else:
            held = [target_spread(info.classes, part.y_train, info.facts.target_shift)]
        name = f"{client_id} ({info.groups[client_id]})" if config.partition == BY_COLUMN else str(client_id)
        rows.add_row(escape(name), str(len(part.y_train)), str(len(part.y_test)), *map(escape, held))
    console.print(rows)
    for line in data.partition_remarks(config):
        console.print(line, soft_wrap=True)


def class_mixes(names: Sequence[str], part: ClientData) -> list[str]:
    """Return a client's training / test samples by class, and how far apart both mixes are: the distance of their shares."""
    from fl_app.partition import apart

    sides = [np.bincount(y, minlength=len(names)) for y in (part.y_train, part.y_test)]
    train, test = sides
    held = [f"{names[int(c)]}: {train[c]}/{test[c]}" for c in np.flatnonzero(train + test)]
    distance = apart(train, test)
    return [", ".join(held), "n/a" if np.isnan(distance) else f"{100 * distance:.0f} %"]


def target_spread(names: Sequence[str], y: NDArray[np.float32], shift: Sequence[float] = ()) -> str:
    """Return the mean and standard deviation of targets [n, k] by name, of the first few. shift: what was taken off them."""
    if not len(y):
        return ""
    means = y.mean(0, dtype=np.float64) + np.array(shift or [0.0])
    columns = zip(names, means, y.std(0, dtype=np.float64), strict=True)
    return listed([f"{name}: {mean:.4g} ± {std:.2g}" for name, mean, std in columns])


def data_config(preset: str | None, pairs: list[str], clients: int | None, scale: Scale) -> RunConfig:
    """Resolve what a command about data is asked for, as `corolla run` would."""
    given = with_clients(parse_set(pairs), clients)
    base = scaled(read_preset(preset) if preset else {}, scale)
    flat = absolute_paths(without_others({**base, **given}, [str(base.get("method"))]))
    flat["num-clients"] = flat.get("num-clients") or DEFAULT_CLIENTS
    config = resolve(flat)
    if config.dataset == NODE:
        raise UserError("dataset: node data is prepared on its own SuperNode")
    return config


def prepared(config: RunConfig, force: bool) -> DatasetInfo:
    """Prepare what a config asks for and describe it."""
    from fl_app import data, tasks

    with waiting(console) as shown:
        shown.step(f"preparing {config.dataset}", brief=True)
        info = data.check(config, force)
    of_classes = tasks.of(config).has_classes
    console.print(
        f"{escape(config.dataset)}: {info.num_train} training and {info.num_test} test {info.samples}, "
        f"{' x '.join(map(str, info.input_shape))}, {info.num_classes} {'classes' if of_classes else 'outputs'}, under "
        f"{data.data_root(config)}",
        soft_wrap=True,
    )
    if not of_classes:
        console.print(
            f"{TARGETS}: {escape(target_spread(info.classes, data.prepare_for(config).y_train, info.facts.target_shift))}",
            soft_wrap=True,
        )
    if info.samples == "images":
        values = "; ".join(f"{mean:.3f} ± {std:.3f}" for mean, std in zip(info.mean, info.spread, strict=True))
        console.print(f"pixels from 0 to 1, mean ± standard deviation per channel: {values}", soft_wrap=True)
    warn_of_data(info)
    return info


# State ----------------------------------------------------------------------------------------------------------------


@state_app.callback(invoke_without_command=True)
def state(context: typer.Context) -> None:
    """List what is there, unless a command says otherwise."""
    if context.invoked_subcommand is None:
        state_list("", Path("runs"))


@state_app.command("list")
def state_list(
    state_dir: StateDirOption = "",
    runs: Annotated[Path, typer.Option(help="Directory of run folders, where the runs' names are looked up.")] = Path(
        "runs"
    ),
) -> None:
    """List the experiments with client state on this machine, with their runs if these are here too."""
    from client_app.state import state_root, stored

    root = state_root(state_dir)
    found = stored(root)
    folders = {experiment: run.path for experiment, run in by_experiment(runs).items()}
    total = size(sum(e.nbytes for e in found))
    console.print(f"client state under {root}: {len(found)} experiments, {total} in all", soft_wrap=True)
    for e in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.modified))
        run = escape(str(folders.get(e.experiment, f"no run under {runs}")))
        console.print(f"{e.experiment}  {when}  {e.clients} clients  {size(e.nbytes)}  {run}", soft_wrap=True)


@state_app.command("remove")
def state_remove(
    experiment: Annotated[str, typer.Argument(help="Experiment id, as `corolla state list` prints it.")],
    state_dir: StateDirOption = "",
) -> None:
    """Delete one experiment's client state from this machine."""
    from client_app.state import remove, state_root

    root = state_root(state_dir)
    remove(root, experiment)
    console.print(f"removed the client state of {experiment}", soft_wrap=True)
