"""Commands that tell what there is: presets, methods, prepared data, client state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fl_app import plugins
from fl_app.cli.settings import SetOption, absolute_paths, console, errors, parse_set, resolve
from fl_app.cli.tables import size
from fl_app.config import class_names
from fl_app.errors import UserError
from fl_app.experiments.runs import by_experiment
from fl_app.keys import Scalar, nearest, specs
from strategies import METHOD_PARAMS, METHODS

data_app = typer.Typer(no_args_is_help=True, help="Prepared data sets.")
state_app = typer.Typer(no_args_is_help=True, help="Client state left on this machine's disk.")

ClientsOption = Annotated[int | None, typer.Option(help="Clients the data is divided over (default 10).", min=1)]
StateDirOption = Annotated[str, typer.Option(help="State directory.")]


def presets(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Also those that Corolla cannot run, with the reason.")] = False,
) -> None:
    """List presets, with the published figures; one name a line when piped."""
    from fl_app.presets import find

    found = [(preset, preset.unavailable(METHODS)) for preset in find(pattern)]
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


def methods(
    name: Annotated[str, typer.Argument(help="One of them, with what its parameters mean; your own as module:METHOD.")] = "",
) -> None:
    """List the methods and their parameters."""
    if name and not plugins.is_reference(name) and name not in METHODS:
        raise UserError(f"method: must be one of {', '.join(METHODS)} or module:METHOD, got {name!r}{nearest(name, METHODS)}")
    for each in [name] if name else METHODS:
        method = METHODS[each]
        console.print(f"[bold]{each}[/]  {escape(METHODS.summary(each))}", soft_wrap=True)
        for spec in specs(method.params, method.name):
            meaning = f"  {spec.doc}" if name else ""
            words = f"    {spec.name} = {spec.default!r}  ({spec.range.replace('`', '')}){meaning}"
            console.print(escape(words), soft_wrap=True)


def reference(root: Annotated[Path, typer.Argument(help="A clone's root.")] = Path(".")) -> None:
    """Rewrite docs/config.md and the defaults in pyproject.toml from the declared keys (`make docs`)."""
    from fl_app.cli.reference import write

    write(root, METHOD_PARAMS)


# Data -----------------------------------------------------------------------------------------------------------------


@data_app.command("prepare")
def data_prepare(
    set_: SetOption = None,
    clients: ClientsOption = None,
    force: Annotated[bool, typer.Option("--force", help="Convert again.")] = False,
) -> None:
    """Download and convert a data set, and make its partition, ahead of a run."""
    show_data(set_ or [], clients, force)


@data_app.command("show")
def data_show(set_: SetOption = None, clients: ClientsOption = None) -> None:
    """Show the data set and who gets how much of which class."""
    show_data(set_ or [], clients, force=False, table=True)


def show_data(pairs: list[str], clients: int | None, force: bool, table: bool = False) -> None:
    """Prepare what a config asks for and describe it."""
    from fl_app import data

    given = parse_set(pairs)
    if clients is not None and given.get("num-clients", clients) != clients:
        raise UserError(f"--clients {clients} and --set num-clients={given['num-clients']} contradict each other")
    asked: dict[str, Scalar] = {} if clients is None else {"num-clients": clients}
    config = resolve(absolute_paths({"num-clients": 10, **given, **asked}))
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


# State ----------------------------------------------------------------------------------------------------------------


@state_app.command("list")
def state_list(
    state_dir: StateDirOption = "",
    runs: Annotated[Path, typer.Option(help="Directory of run folders, where the runs' names are looked up.")] = Path("runs"),
) -> None:
    """List the experiments with client state on this machine, with their runs if these are here too."""
    from client_app.state import state_root, stored

    root = state_root(state_dir)
    found = stored(root)
    folders = {experiment: run.path for experiment, run in by_experiment(runs).items()}
    console.print(f"client state under {root}: {len(found)} experiments", soft_wrap=True)
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

    remove(state_root(state_dir), experiment)
    console.print(f"removed the client state of {experiment}")
