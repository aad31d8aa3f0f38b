"""What all commands share: the console; --set, presets and scale on the way to a run's config; its checks on this machine."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from corolla import presets
from corolla.cli.waiting import waiting
from fl_app import extras, plugins
from fl_app.app_bundle import APP_DIRECTORY
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError
from fl_app.files import refuse_unwritable
from fl_app.keys import Scalar, bears_on
from fl_app.sources import NODE, path_in
from strategies import METHOD_PARAMS, METHODS
from strategies.robust import ABLE

if TYPE_CHECKING:
    from fl_app.data import DatasetInfo

console = Console(highlight=False, emoji=False, force_jupyter=False)  # in a notebook lines are text too
errors = Console(stderr=True, highlight=False, emoji=False, force_jupyter=False)


class Scale(StrEnum):
    """How large a run is: as configured, or cut to what a laptop does."""

    full = "full"
    small = "small"


DEFAULT_CLIENTS = 10
PresetArgument = Annotated[
    str | None,
    typer.Argument(
        help="A preset's name or a .toml file with config keys.",
        autocompletion=lambda incomplete: [name for name in presets.all_presets() if name.startswith(incomplete)],
    ),
]
ScaleOption = Annotated[
    Scale, typer.Option(help="small: cut clients, rounds and samples to what a laptop does; --set still wins.")
]
CpusOption = Annotated[float, typer.Option(help="Simulation: CPU cores per client.", min=0.1)]
GpusOption = Annotated[float, typer.Option(help="Simulation: GPUs per client, may be a fraction.", min=0)]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Show Flower's and Ray's log lines too.")]


def parse_set(pairs: Iterable[str]) -> dict[str, Scalar]:
    """Turn KEY=VALUE words into a flat run config. Raises UserError naming every word that is not one."""
    out: dict[str, Scalar] = {}
    problems = []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            problems.append(f"--set {pair}: expected KEY=VALUE in one word, as in --set {name.strip() or 'seed'}=1")
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


def checked_set(pairs: list[str] | None) -> list[str] | None:
    """Complain of `--set KEY VALUE` before the parser does of the stray VALUE."""
    parse_set(pairs or [])
    return pairs


SET_HELP = "A config key, e.g. --set fedcac.tau=0.3; the value is TOML, a bare word is a string. Repeatable."
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP, callback=checked_set)]


def look_for_plugins(*first: Path) -> None:
    """Look up the user's own files in these directories, then in the current one, then in the app's."""
    plugins.look_in(*first, Path(), APP_DIRECTORY)


def read_preset(name: str) -> dict[str, Scalar]:
    """Read a preset by name, or a TOML file by path, as a flat run config; the user's own files may lie beside such a file."""
    if name.endswith(".toml"):
        look_for_plugins(Path(name).parent)
    return presets.read_preset(name)


def resolve(config: Mapping[str, Scalar]) -> RunConfig:
    """Parse a config with all registered methods, and let its own check it."""
    parsed = parse(config, METHOD_PARAMS)
    METHODS[parsed.method].check(parsed)
    return parsed


def scaled(config: dict[str, Scalar], scale: Scale) -> dict[str, Scalar]:
    """Cut a config by --scale small."""
    return config | presets.small(resolve(config)) if scale is Scale.small else config


def with_clients(given: dict[str, Scalar], clients: int | None) -> dict[str, Scalar]:
    """Add --clients to the keys of --set. Raises UserError if the two contradict each other."""
    if clients is None:
        return given
    if given.get("num-clients", clients) != clients:
        raise UserError(f"--clients {clients} and --set num-clients={given['num-clients']} contradict each other")
    return {**given, "num-clients": clients}


def absolute_paths(config: dict[str, Scalar]) -> dict[str, Scalar]:
    """Make the paths in a config absolute: the ServerApp and the clients have other working directories."""
    out = dict(config)
    for name in ("output-dir", "data-dir", "state-dir", "initial-weights"):
        if out.get(name):
            out[name] = str(Path(str(out[name])).expanduser().resolve())
    for name in ("dataset", "partition"):
        value = str(out.get(name, ""))
        if path := path_in(name, value):
            out[name] = f"{value.removesuffix(path)}{Path(path).expanduser().resolve()}"
    return out


def ready(config: dict[str, Scalar]) -> dict[str, Scalar]:
    """Make a config fit to leave this process: absolute paths, the user's own files named with what is in them."""
    return absolute_paths(config) | {"plugins": plugins.fingerprint(plugins.files(config))}


def name_plugins(configs: Iterable[Mapping[str, Scalar]]) -> None:
    """Say on standard error which files the user's own methods and models are taken from."""
    used = dict.fromkeys(item for config in configs for item in plugins.references(config).items())
    for key, reference in used:
        if origin := plugins.origin(reference):  # what is nowhere is an error when it is loaded
            errors.print(f"{key} {escape(reference)}: {escape(origin)}", soft_wrap=True)


# Checks ---------------------------------------------------------------------------------------------------------------


def check_locally(config: RunConfig) -> None:
    """Everything that can be wrong on this machine, before a simulation starts: data, partition, model, device."""
    from fl_app import data, tasks
    from fl_app.layout import Layout
    from fl_app.server import trackers

    trackers.require(config.resolved)
    if config.dataset == NODE:
        raise UserError(
            "dataset: node is for deployments, where every SuperNode has its own data-path; got a simulation"
        )
    method = METHODS[config.method]
    method.check(config)
    tasks.require_packages(config)
    if config.dp_epsilon:
        extras.require("opacus", "dp-epsilon")
    with waiting(console) as shown:
        shown.step("checking the data and the model", brief=True)
        from client_app.device_model import resolve_device  # here, for torch takes seconds

        resolve_device(config.device)
        if config.state_dir:
            refuse_unwritable("state-dir", Path(config.state_dir))
        info = data.check(config)
        repeated = data.repeated(config)
        if config.augment != "none" and (len(info.input_shape) != 3 or info.input_shape[1] != info.input_shape[2]):
            raise UserError(
                f"augment: {config.augment} needs square images, a sample has shape {list(info.input_shape)}"
            )
        module = method.network(config, **info.model_arguments, initial_weights=config.initial_weights)
        method.travelling(config, Layout.of(module))
    warn_of_data(info)
    for line in repeated:
        warn(line)


def check_resources(cpus_per_client: float, gpus_per_client: float) -> None:
    """Refuse what Ray would wait for forever. Raises UserError naming the option."""
    cores = os.cpu_count() or 1
    if cpus_per_client > cores:
        raise UserError(f"--cpus-per-client: this machine has {cores} cores, got {cpus_per_client:g}")
    if gpus_per_client:
        import torch

        if gpus_per_client > torch.cuda.device_count():
            raise UserError(
                f"--gpus-per-client: this machine has {torch.cuda.device_count()} GPUs, got {gpus_per_client:g}"
            )


def warn_of_settings(given: Iterable[str], runs: Collection[tuple[RunConfig, Collection[str]]]) -> None:
    """Say on standard error which settings are not what they seem: nothing is refused.

    given: keys of --set, of which those in a table of a method that no run has are without effect. Keys of presets and files
    may be for several methods and are not named. runs: each with the keys that somebody chose for it; defaults are not named.
    """
    methods = {config.method for config, _ in runs}
    for key in given:
        if not any(bears_on(key, method) for method in methods):
            owner = key.rpartition(".")[0]
            warn(f"--set {key} has no effect: it is a key of method {owner}, not of {', '.join(sorted(methods))}")
    few = {
        f"robust = {config.robust} outvotes nobody among {asked} clients a round; from {ABLE} on it can"
        for config, _ in runs
        if config.robust != "none" and config.num_clients and (asked := config.drawn(config.num_training)) < ABLE
    }
    late = {
        f"{key.name} = {value} is above num-server-rounds = {config.num_server_rounds}: what begins after round {value} is "
        "never reached"
        for config, chosen in runs
        for key, value in config.own_keys()
        if key.counts_rounds and key.name in chosen and isinstance(value, int) and value > config.num_server_rounds
    }
    for text in sorted(few | late):
        warn(text)


def warn_of_data(info: DatasetInfo) -> None:
    """Say on standard error that a data set has nothing to learn from."""
    if info.constant:
        warn("the data set is constant: in every channel all pixels of all training images are the same")


def say_unfinished(folders: Iterable[Path]) -> None:
    """Name on standard error the runs that a comparison leaves out."""
    for folder in folders:
        errors.print(f"skipped, not finished: {escape(str(folder))}", soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning in one line."""
    errors.print(f"[bold yellow]warning:[/] {escape(text)}", soft_wrap=True)
