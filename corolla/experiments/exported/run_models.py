"""A run's final models as networks with weights, for `corolla export` and `corolla.Run.model`."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corolla.experiments.runs import RecordedRun
from fl_app import tasks, trainable_tensors
from fl_app.config import RunConfig
from fl_app.errors import UserError, listed, plain
from fl_app.keys import nearest
from fl_app.metrics import kept
from fl_app.model_card import FORMAT, Entries
from fl_app.model_names import ModelNames
from fl_app.server.properties import SAMPLES
from fl_app.server.run_folder import FROZEN, INITIAL, MODELS, NAME, SHAPE
from fl_app.transport import wire
from fl_app.weight_files import at_site

if TYPE_CHECKING:
    from torch import nn

Shape = Mapping[str, Any]  # arguments of a model's builder
# keys about the file that a run started from, whose path is on the run's machine, and the values that need it
_OF_START = ("initial-weights", "initial-weights-partial", "from-run")
_NEED_START = (("normalize-over", "initial"),)
# keys with values that may contain a path: `kind:/path`
_NAMED = ("dataset", "partition")
MOST_NAMES = 20
"""Most client names in an error about an unknown client."""


@dataclass(frozen=True)
class Trained:
    """One of a run's final models, in evaluation mode.

    client: the client that uses it, even if it is the global one; None: the global model itself.

    missing: tensors that the run folder lacks; in `module` they have their initial values. hashes: of the parameters,
    and of the buffers if there are any, as recorded in evaluations.
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
        """Hash of its parameters."""
        return self.hashes[wire.SHA256]

    def is_of(self, told: Mapping[str, Any]) -> bool:
        """Return whether a client was evaluated with this model. told: the client's entry in an evaluation.

        Digests of version 1 do not cover buffers: entries of these runs have the hash of the parameters only.
        """
        names = (wire.SHA256,) if self.run.outcome["digest-version"] == 1 else (wire.SHA256, wire.BUFFERS_SHA256)
        return all(told.get(name) == self.hashes.get(name) for name in names)

    @property
    def name(self) -> str:
        """`global`, or `client-3`."""
        return file_stem(self.client)


def file_stem(client: int | None) -> str:
    """Return the name of a model's file without its suffix."""
    return "global" if client is None else f"client-{client}"


def client_id(run: RecordedRun, client: object) -> int:
    """Return a client's id, given its id or its name.

    An integer is an id, and so is the text `id:3`. Another text may be an id in digits or a name. Raises UserError if
    the run has no such client, or if the text means more than one: clients choose their names themselves.
    """
    count = int(run.settings["num-clients"])
    names = {int(i): plain(str(facts["name"])) for i, facts in run.clients.items() if facts.get("name")}
    if not isinstance(client, str):
        number = _integer(client)
        if number is not None and 0 <= number < count:
            return number
        raise _no_such_client(client if number is None else number, count, names)
    digits = re.fullmatch(r"(id:)?(\d{1,9})", client, re.ASCII)
    number = int(digits[2]) if digits and int(digits[2]) < count else None
    if digits and digits[1] and number is not None:
        return number
    meant = {i: f"the name of client {i}" for i, name in names.items() if name == client}
    if number is not None:
        meant[number] = f"the id of client {number}"
    if len(meant) > 1:
        ways = " or ".join(f"id:{i}" for i in sorted(meant))
        raise UserError(key="client", rule=f"{client!r} is {' and '.join(meant.values())}; write {ways}")
    if not meant:
        raise _no_such_client(int(client) if digits and not digits[1] else client, count, names)
    return next(iter(meant))


def _integer(value: object) -> int | None:
    """Return an integer of Python, NumPy or pandas as an int; None for other values, True and False among them."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _no_such_client(client: object, count: int, names: Mapping[int, str]) -> UserError:
    known = f", or one of {listed(list(names.values()), most=MOST_NAMES)}" if names else ""
    return UserError(
        key="client",
        rule=f"must be one of 0 to {count - 1}{known}",
        value=client,
        hint=nearest(str(client), names.values()),
    )


def load(path: Path, client: int | str | None, methods: Mapping[str, Any]) -> Trained:
    """Build the network of a run's global model, or of a client's model, with its final weights.

    A client's model is the run folder's model for this client. Without one, it is the global model, if the client was
    evaluated with that after the last round. Its hash must equal the one that the client sent then. A method with a
    network around the user's model (FedEM's mixture) gives that network; other methods give the user's own.

    methods: the registered Methods. Raises UserError if the run is not finished, has no model of this client, or if
    anything needed to build the model has changed.
    """
    run = RecordedRun(path, {name: method.params for name, method in methods.items()})
    # raises UserError unless the run is finished
    _ = run.summary
    if client is None:
        return _read(run, None, methods)
    client = client_id(run, client)
    held = {file.stem for file in (path / MODELS).glob("*.safetensors")}
    own = file_stem(client) in held or file_stem(None) not in held
    found = _read(run, client if own else None, methods)
    if found.missing and not own:
        # raises UserError: the global model is only a part of the client's
        return _read(run, client, methods)
    if not found.missing:
        _check(found, client)
    return dataclasses.replace(found, client=client)


def _check(model: Trained, client: int) -> None:
    """Raise UserError unless a model's hashes equal those of the client's personal model after the last round."""
    run = model.run
    told = kept(list(run.rounds.values())).get("evaluation", {}).get("clients", {}).get(str(client), {})
    if model.is_of(told) or (wire.SHA256 not in told and model.client == client):
        return
    if model.config.collect_personal_models and model.client == client:
        file = run.path / MODELS / f"{model.name}.safetensors"
        raise UserError(
            f"{file} is not the model that client {run.called(client)} was evaluated with: {_difference(model.hashes, told)}"
        )
    if not told:
        raise UserError(
            f"{run.path} does not hold the personal model of client {run.called(client)}, and the client was not in the last "
            "evaluation, which would show whether it uses the global one; export the global model without --client"
        )
    raise UserError(
        f"{run.path} does not hold the personal model of client {run.called(client)}, which only the client can make{_hint(run)}"
    )


def _difference(hashes: Mapping[str, str], told: Mapping[str, Any]) -> str:
    """Return a text that names the first hash that differs from the recorded one."""
    names = (wire.SHA256, wire.BUFFERS_SHA256)
    name = next(name for name in names if hashes.get(name) != told.get(name))
    return f"its {name} is {hashes.get(name)}, the recorded one is {told.get(name)}"


def _read(run: RecordedRun, client: int | None, methods: Mapping[str, Any]) -> Trained:
    """Build the network of one of the run folder's model files."""
    from fl_app import weights
    from fl_app.layout import Layout

    path = run.path
    config = run.config
    file = path / MODELS / f"{file_stem(client)}.safetensors"
    if not file.is_file():
        there = sorted(p.stem for p in (path / MODELS).glob("*.safetensors"))
        hint = "" if client is None or config.collect_personal_models else _hint(run)
        whose = "global model" if client is None else f"model of client {run.called(client)}"
        raise UserError(f"{path} holds no {whose}; it holds {', '.join(there) or 'none'}{hint}")
    names, shape = weights.names_in(file), shape_of(run)
    for module in networks(config, shape, methods, names, _names_of_data(run)):
        layout = Layout.of(module)
        if names <= layout.names:
            break
    else:
        raise UserError(key=file, rule=f"model {config.model} has no {listed(sorted(names - layout.names))}")
    frozen = run.about.get(FROZEN, layout.constants)  # runs of earlier versions do not record it
    if frozen != layout.constants:
        raise UserError(
            key=path,
            rule=f"the frozen tensors of model {config.model} differ from the run's (sha256 "
            f"{layout.constants[:12] or 'of none'}, the run's {frozen[:12] or 'of none'})",
        )
    trainable_tensors.widen(module)
    part = weights.load_safetensors(file, layout.subset(names))
    weights.write(module, layout.put(weights.read(module), part, names))
    return Trained(run, client, config, shape, module.eval(), tuple(sorted(layout.names - names)), wire.hashes(part))


def _hint(run: RecordedRun) -> str:
    """Return how to get a client's model that a run does not hold."""
    if run.config.private:
        return f"; a private run's clients keep theirs: corolla node export {run.path.resolve().name}, at the client"
    return (
        "; run with --set collect-personal-models=true to save every client's model; a finished run collects them with --resume, "
        "if its clients kept their state"
    )


def refuse_parts(trained: Trained) -> None:
    """Raise UserError if a model that must be complete lacks tensors."""
    if trained.missing:
        raise UserError(
            f"{trained.run.path}: method {trained.config.method} leaves {listed(list(trained.missing))} on the clients: "
            f"{trained.name} cannot predict alone"
            + (
                _hint(trained.run)
                if trained.client is not None
                else f"; export a client's model, --client K{_hint(trained.run)}"
            )
        )


def _names_of_data(run: RecordedRun) -> ModelNames | None:
    """Return the names by which a run read `initial-weights`; None if it did not."""
    if not isinstance(told := run.about.get(INITIAL), dict):
        return None
    lists = (told.get(name) for name in ModelNames._fields)
    return ModelNames(*(tuple(values) if isinstance(values, list) else None for values in lists))  # type: ignore[arg-type]


def networks(
    config: RunConfig,
    shape: Shape,
    methods: Mapping[str, Any],
    names: frozenset[str],
    of_data: ModelNames | None = None,
) -> Iterator[nn.Module]:
    """Yield the networks that may have these tensors: the user's own, then those that the method builds around it.

    of_data: the names by which the run read `initial-weights`.
    """
    import torch

    from fl_app import weights

    # frozen tensors get their values from these weights
    initial = at_site(config.initial_weights) if config.train else ""
    module = build(config, shape)
    if initial:
        sample = shape.get("input_shape") or (shape["in_channels"], shape["image_size"], shape["image_size"])
        weights.load_initial(
            module,
            initial,
            partial=config.initial_weights_partial,
            trains=trainable_tensors.trained(module, config.train),
            names=of_data,
            example=torch.zeros((2, *sample), dtype=getattr(torch, tasks.of(config).input_dtype)),
        )
    if config.train:
        trainable_tensors.freeze(module, config.train, config.frozen_dtype)
    yield module
    method, kept = methods[config.method], dataclasses.replace(config, gradient_checkpointing=False)
    yield method.network(kept, **shape, initial_weights=initial, names=of_data, tried=True)
    if method.exported.network is not None:
        yield method.exported.network(functools.partial(build, config, shape), names)


def build(config: RunConfig, shape: Shape) -> nn.Module:
    """Return a run's own model, with its values from the seed."""
    from fl_app import models

    more: dict[str, Any] = {"input_dtype": tasks.of(config).input_dtype, "classifier": config.classifier}
    return models.build(config.model, **shape, norm=config.norm, seed=config.seed, tried=True, **more)


def shape_of(run: RecordedRun) -> Shape:
    """Return the arguments of a run's model builder, as recorded. Raises UserError if they are not."""
    recorded = run.about.get(SHAPE)
    if not isinstance(recorded, dict):
        raise UserError(f"{run.path} does not record the shape of its data")
    return {**recorded, "input_shape": tuple(recorded.get("input_shape", ()))}


# Cards -----------------------------------------------------------------------------------------------------------------


def about(trained: Trained) -> Entries:
    """Return the card's description of a model's run: the model, its training, its metrics and its data."""
    run, config = trained.run, trained.config
    client = None if trained.client is None else str(trained.client)
    clients = run.clients if client is None else {client: run.clients.get(client, {})}
    metric = run.headline.name
    return {
        "format": FORMAT,
        "made-by": f"corolla {metadata.version('corolla')}",
        "run": {
            "name": run.path.resolve().name,
            "experiment": run.summary["experiment"],
            "digest": run.summary["digest"],
            "digest-version": run.summary.get("digest-version", 1),
            "rounds": run.summary["rounds"],
            "clients": run.summary["num-clients"],
            # the mean over all clients is no client's own
            **({f"final-{metric}": run.summary.get(f"final-{metric}")} if client is None else {}),
        },
        "model": trained.name,
        **({} if client is None or NAME not in clients[client] else {"client": clients[client][NAME]}),
        "method": config.method,
        "parameters-sha256": trained.sha256,
        "metrics": measured(trained),
        "data": {
            "dataset": _without_path(config.dataset),
            **{
                what: sum(told)
                for what in SAMPLES
                if (told := [n for facts in clients.values() if (n := facts.get(what))])
            },
            **_class_counts(list(clients.values())),
        },
        "task": config.task,
        "settings": {
            key.name: _without_path(str(value)) if key.name in _NAMED else value
            for key, value in config.own_keys()
            if key.tells_runs_apart and key.name not in _OF_START and (key.name, value) not in _NEED_START
        },
        "shape": {**trained.shape, "input_shape": list(trained.shape.get("input_shape", ()))},
    }


def measured(trained: Trained) -> Entries:
    """Return the last metrics of exactly this model: means over the clients evaluated with it, and their number.

    Empty if there are none: for example, a global model that no client uses unchanged.
    """
    rows = kept(list(trained.run.rounds.values())).get("evaluation", {}).get("clients", {})
    mine = rows if trained.client is None else {i: row for i, row in rows.items() if i == str(trained.client)}
    same = [row for row in mine.values() if trained.is_of(row)]
    found: Entries = {"clients": len(same)} if same else {}
    for metric in tasks.of(trained.config).metrics:
        if values := [row[metric.name] for row in same if row.get(metric.name) is not None]:
            found[metric.name] = sum(values) / len(values)
    return found


def _class_counts(clients: list[Entries]) -> Entries:
    """Return the sum of training samples per class; empty unless all clients sent theirs."""
    counts = [facts.get("class-counts") for facts in clients]
    if not counts or not all(counts):
        return {}
    return {"class-counts": [sum(column) for column in zip(*counts, strict=True)]}  # type: ignore[arg-type]


def _without_path(value: str) -> str:
    """Return `kind:/a/b` as `kind:b`: a card is passed on, and must not reveal paths."""
    kind, colon, path = value.partition(":")
    return f"{kind}:{Path(path).name}" if colon else value
