"""A run's final models as networks with their weights."""

from __future__ import annotations

from torch import nn

from fl_app.cli.settings import look_for_plugins
from fl_app.errors import UserError
from fl_app.experiments import trained
from fl_app.experiments.runs import Run
from fl_app.server.run_folder import MODELS, PLUGINS
from strategies import METHODS


def personal(run: Run, client: int | None) -> nn.Module:
    """Return what `corolla.Run.model` does."""
    count = run.summary["num-clients"]
    if client is not None and client not in range(count):
        raise UserError(f"client: must be one of 0 to {count - 1}, got {client!r}")
    look_for_plugins(run.path / PLUGINS)
    model = trained.load(run.path, held(run, client), METHODS)
    if model.client != client and model.missing:
        trained.load(run.path, client, METHODS)  # for its error: the global model is a part of the client's at most
    trained.refuse_parts(model)
    if client is not None:
        check(client, model)
    return model.module


def held(run: Run, client: int | None) -> int | None:
    """Whose model may be the client's: its own, or the global one (None) where there is only that."""
    names = {path.stem for path in (run.path / MODELS).glob("*.safetensors")}
    return None if trained.file_stem(client) not in names and trained.file_stem(None) in names else client


def check(client: int, model: trained.Trained) -> None:
    """Raise UserError unless a model's sha256 is what the client told of its personal model after the last round."""
    run = model.run
    rounds = list(run.rounds.values())
    last = rounds[-1].get("evaluation", {}).get("clients", {}) if rounds else {}
    told = last.get(str(client), {}).get("sha256")
    if told == model.sha256 or (told is None and model.client == client):
        return
    if run.settings.get("collect-personal-models") and model.client == client:
        file = run.path / MODELS / f"{model.name}.safetensors"
        raise UserError(f"{file} is not what client {client} was evaluated with: its sha256 is {model.sha256}, recorded is {told}")
    raise UserError(f"{run.path} does not hold client {client}'s personal model, which only the client can make{trained.COLLECT}")
