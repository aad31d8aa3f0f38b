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
        self._tuning = False
        self.indices = torch.zeros(0, dtype=torch.int64, device=self.device)
        # the task's loss of the current batch, if an objective asked for it
        self._reported: Tensor | None = None
        self._plain: SGD | None = None
        self._epoch_loss, self._counted = torch.zeros((), device=self.device), 0

    @property
    def learning_rate(self) -> float:
        """This round's learning rate; from `begin_finetuning` on that of fine-tuning."""
        if self._tuning:
            return self.config.tuning_rate
        return self.config.learning_rate * self.config.rate_factor(self.round)

    def begin_finetuning(self) -> None:
        """Train at `finetune-learning-rate` from here on, whatever loop of a method's own asks for the learning rate."""
        self._tuning = True

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
        optimizer, learning_rate = self.optimizer(self.weights, fixed=self.flat.freeze(frozen)), self.learning_rate
        # an epoch has one batch at least: as many epochs as batches are enough
        for x, y in self.batches(max_batches or epochs, purpose, max_batches):
            differentiate(x, y)
            if correction is not None:
                with torch.no_grad():
                    correction(self.weights, self.gradient)
            optimizer.step(self.gradient, learning_rate)
            self.steps += 1
        trained = self.finish()
        # statistics of frozen layers stay too
        if isinstance(frozen, frozenset) and frozen:
            trained = self.layout.put(trained, self.layout.take(start, frozen), frozen)
        return trained

    def alternate(self, start: Model, sides: Mapping[str, NDArray[np.bool_]], *, epochs: int | None = None) -> Model:
        """Run local SGD on sides of the parameters in turn, an epoch each, and return the trained model.

        sides: the parameters that are frozen, bool [d] in named_parameters order, by the purpose that names the side's random
        stream. Momentum is a side's own, over all its epochs. epochs: on every side; default local-epochs.
        """
        self.load(start)
        self.train_mode()
        self.steps = self.epoch = 0
        parameters = list(self.module.parameters())
        learning_rate = self.learning_rate
        optimizers, differentiated = {}, {}
        for purpose, frozen in sides.items():
            optimizers[purpose] = self.optimizer(self.weights, fixed=self.flat.freeze(frozen))
            differentiated[purpose] = [parameter.requires_grad for parameter in parameters]
        epochs = self.config.local_epochs if epochs is None else epochs
        for purpose, batch in self.data.alternating_epochs(epochs, sides):
            if batch.first:
                for parameter, needed in zip(parameters, differentiated[purpose], strict=True):
                    parameter.requires_grad_(needed)
            x, y = self.begin_batch(batch)
            self.differentiate(x, y)
            optimizers[purpose].step(self.gradient, learning_rate)
            self.steps += 1
        self.check_loss()
        return self.finish()

    def finish(self) -> Model:
        """End a training: nothing is frozen any more. Returns the trained model."""
        self.flat.freeze(frozenset())
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
            yield self.begin_batch(batch)
        self.check_loss()

    def train_mode(self) -> None:
        """Put the module into training mode, but for BatchNorm whose statistics are frozen."""
        self.module.train()
        for layer in self._frozen_batchnorms:
            layer.eval()

    def begin_batch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's (x, y), noting its `indices`; an epoch's first starts the mean loss anew."""
        if batch.first:
            self._epoch_loss, self._counted = torch.zeros((), device=self.device), 0
            self.epoch += 1
        self.indices = batch.indices
        return batch.x, batch.y

    def check_loss(self) -> None:
        """Raise UserError if the last epoch's mean training loss is not finite, or larger than the server takes."""
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
        # without a gradient: everything that the user's model trains is frozen
        if value.requires_grad:
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
            fixed = self.flat.freeze(frozenset())
            decay, clip = self.config.weight_decay, self.config.clip_norm
            self._plain = SGD(self.weights, momentum=0, weight_decay=decay, fixed=fixed, clip_norm=clip)
        self._plain.step(self.gradient, self.learning_rate if learning_rate is None else learning_rate)
        self.steps += 1

    def optimizer(self, vector: Tensor, fixed: Tensor | None = None, part: slice = slice(None)) -> Optimizer:
        """Return the run's optimizer for a vector [d] on the device, or a part of it.

        fixed: bool [d], the parameters that do not change; default: those the user's model fixes.
        """
        if fixed is None:
            fixed = self.flat.freeze(frozenset())
        if fixed is not None:
            fixed = fixed[part]
        vector, config = vector[part], self.config
        if config.optimizer == "adamw":
            return AdamW(vector, weight_decay=config.weight_decay, fixed=fixed, clip_norm=config.clip_norm)
        return SGD(
            vector, momentum=config.momentum, weight_decay=config.weight_decay, fixed=fixed, clip_norm=config.clip_norm
        )

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the task's mean loss, a scalar; inside an objective this is what `last_loss` counts."""
        value = self.task.loss(logits.float(), y)
        self._reported = value.detach()
        return value
