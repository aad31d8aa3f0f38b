"""The client half of a method: its hooks, their arguments, and the trainer.

Only the trainer imports torch. A client that is asked only for its properties never loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_origin

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from fl_app.config import RunConfig
from fl_app.layout import Layout, Model, Vector
from fl_app.tasks import Task
from fl_app.transport.wire import Upload
from strategies.base import attributes, hooks

if TYPE_CHECKING:
    from torch import Tensor, nn

P = TypeVar("P")

Objective = Callable[["nn.Module", "Tensor", "Tensor"], "Tensor"]
"""An objective: (module, x, y) -> scalar. Training takes its gradient on a batch, in place of that of the task's mean loss."""

Correction = Callable[["Tensor", "Tensor"], None]
"""A correction: (weights [d], gradient [d]) -> None, both in the device's order.

It changes a step's gradient in place, before weight decay and momentum.
"""


OWN_MODEL = (
    "before and after training, each client's own model is tested. Downloads do not change it: before a round it is as the "
    "client's last round left it, at first it is the received model"
)
"""The text of `Method.tested` for methods in which every client keeps a second, personal model."""
_BY_HOOK = "before and after training, the models that the method's `personal` returns are tested"


class ClientState(Protocol):
    """Named arrays that a client keeps on its own disk between its rounds."""

    arrays: MutableMapping[str, NDArray[Any]]


class Optimizer(Protocol):
    """An optimizer of one flat vector. Its momentum or moments start at zero."""

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector by one step, as torch.optim.SGD or AdamW does."""


class Trainer(Protocol):
    """Local training and evaluation on this client's data and device (client_app/trainer.py).

    `train` is enough for most methods. A method's own loop uses `batches`, `differentiate` and `step`. They work on
    `weights` and `statistics`: the module's parameters and BatchNorm statistics as one vector each, in the device's
    order. `tensor` and `vector` convert between this order and that of `named_parameters()`. The module is in training
    mode while `train` or `batches` runs.
    """

    task: Task
    module: nn.Module
    weights: Tensor  # float32 [d]
    gradient: Tensor  # float32 [d]
    statistics: Tensor  # float32 [b]

    @property
    def steps(self) -> int:
        """Number of steps since the last `train` or `batches` began."""

    @property
    def epoch(self) -> int:
        """The current batch's epoch, from 1."""

    @property
    def learning_rate(self) -> float:
        """This round's learning rate. Inside `LocalUpdate.finetune` it is the learning rate of fine-tuning."""

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training samples per class, int64 [C]."""

    def train(
        self,
        start: Model,
        *,
        epochs: int | None = None,
        purpose: str = "train",
        objective: Objective | None = None,
        correction: Correction | None = None,
        frozen: frozenset[str] | NDArray[np.bool_] = frozenset(),
        max_batches: int = 0,
        learning_rate: float | None = None,
    ) -> Model:
        """Train locally from `start` with the run's optimizer, and return the trained model.

        - `epochs`: default `local-epochs`.
        - `purpose`: names the random stream of the batches. A second training in the same round needs another name.
        - `objective`: a function in place of the task's mean loss, see `Objective`.
        - `correction`: a function that changes each step's gradient, see `Correction`.
        - `frozen`: tensors by name, or parameters by position, bool [d]. They neither train nor change: no gradient,
          weight decay or momentum moves them.
        - `max_batches`: number of batches, over as many epochs as they take. 0: all batches of `epochs`.
        - `learning_rate`: default this round's.
        """

    def alternate(self, start: Model, sides: Mapping[str, NDArray[np.bool_]], *, epochs: int | None = None) -> Model:
        """Train on sides of the parameters in turn, one epoch each, `epochs` times. Return the trained model.

        - `sides`: a side's name -> its frozen parameters, as in `train`. The name is the purpose of the side's random
          stream. Each side has its own momentum over all its epochs. All sides move the statistics.
        - `epochs`: epochs of each side. Default `local-epochs`.
        """

    def load(self, model: Model) -> None:
        """Copy a model's values into the module."""

    def read(self) -> Model:
        """Return a copy of the module's values."""

    def batches(self, epochs: int | None = None, purpose: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (x, y) over shuffled epochs, as `train` sees them. `indices` holds the current batch's samples.

        `epochs` defaults to `local-epochs`. Raises UserError after the last batch if the last epoch's training loss is
        not finite.
        """

    @property
    def indices(self) -> Tensor:
        """Positions of the current batch's training samples, int64 [n], on the device."""

    def samples(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return (x, y) of the chosen training samples, without augmentation."""

    def differentiate(
        self, x: Tensor, y: Tensor, objective: Objective | None = None, *, counted: bool = True
    ) -> Tensor:
        """Compute the objective's gradient on a batch and leave it in `gradient`. Return the objective's value, detached.

        - `objective`: default the task's mean loss.
        - `counted`: whether the batch counts in the training loss that the client reports.

        Raises UserError if the objective does not return a scalar.
        """

    def step(self, learning_rate: float | None = None) -> None:
        """Take one gradient step on `weights`, with weight decay and without momentum. Default: this round's learning rate."""

    def clip_factor(self, gradient: Tensor | NDArray[Any]) -> float:
        """Return the factor, in (0, 1], that scales a gradient of any shape down to a norm of `clip-norm`. Without the key: 1.

        Steps that a method takes without `step` and `optimizer` multiply their size by it.
        """

    def optimizer(self, vector: Tensor, *, part: slice = slice(None)) -> Optimizer:
        """Return the run's optimizer for a vector [d] on the device, or for a part of it. Its gradients are as long as that part.

        Parameters that the user's model holds fixed do not move.
        """

    def tensor(self, vector: Vector) -> Tensor:
        """Return a vector in `named_parameters()` order, float32 or bool [d], as a tensor in the device's order."""

    def vector(self, tensor: Tensor) -> Vector:
        """Return a tensor [d] in the device's order as a vector in `named_parameters()` order. The inverse of `tensor`."""

    def network(self, model: Model) -> nn.Module:
        """Return a second network with a model's values, in evaluation mode and without gradients."""

    def classifier(self, module: nn.Module | None = None) -> Any:
        """Return the part of a network, default `module`, that holds its classifier.

        Raises UserError if no single module does.
        """

    def logits(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return logits float32 [n, C], computed in the run's precision."""

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features float32 [n, f], logits float32 [n, C]). Features are the classifier's input."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the task's mean loss, a scalar. If an objective calls it, the client reports this loss as its training loss."""

    def features(self, model: Model) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return (features float32 [n, f], labels int64 [n]) of all training data, in evaluation mode and without augmentation."""

    def fisher(self, model: Model, samples: int = 0) -> Vector:
        """Return the mean over training samples of the squared gradient of each sample's loss, float32 [d].

        `samples`: the number of samples, drawn from the stream "fisher". 0: all samples. The module is in evaluation
        mode, and nothing is augmented.
        """

    def loss_gradient(self, model: Model) -> Vector:
        """Return the gradient of the mean training loss at `model`, float32 [d], in evaluation mode and without augmentation."""

    def sample_losses(
        self, model: Model, samples: NDArray[np.int64] | None = None, module: nn.Module | None = None
    ) -> NDArray[np.float32]:
        """Return the losses of training samples, float32 [n], in evaluation mode and without augmentation.

        - `samples`: positions of the samples, int64 [n]. Default: all samples.
        - `module`: the part of the network that returns the logits. Default: the whole network.
        """

    def leave_out(self, samples: NDArray[np.int64]) -> None:
        """Exclude training samples, int64 [m], from all later batches."""

    def evaluate(self, model: Model) -> tuple[float, float]:
        """Return (loss, the task's headline metric) on the test data. Both are NaN without test data."""


@dataclass(frozen=True)
class RoundContext(Generic[P]):
    """The arguments of a client half's hooks besides models and state.

    - `config`, `params`: the run's configuration and the method's parameters.
    - `round`: the round's number, from 1. `client_id`: the client's number, from 0.
    - `layout`: the layout of the whole model. `shared`: names of the tensors that travel.
    - `initial()`: returns the run's initial model, for tensors that never travel.
    - `trainer`: trains and evaluates on the client's data.
    - `num_samples`: number of training samples.
    - `extras`: the server's additional arrays by name (`download_extras` of the server half).
    """

    config: RunConfig
    params: P
    round: int
    client_id: int
    layout: Layout
    shared: frozenset[str]
    initial: Callable[[], Model]
    trainer: Trainer
    num_samples: int
    extras: Mapping[str, NDArray[Any]]

    def rng(self, purpose: str) -> np.random.Generator:
        """Return the generator for (seed, round, client id, purpose)."""
        return rng.generator(self.config.seed, purpose, self.round, self.client_id)

    @property
    def local(self) -> frozenset[str]:
        """Names of the tensors that stay on the client."""
        return self.layout.names - self.shared


class LocalUpdate(Generic[P]):
    """The client half of FedAvg, and of every method that only keeps some tensors local.

    The object has no state. `state` holds the arrays that a client keeps between rounds, and `ctx` is a `RoundContext`.
    A round calls `merge`, `train`, `keep_local` and `upload`. It evaluates the `personal` model before and after
    training.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let the hooks that the class overrides check what they return."""
        super().__init_subclass__(**keywords)
        hooks.checked(cls, LocalUpdate, hooks.CLIENT)

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Return the model that training starts from: the received tensors, and the client's own where they do not travel."""
        if not ctx.local:
            return received
        own = ctx.initial()
        if "local.params" in state.arrays:
            kept = Model(state.arrays["local.params"], state.arrays["local.buffers"])
            own = ctx.layout.put(own, kept, ctx.local)
        return ctx.layout.put(own, received, ctx.shared)

    def global_model(self, received: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Return the received global model as a whole (key `evaluate-global`), with the client's own tensors where they do
        not travel.
        """
        return LocalUpdate.merge(self, received, state, ctx)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Train locally and return the model to upload. Store in `state` the arrays that the method keeps."""
        return ctx.trainer.train(start)

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[P]) -> None:
        """Store the tensors of the trained model that do not travel. Called after `train`."""
        if ctx.local:
            kept = ctx.layout.take(after, ctx.local)
            state.arrays["local.params"], state.arrays["local.buffers"] = kept.params, kept.buffers

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Return the model that the client would use. This model is evaluated.

        `model` is the merged or the trained model. Default: the client's second model once `keep_personal` has stored
        one, else `model`.
        """
        if "personal.params" in state.arrays:
            return Model(state.arrays["personal.params"], state.arrays["personal.buffers"])
        return model

    def keep_personal(self, model: Model, state: ClientState) -> None:
        """Store all tensors of the client's second model. From then on it is the client's personal model."""
        state.arrays["personal.params"], state.arrays["personal.buffers"] = model.params, model.buffers

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[P], epochs: int) -> Model:
        """Return the model after `epochs` more local epochs. It is evaluated and dropped (key `finetune-epochs`)."""
        return ctx.trainer.train(start, epochs=epochs, purpose="finetune")

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[P]) -> Upload:
        """Return the message to the server: the tensors that travel, and the method's extra arrays and numbers.

        `before` is the model that training started from, `after` the trained model.
        """
        return Upload(ctx.layout.take(after, ctx.shared), num_examples=ctx.num_samples)


def tested_by(update: type[LocalUpdate[Any]]) -> str:
    """Return the sentence on the tested models that follows from a client half's hooks.

    It is "" if training starts from and ends with the tested models.
    """
    half: type = get_origin(update) or update
    own = [cls for cls in half.__mro__[:-1] if cls.__module__ != __name__ and issubclass(cls, LocalUpdate)]
    words = set[str]().union(*(attributes.words_in(function.__code__) for function in attributes.called_by(own)))
    if words & {"keep_personal", "personal.params"}:
        return OWN_MODEL
    return _BY_HOOK if any("personal" in vars(cls) for cls in own) else ""
