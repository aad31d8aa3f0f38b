"""A run's final models as networks with their weights."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from torch import nn

from fl_app import data, weights
from fl_app.cli.settings import look_for_plugins
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError, listed
from fl_app.experiments import dry_run
from fl_app.experiments.export import COLLECT, GLOBAL, model_file
from fl_app.experiments.runs import Run
from fl_app.layout import Layout
from fl_app.server.run_folder import MODELS, PLUGINS, SHAPE
from strategies import METHOD_PARAMS, METHODS


def personal(run: Run, client: int | None) -> nn.Module:
    """Return what `corolla.Run.model` does."""
    count = run.summary["num-clients"]
    if client is not None and client not in range(count):
        raise UserError(f"client: must be one of 0 to {count - 1}, got {client!r}")
    look_for_plugins(run.path / PLUGINS)
    config = parse(run.settings, METHOD_PARAMS)
    method, shape = METHODS[config.method], shape_of(run, config)
    constants = config.initial_weights if config.train else ""  # what does not train is in no file of the run
    trained = method.network(config, **shape, initial_weights=constants)
    if method.wrap is None and method.compose is None:
        networks = [trained]
    else:  # most export the user's own network, some the one they train
        networks = [dataclasses.replace(method, wrap=None, compose=None).network(config, **shape), trained]
    layout = Layout.of(trained)
    all_travels = method.travelling(config, layout) >= layout.names
    file = source(run.path, client, all_travels)
    names = weights.names(file)
    fitting = [(module, found) for module in networks if (found := Layout.of(module)).names == names]
    if not fitting:
        missing = sorted(Layout.of(networks[0]).names - names)
        raise UserError(f"{file} is not a whole model: it has no {listed(missing)}{COLLECT}")
    module, layout = fitting[0]
    model = weights.load_safetensors(file, layout)
    if client is not None:
        check(run, client, file, hashlib.sha256(model.params.tobytes()).hexdigest())
    weights.write(module, model)
    return module.eval()


def shape_of(run: Run, config: RunConfig) -> dict[str, Any]:
    """What the run's model is built with, as it has recorded it; of older runs, as the data say."""
    told = run.about.get(SHAPE)
    if isinstance(told, dict):
        return {**told, "input_shape": tuple(told.get("input_shape", ()))}
    return dict(dry_run.known_shape(config) or data.check(config).model_arguments)


def source(run: Path, client: int | None, all_travels: bool) -> Path:
    """The file of a client's model: its own, or the global one where nothing else can be the client's."""
    held = {path.stem: path for path in (run / MODELS).glob("*.safetensors")}
    if client is not None and all_travels and f"client-{client}" not in held and GLOBAL in held:
        return held[GLOBAL]
    return model_file(run, client)


def check(run: Run, client: int, file: Path, found: str) -> None:
    """Raise UserError unless a model's sha256 is what the client told of its personal model after the last round."""
    rounds = list(run.rounds.values())
    last = rounds[-1].get("evaluation", {}).get("clients", {}) if rounds else {}
    told = last.get(str(client), {}).get("sha256")
    if told == found or (told is None and file.stem != GLOBAL):
        return
    if run.settings.get("collect-personal-models") and file.stem != GLOBAL:
        raise UserError(f"{file} is not what client {client} was evaluated with: its sha256 is {found}, recorded is {told}")
    raise UserError(f"{run.path} does not hold client {client}'s personal model, which only the client can make{COLLECT}")
