"""Local training and evaluation: a plain torch loop over the batches of batches.py, on the vectors of flat.py.

strategies.base.Trainer is the part that methods may use.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from client_app import at_once
from client_app.batches import Batch
from client_app.captured import Differentiate, Step, launched
from client_app.device_model import LoadedModel
from client_app.flat import SGD, Adam, FlatModule, set_mode
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError, diverged
from fl_app.layout import Model
from fl_app.metrics import MAX_NUMBER
from strategies.base import Correction, Objective, Optimizer


class LocalTrainer(LoadedModel):
    """Trains and evaluates one client's models (strategies.base.Trainer)."""

    def __init__(
        self, module: nn.Module | FlatModule, config: RunConfig, data: ClientData, round: int, client_id: int
    ) -> None:
        """module: as for LoadedModel."""
        super().__init__(module, config, data, round, client_id)
        self._steps = self._epoch = 0
        # whether a caller read them
        self._counters_read = False
        self._tuning = False
        self.indices = torch.zeros(0, dtype=torch.int64, device=self.device)
        # the task's loss of the current batch, if an objective asked for it
        self._reported: Tensor | None = None
        self._plain: SGD | None = None
        self._epoch_loss, self._counted = self.flat.epoch_loss, 0

    @property
    def steps(self) -> int:
        """Steps taken since the last `train` or `batches` began."""
        self._counters_read = True
        return self._steps

    @property
    def epoch(self) -> int:
        """The current batch's epoch, from 1."""
        self._counters_read = True
        return self._epoch

    @contextmanager
    def uncounted(self) -> Iterator[Callable[[], bool]]:
        """Restore the counters at the end.

        Yields a function that returns whether `steps` or `epoch` was read inside so far.
        """
        counted, reported, self._counters_read = self._counted, self._reported, False
        try:
            yield lambda: self._counters_read
        finally:
            self._counted, self._reported = counted, reported

    def count(self, samples: int) -> None:
        """Count a batch's samples as `differentiate` does."""
        self._counted += samples

    @property
    def learning_rate(self) -> float:
        """This round's learning rate; after `begin_finetuning`, that of fine-tuning."""
        if self._tuning:
            return self.config.tuning_rate
        return self.config.learning_rate * self.config.rate_factor(self.round)

    def begin_finetuning(self) -> None:
        """Train at `finetune-learning-rate` from here on, also in a method's own loops."""
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
        learning_rate: float | None = None,
        differentiate: Differentiate | None = None,
    ) -> Model:
        """Train locally and return the trained model. `last_loss` is then the last epoch's mean training loss.

        differentiate: replaces the objective's gradient.
        """
        rate = self.learning_rate if learning_rate is None else learning_rate
        self.load(start)
        optimizer = self.optimizer(self.weights, fixed=self.flat.freeze(frozen))
        own = differentiate or partial(self.differentiate, objective=objective)
        step = Step(self, own, correction, optimizer, rate)
        # the key under which a lane keeps the step, if every training of the run takes the same
        alike = objective is None and correction is None
        key = frozen if alike and isinstance(frozen, frozenset) else None
        take = launched(step, key) if differentiate is None else step
        # an epoch has at least one batch, so as many epochs as batches are enough
        for x, y in self._batches(max_batches or epochs, purpose, max_batches):
            take(x, y)
            self._steps += 1
        trained = self.finish()
        # statistics of frozen layers stay too
        if isinstance(frozen, frozenset) and frozen:
            trained = self.layout.put(trained, self.layout.take(start, frozen), frozen)
        return trained

    def alternate(self, start: Model, sides: Mapping[str, NDArray[np.bool_]], *, epochs: int | None = None) -> Model:
        """Run local SGD on sides of the parameters in turn, an epoch each, and return the trained model.

        sides: by the purpose that names the side's random stream, its frozen parameters, bool [d] in named_parameters
        order. Each side keeps its own momentum over all its epochs. epochs: on every side; default local-epochs.
        """
        self.load(start)
        self._say_own_loop()
        self.train_mode()
        self._steps = self._epoch = 0
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
            self._steps += 1
        at_once.pause()
        self.check_loss()
        return self.finish()

    def finish(self) -> Model:
        """End a training: unfreeze all parameters, and return the trained model."""
        self.flat.freeze(frozenset())
        return self.read()

    def batches(
        self, epochs: int | None = None, purpose: str = "train", max_batches: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (x, y) over shuffled epochs, the module in training mode. `indices` has the samples' positions.

        epochs: default local-epochs. max_batches: yield only the first ones; 0 means all. Raises UserError at the end
        if the last epoch's loss is not finite.
        """
        self._say_own_loop()
        return self._batches(epochs, purpose, max_batches)

    def _batches(self, epochs: int | None, purpose: str, max_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.train_mode()
        self._steps = self._epoch = 0
        if epochs is None:
            # an epoch has at least one batch, so as many epochs as steps are enough
            max_batches = max_batches or self.config.local_steps
            epochs = self.config.local_steps or self.config.local_epochs
        for batch in islice(self.data.epochs(epochs, purpose), max_batches or None):
            yield self.begin_batch(batch)
        at_once.pause()
        self.check_loss()

    def _say_own_loop(self) -> None:
        lane = at_once.current()
        if lane is not None:
            lane.lanes.say(
                f"clients-at-once: method {self.config.method} has its own training loop; its steps are taken one by one"
            )

    def train_mode(self) -> None:
        """Put the module into training mode, except BatchNorm layers with frozen statistics."""
        set_mode(self.module, training=True)
        for layer in self._frozen_batchnorms:
            layer.eval()

    def begin_batch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's (x, y), and set `indices`. An epoch's first batch resets the mean loss."""
        if batch.first:
            self._epoch_loss.zero_()
            self._counted = 0
            self._epoch += 1
        self.indices = batch.indices
        return batch.x, batch.y

    def check_loss(self) -> None:
        """Raise UserError if the last epoch's mean training loss is not finite, or larger than the server accepts."""
        largest = MAX_NUMBER if self.config.report_accuracy else sys.float_info.max
        if self._counted and not abs(self.last_loss) <= largest:
            raise diverged("loss", self.last_loss, self.learning_rate)

    def differentiate(
        self, x: Tensor, y: Tensor, objective: Objective | None = None, *, counted: bool = True
    ) -> Tensor:
        """Leave the gradient of the objective, by default the mean loss, in `gradient`. Return its value, detached.

        counted: the batch counts in `last_loss`, with the task's loss if the objective computes it (`loss`). BatchNorm
        cannot normalise a single sample, so a batch of one uses the running statistics. Raises UserError if the
        objective is not a scalar.
        """
        self.gradient.zero_()
        alone = len(y) == 1 and self.module.training and bool(self._batchnorms)
        for layer in self._batchnorms if alone else []:
            layer.eval()
        self._reported = None
        value = self.task.loss(self.logits(self.module, x), y) if objective is None else objective(self.module, x, y)
        if not isinstance(value, Tensor) or value.ndim:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(key="objective", rule=f"must return a scalar tensor, the batch's mean, got {got}")
        # there is no gradient if all trainable parameters of the user's model are frozen
        if value.requires_grad:
            self.backward(value)
        for layer in self._batchnorms if alone else []:
            layer.train()
        value = value.detach()
        if counted:
            loss = value if self._reported is None else torch.where(value.isfinite(), self._reported, value)
            self._epoch_loss += loss * len(y)
            self._counted += len(y)
        return value

    def step(self, learning_rate: float | None = None) -> None:
        """Take one gradient step on `weights`, with weight decay and without momentum.

        learning_rate: default this round's.
        """
        if self._plain is None:
            fixed = self.flat.freeze(frozenset())
            decay, clip = self.config.weight_decay, self.config.clip_norm
            self._plain = SGD(self.weights, momentum=0, weight_decay=decay, fixed=fixed, clip_norm=clip)
        self._plain.step(self.gradient, self.learning_rate if learning_rate is None else learning_rate)
        self._steps += 1

    def clip_factor(self, gradient: Tensor | NDArray[Any]) -> float:
        """Return the factor, in (0, 1], that scales a gradient of any shape down to a norm of `clip-norm`. Without the key: 1."""
        limit = self.config.clip_norm
        return min(1.0, limit / (float((gradient**2).sum()) ** 0.5 + 1e-6)) if limit else 1.0

    def optimizer(self, vector: Tensor, fixed: Tensor | None = None, part: slice = slice(None)) -> Optimizer:
        """Return the run's optimizer for a vector [d] on the device, or a part of it.

        fixed: bool [d], the parameters that do not change; default: those that the user's model fixes.
        """
        if fixed is None:
            fixed = self.flat.freeze(frozenset())
        if fixed is not None:
            fixed = fixed[part]
        vector, config = vector[part], self.config
        decay, clip = config.weight_decay, config.clip_norm
        if config.optimizer != "sgd":
            decoupled = config.optimizer == "adamw"
            return Adam(vector, weight_decay=decay, decoupled=decoupled, fixed=fixed, clip_norm=clip)
        return SGD(vector, momentum=config.momentum, weight_decay=decay, fixed=fixed, clip_norm=clip)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the task's mean loss, a scalar. Inside an objective, this value counts in `last_loss`."""
        value = self.task.loss(logits.float(), y)
        self._reported = value.detach()
        return value
