"""What a run starts from: a file of weights (`initial-weights`), or another run (`corolla run --from`).

A file of weights is compared with the clients' data by the names in its card.

A run that goes on from another one has the models and states of the same clients, by their names. The server takes over the
arrays of the earlier run's last checkpoint. Clients' states stay where they are: the first message to a client names the
earlier run, so that the client reads its last state there and keeps the next one for the new run. A client that is new
starts as the method starts. The earlier run does not change.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_app import tasks
from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.errors import ConfigurationError, UserError, counted, listed
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.model_names import ModelCard, ModelNames, differ, names_in, read_card, scaling_line
from fl_app.server import checkpoint
from fl_app.server.properties import INPUT, MODEL_NAMES, ClientReport, Properties, Shape, input_facts
from fl_app.server.run_folder import (
    DATA,
    INITIAL,
    NAME,
    NORMALIZED_BY,
    READ_BY,
    SHAPE,
    STATE_REMOVED,
    name_of,
    read_about,
    read_clients,
    read_config,
    read_summary,
    secret_of,
)
from fl_app.sources import NODE
from fl_app.transport.client_registry import ClientRegistry
from fl_app.transport.wire import FEATURES, STATE_OF

# keys in which a run must be as the one it goes on from
_SAME = ("method", "model", "norm", "task", "train", "share")


@dataclass(frozen=True)
class Origin:
    """The run that a new run goes on from.

    ids: by a client's id, its id there; new clients are missing. new: the number of new clients that are there. saved: its last
    checkpoint.
    """

    path: Path
    digest: str
    secret: str
    ids: Mapping[int, int]
    new: int
    num_clients: int
    saved: checkpoint.Checkpoint

    @property
    def recorded(self) -> dict[str, Any]:
        """The entry `from` of run.json."""
        return {"run": str(self.path), "digest": self.digest, "clients": {str(i): old for i, old in self.ids.items()}}

    def first_messages(self) -> dict[int, dict[str, Scalar]]:
        """Return the scalars of each client's first message, for the clients that keep state."""
        versions = self.saved.meta.get("versions", {})
        return {
            i: {STATE_OF: json.dumps({"secret": self.secret, "client": old, "version": versions[str(old)]})}
            for i, old in self.ids.items()
            if versions.get(str(old))
        }

    def give(self, server: Any) -> None:
        """Let a new run's server half start from the arrays. Raises UserError for arrays of other clients in a fixed order."""
        arrays = dict(self.saved.arrays)
        before = Model(arrays.pop("global.params"), arrays.pop("global.buffers"))
        mine = server.state.model
        if (before.params.shape, before.buffers.shape) != (mine.params.shape, mine.buffers.shape):
            raise UserError(
                key="from",
                rule=f"the model of {self.path} has {before.params.size} travelling parameters and "
                f"{before.buffers.size} statistics, this run's {mine.params.size} and {mine.buffers.size}",
            )
        server.state = dataclasses.replace(server.state, model=before)
        new_id = {old: i for i, old in self.ids.items()}
        same = self.num_clients == server.config.num_clients and all(i == old for i, old in self.ids.items())
        for name, array in arrays.items():
            whose, _, key = name.partition(".")
            if whose == "memory":
                if not (same and len(self.ids) == self.num_clients) and self.num_clients in array.shape:
                    raise UserError(
                        key="from",
                        rule=f"method {server.config.method} keeps {key} for the {self.num_clients} clients of "
                        f"{self.path}, in order; this run must have the same clients in the same order",
                    )
                server.state.memory[key] = array
            elif whose == "client":
                client_id, _, key = key.partition(".")
                if int(client_id) in new_id:
                    server.state.clients.setdefault(new_id[int(client_id)], {})[key] = array


def origin_of(
    config: RunConfig, properties: Mapping[int, Properties], shape: Shape, names: ModelNames, layout: Layout
) -> Origin:
    """Return the run that `from-run` names, with its clients matched by name, or by id if neither run has names.

    Raises UserError, naming what differs, if the run cannot go on from it.
    """
    path = Path(config.from_run)
    about, saved = read_about(path), read_config(path)
    digest = str(read_summary(path)["digest"])
    before = {**config.defaults, **saved}
    lines = [
        f"{key}: {before.get(key)!r} there, {value!r} here"
        for key in _SAME
        if before.get(key) != (value := config.resolved.get(key))
    ]
    theirs = _features_in(about)
    for what, old, new in (("features", theirs, names.features), ("classes", about.get("classes"), names.outputs)):
        if differ(old, new):
            lines.append(f"{what}: {_difference(list(old or ()), list(new or ()))}")
    recorded = about.get(SHAPE)
    if (
        not lines
        and isinstance(recorded, dict)
        and Shape(**{**recorded, "input_shape": tuple(recorded["input_shape"])}) != shape
    ):
        lines.append("the data have another shape")
    if not lines and str(about.get("frozen-sha256", "")) != layout.constants:
        lines.append("train: the tensors that do not train have other values")
    if lines:
        raise UserError(
            key="from", rule="\n".join([f"a run cannot go on from {path}:", *(f"  {line}" for line in lines)])
        )
    loaded = checkpoint.load_latest(path, read_summary(path).get("kept-round"))
    if about.get(STATE_REMOVED):
        raise UserError(
            key="from",
            rule=f"the clients of {path} removed their state when it ended; they keep it with keep-state = true",
        )
    ids = _matched(read_clients(path), properties, int(before["num-clients"]))
    if not ids:
        raise UserError(key="from", rule=f"no client of this run is one of {path}")
    return Origin(
        path,
        digest,
        secret_of(path, "from"),
        ids,
        len(properties.keys() - ids.keys()),
        int(before["num-clients"]),
        loaded,
    )


def features_before(config: RunConfig) -> tuple[str, ...]:
    """Return the features' names of the run that a run goes on from, () if there is none, or if it did not record them.

    A run that is resumed has them itself.
    """
    return _features_in(read_about(Path(config.resume or config.from_run))) if config.from_run else ()


def private_names(config: RunConfig) -> ModelNames | None:
    """Return the earlier run's names, by which clients of a private run order their columns themselves; None if there are none."""
    features = features_before(config) if config.private else ()
    return ModelNames(features, split_names(config.classes) or None) if features else None


def _features_in(about: Mapping[str, Any]) -> tuple[str, ...]:
    known = names_in(about.get(DATA, {}).get(READ_BY, {}))
    return known or tuple((about.get(INITIAL) or {}).get("features") or ())


def _difference(old: list[str], new: list[str]) -> str:
    """Return in words how two lists of names differ."""
    gone, more = [name for name in old if name not in new], [name for name in new if name not in old]
    if not gone and not more:
        return f"another order ({listed(new)})"
    return "; ".join([f"{listed(gone)} only there"] * bool(gone) + [f"{listed(more)} only here"] * bool(more))


def _matched(
    before: Mapping[str, Mapping[str, Any]], properties: Mapping[int, Properties], num_clients: int
) -> dict[int, int]:
    """Return each client's id in the earlier run. Raises UserError if a name is two clients'."""
    names = {i: name for i, found in properties.items() if (name := name_of(found))}
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise UserError(key="from", rule=f"two clients of this run are called {twice[0]!r}")
    old: dict[str, int] = {}
    for i, facts in before.items():
        if there := str(facts.get(NAME) or ""):
            if there in old:
                raise UserError(key="from", rule=f"two clients of the earlier run are called {there!r}")
            old[there] = int(i)
    if names and old:
        return {i: old[name] for i, name in sorted(names.items()) if name in old}
    return {i: i for i in sorted(properties) if i < num_clients}


def goes_on_line(origin: Origin, config: RunConfig, normalize: str) -> str:
    """Return the log's line about the run that a run goes on from. normalize: how inputs are scaled."""
    more = f"; {counted(origin.new, 'client')} {'is' if origin.new == 1 else 'are'} new" if origin.new else ""
    if normalize == "mean-std":
        more += (
            "; inputs are scaled by its mean and std (normalize-over = initial)"
            if config.normalizes_by_initial
            else "; inputs are scaled by the mean and std of this run's data; normalize-over = initial keeps that run's"
        )
    return f"goes on from {origin.path} (digest {origin.digest[:12]}) with {counted(len(origin.ids), 'client')}{more}"


def recorded_scaling(path: Path) -> dict[str, list[float]]:
    """Return the inputs' scaling of the run that a run goes on from. Raises UserError if it did not record one."""
    found = read_about(path).get(DATA, {}).get(NORMALIZED_BY)
    if not isinstance(found, dict):
        raise UserError(key="normalize-over", rule=f"initial: {path} records no mean and std of its inputs")
    return {str(name): [float(value) for value in values] for name, values in found.items()}


@dataclass(frozen=True)
class Start:
    """How a run starts from a file of weights.

    names: of the clients' data, as far as the server knows them. scaling: the model's own, which the server sends; None: it
    sends none. remarks: lines for the run's log. told: scalars for the clients.
    """

    names: ModelNames
    scaling: dict[str, list[float]] | None
    remarks: list[str]
    told: Mapping[str, Scalar]


def start_of(config: RunConfig, registry: ClientRegistry, target_shift: tuple[float, ...]) -> Start | None:
    """Return the start of a run with `initial-weights`, None for other runs.

    target_shift: what the data's targets are stored less. Raises UserError for a card that is damaged, or that lacks the
    scaling that `normalize-over` asks for.
    """
    if not config.initial_weights:
        return None
    names = names_of_data(config, registry)._replace(target_shift=target_shift)
    source = f"initial-weights {config.initial_weights}"
    card = read_card(source, Path(config.initial_weights))
    has_classes = tasks.of(config).has_classes
    if card is not None and card.has_classes != has_classes and not config.initial_weights_partial:
        what = ("numbers", "classes")
        raise ConfigurationError(
            key=source,
            rule=f"its outputs must be {what[has_classes]}, as those of task {config.task} are",
            value=what[card.has_classes],
            hint="; initial-weights-partial = true takes the tensors that fit",
        )
    scaling = own_scaling(config, source, card, names) if config.normalizes_by_initial else None
    line = scaling_line(source, card, normalization_of(config, registry), config.normalize_over) if card else ""
    if card is None or not config.private:
        return Start(names, scaling, [line] if line else [], {})
    # the clients take their columns in the model's order
    names = names._replace(features=card.names.features)
    told = of_model(names._replace(outputs=names.outputs or card.names.outputs))
    return Start(names, scaling, [line] if line else [], told)


def of_model(names: ModelNames) -> dict[str, Scalar]:
    """Return the scalar by which the clients of a private run put their columns in a model's order, or refuse it."""
    return {MODEL_NAMES: json.dumps({"features": names.features, "classes": names.outputs})}


def own_scaling(config: RunConfig, source: str, card: ModelCard | None, names: ModelNames) -> dict[str, list[float]]:
    """Return the scaling of a model's inputs, in the order of the data's features. Raises UserError if it has none."""
    if card is None:
        raise UserError(
            key="normalize-over", rule=f"initial needs the card of the model in {source}, which has its mean and std"
        )
    if card.normalize != "mean-std" or not card.scaling["mean"]:
        raise UserError(
            key="normalize-over",
            rule=f"initial needs a model whose inputs were scaled by mean and std; those of {source} were "
            f"not (normalize = {card.normalize})",
        )
    if config.normalize not in ("auto", "mean-std"):
        raise UserError(key="normalize-over", rule=f"initial needs normalize = mean-std, got {config.normalize}")
    return card.for_features(source, names)


def names_of_data(config: RunConfig, registry: ClientRegistry) -> ModelNames:
    """Return the names of the clients' data. The sites of a private run keep their features' names."""
    if config.dataset == NODE:
        agreed = registry.agreed.names
        return ModelNames(agreed.features, agreed.classes) if agreed else ModelNames()
    told = [ClientReport(properties) for _, properties in sorted(registry.properties.items())]
    features = next((one.names.features for one in told if FEATURES in one.answer), None)
    if features is None:
        facts = next((found for one in told if (found := input_facts(one.answer.get(INPUT)))), None)
        features = names_in(facts) if facts else None
    return ModelNames(features, next((one.names.classes for one in told if one.names.classes), None))


def normalization_of(config: RunConfig, registry: ClientRegistry) -> str:
    """Return how inputs are scaled. If no client sends their dtype, square images count as 8-bit ones."""
    facts = (input_facts(properties.get(INPUT)) for properties in registry.properties.values())
    images = registry.agreed.shape is not None and len(registry.agreed.shape.input_shape) in (0, 3)
    dtype = next((found["dtype"] for found in facts if found), "uint8" if images else "float32")
    return tasks.normalization(config, np.dtype(dtype))
