"""A run's final models as networks with their weights: what `corolla export` writes and `corolla.Run.model` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corolla.experiments.dry_run import known_shape
from corolla.experiments.runs import RecordedRun
from fl_app import wire
from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.server.run_folder import FROZEN, MODELS, SHAPE
from fl_app.sources import NODE

if TYPE_CHECKING:
    from torch import nn

Shape = Mapping[str, Any]  # what a model is built with


@dataclass(frozen=True)
class Trained:
    """One of a run's final models, in evaluation mode. client: whose it is, maybe as global one; None: the global one.

    missing: tensors that the run folder does not hold; in `module` they are as the run started. hashes: of the parameters, and of
    the buffers if there are any, as the run's evaluations record them.
    """

    run: RecordedRun
    client: int | None
    config: RunConfig
    shape: Shape
    module: nn.Module
    missing: tuple[str, ...]
    hashes: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """The hash of its parameters."""
        return self.hashes[wire.SHA256]

    def is_of(self, told: Mapping[str, Any]) -> bool:
        """Tell whether it is the model that a client was evaluated with. told: the client's entry in an evaluation.

        Entries of runs whose digest is of version 1 have no hash of buffers, and tell of parameters alone.
        """
        names = (wire.SHA256,) if self.run.outcome["digest-version"] == 1 else (wire.SHA256, wire.BUFFERS_SHA256)
        return all(told.get(name) == self.hashes.get(name) for name in names)

    @property
    def name(self) -> str:
        """`global`, or `client-3`."""
        return file_stem(self.client)


def file_stem(client: int | None) -> str:
    """Return the name of a model's file."""
    return "global" if client is None else f"client-{client}"


def load(path: Path, client: int | None, methods: Mapping[str, Any]) -> Trained:
    """Build the network of a run's global model, or of a client's, with its final weights.

    A client's is the one the run holds for it, or the global one where that is what the client was evaluated with after the last
    round; either is compared with the hash that the client told then. methods: the registered Methods. A method whose predictor is
    a network around the user's model (FedEM's mixture) gives that network, any other the user's own. Raises UserError if the run is
    not finished, has no such model, or if what it takes to build it is not what it was.
    """
    run = RecordedRun(path, {name: method.params for name, method in methods.items()})
    count = run.summary["num-clients"]
    if client is None:
        return _read(run, None, methods)
    if client not in range(count):
        raise UserError(f"client: must be one of 0 to {count - 1}, got {client!r}")
    held = {file.stem for file in (path / MODELS).glob("*.safetensors")}
    own = file_stem(client) in held or file_stem(None) not in held
    found = _read(run, client if own else None, methods)
    if found.missing and not own:
        # for its error: the global model is a part of the client's at most
        return _read(run, client, methods)
    if not found.missing:
        _check(found, client)
    return dataclasses.replace(found, client=client)


def _check(model: Trained, client: int) -> None:
    """Raise UserError unless a model's hashes are what the client told of its personal model after the last round."""
    run = model.run
    rounds = list(run.rounds.values())
    last = rounds[-1].get("evaluation", {}).get("clients", {}) if rounds else {}
    told = last.get(str(client), {})
    if model.is_of(told) or (wire.SHA256 not in told and model.client == client):
        return
    if model.config.collect_personal_models and model.client == client:
        file = run.path / MODELS / f"{model.name}.safetensors"
        raise UserError(f"{file} is not what client {client} was evaluated with: {_difference(model.hashes, told)}")
    raise UserError(
        f"{run.path} does not hold client {client}'s personal model, which only the client can make{COLLECT}"
    )


def _difference(hashes: Mapping[str, str], told: Mapping[str, Any]) -> str:
    """Say which of a model's hashes is not the recorded one."""
    names = (wire.SHA256, wire.BUFFERS_SHA256)
    name = next(name for name in names if hashes.get(name) != told.get(name))
    return f"its {name} is {hashes.get(name)}, recorded is {told.get(name)}"


def _read(run: RecordedRun, client: int | None, methods: Mapping[str, Any]) -> Trained:
    """Build the network of one of the model files a run holds."""
    from fl_app import weights
    from fl_app.layout import Layout

    path = run.path
    config = run.config
    file = path / MODELS / f"{file_stem(client)}.safetensors"
    if not file.is_file():
        there = sorted(p.stem for p in (path / MODELS).glob("*.safetensors"))
        hint = "" if client is None or config.collect_personal_models else COLLECT
        raise UserError(f"{path} holds no model {file_stem(client)!r}; it holds {', '.join(there) or 'none'}{hint}")
    names, shape = weights.names_in(file), shape_of(run, config)
    for module in networks(config, shape, methods, names):
        layout = Layout.of(module)
        if names <= layout.names:
            break
    else:
        raise UserError(f"{file}: model {config.model} has no {listed(sorted(names - layout.names))}")
    frozen = run.about.get(FROZEN, layout.constants)  # older runs tell none
    if frozen != layout.constants:
        raise UserError(
            f"{path}: the tensors of model {config.model} that did not train are not those of the run (sha256 "
            f"{layout.constants[:12] or 'of none'}, the run's {frozen[:12] or 'of none'})"
        )
    part = weights.load_safetensors(file, layout.subset(names))
    weights.write(module, layout.put(weights.read(module), part, names))
    missing = tuple(sorted(layout.names - names))
    return Trained(run, client, config, shape, module.eval(), missing, wire.hashes(part))


COLLECT = "; run with --set collect-personal-models=true to have every client's"


def refuse_parts(trained: Trained) -> None:
    """Raise UserError if tensors are missing of a model that must be whole."""
    if trained.missing:
        raise UserError(
            f"{trained.run.path}: method {trained.config.method} leaves {listed(list(trained.missing))} on the clients: "
            f"{trained.name} alone predicts nothing"
            + (
                COLLECT
                if trained.client is not None
                else "; a client's model does, --client K, of a run with --set collect-personal-models=true"
            )
        )


def networks(config: RunConfig, shape: Shape, methods: Mapping[str, Any], names: frozenset[str]) -> Iterator[nn.Module]:
    """Yield the networks a run's final models with these tensors may be of: the user's own, then what the method makes of it."""
    from fl_app import models, tasks, trainable_tensors, weights

    # where the constants come from
    initial = config.initial_weights if config.train else ""

    def build() -> nn.Module:
        dtype = tasks.of(config).input_dtype
        return models.build(config.model, **shape, norm=config.norm, seed=config.seed, input_dtype=dtype)

    module = build()
    if initial:
        weights.write(module, weights.initial_model(module, initial))
    if config.train:
        trainable_tensors.freeze(module, config.train)
    yield module
    method = methods[config.method]
    yield method.network(config, **shape, initial_weights=initial)
    if method.exported is not None:
        yield method.exported(build, names)


def shape_of(run: RecordedRun, config: RunConfig) -> Shape:
    """Return what a run's model was built with: as the run tells, or for one of an earlier version as its data are."""
    recorded = run.about.get(SHAPE)
    if isinstance(recorded, dict):
        return {**recorded, "input_shape": tuple(recorded.get("input_shape", ()))}
    if (shape := known_shape(config)) is not None:
        return shape
    if config.dataset == NODE:
        raise UserError(f"{run.path} does not tell what its nodes' data are like: it was made by an earlier version")
    from fl_app import data

    return data.prepare_for(config).info.model_arguments
