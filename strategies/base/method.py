"""A registered method, and which tensors travel in the usual cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.layout import Layout
from fl_app.report.kinds import Figure
from strategies.base.local_update import LocalUpdate
from strategies.base.strategy import PersonalizedStrategy

if TYPE_CHECKING:
    from torch import nn

P = TypeVar("P")


@dataclass(frozen=True)
class Method(Generic[P]):
    """A method: its two halves, its parameters, and what travels.

    name: of its parameter table too. shared(layout, params): names of the tensors that travel; raises UserError for a model the
    method cannot be used with. wrap(module, params, seed): the network that is trained instead of the run's model. figures:
    what a report draws of the method's records.
    """

    name: str
    params: type[P]
    strategy: type[PersonalizedStrategy[P]]
    local_update: type[LocalUpdate[P]]
    shared: Callable[[Layout, P], frozenset[str]]
    wrap: Callable[[nn.Module, P, int], nn.Module] | None = None
    figures: tuple[Figure, ...] = ()

    def network(
        self, config: RunConfig, *, in_channels: int, num_classes: int, image_size: int, initial_weights: str = ""
    ) -> nn.Module:
        """Build the network the method trains, with its initial weights from the seed.

        initial_weights: a safetensors file that gives those of the run's model, before the method wraps it.
        """
        from fl_app import models, weights

        module = models.build(
            config.model, in_channels=in_channels, num_classes=num_classes, image_size=image_size, norm=config.norm,
            seed=config.seed,
        )  # fmt: skip
        if initial_weights:
            weights.write(module, weights.initial_model(module, initial_weights))
        return module if self.wrap is None else self.wrap(module, config.params, config.seed)


AnyMethod = Method[Any]


def all_tensors(layout: Layout, params: object) -> frozenset[str]:
    """All tensors travel."""
    return layout.names


def no_tensors(layout: Layout, params: object) -> frozenset[str]:
    """Nothing travels."""
    return frozenset()


class HasStatistics(Protocol):
    """Parameters of a method with the key `batchnorm-statistics`."""

    @property
    def batchnorm_statistics(self) -> str:
        """What becomes of BatchNorm's running statistics."""
        ...


def all_but_local_statistics(layout: Layout, params: HasStatistics) -> frozenset[str]:
    """All tensors travel, but for BatchNorm statistics where these are `local`."""
    if params.batchnorm_statistics == "local":
        return layout.names - {slot.name for slot in layout.buffers}
    return layout.names


def all_but_classifier(layout: Layout, params: object = None) -> frozenset[str]:
    """All tensors travel but the last Linear layer's.

    Raises UserError if the model cannot be split: no Linear layer, or nothing but one.
    """
    below = layout.names - layout.classifier
    if not layout.classifier or not below:
        what = "nothing below its only Linear layer" if layout.classifier else "no Linear layer, hence no classifier"
        raise UserError(f"model: this method splits it into body and classifier, but it has {what}")
    return below


def all_where_features_are(layout: Layout, params: HasStatistics) -> frozenset[str]:
    """What `all_but_local_statistics` says, of a model that has features: a last Linear layer and something below it.

    Raises UserError if it has not.
    """
    all_but_classifier(layout)
    return all_but_local_statistics(layout, params)
