"""From a preset, a file and keys to a run's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from rich.markup import escape

from corolla import presets
from corolla.api.console import errors
from fl_app import plugins
from fl_app.app_bundle import APP_DIRECTORY
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.sources import path_in
from strategies import METHOD_PARAMS, METHODS

DEFAULT_CLIENTS = 10


class Scale(StrEnum):
    """How large a run is: as configured, or cut to what a laptop does."""

    full = "full"
    small = "small"


def look_for_plugins(*first: Path) -> None:
    """Look up the user's own files in these directories, then in the current one, then in the app's."""
    plugins.reset(*first, Path(), APP_DIRECTORY)


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
        # what is nowhere is an error when it is loaded
        if origin := plugins.origin(reference):
            errors.print(f"{key} {escape(reference)}: {escape(origin)}", soft_wrap=True)
