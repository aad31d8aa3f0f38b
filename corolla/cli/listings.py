"""Commands that list or show: presets, methods, prepared data, client state."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from corolla.api.checks import warn_of_data
from corolla.api.console import command, console
from corolla.api.one_run import CLIENTS
from corolla.api.settings import Scale, number_of_clients, read_preset, resolve, scaled, with_clients
from corolla.api.waiting import waiting
from corolla.cli.options import JsonOption, PresetArgument, QuietOption, ScaleOption, SetOption, be_quiet, parse_set
from corolla.cli.output import of_data, of_methods, of_presets, show_json
from corolla.experiments.forecast import RecordedPaces, duration, seconds_of
from corolla.experiments.runs import RUNS, RecordedRun, by_experiment, run_folders
from corolla.presets import Preset, by_column
from fl_app import checksums, data, plugins, tasks
from fl_app.config import RunConfig
from fl_app.data import ClientData, DatasetInfo, site_columns
from fl_app.data.site_columns import SiteColumns
from fl_app.errors import UserError, counted, listed, size
from fl_app.keys import nearest, specs, without_others
from fl_app.partition import apart
from fl_app.paths import anchored
from fl_app.sources import NODE
from fl_app.toml import value_to_toml
from strategies import METHOD_PARAMS, METHODS, method_tables

data_app = typer.Typer(no_args_is_help=True, help="Prepared data sets.")
state_app = typer.Typer(help="Client state on this machine's disk; without a command: list it.")

TARGETS = "training targets, mean ± standard deviation"
ClientsOption = Annotated[
    int | None, typer.Option(help="Number of clients that share the data (default 10).", click_type=CLIENTS)
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
    """Personalized federated learning: run methods, compare results, deploy."""


def presets(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="List all presets, not only the tables' columns.")] = False,
    cost: Annotated[
        bool,
        typer.Option(
            "--cost", help="What each column would cost here, from rounds recorded on this machine under runs."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the papers' tables by column; with a pattern or --all, presets with the published figures.

    When piped, one preset's name per line.
    """
    from corolla.presets import find

    found = find(pattern)
    seconds = recorded_seconds(found) if cost else None
    if as_json:
        show_json(of_presets(found, seconds))
        return
    if seconds is not None or (console.is_terminal and not pattern and not all_):
        show_columns(found, seconds)
        return
    width = max(len(preset.name) for preset in found)
    for preset in found:
        if not console.is_terminal:
            typer.echo(preset.name)
            continue
        console.print(
            f"[bold]{preset.name:{width}}[/]  {preset.published or '':12}  {escape(preset.source)}", soft_wrap=True
        )


def recorded_seconds(found: Iterable[Preset]) -> dict[str, float | None]:
    """Return the seconds of a run of each preset, by name, from rounds recorded here; None without any."""
    paces = RecordedPaces(RecordedRun(path, METHOD_PARAMS) for path in run_folders(RUNS, 1, 2))
    out: dict[str, float | None] = {}
    for preset in found:
        config = resolve(preset.settings)
        pace = paces.of(config)
        out[preset.name] = None if pace is None else seconds_of(config, pace)
    return out


def show_columns(found: Iterable[Preset], seconds: Mapping[str, float | None] | None) -> None:
    """Print a line per column of the papers' tables: name, number of methods, data; with `seconds`, the cost of a seed."""
    columns = by_column(found)
    width = max(len(column or cells[0].name) for (_, _, column), cells in columns.items())
    heading = None
    for (paper, table, column), cells in columns.items():
        if (paper, table) != heading:
            heading = (paper, table)
            console.print(f"[bold]{escape(f'{paper}, {table}' if paper else 'of our own')}[/]", soft_wrap=True)
        count = f"{counted(len(cells), 'method'):10}" if column else ""
        told = "" if seconds is None else f"{cost_of([seconds[cell.name] for cell in cells])}  "
        console.print(
            escape(f"  {column or cells[0].name:{width}}  {count}  {told}{cells[0].label}".rstrip()), soft_wrap=True
        )
    console.print(
        "\n`corolla presets 'COLUMN/*'` lists a column's presets of all tables, "
        "`corolla sweep --preset 'COLUMN/*' --seeds 0,1,2` runs them",
        soft_wrap=True,
    )
    if seconds is not None and None in seconds.values():
        first, cells = next(
            (column, cells)
            for (_, _, column), cells in columns.items()
            if any(seconds[cell.name] is None for cell in cells)
        )
        pattern = f"{first}/*" if first else cells[0].name
        console.print(
            f"to measure what is not measured, for example: {command()} sweep --preset {shlex.quote(pattern)} --forecast "
            "(it runs the first rounds, and ends; they count when the sweep goes on)",
            soft_wrap=True,
            markup=False,
        )


def cost_of(seconds: Sequence[float | None]) -> str:
    """Return what a seed of a column costs, as text: runs of unknown duration take the mean of the others."""
    known = [one for one in seconds if one is not None]
    if not known:
        return "not measured"
    total = duration(sum(known) * len(seconds) / len(known))
    return f"about {total} a seed" + (f" ({len(known)} measured)" if len(known) < len(seconds) else "")


def methods(
    name: Annotated[
        str,
        typer.Argument(
            help="A method, to show its parameters' meaning; your own as module:METHOD.",
            autocompletion=lambda incomplete: [name for name in METHODS if name.startswith(incomplete)],
        ),
    ] = "",
    table: Annotated[
        bool, typer.Option("--table", help="Table: what clients share and keep, costs, and when to use a method.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the methods and their parameters."""
    if table and as_json:
        raise UserError("--json and --table exclude each other")
    if table:
        tables = (method_tables.names_table("`{}`"), method_tables.methods_table(), method_tables.absent_table())
        typer.echo("\n\n".join(tables))
        return
    if name and not plugins.is_reference(name) and name not in METHODS:
        raise UserError(
            key="method",
            rule=f"must be one of {', '.join(METHODS)} or module:METHOD",
            value=name,
            hint=nearest(name, METHODS),
        )
    if as_json:
        show_json(of_methods([name] if name else METHODS))
        return
    for each in [name] if name else METHODS:
        method = METHODS[each]
        console.print(f"[bold]{each}[/]  {escape(METHODS.summary(each))}", soft_wrap=True)
        for spec in specs(method.params, method.name):
            meaning = f"  {spec.doc}" if name else ""
            words = f"    {spec.name} = {value_to_toml(spec.default)}  ({spec.range.replace('`', '')}){meaning}"
            console.print(escape(words), soft_wrap=True)


def reference(root: Annotated[Path, typer.Argument(help="A clone's root.")] = Path(".")) -> None:
    """Rewrite docs/config.md, the defaults in pyproject.toml and the tables of methods from the code (`make docs`)."""
    from corolla.cli.reference import write

    write(root, METHOD_PARAMS)


# Data -----------------------------------------------------------------------------------------------------------------


@data_app.command("prepare", epilog="Example: corolla data prepare --set dataset=cifar10")
def data_prepare(
    preset: PresetArgument = None,
    set_: SetOption = None,
    clients: ClientsOption = None,
    scale: ScaleOption = Scale.full,
    force: Annotated[bool, typer.Option("--force", help="Convert again.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Prepare a run's data: download and convert the data set of a preset, a .toml file or --set, and make its partition."""
    prepared(data_config(preset, set_ or [], clients, scale), force)


@data_app.command("show", epilog="Example: corolla data show my-experiment.toml")
def data_show(
    preset: PresetArgument = None,
    set_: SetOption = None,
    clients: ClientsOption = None,
    scale: ScaleOption = Scale.full,
    site: Annotated[
        Path | None, typer.Option(metavar="site.toml", help="Read the table as this site's `[data]` says.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the data set of a preset, a .toml file or --set, and each client's samples per class."""
    if site:
        from deploy.site import read_site

        os.environ[site_columns.VARIABLE] = SiteColumns.of(read_site(site).data).text
    config = data_config(preset, set_ or [], clients, scale)
    if as_json:
        be_quiet(True)
        show_json(of_data(config, prepared(config, force=False)))
        return
    info = prepared(config, force=False)
    of_classes = tasks.of(config).has_classes
    if info.facts.columns:
        columns = Table("column", "is", "how")
        for column in info.facts.columns:
            columns.add_row(*map(escape, column))
        console.print(columns)
    headings = ("training / test samples per class", "apart") if of_classes else (TARGETS,)
    names = data.client_names(config, info)
    rows = Table("client", "train", "test", *headings)
    for client_id in range(config.num_clients):
        part = data.open_client(config, client_id)
        if of_classes:
            held = class_mixes(info.classes, part)
        else:
            held = [target_spread(info.classes, part.y_train, info.facts.target_shift)]
        rows.add_row(
            escape(names[client_id] if names else str(client_id)),
            str(len(part.y_train)),
            str(len(part.y_test)),
            *map(escape, held),
        )
    console.print(rows)
    for line in filter(None, [data.numbering(config), *data.partition_remarks(config)]):
        console.print(line, soft_wrap=True)


def class_mixes(names: Sequence[str], part: ClientData) -> list[str]:
    """Return a client's training / test samples by class, and the distance between the shares of both."""
    train, test = [np.bincount(y, minlength=len(names)) for y in (part.y_train, part.y_test)]
    distance = apart(train, test)
    return [
        ", ".join([f"{names[int(c)]}: {train[c]}/{test[c]}" for c in np.flatnonzero(train + test)]),
        "n/a" if np.isnan(distance) else f"{100 * distance:.0f} %",
    ]


def target_spread(names: Sequence[str], y: NDArray[np.float32], shift: Sequence[float] = ()) -> str:
    """Return mean and standard deviation of the first few targets [n, k], by name.

    shift: value that was subtracted from each.
    """
    if not len(y):
        return ""
    columns = zip(
        names, y.mean(0, dtype=np.float64) + np.array(shift or [0.0]), y.std(0, dtype=np.float64), strict=True
    )
    return listed([f"{name}: {mean:.4g} ± {std:.2g}" for name, mean, std in columns])


def data_config(preset: str | None, pairs: list[str], clients: int | None, scale: Scale) -> RunConfig:
    """Return the config of a command about data, resolved as `corolla run` does."""
    given = with_clients(parse_set(pairs), clients)
    base = scaled(read_preset(preset) if preset else {}, scale)
    flat = anchored(without_others({**base, **given}, [str(base.get("method"))]), Path())
    flat["num-clients"] = number_of_clients(flat)
    config = resolve(flat)
    if config.dataset == NODE:
        raise UserError(key="dataset", rule="node data is prepared on its own SuperNode")
    return config


def prepared(config: RunConfig, force: bool) -> DatasetInfo:
    """Prepare a config's data set, print its description, and return it."""
    with waiting(console) as shown:
        shown.step(f"preparing {config.dataset}", brief=True)
        info = data.check(config, force)
    of_classes = tasks.of(config).has_classes
    answers = counted(info.num_classes, *(("class", "classes") if of_classes else ("output", "outputs")))
    shape = " x ".join(map(str, info.input_shape))
    if len(info.input_shape) == 1:
        shape = counted(info.input_shape[0], "feature")
    console.print(
        f"{escape(config.dataset)}: {info.num_train} training and {info.num_test} test {info.samples}, "
        f"{shape}, {answers}, under {data.data_root(config)}",
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


@data_app.command("verify", epilog="Example: corolla data verify")
def data_verify(set_: SetOption = None, quiet: QuietOption = False) -> None:
    """Check all prepared data sets and partitions against their checksums. From --set, only data-dir is used."""
    root = data.data_root(resolve(anchored(parse_set(set_ or []), Path())))
    damaged: dict[str, str] = {}
    sound = 0
    for directory, nbytes, problems in checked(root):
        sound += not problems
        words = "; ".join(problems) or "sound"
        console.print(escape(f"{directory.relative_to(root)}: {words} ({size(nbytes)})"), soft_wrap=True)
        if problems:
            damaged[str(directory)] = words
    if damaged:
        lines = [f"data-dir: {directory} is damaged: {words}" for directory, words in damaged.items()]
        remedy = "prepare it again by `corolla data prepare --force` with the run's settings, or remove it"
        raise UserError("\n".join([*lines, remedy]))
    console.print(escape(f"{sound} prepared data sets and partitions under {root} are sound"), soft_wrap=True)


def checked(root: Path) -> Iterator[tuple[Path, int, list[str]]]:
    """Yield (directory, bytes, problems as text) for every prepared data set and partition under a data directory."""
    for kind in ("datasets", "partitions"):
        for directory in sorted((root / kind).glob("[!.]*/")):
            nbytes = sum(path.stat().st_size for path in directory.iterdir())
            yield directory, nbytes, checksums.compare(directory, whole=True)


# State ----------------------------------------------------------------------------------------------------------------


@state_app.callback(invoke_without_command=True)
def state(context: typer.Context) -> None:
    """List client state if no command is given."""
    if context.invoked_subcommand is None:
        state_list("", Path("runs"), as_json=False)


@state_app.command("list", epilog="Example: corolla state list")
def state_list(
    state_dir: StateDirOption = "",
    runs: Annotated[Path, typer.Option(help="Directory where the run folders are searched.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List experiments with client state on this machine, with its size and the run's folder."""
    from client_app.stored_state import state_root, stored

    root = state_root(state_dir)
    found = stored(root)
    folders = {experiment: run.path for experiment, run in by_experiment(runs).items()}
    if as_json:
        rows = [
            {
                "experiment": e.experiment,
                "modified": e.modified,
                "clients": e.clients,
                "bytes": e.nbytes,
                "run": str(folders[e.experiment]) if e.experiment in folders else None,
            }
            for e in found
        ]
        show_json({"directory": str(root), "experiments": rows})
        return
    total = size(sum(e.nbytes for e in found))
    console.print(f"client state under {root}: {counted(len(found), 'experiment')}, {total} in all", soft_wrap=True)
    for e in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.modified))
        run = escape(str(folders.get(e.experiment, f"no run under {runs}")))
        console.print(
            f"{e.experiment}  {when}  {counted(e.clients, 'client')}  {size(e.nbytes)}  {run}", soft_wrap=True
        )


@state_app.command("prune", epilog="Example: corolla state prune --older-than 30d --dry-run")
def state_prune(
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Least age of the last write: 30d, 12h or 8w.")],
    state_dir: StateDirOption = "",
    runs: Annotated[Path, typer.Option(help="Directory where the run folders are searched.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Delete client state that was last written long ago. Such a run cannot be resumed any more."""
    from client_app.stored_state import remove, state_root, stored

    root, before = state_root(state_dir), time.time() - seconds_in("--older-than", older_than)
    going_on = {experiment for experiment, run in by_experiment(runs).items() if run.state == "running"}
    found = [e for e in stored(root) if e.modified < before and e.experiment not in going_on]
    for e in found:
        if not dry_run:
            remove(root, e.experiment)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.modified))
        console.print(f"{e.experiment}  {when}  {counted(e.clients, 'client')}  {size(e.nbytes)}", soft_wrap=True)
    what = "would be removed" if dry_run else "removed"
    total = size(sum(e.nbytes for e in found))
    console.print(f"{counted(len(found), 'experiment')} {what} under {root}, {total} in all", soft_wrap=True)


def seconds_in(option: str, text: str) -> float:
    """Return the seconds of a duration such as 30d. Raises UserError that names the option."""
    found = re.fullmatch(r"(\d{1,6})([hdw])", text, re.ASCII)
    if not found:
        raise UserError(key=option, rule="must be a number of hours, days or weeks, such as 12h, 30d or 8w", value=text)
    return int(found[1]) * {"h": 3600.0, "d": 86400.0, "w": 604800.0}[found[2]]


@state_app.command("remove", epilog="Example: corolla state remove 3f2a9c4b7d10")
def state_remove(
    experiment: Annotated[str, typer.Argument(help="Experiment id, as `corolla state list` prints it.")],
    state_dir: StateDirOption = "",
    quiet: QuietOption = False,
) -> None:
    """Delete one experiment's client state from this machine."""
    from client_app.stored_state import remove, state_root

    remove(state_root(state_dir), experiment)
    console.print(f"removed the client state of {experiment}", soft_wrap=True)
