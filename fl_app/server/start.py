"""The model that a run starts from: `initial-weights`, compared with the clients' data by the names in its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_app import tasks
from fl_app.config import RunConfig
from fl_app.errors import ConfigurationError, UserError
from fl_app.keys import Scalar
from fl_app.model_names import ModelCard, ModelNames, names_in, read_card, scaling_line
from fl_app.server.properties import INPUT, MODEL_NAMES, ClientReport, input_facts
from fl_app.sources import NODE
from fl_app.transport.client_registry import ClientRegistry
from fl_app.transport.wire import FEATURES


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
