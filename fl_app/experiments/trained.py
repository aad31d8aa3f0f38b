"""A run's final models as networks with their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.experiments.dry_run import known_shape
from fl_app.experiments.runs import Run
from fl_app.server.run_folder import FROZEN, MODELS, SHAPE

if TYPE_CHECKING:
    from torch import nn

Shape = Mapping[str, Any]  # what a model is built with


@dataclass(frozen=True)
class Trained:
    """One of a run's final models, in evaluation mode. client: whose it is, None: the global one.

    missing: tensors that the run folder does not hold; in `module` they are as the run started. sha256: of the parameters, as the
    run's evaluations record it.
    """

    run: Run
    client: int | None
    config: RunConfig
    shape: Shape
    module: nn.Module
    missing: tuple[str, ...]
    sha256: str

    @property
    def name(self) -> str:
        """`global`, or `client-3`."""
        return file_stem(self.client)


def file_stem(client: int | None) -> str:
    """Return the name of a model's file."""
    return "global" if client is None else f"client-{client}"


def load(path: Path, client: int | None, methods: Mapping[str, Any]) -> Trained:
    """Build the network of a run's global model, or of a client's, with its final weights.

    methods: the registered Methods. A method whose predictor is a network around the user's model (FedEM's mixture) gives that
    network, any other the user's own. Raises UserError if the run is not finished, has no such model, or if what it takes to build
    it is not what it was.
    """
    from fl_app import weights
    from fl_app.layout import Layout

    run = Run(path)
    run.summary  # noqa: B018 - for its error if the run is not finished
    config = run.config({name: method.params for name, method in methods.items()})
    file = path / MODELS / f"{file_stem(client)}.safetensors"
    if not file.is_file():
        if client is not None and client not in range(count := run.summary["num-clients"]):
            raise UserError(f"client: must be one of 0 to {count - 1}, got {client}")
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
    digest = hashlib.sha256(part.params.tobytes()).hexdigest()
    return Trained(run, client, config, shape, module.eval(), tuple(sorted(layout.names - names)), digest)


COLLECT = "; run with --set collect-personal-models=true to have every client's"


def refuse_parts(trained: Trained) -> None:
    """Raise UserError if tensors are missing of a model that must be whole."""
    if trained.missing:
        raise UserError(
            f"{trained.run.path}: method {trained.config.method} leaves {listed(list(trained.missing))} on the clients: "
            f"{trained.name} alone predicts nothing"
            + (COLLECT if trained.client is not None else "; a client's model does, --client K, of a run with "
               "--set collect-personal-models=true")
        )  # fmt: skip


def networks(config: RunConfig, shape: Shape, methods: Mapping[str, Any], names: frozenset[str]) -> Iterator[nn.Module]:
    """Yield the networks a run's final models with these tensors may be of: the user's own, then what the method makes of it."""
    from fl_app import models, parts, tasks, weights

    initial = config.initial_weights if config.train else ""  # where the constants come from

    def build() -> nn.Module:
        dtype = tasks.of(config).input_dtype
        return models.build(config.model, **shape, norm=config.norm, seed=config.seed, input_dtype=dtype)

    module = build()
    if initial:
        weights.write(module, weights.initial_model(module, initial))
    if config.train:
        parts.freeze(module, config.train)
    yield module
    method = methods[config.method]
    yield method.network(config, **shape, initial_weights=initial)
    if method.exported is not None:
        yield method.exported(build, names)


def shape_of(run: Run, config: RunConfig) -> Shape:
    """Return what a run's model was built with: as the run tells, or for one of an earlier version as its data are."""
    told = run.about.get(SHAPE)
    if isinstance(told, dict):
        return {**told, "input_shape": tuple(told.get("input_shape", ()))}
    if (shape := known_shape(config)) is not None:
        return shape
    if config.dataset == "node":
        raise UserError(f"{run.path} does not tell what its nodes' data are like: it was made by an earlier version")
    from fl_app import data

    return data.prepare_for(config).info.model_arguments
