"""The registration of a method, and the usual choices of the tensors that travel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from fl_app import gradient_checkpointing, metrics, rng, stopping, tasks, trainable_tensors
from fl_app.config import RunConfig
from fl_app.contents import Effects
from fl_app.errors import MethodError, UserError, listed
from fl_app.figures import Figure, Scalars
from fl_app.layout import Layout, Model
from fl_app.model_names import ModelNames
from fl_app.server.run_folder import RunFolder
from fl_app.weight_files import stamps_of
from strategies.base import earlier, handed_on, hooks
from strategies.base.declared import Exported, Submodel
from strategies.base.local_update import LocalUpdate, tested_by
from strategies.base.needs import FEATURES, Need, refuse
from strategies.base.strategy import PersonalizedStrategy
from strategies.engine import late, private
from strategies.engine.steps import server_optimizer

if TYPE_CHECKING:
    from torch import nn

NONE = "–"
Group = Literal[
    "Nothing",
    "One global model for all",
    "A global model and a personal one",
    "A part of the model",
    "Parameters among similar clients",
    "Several global models",
]


@dataclass(frozen=True)
class Overview:
    """A method's costs, and when to use it. The defaults are FedAvg's.

    Sizes are bytes at the parameters' defaults, in the letters of docs/methods/index.md. group: what the clients share;
    methods of one group stand together. use: when to use the method. travels: up and down, per client and round.
    epochs: of training per round; E is `local-epochs`. unseen: what a client that never trains gets. stays: what never
    leaves a client. server, disk: what the server keeps, and what each client keeps.
    """

    group: Group
    use: str
    travels: str = "model both ways"
    epochs: str = "E"
    unseen: str = "global model"
    stays: str = NONE
    server: str = NONE
    disk: str = NONE


P = TypeVar("P")


@dataclass(frozen=True)
class ModelFactory:
    """Builds the run's model several times: `factory(k)` is the k-th drawing. Each has different initial weights.

    `factory(0)` is the run's model.

    - `inputs`: shape of a sample: channels, height and width of an image.
    - `seed`: the run's seed.
    """

    make: Callable[[int], nn.Module]
    inputs: tuple[int, ...]
    seed: int

    def __call__(self, k: int) -> nn.Module:
        """Build the k-th drawing, from 0."""
        return self.make(k)


@dataclass(frozen=True)
class Method(Generic[P]):
    """A method: its two halves, its parameters, and the tensors that travel.

    - `name`: the method's name, and the name of its parameter table.
    - `params`: the dataclass of its parameters.
    - `strategy`, `local_update`: the classes of its server half and its client half.
    - `shared(layout, params)`: returns the names of the tensors that travel. Raises UserError for a model that does not
      fit.
    - `wrap(module, params, seed)`: returns the network to train in place of the run's model.
    - `compose(factory, params)`: the same, for a network made of several models from the factory, or of more than
      the model.
    - `side_by_side(params)`: the number of models from the factory, if `compose` puts them side by side and a client trains
      the one that it chooses (`components.chosen_of`). 0: it composes another network.
    - `exported`: how the models leave the run, if the network is not the user's.
    - `submodel`: the part of the travelling tensors that each client holds, if not all.
    - `reports`: numbers that `upload` adds to its metrics. A `Metric` declares how the round's record, trackers and
      reports use the number. A name alone keeps the number in the clients' entries. The server drops other numbers,
      except those that figures draw.
    - `tested`: a sentence that names the models tested before and after training, or a function of the parameters that returns
      it. "" if training starts from and ends with these models: otherwise the difference between the two figures is not the
      effect of local training. Default for a user's method: what follows from `keep_personal` and `personal` of the client half.
    - `local_from_file`: whether tensors that do not travel start from `initial-weights`, if that key is set. If not,
      they start from the seed.
    - `figures`: figures that a report draws of the method's records.
    - `needs`: what the method needs of the model's classifier (strategies/base/needs.py), or a function of the parameters
      that returns it. Other models are refused before the run starts.
    - `needs_classes`: the method is for classification; other tasks are refused.
    - `needs_whole`: the key `share` is refused, because the method's arrays are as long as the trained model, or
      because clients keep nothing.
    - `needs_all_layers`: why a method with `compose` refuses the keys `train` and `share`. "": it trains a larger network.
    - `dp_epochs(config)`: returns the epochs of plain gradient steps that a client takes in a round. It declares that
      clients use their records in no other way, so that the method can run with `dp-epsilon`.
    - `needs_all`: why the server needs all clients' facts about their data before the first round (key `discover`). "":
      it does not.
    - `sums`: the server needs only means of clients' models over groups, so that the method can run private.
    - `not_private`: why a method without `sums` cannot run private.
    - `global_beside_personal`: all clients receive one global model, and use personal models that differ from it. The
      key `evaluate-global` then measures the received model too.
    - `overview`: a built-in method's line in the table of all methods.
    """

    name: str
    params: type[P]
    strategy: type[PersonalizedStrategy[P]]
    local_update: type[LocalUpdate[P]]
    shared: Callable[[Layout, P], frozenset[str]]
    wrap: Callable[[nn.Module, P, int], nn.Module] | None = None
    compose: Callable[[ModelFactory, P], nn.Module] | None = None
    side_by_side: Callable[[P], int] | None = None
    exported: Exported = Exported()
    submodel: Submodel | None = None
    reports: tuple[str | metrics.Metric, ...] = ()
    tested: str | Callable[[P], str] = ""
    local_from_file: bool = True
    figures: tuple[Figure, ...] = ()
    needs: Need | Callable[[P], Need] = ""
    needs_classes: bool = False
    needs_whole: bool = False
    needs_all_layers: str = ""
    dp_epochs: Callable[[RunConfig], int] | None = None
    needs_all: str = ""
    sums: bool = False
    not_private: str = "its server works on single clients' models"
    global_beside_personal: bool = False
    overview: Overview | None = None

    def __post_init__(self) -> None:
        """Take what the client half says by earlier flags, and by what its hooks do."""
        for name, value in earlier.declarations_of(self.local_update).items():
            object.__setattr__(self, name, value)
        if not self.tested and self.overview is None:
            object.__setattr__(self, "tested", tested_by(self.local_update))

    def check(self, config: RunConfig) -> None:
        """Raise UserError if the method cannot do what the run asks, or if `stop-when` names a number that is not reported."""
        stopping.rule_of(config)
        if self.needs_classes and not tasks.of(config).has_classes:
            raise MethodError(key=f"method {config.method}", rule=f"it is for classes, and task {config.task} has none")
        if self.compose is not None:
            why = self.needs_all_layers or "trains all of a larger network, made around the model"
            instead = "; the model's own code can keep tensors from training (requires_grad = False)"
            for name, patterns, way in (("train", config.train, instead), ("share", config.share, "")):
                if patterns:
                    way = "" if self.needs_all_layers else way
                    raise MethodError(
                        key=name, rule=f"method {config.method} {why}; leave it unset{way}", value=patterns
                    )
            if config.gradient_checkpointing and not self.needs_all_layers:
                rule = f"method {config.method} trains a larger network, made around the model; leave it false"
                raise MethodError(key="gradient-checkpointing", rule=rule, value=True)
        if taken := metrics.taken_names(metrics.declared(self.reports), tasks.measured(config)):
            raise MethodError(
                key=f"method {config.method}",
                rule=f"reports: names must differ, and a record must not use them otherwise, got {', '.join(taken)}",
            )
        if self.needs_whole and config.share:
            raise MethodError(
                key=f"method {config.method}",
                rule="it works on all parameters that train; choose them with train, and leave share unset",
                value=config.share,
            )
        able = ("none", *sorted(self.strategy.means.rules))
        if config.robust not in able:
            what = "has no mean over clients that it could replace" if len(able) == 1 else f"can do {', '.join(able)}"
            raise MethodError(key="robust", rule=f"method {config.method} {what}", value=config.robust)
        if config.server_optimizer != "none" and not server_optimizer.fits(self.strategy):
            raise MethodError(
                key="server-optimizer",
                rule=f"method {config.method} sets no mean global model that it could move",
                value=config.server_optimizer,
            )
        if config.evaluate_global and not self.global_beside_personal:
            raise MethodError(
                key="evaluate-global",
                rule=f"method {config.method} has no global model beside its clients' personal models; leave it off",
            )
        if config.evaluate_global and config.private:
            raise MethodError(
                key="evaluate-global",
                rule="the server of a private run would learn how a model that it knows does on each client's "
                "test data; leave it off",
            )
        if config.evaluate_global and not config.report_accuracy:
            raise MethodError(
                key="evaluate-global", rule="clients send no metrics with report-accuracy = false; leave it off"
            )
        late.check(config, self.strategy)
        if config.private:
            private.check(config, self.strategy, "" if self.sums else self.not_private)
        if config.dp_epsilon and self.dp_epochs_of(config) and config.finetune_epochs:
            raise MethodError(key="dp-epsilon", rule="finetune-epochs would use records outside the budget; leave it 0")

    def reports_counts(self, config: RunConfig) -> bool:
        """Return whether clients report their sample counts: never with `dp-epsilon`, because a record changes them.

        In a private run they do only if the server must bound the counts (`max-size-weight`), and weights depend on them.
        """
        if config.dp_epsilon:
            return False
        return not config.private or (config.max_size_weight > 0 and private.weighs_by_size(self.strategy, config))

    def own_weight(self, config: RunConfig) -> Callable[[float], float]:
        """Return a function from a client's sample count to its weight in a private run's sums, in (0, 1]."""
        return functools.partial(private.own_weight, self.strategy, config)

    def dp_epochs_of(self, config: RunConfig) -> int:
        """Return the epochs of noisy steps that a client takes in a round.

        Raises UserError if the method cannot run with `dp-epsilon`.
        """
        if self.dp_epochs is None:
            raise MethodError(
                key="dp-epsilon",
                rule=f"method {config.method} cannot run with differential privacy: its clients use their "
                "records for more than plain gradient steps",
            )
        return self.dp_epochs(config)

    def travelling(self, config: RunConfig, layout: Layout) -> frozenset[str]:
        """Return the names of the tensors that travel. Raises UserError for a model, or for patterns, that the method
        cannot use.
        """
        if config.dp_epsilon and layout.b:
            raise MethodError(
                key="dp-epsilon",
                rule=f"model {config.model} has statistics of whole batches (BatchNorm), which no noise "
                "covers; take norm = group, or another model",
            )
        if self.compose is None:
            refuse(layout, self.need(config))
        shared = hooks.tensor_names(config.method, self.shared(layout, config.params), layout.names)
        names = trainable_tensors.travelling(config, layout, shared)
        if config.keep_uploads and not names:
            raise MethodError(
                key="keep-uploads",
                rule=f"method {config.method} uploads no parameters; leave it empty",
                value=config.keep_uploads,
            )
        return names

    def need(self, config: RunConfig) -> Need:
        """Return what the method needs of the model's classifier. Raises UserError for an unknown word."""
        need = self.needs(config.params) if callable(self.needs) else self.needs
        if need not in get_args(Need):
            raise MethodError(
                key=f"method {config.method}", rule=f"needs: must be one of {', '.join(get_args(Need)[1:])}", value=need
            )
        return need

    @property
    def recorded(self) -> tuple[metrics.Metric, ...]:
        """The method's own numbers that clients may report: those that its client half declares, and those that figures draw."""
        own = metrics.declared(self.reports)
        drawn = {figure.record for figure in self.figures if isinstance(figure, Scalars)}
        return (*own, *metrics.declared(sorted(drawn - {metric.name for metric in own})))

    @property
    def drawn(self) -> tuple[Figure, ...]:
        """The figures that a report draws of the method's records: `figures`, and the pictures of the numbers that
        clients report, those of every method too.
        """
        reported = (*metrics.declared(self.reports), *metrics.OF_EVERY_METHOD)
        own = [metric.figure for metric in reported]
        return (*self.figures, *(figure for figure in own if figure is not None))

    def tested_in(self, config: RunConfig) -> str:
        """Return the sentence that names the models tested before and after training, "" if none is needed."""
        return self.tested(config.params) if callable(self.tested) else self.tested

    def server(
        self, config: RunConfig, layout: Layout, initial: Model, shared: frozenset[str], folder: RunFolder
    ) -> PersonalizedStrategy[P]:
        """Return a server half for a run.

        layout, initial: those of the trained network. shared: names of the tensors that travel.
        """
        half = self.strategy(config, config.params, layout, initial, shared, folder)
        half.submodel, half.form_of_exports, half.sender = self.submodel, self.exported, self.local_update
        half.reports = metrics.Reports(self.recorded)
        return half

    def network(
        self,
        config: RunConfig,
        *,
        in_channels: int,
        num_classes: int,
        image_size: int,
        input_shape: tuple[int, ...] = (),
        initial_weights: str = "",
        told: Callable[[str], None] = lambda line: None,
        names: ModelNames | None = None,
        tried: bool = False,
    ) -> nn.Module:
        """Build the network that the method trains, with initial weights from the seed.

        `initial_weights` is a file or folder with the initial weights of the run's model, before the method wraps it. `told` takes
        a line about the tensors that a file with only a part of them gives (`initial-weights-partial`). `names` are those
        of the data, with which the file's card is compared; None: they are not compared. `tried`: the run's server has tried the
        model in training mode.
        Raises UserError if it is given for a method that starts from several models.
        """
        import torch

        from fl_app import models, weights

        shape = input_shape or (in_channels, image_size, image_size)
        file = (initial_weights, stamps_of(Path(initial_weights)), names) if initial_weights else None
        # neither the number of clients nor the texts of all keys are known everywhere
        same = replace(config, num_clients=0, resolved={}, defaults={})
        wanted = self.name, same, (in_channels, num_classes, image_size, shape), file
        if (left := handed_on.taken(wanted)) is not None:
            module, lines = left
            for line in lines:
                told(line)
            return module
        said: list[str] = []

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
                classifier=config.classifier,
                tried=tried,
            )
            if self.wrap is not None or self.compose is not None:
                refuse(Layout.of(module), self.need(config))
            if initial_weights:
                if k:
                    raise MethodError(
                        key="initial-weights",
                        rule=f"{self.name} starts from several models, which one file would make equal",
                    )
                weights.load_initial(
                    module,
                    initial_weights,
                    partial=config.initial_weights_partial,
                    trains=trainable_tensors.trained(module, config.train),
                    told=said.append,
                    names=names,
                    example=torch.zeros((2, *shape), dtype=getattr(torch, tasks.of(config).input_dtype)),
                )
            return module

        module = self.around(ModelFactory(drawn, shape, config.seed), config)
        if changed := Effects.of(module).changed:
            attributes = listed(sorted(changed))
            said.append(
                f"model {config.model}: a pass changes {attributes}; every message starts with their first values"
            )
        if config.train:
            trainable_tensors.freeze(module, config.train, config.frozen_dtype)
        if config.gradient_checkpointing:
            gradient_checkpointing.enable(module, config.model)
        handed_on.made(module, wanted, said)
        for line in said:
            told(line)
        return module

    def around(self, factory: ModelFactory, config: RunConfig) -> nn.Module:
        """Build the network that the method trains."""
        if self.compose is not None:
            return hooks.network(config.method, "compose", self.compose(factory, config.params))
        if self.wrap is None:
            return factory(0)
        return hooks.network(config.method, "wrap", self.wrap(factory(0), config.params, config.seed))


AnyMethod = Method[Any]


def local_epochs(config: RunConfig) -> int:
    """Return `local-epochs`: the `dp_epochs` of a method with FedAvg's local training."""
    return config.local_epochs


@dataclass(frozen=True)
class InEpochs:
    """Parameters of a method whose parts train for epochs in turn."""

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for `local-steps`."""
        if config.local_steps:
            rule = f"method {config.method} trains its parts for epochs in turn; leave it 0"
            yield UserError(key="local-steps", rule=rule, value=config.local_steps)


def all_tensors(layout: Layout, params: object) -> frozenset[str]:
    """Return the names of all tensors: all travel."""
    return layout.names


def no_tensors(layout: Layout, params: object) -> frozenset[str]:
    """Return no names: nothing travels."""
    return frozenset()


def all_but_local_statistics(layout: Layout, params: Any) -> frozenset[str]:
    """Return the names of all tensors, without BatchNorm's statistics if `batchnorm-statistics` is "local"."""
    if params.batchnorm_statistics == "local":
        return layout.names - {slot.name for slot in layout.buffers}
    return layout.names


def all_where_features_are(layout: Layout, params: Any) -> frozenset[str]:
    """Return the names of `all_but_local_statistics`, for a model with features. Raises UserError for any other model."""
    refuse(layout, FEATURES)
    return all_but_local_statistics(layout, params)
