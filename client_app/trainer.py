"""Local training and evaluation: a plain torch loop over the batches of client_app/batches.py, on the vectors of flat.py.

What a method may do with it is strategies.base.Trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from client_app.batches import Batch, Batches
from client_app.fisher import fisher
from client_app.flat import SGD, FlatModule
from client_app.measures import accuracy, features, loss_gradient
from client_app.turns import alternate
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError
from fl_app.layout import Model, Vector
from strategies.base import Correction, Objective


def resolve_device(name: str) -> torch.device:
    """Return the device a config asks for. Raises UserError if it is a GPU this machine does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {name} asked for, this machine has {torch.cuda.device_count()} usable GPUs")
    return device


class LocalTrainer:
    """Trains and evaluates one client's models (strategies.base.Trainer)."""

    def __init__(self, module: nn.Module, config: RunConfig, data: ClientData, round: int, client_id: int) -> None:
        torch.set_num_threads(config.client_threads)
        self.config, self.round, self.client_id = config, round, client_id
        self.device = resolve_device(config.device)
        self.flat = FlatModule(module, self.device)
        self.module, self.layout = self.flat.module, self.flat.layout
        self.weights, self.gradient, self.statistics = self.flat.weights, self.flat.gradient, self.flat.statistics
        self.load, self.read, self.tensor, self.vector = self.flat.load, self.flat.read, self.flat.tensor, self.flat.vector
        self._batchnorms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.data = Batches(
            config, data, self.device, round=round, client_id=client_id, avoid_single=bool(self._batchnorms),
            memory_format=self.flat.memory_format,
        )  # fmt: skip
        self.num_classes = data.info.num_classes
        self.steps = self.epoch = 0
        self.indices = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._reported: Tensor | None = None  # the task's loss of the current batch, if an objective asked for it
        self._plain: SGD | None = None
        self._epoch_loss, self._counted = torch.zeros((), device=self.device), 0

    @property
    def learning_rate(self) -> float:
        """This round's learning rate."""
        return self.config.learning_rate * self.config.learning_rate_decay ** (self.round - 1)

    @property
    def last_loss(self) -> float:
        """Mean training loss of the last epoch trained; NaN before."""
        return float(self._epoch_loss) / self._counted if self._counted else math.nan

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training samples per class, int64 [C]."""
        return np.bincount(self.data.train_labels.cpu().numpy(), minlength=self.num_classes)

    def train(
        self,
        start: Model,
        *,
        epochs: int | None = None,
        purpose: str = "train",
        objective: Objective | None = None,
        correction: Correction | None = None,
        frozen: frozenset[str] | NDArray[np.bool_] = frozenset(),
    ) -> Model:
        """Run local SGD and return the trained model; `last_loss` is the last epoch's mean training loss."""
        self.load(start)
        optimizer = self.optimizer(self.weights, still=self.flat.hold(frozen))
        for x, y in self.batches(epochs, purpose):
            self.differentiate(x, y, objective)
            if correction is not None:
                with torch.no_grad():
                    correction(self.weights, self.gradient)
            optimizer.step(self.gradient, self.learning_rate)
            self.steps += 1
        still = frozen if isinstance(frozen, frozenset) else frozenset()  # statistics of frozen layers too
        return self.layout.put(self.trained(), self.layout.take(start, still), still) if still else self.trained()

    def alternate(self, start: Model, sides: Mapping[str, NDArray[np.bool_]], *, epochs: int | None = None) -> Model:
        """Run local SGD on sides of the parameters in turn, an epoch each, and return the trained model."""
        return alternate(self, start, sides, self.config.local_epochs if epochs is None else epochs)

    def trained(self) -> Model:
        """End a training: nothing is frozen any more. Returns the model; raises UserError if its last loss is not finite."""
        self.flat.hold(frozenset())
        self.check_loss()
        return self.read()

    def batches(self, epochs: int | None = None, purpose: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (x, y) over shuffled epochs (default local-epochs), the module in training mode; `indices` says which samples.

        After the last one raises UserError if the last epoch's training loss is not finite.
        """
        self.module.train()
        self.steps = self.epoch = 0
        for batch in self.data.epochs(self.config.local_epochs if epochs is None else epochs, purpose):
            yield self.opened(batch)
        self.check_loss()

    def opened(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's (x, y), noting its `indices`; an epoch's first starts the mean loss anew."""
        if batch.first:
            self._epoch_loss, self._counted = torch.zeros((), device=self.device), 0
            self.epoch += 1
        self.indices = batch.indices
        return batch.x, batch.y

    def check_loss(self) -> None:
        """Raise UserError if the last epoch's mean training loss is not finite."""
        if self._counted and not math.isfinite(self.last_loss):
            raise UserError(f"training diverged: its loss is {self.last_loss} (learning-rate {self.learning_rate:g})")

    def samples(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return (x, y) of chosen training samples, nothing augmented."""
        return self.data.chosen(torch.from_numpy(np.asarray(indices, np.int64)).to(self.device))

    def differentiate(self, x: Tensor, y: Tensor, objective: Objective | None = None, *, counted: bool = True) -> Tensor:
        """Leave the gradient of the objective, by default the mean loss, in `gradient`; return its value, detached.

        counted: the batch counts in `last_loss`, with the task's loss where the objective computes it (`loss`). BatchNorm cannot
        normalise a single sample: such a batch uses its running statistics. Raises UserError if the objective is not a scalar.
        """
        self.gradient.zero_()
        alone = len(y) == 1 and self.module.training and bool(self._batchnorms)
        for layer in self._batchnorms if alone else []:
            layer.eval()
        self._reported = None
        value = cross_entropy(self.logits(self.module, x), y) if objective is None else objective(self.module, x, y)
        if not isinstance(value, Tensor) or value.ndim:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"objective: must return a scalar tensor, the batch's mean, got {got}")
        if value.requires_grad:  # not so when everything the user's model trains is frozen
            value.backward()  # type: ignore[no-untyped-call]
        for layer in self._batchnorms if alone else []:
            layer.train()
        value = value.detach()
        if counted:
            loss = value if self._reported is None else torch.where(value.isfinite(), self._reported, value)
            self._epoch_loss += loss * len(y)
            self._counted += len(y)
        return value

    def step(self, learning_rate: float | None = None) -> None:
        """One gradient step on `weights`, with weight decay and without momentum; default: this round's learning rate."""
        if self._plain is None:
            still = self.flat.hold(frozenset())
            self._plain = SGD(self.weights, momentum=0, weight_decay=self.config.weight_decay, still=still)
        self._plain.step(self.gradient, self.learning_rate if learning_rate is None else learning_rate)
        self.steps += 1

    def optimizer(self, vector: Tensor, still: Tensor | None = None) -> SGD:
        """Return the run's optimizer for a vector [d] on the device.

        still: bool [d], what must not move; default: what the user's model holds fixed.
        """
        still = self.flat.hold(frozenset()) if still is None else still
        return SGD(vector, momentum=self.config.momentum, weight_decay=self.config.weight_decay, still=still)

    def network(self, model: Model) -> nn.Module:
        """Return a second network with a model's values: evaluation mode, without gradients."""
        return self.flat.network(model)

    def classifier(self, module: nn.Module | None = None) -> nn.Linear:
        """Return a module's last Linear layer. Raises UserError if it has none."""
        linear = [m for m in (self.module if module is None else module).modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise UserError(f"model: {self.config.model} has no Linear layer, whose input the features are")
        return linear[-1]

    def logits(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return logits float32 [n, C], computed in the run's precision."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            logits: Tensor = module(x)
        return logits.float()

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features float32 [n, f], logits float32 [n, C]); features: the input of the last Linear layer."""
        seen: list[Tensor] = []
        hook = self.classifier(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self.logits(module, x)
        finally:
            hook.remove()
        return seen[-1].flatten(1).float(), logits

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy, a scalar; inside an objective this is what `last_loss` counts."""
        value = cross_entropy(logits.float(), y)
        self._reported = value.detach()
        return value

    def features(self, model: Model) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return (features float32 [n, f], labels int64 [n]) of all training data: evaluation mode, nothing augmented."""
        self.load(model)
        self.module.eval()
        return features(self)

    def fisher(self, model: Model, samples: int = 0) -> Vector:
        """Return the mean over training samples of the squared gradient of each one's loss, float32 [d]."""
        self.load(model)
        self.module.eval()
        return fisher(self, samples)

    def loss_gradient(self, model: Model) -> Vector:
        """Return the gradient of the mean cross-entropy over all training data at `model`, float32 [d]."""
        self.load(model)
        self.module.eval()
        return loss_gradient(self)

    def evaluate(self, model: Model) -> tuple[float, float]:
        """Return (mean cross-entropy, accuracy) on the test data; NaN where there is none."""
        if not len(self.data.test_labels):
            return math.nan, math.nan
        self.load(model)
        self.module.eval()
        return accuracy(self)
