"""Local training and evaluation: a plain torch loop over the batches of client_app/batches.py, on the vectors of flat.py.

What a method may do with it is strategies.base.Trainer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from client_app.batches import Batch
from client_app.device_model import LoadedModel
from client_app.flat import SGD, AdamW
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError, diverged
from fl_app.layout import Model
from fl_app.metrics import MAX_NUMBER
from strategies.base import Correction, Objective, Optimizer


class LocalTrainer(LoadedModel):
    """Trains and evaluates one client's models (strategies.base.Trainer)."""

    def __init__(self, module: nn.Module, config: RunConfig, data: ClientData, round: int, client_id: int) -> None:
        super().__init__(module, config, data, round, client_id)
        self.steps = self.epoch = 0
        self.indices = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._reported: Tensor | None = None  # the task's loss of the current batch, if an objective asked for it
        self._plain: SGD | None = None
        self._epoch_loss, self._counted = torch.zeros((), device=self.device), 0

    @property
    def learning_rate(self) -> float:
        """This round's learning rate."""
        return self.config.learning_rate * self.config.rate_factor(self.round)

    @property
    def last_loss(self) -> float:
        """Mean training loss of the last epoch trained; NaN before."""
        return float(self._epoch_loss) / self._counted if self._counted else math.nan

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
        differentiate: Callable[[Tensor, Tensor], object] | None = None,
    ) -> Model:
        """Train locally and return the trained model; `last_loss` is the last epoch's mean training loss.

        differentiate: (x, y) of a batch; leaves what a step goes along in `gradient`, in place of the objective's gradient.
        """
        if differentiate is None:
            differentiate = partial(self.differentiate, objective=objective)
        self.load(start)
        optimizer = self.optimizer(self.weights, still=self.flat.hold(frozen))
        for x, y in self.batches(max_batches or epochs, purpose, max_batches):  # an epoch has one at least
            differentiate(x, y)
            if correction is not None:
                with torch.no_grad():
                    correction(self.weights, self.gradient)
            optimizer.step(self.gradient, self.learning_rate)
            self.steps += 1
        still = frozen if isinstance(frozen, frozenset) else frozenset()  # statistics of frozen layers too
        return self.layout.put(self.trained(), self.layout.take(start, still), still) if still else self.trained()

    def alternate(self, start: Model, sides: Mapping[str, NDArray[np.bool_]], *, epochs: int | None = None) -> Model:
        """Run local SGD on sides of the parameters in turn, an epoch each, and return the trained model.

        sides: the parameters that are frozen, bool [d] in named_parameters order, by the purpose that names the side's random
        stream. Momentum is a side's own, over all its epochs. epochs: on every side; default local-epochs.
        """
        self.load(start)
        self.train_mode()
        self.steps = self.epoch = 0
        parameters = list(self.module.parameters())
        optimizers, differentiated = {}, {}
        for purpose, frozen in sides.items():
            optimizers[purpose] = self.optimizer(self.weights, still=self.flat.hold(frozen))
            differentiated[purpose] = [parameter.requires_grad for parameter in parameters]
        epochs = self.config.local_epochs if epochs is None else epochs
        for purpose, batch in self.data.turns(epochs, sides):
            if batch.first:
                for parameter, needed in zip(parameters, differentiated[purpose], strict=True):
                    parameter.requires_grad_(needed)
            x, y = self.opened(batch)
            self.differentiate(x, y)
            optimizers[purpose].step(self.gradient, self.learning_rate)
            self.steps += 1
        self.check_loss()
        return self.trained()

    def trained(self) -> Model:
        """End a training: nothing is frozen any more. Returns the model."""
        self.flat.hold(frozenset())
        return self.read()

    def batches(
        self, epochs: int | None = None, purpose: str = "train", max_batches: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (x, y) over shuffled epochs (default local-epochs), the module in training mode; `indices` says which samples.

        max_batches: the first of them alone; 0: all. After the last raises UserError if the last epoch's loss is not finite.
        """
        self.train_mode()
        self.steps = self.epoch = 0
        batches = self.data.epochs(self.config.local_epochs if epochs is None else epochs, purpose)
        for batch in islice(batches, max_batches or None):
            yield self.opened(batch)
        self.check_loss()

    def train_mode(self) -> None:
        """Put the module into training mode, but for BatchNorm whose statistics are frozen."""
        self.module.train()
        for layer in self._fixed:
            layer.eval()

    def opened(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's (x, y), noting its `indices`; an epoch's first starts the mean loss anew."""
        if batch.first:
            self._epoch_loss, self._counted = torch.zeros((), device=self.device), 0
            self.epoch += 1
        self.indices = batch.indices
        return batch.x, batch.y

    def check_loss(self) -> None:
        """Raise UserError if the last epoch's mean training loss is not finite, or larger than the server takes if it is told."""
        largest = MAX_NUMBER if self.config.report_accuracy else sys.float_info.max
        if self._counted and not abs(self.last_loss) <= largest:
            raise diverged("loss", self.last_loss, self.learning_rate)

    def differentiate(
        self, x: Tensor, y: Tensor, objective: Objective | None = None, *, counted: bool = True
    ) -> Tensor:
        """Leave the gradient of the objective, by default the mean loss, in `gradient`; return its value, detached.

        counted: the batch counts in `last_loss`, with the task's loss where the objective computes it (`loss`). BatchNorm cannot
        normalise a single sample: such a batch uses its running statistics. Raises UserError if the objective is not a scalar.
        """
        self.gradient.zero_()
        alone = len(y) == 1 and self.module.training and bool(self._batchnorms)
        for layer in self._batchnorms if alone else []:
            layer.eval()
        self._reported = None
        value = self.task.loss(self.logits(self.module, x), y) if objective is None else objective(self.module, x, y)
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
            decay, clip = self.config.weight_decay, self.config.clip_norm
            self._plain = SGD(self.weights, momentum=0, weight_decay=decay, still=still, clip_norm=clip)
        self._plain.step(self.gradient, self.learning_rate if learning_rate is None else learning_rate)
        self.steps += 1

    def optimizer(self, vector: Tensor, still: Tensor | None = None, part: slice = slice(None)) -> Optimizer:
        """Return the run's optimizer for a vector [d] on the device, or a part of it.

        still: bool [d], what must not move; default: what the user's model holds fixed.
        """
        still = self.flat.hold(frozenset()) if still is None else still
        still = still if still is None else still[part]
        vector, config = vector[part], self.config
        if config.optimizer == "adamw":
            return AdamW(vector, weight_decay=config.weight_decay, still=still, clip_norm=config.clip_norm)
        return SGD(
            vector, momentum=config.momentum, weight_decay=config.weight_decay, still=still, clip_norm=config.clip_norm
        )

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the task's mean loss, a scalar; inside an objective this is what `last_loss` counts."""
        value = self.task.loss(logits.float(), y)
        self._reported = value.detach()
        return value
