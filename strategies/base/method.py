"""A registered method, and which tensors travel in the usual cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fl_app import metrics, rng, tasks, trainable_tensors
from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.figures import Figure, Scalars
from fl_app.layout import Layout
from strategies.base.local_update import LocalUpdate
from strategies.base.strategy import PersonalizedStrategy
from strategies.engine import private

if TYPE_CHECKING:
    from torch import nn

P = TypeVar("P")


@dataclass(frozen=True)
class Drawings:
    """The run's model, drawn as often as a method wants: drawings(k) is the k-th, each with initial weights of its own.

    The first, drawings(0), is the run's. inputs: shape of a sample, channels, height and width of an image; seed: the run's.
    """

    make: Callable[[int], nn.Module]
    inputs: tuple[int, ...]
    seed: int

    def __call__(self, k: int) -> nn.Module:
        """Draw the k-th."""
        return self.make(k)


@dataclass(frozen=True)
class Method(Generic[P]):
    """A method: its two halves, its parameters, and what travels.

    name: of its parameter table too. shared(layout, params): names of the tensors that travel; raises UserError for a model the
    method cannot be used with. wrap(module, params, seed): the network that is trained instead of the run's model.
    compose(drawings, params): likewise, for one made of several drawings of the run's model, or beside which something stands.
    exported(make, names): the network of a run's final models with tensors of these names, where it is neither the run's model,
    which make() builds, nor the one that trains. figures: what a report draws of the method's records. needs_classes: it is about
    classes, and only runs tasks that have them.
    needs_whole: its arrays are as long as what trains, or its clients keep nothing of their own: `share` cannot leave out some.
    dp_epochs(config): epochs of plain gradient steps that a round is for a client, where it looks at its records by nothing else
    (it can run with `dp-epsilon`).
    sums: its server needs no more of clients' models than means over groups of them: it can run private. not_private: of one that
    cannot, why.
    """

    name: str
    params: type[P]
    strategy: type[PersonalizedStrategy[P]]
    local_update: type[LocalUpdate[P]]
    shared: Callable[[Layout, P], frozenset[str]]
    wrap: Callable[[nn.Module, P, int], nn.Module] | None = None
    compose: Callable[[Drawings, P], nn.Module] | None = None
    exported: Callable[[Callable[[], nn.Module], frozenset[str]], nn.Module] | None = None
    figures: tuple[Figure, ...] = ()
    needs_classes: bool = False
    needs_whole: bool = False
    dp_epochs: Callable[[RunConfig], int] | None = None
    sums: bool = False
    not_private: str = "its server works on single clients' models"

    def check(self, config: RunConfig) -> None:
        """Raise UserError if a run asks of the method what it cannot do."""
        if self.needs_classes and not tasks.of(config).has_classes:
            raise UserError(f"method {config.method}: it is about classes, and task {config.task} has none")
        for name, patterns in (("train", config.train), ("share", config.share)):
            if self.compose is not None and patterns:
                raise UserError(
                    f"{name}: method {config.method} trains a network around the model, which has no such parts"
                )
        if taken := metrics.taken_names(metrics.declared(self.local_update.reports), tasks.of(config).headline):
            raise UserError(
                f"method {config.method}: reports: every name once, and none that a record has for something else, got "
                f"{', '.join(taken)}"
            )
        if self.needs_whole and config.share:
            raise UserError(
                f"method {config.method}: it is about all parameters that train; say with train which, and leave share unset, "
                f"got {config.share!r}"
            )
        able = ("none", *sorted(self.strategy.robust))
        if config.robust not in able:
            what = "has no mean over clients that it could replace" if len(able) == 1 else f"can do {', '.join(able)}"
            raise UserError(f"robust: method {config.method} {what}, got {config.robust!r}")
        if config.private:
            private.check(config, self.strategy, "" if self.sums else self.not_private)
        if config.dp_epsilon and self.dp_epochs_of(config) and config.finetune_epochs:
            raise UserError("dp-epsilon: finetune-epochs would look at records beside the budget; leave it 0")

    def reports_counts(self, config: RunConfig) -> bool:
        """Whether clients tell how many samples they have: not in a private run whose weights do not depend on it."""
        return not config.private or private.weighs_by_size(self.strategy, config)

    def dp_epochs_of(self, config: RunConfig) -> int:
        """How many epochs of noisy steps a round is for a client. Raises UserError if it cannot run with `dp-epsilon`."""
        if self.dp_epochs is None:
            raise UserError(
                f"dp-epsilon: method {config.method} cannot run with differential privacy: its clients look at their records by "
                "more than plain gradient steps"
            )
        return self.dp_epochs(config)

    def travelling(self, config: RunConfig, layout: Layout) -> frozenset[str]:
        """Names of the tensors that travel. Raises UserError for a model, or patterns, that the method cannot be used with."""
        if config.dp_epsilon and layout.b:
            raise UserError(
                f"dp-epsilon: model {config.model} has statistics of whole batches (BatchNorm), which no noise covers; take "
                "norm = group, or another model"
            )
        return trainable_tensors.travelling(config, layout, self.shared(layout, config.params))

    @property
    def reports(self) -> tuple[metrics.Metric, ...]:
        """What clients may report beside what every method's do: what the client half declares, and what figures draw."""
        own = metrics.declared(self.local_update.reports)
        drawn = {figure.record for figure in self.figures if isinstance(figure, Scalars)}
        return (*own, *metrics.declared(sorted(drawn - {metric.name for metric in own})))

    @property
    def drawn(self) -> tuple[Figure, ...]:
        """What a report draws of the method's records: its figures, and the pictures of what clients report."""
        own = [metric.figure for metric in metrics.declared(self.local_update.reports)]
        return (*self.figures, *(figure for figure in own if figure is not None))

    def tested(self, config: RunConfig) -> str:
        """Say which models are tested before and after training where that needs saying (`LocalUpdate.tested`)."""
        return self.local_update.tested(config.params)

    def network(
        self,
        config: RunConfig,
        *,
        in_channels: int,
        num_classes: int,
        image_size: int,
        input_shape: tuple[int, ...] = (),
        initial_weights: str = "",
    ) -> nn.Module:
        """Build the network the method trains, with its initial weights from the seed.

        initial_weights: a safetensors file that gives those of the run's model, before the method wraps it.
        """
        from fl_app import models, weights

        def drawn(k: int) -> nn.Module:
            module = models.build(
                config.model,
                in_channels=in_channels,
                num_classes=num_classes,
                image_size=image_size,
                norm=config.norm,
                seed=rng.torch_seed(config.seed, f"drawing-{k}") if k else config.seed,
                input_shape=input_shape,
                input_dtype=tasks.of(config).input_dtype,
            )
            if initial_weights:
                if k:
                    raise UserError(
                        f"initial-weights: {self.name} starts from several models, which one file would make equal"
                    )
                weights.write(module, weights.initial_model(module, initial_weights))
            return module

        module = self.around(Drawings(drawn, input_shape or (in_channels, image_size, image_size), config.seed), config)
        if config.train:
            trainable_tensors.freeze(module, config.train)
        return module

    def around(self, drawings: Drawings, config: RunConfig) -> nn.Module:
        """Build the network the method trains from drawings of the run's model."""
        if self.compose is not None:
            return self.compose(drawings, config.params)
        return drawings(0) if self.wrap is None else self.wrap(drawings(0), config.params, config.seed)


AnyMethod = Method[Any]


def local_epochs(config: RunConfig) -> int:
    """What a method's training takes that is the usual one."""
    return config.local_epochs


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

    Raises UserError if the model cannot be split: no Linear layer, or nothing but one, or `train` leaves nothing of either.
    """
    below = layout.names - layout.classifier
    if not layout.classifier:
        check_head_trains(layout)
        what = "no Linear layer, hence no classifier"
        raise UserError(f"model: this method splits it into body and classifier, but it has {what}")
    if not below:
        if layout.constants:
            raise UserError(
                "train: this method splits what trains into body and classifier; of the body, below the last Linear layer, "
                "no tensor trains"
            )
        what = "nothing below its only Linear layer"
        raise UserError(f"model: this method splits it into body and classifier, but it has {what}")
    return below


def check_head_trains(layout: Layout, *tensors: str) -> None:
    """Raise UserError if `train` leaves out any of the last Linear layer's tensors, or of these of them (`weight`, `bias`)."""
    lacking = sorted(name for name in layout.constant_head if not tensors or name.rpartition(".")[2] in tensors)
    if lacking:
        raise UserError(
            f"train: this method needs the last Linear layer{_tensors_said(tensors)} among what trains; the key leaves out "
            f"{listed(lacking)}"
        )


def _tensors_said(tensors: tuple[str, ...]) -> str:
    return f"'s {' and '.join(tensors)}" if tensors else ""


def all_where_features_are(layout: Layout, params: HasStatistics) -> frozenset[str]:
    """What `all_but_local_statistics` says, of a model that has features: a last Linear layer and something below it.

    Raises UserError if it has not.
    """
    all_but_classifier(layout)
    return all_but_local_statistics(layout, params)
