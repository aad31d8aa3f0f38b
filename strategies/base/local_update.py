"""The client half of a method: what it is given, and the hooks it may override.

torch is imported by the trainer alone: a client that was only asked for its properties never loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from fl_app.config import RunConfig
from fl_app.layout import Layout, Model, Vector
from fl_app.metrics import Metric
from fl_app.tasks import Task
from fl_app.wire import Upload

if TYPE_CHECKING:
    from torch import Tensor, nn

P = TypeVar("P")

Objective = Callable[["nn.Module", "Tensor", "Tensor"], "Tensor"]
"""(module, x, y) -> scalar: what a batch's gradient is taken of, instead of the task's mean loss."""

Correction = Callable[["Tensor", "Tensor"], None]
"""(weights [d], gradient [d]): changes a step's gradient in place, before weight decay and momentum; both in the device's order."""


OWN_MODEL = (
    "before and after training are of each client's own model, which what it receives does not change: a client's before is its "
    "after of the last time, at first that of the model received"
)
"""What `LocalUpdate.tested` tells of a method whose clients keep a second model, their personal one."""


class ClientState(Protocol):
    """What a client remembers between its rounds, on its own disk: named arrays."""

    arrays: MutableMapping[str, NDArray[Any]]


class SampleLosses(Protocol):
    """Losses of training samples, one by one."""

    def __call__(
        self, model: Model, samples: NDArray[np.int64] | None = None, module: nn.Module | None = None
    ) -> NDArray[np.float32]:
        """Return the losses of chosen training samples, default all, float32 [n]: evaluation mode, nothing augmented.

        module: what of the network gives the logits, default all of it.
        """
        ...


class Optimizer(Protocol):
    """Steps on one flat vector, with a momentum or moments of its own that start at zero."""

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector, as torch.optim.SGD or AdamW."""
        ...


class Trainer(Protocol):
    """Local training and evaluation on this client's data and device (client_app/trainer.py).

    `train` is enough for most methods. For a loop of one's own: `batches`, `differentiate`, `step`, on `weights` and
    `statistics`, which are the module's parameters and BatchNorm statistics as one vector each, in the device's order
    (`tensor` and `vector` convert). The module is in training mode while `train` or `batches` runs.
    """

    task: Task
    module: nn.Module
    weights: Tensor  # float32 [d]
    gradient: Tensor  # float32 [d]
    statistics: Tensor  # float32 [b]

    @property
    def steps(self) -> int:
        """Steps taken since the last `train` or `batches` began."""
        ...

    @property
    def epoch(self) -> int:
        """The current batch's epoch, from 1."""
        ...

    @property
    def learning_rate(self) -> float:
        """This round's learning rate."""
        ...

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training samples per class, int64 [C]."""
        ...

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
    ) -> Model:
        """Run local SGD from `start` and return the trained model.

        epochs: default local-epochs. purpose: names the random stream of the batches. frozen: tensors by name, or parameters
        by position, bool [d], that neither train nor change; no gradient, weight decay or momentum moves them. max_batches: how
        many to train on, over as many epochs as that takes; 0: all of those of `epochs`.
        """
        ...

    def alternate(self, start: Model, sides: Mapping[str, NDArray[np.bool_]], *, epochs: int | None = None) -> Model:
        """Run local SGD on sides of the parameters in turn, an epoch each, `epochs` times, and return the trained model.

        sides: which parameters are frozen, as in `train`, by the purpose that names the side's random stream. Each side has a
        momentum of its own over all its epochs; all of them move the statistics.
        """
        ...

    def load(self, model: Model) -> None:
        """Put a model's values into the module."""
        ...

    def read(self) -> Model:
        """Copy the module's values out."""
        ...

    def batches(self, epochs: int | None = None, purpose: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (x, y) over shuffled epochs (default local-epochs), as `train` sees them; `indices` says which samples.

        After the last one raises UserError if the last epoch's training loss is not finite.
        """
        ...

    @property
    def indices(self) -> Tensor:
        """Which training samples the current batch holds, int64 [n], on the device."""
        ...

    def samples(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return (x, y) of chosen training samples, nothing augmented."""
        ...

    def differentiate(
        self, x: Tensor, y: Tensor, objective: Objective | None = None, *, counted: bool = True
    ) -> Tensor:
        """Leave the gradient of the objective, by default the mean loss, in `gradient`; return its value, detached.

        counted: the batch counts in the training loss that the client reports. Raises UserError if it is not a scalar.
        """
        ...

    def step(self, learning_rate: float | None = None) -> None:
        """One gradient step on `weights`, with weight decay and without momentum; default: this round's learning rate."""
        ...

    def optimizer(self, vector: Tensor, *, part: slice = slice(None)) -> Optimizer:
        """Return the run's optimizer for a vector [d] on the device, or a part of it, of which it then takes gradients.

        What the user's model holds fixed does not move.
        """
        ...

    def tensor(self, vector: Vector) -> Tensor:
        """Return a float32 or bool [d] in named_parameters order as the device holds it."""
        ...

    def vector(self, tensor: Tensor) -> Vector:
        """Return a vector [d] on the device in named_parameters order; the inverse of `tensor`."""
        ...

    def network(self, model: Model) -> nn.Module:
        """Return a second network with a model's values: evaluation mode, without gradients."""
        ...

    def classifier(self, module: nn.Module | None = None) -> nn.Linear:
        """Return a module's last Linear layer. Raises UserError if it has none."""
        ...

    def logits(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return logits float32 [n, C], computed in the run's precision."""
        ...

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features float32 [n, f], logits float32 [n, C]); features: the input of the last Linear layer."""
        ...

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the task's mean loss, a scalar; inside an objective this is what is reported as the training loss."""
        ...

    def features(self, model: Model) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return (features float32 [n, f], labels int64 [n]) of all training data: evaluation mode, nothing augmented."""
        ...

    def fisher(self, model: Model, samples: int = 0) -> Vector:
        """Return the mean over training samples (0: all, else drawn, stream "fisher") of the squared gradient of a sample's loss.

        float32 [d]; evaluation mode, nothing augmented.
        """
        ...

    def loss_gradient(self, model: Model) -> Vector:
        """Return the gradient of the mean training loss at `model`, float32 [d]; evaluation mode, nothing augmented."""
        ...

    @property
    def sample_losses(self) -> SampleLosses:
        """Each training sample's loss at a model."""
        ...

    @property
    def leave_out(self) -> Callable[[NDArray[np.int64]], None]:
        """Make no batches of some training samples, int64 [m], any more."""
        ...

    def evaluate(self, model: Model) -> tuple[float, float]:
        """Return (loss, the task's headline metric) on the test data, NaN where there is none."""
        ...


@dataclass(frozen=True)
class RoundContext(Generic[P]):
    """What a client half is given besides models and state. initial: the run's model for parts that never travel."""

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
        """Generator for (seed, round, client id, purpose)."""
        return rng.generator(self.config.seed, purpose, self.round, self.client_id)

    @property
    def local(self) -> frozenset[str]:
        """Names of the tensors that stay on the client."""
        return self.layout.names - self.shared


class LocalUpdate(Generic[P]):
    """The client half of FedAvg, and of every method that only keeps some tensors local. Stateless; see RoundContext.

    reports: the numbers that `upload` adds to its metrics. A Metric says what the round's record, trackers and reports make of one;
    a name alone stands in the clients' entries. The server keeps no others, but for those that figures draw.
    """

    reports: ClassVar[tuple[str | Metric, ...]] = ()
    # what does not travel starts from `initial-weights`, if given; else from the seed
    local_from_file: ClassVar[bool] = True

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Return the model training starts from: received tensors, and the client's own where they do not travel."""
        if not ctx.local:
            return received
        own = ctx.initial()
        if "local.params" in state.arrays:
            kept = Model(state.arrays["local.params"], state.arrays["local.buffers"])
            own = ctx.layout.put(own, kept, ctx.local)
        return ctx.layout.put(own, received, ctx.shared)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Train locally, leave in `state` what the method keeps, and return the model to upload."""
        return ctx.trainer.train(start)

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[P]) -> None:
        """Store the tensors of the trained model that do not travel; called after `train`."""
        if ctx.local:
            kept = ctx.layout.take(after, ctx.local)
            state.arrays["local.params"], state.arrays["local.buffers"] = kept.params, kept.buffers

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Return the model the client would use: what is evaluated, given the merged or the trained one.

        That is the second model of a method that keeps one (`keep_personal`), as soon as the client has it.
        """
        if "personal.params" in state.arrays:
            return Model(state.arrays["personal.params"], state.arrays["personal.buffers"])
        return model

    def export(self, model: Model, state: ClientState, ctx: RoundContext[P]) -> Model:
        """Return a personal model as it is hashed and collected: as it is, or, where the method wraps the user's network, as that
        network (the strategy's `exported_layout`).
        """
        return model

    @classmethod
    def tested(cls, params: P) -> str:
        """Say which models are tested before and after training where `personal` makes others of those training starts from and
        ends with: two figures whose difference is not what local training adds. "": it does not.
        """
        return ""

    def keep_personal(self, model: Model, state: ClientState) -> None:
        """Store the client's second model, all tensors of it: from now on its personal one."""
        state.arrays["personal.params"], state.arrays["personal.buffers"] = model.params, model.buffers

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[P], epochs: int) -> Model:
        """Return what `epochs` more local epochs make of a model; evaluated and dropped (key `finetune-epochs`)."""
        return ctx.trainer.train(start, epochs=epochs, purpose="finetune")

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[P]) -> Upload:
        """Return what the server gets: the tensors that travel, and the method's extras."""
        return Upload(ctx.layout.take(after, ctx.shared), num_examples=ctx.num_samples)
