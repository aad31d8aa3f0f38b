"""Building of a run's config from a preset, a file and keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path

from rich.markup import escape

from corolla import presets
from corolla.api.console import errors
from fl_app import plugins
from fl_app.config import RunConfig, parse
from fl_app.config.rules import with_implied
from fl_app.errors import ConfigurationError, UserError
from fl_app.keys import Scalar
from fl_app.paths import anchored
from fl_app.transport.app_bundle import APP_DIRECTORY
from strategies import METHOD_PARAMS, METHODS

DEFAULT_CLIENTS = 10


class Scale(StrEnum):
    """Size of a run: as configured, or cut for a laptop."""

    full = "full"
    small = "small"


def look_for_plugins(*first: Path, told: Callable[[Sequence[Path]], None] | None = None) -> None:
    """Search the user's own files in these directories, then in the current one, then in the app's.

    told: gets the files of a module before they run.
    """
    plugins.reset(*first, Path(), APP_DIRECTORY, told=told)


def read_preset(name: str) -> dict[str, Scalar]:
    """Return a preset, by name, or a TOML file, by path, as a flat run config.

    The directories of this file and of the files it extends are searched for the user's own files.
    """
    if name.endswith(".toml"):
        found = presets.read_file(Path(name))
        look_for_plugins(*(file.parent for file in found.files))
        return found.settings
    return presets.read_preset(name)


def resolve(config: Mapping[str, Scalar]) -> RunConfig:
    """Parse a config with all registered methods, and let its own method check it."""
    parsed = parse(config, METHOD_PARAMS)
    METHODS[parsed.method].check(parsed)
    return parsed


def number_of_clients(config: Mapping[str, Scalar]) -> int:
    """Return the number of a simulation's clients.

    It is the configured number, else that of the data's `client` column, else DEFAULT_CLIENTS.
    """
    if asked := config.get("num-clients"):
        return int(asked)
    if not config.get("client"):
        return DEFAULT_CLIENTS
    from fl_app import data

    return data.count_clients(resolve(config)) or DEFAULT_CLIENTS


def scaled(config: dict[str, Scalar], scale: Scale) -> dict[str, Scalar]:
    """Cut a config if scale is small."""
    return presets.cut(config, resolve(config)) if scale is Scale.small else config


def with_clients(given: dict[str, Scalar], clients: int | None) -> dict[str, Scalar]:
    """Add --clients to the keys of --set. Raises UserError if the two contradict each other."""
    if clients is None:
        return given
    if given.get("num-clients", clients) != clients:
        raise ConfigurationError(
            f"--clients {clients} and --set num-clients={given['num-clients']} contradict each other"
        )
    return {**given, "num-clients": clients}


def ready(config: dict[str, Scalar]) -> dict[str, Scalar]:
    """Return a config that other processes can use: absolute paths, implied keys, fingerprints of the user's own files.

    Callbacks' files are not among these: they change no result.
    """
    result = {**config, "callbacks": ""}
    return anchored(with_implied(config), Path()) | {"plugins": plugins.fingerprint(plugins.files(result))}


def name_plugins(configs: Iterable[Mapping[str, Scalar]]) -> None:
    """Print on standard error the files of the user's own methods and models."""
    used = dict.fromkeys(item for config in configs for item in plugins.references(config))
    for key, reference in used:
        # a missing file is an error later, when it is loaded
        if origin := plugins.origin(reference):
            errors.print(f"{key} {escape(reference)}: {escape(origin)}", soft_wrap=True)


class Backend(Enum):
    """Processes in which a simulation's clients run."""

    pool = "pool"
    ray = "ray"


def refuse_unable(asked: Backend | None, ray_address: str | None, gpus_per_client: float) -> None:
    """Raise UserError if a pool is asked for work that only Ray can do: sharing GPUs, or using other machines."""
    if asked is Backend.pool and (needs := _need_of_ray(ray_address, gpus_per_client)):
        raise UserError(f"{needs} is for --backend ray, got --backend {asked.value}")


def refuse_beside(option: str, asked: Backend | None) -> None:
    """Raise UserError if a backend is given together with an option that excludes simulations."""
    if asked:
        raise UserError(f"{option} and --backend exclude each other: --backend is for simulations")


def backend_of(
    asked: Backend | None, ray_address: str | None, gpus_per_client: float, devices: Iterable[str]
) -> Backend:
    """Return the backend of simulations. devices: values of the runs' key `device`.

    The pool is the default on Linux if no GPU may be used, where it is tested. Ray is the default elsewhere.
    """
    if _need_of_ray(ray_address, gpus_per_client):
        return Backend.ray
    if asked:
        return asked
    if sys.platform != "linux":
        return Backend.ray
    if all(device == "cpu" for device in devices):
        return Backend.pool
    import torch

    return Backend.ray if torch.cuda.is_available() else Backend.pool


def _need_of_ray(ray_address: str | None, gpus_per_client: float) -> str:
    """Return the option that needs Ray, or ""."""
    return "--ray-address" if ray_address is not None else "--gpus-per-client" if gpus_per_client else ""
