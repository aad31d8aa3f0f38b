"""One client's module and data on its device: local training, a plain torch loop, and the measurements.

strategies.base.Trainer is the part that methods may use. The batches are those of batches.py, the vectors of flat.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from client_app import at_once
from client_app.batches import Batch, Batches, Part
from client_app.fisher import fisher_diagonal
from client_app.flat import SGD, FlatModule, optimizer_of, set_mode
from fl_app import gradient_checkpointing, rng, tasks
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError, diverged
from fl_app.layout import Model, Vector
from fl_app.metrics import MAX_NUMBER, ONE_CLASS
from fl_app.tracing import uncompiled
from strategies.base import Correction, Objective, Optimizer, classifier_path

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of 16 bits, by the value of the key `precision`."""
LOSS_SCALE = 2.0**16
"""First factor on the loss for gradients in float16, as torch.amp.GradScaler has it."""

Differentiate = Callable[[Tensor, Tensor], object]
"""(x, y) of a batch -> anything. Leaves the gradient of a step in the trainer's `gradient`."""


def resolve_device(name: str) -> torch.device:
    """Return the device that the config names. Raises UserError for a GPU that this machine does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            key="device", rule=f"{name} asked for, this machine has {torch.cuda.device_count()} usable GPUs"
        )
    return device


@dataclass
class Step:
    """One step of `LocalTrainer.train` on a batch: the gradient, the method's correction, the optimizer."""

    trainer: LocalTrainer
    differentiate: Differentiate
    correction: Correction | None
    optimizer: Optimizer
    learning_rate: float

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Move the weights."""
        self.differentiate(x, y)
        if self.correction is not None:
            with torch.no_grad():
                self.correction(self.trainer.weights, self.trainer.gradient)
        self.optimizer.step(self.trainer.gradient, self.learning_rate)

    @property
    def sgd(self) -> SGD:
        """The optimizer, which must be SGD: the only one that a graph can hold."""
        assert isinstance(self.optimizer, SGD)
        return self.optimizer


class LocalTrainer:
    """Trains and evaluates one client's models (strategies.base.Trainer)."""

    def __init__(
        self, module: nn.Module | FlatModule, config: RunConfig, data: ClientData, round: int, client_id: int
    ) -> None:
        """module: the run's network, or the vectors that an earlier client made of it."""
        self.config, self.round, self.client_id = config, round, client_id
        self.device, self.lane = resolve_device(config.device), at_once.current()
        if self.lane is not None:
            self.lane.use(self.device)
        if self.device.type == "cuda":
            # torch's default for convolutions is TF32
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.precision == "tf32"
        if isinstance(module, FlatModule):
            self.flat = module
        elif self.lane is None or config.dp_epsilon:
            # with a budget every message has its own network, which a lane must not keep
            self.flat = FlatModule(module, self.device)
        else:
            self.flat = self.lane.keep(("flat", id(module)), partial(FlatModule, module, self.device))
        flat = self.flat
        flat.reset()
        self.module, self.layout = flat.module, flat.layout
        self.weights, self.gradient, self.statistics = flat.weights, flat.gradient, flat.statistics
        self.load, self.read, self.tensor, self.vector = flat.load, flat.read, flat.tensor, flat.vector
        self.task = tasks.of(config)
        self.data = Batches(
            config,
            data,
            self.device,
            round=round,
            client_id=client_id,
            task=self.task,
            avoid_single=bool(flat.batchnorms),
            memory_format=flat.memory_format,
        )
        self.leave_out = self.data.leave_out
        self.num_classes = len(data.info.classes)
        self._loss_scale = LOSS_SCALE
        # reasons why metrics failed, by name
        self.metric_errors: dict[str, str] = {}
        self._steps = self._epoch = 0
        # whether a caller read them
        self._counters_read = False
        self._tuning = False
        self.indices = torch.zeros(0, dtype=torch.int64, device=self.device)
        # the task's loss of the current batch, if an objective asked for it
        self._reported: Tensor | None = None
        self._plain: Optimizer | None = None
        self._counted = 0

    # Counters and rates

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
        return float(self.flat.epoch_loss) / self._counted if self._counted else math.nan

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training samples per class, int64 [C]."""
        return np.bincount(self.data.train_labels.cpu().numpy(), minlength=self.num_classes)

    # Training

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
        optimizer = optimizer_of(self.config, self.weights, self.flat.freeze(frozen))
        own = differentiate or partial(self.differentiate, objective=objective)
        step = Step(self, own, correction, optimizer, rate)
        take: Callable[[Tensor, Tensor], object] = step
        if self.lane is not None and differentiate is None:
            # the key under which a lane keeps the step, if every training of the run takes the same
            alike = objective is None and correction is None and isinstance(frozen, frozenset)
            take = self.lane.launched(step, frozen if alike else None)  # type: ignore[arg-type]
        # an epoch has at least one batch, so as many epochs as batches are enough
        for x, y in self._batches(max_batches or epochs, purpose, max_batches):
            take(x, y)
            self._steps += 1
        self.flat.freeze(frozenset())
        trained = self.read()
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
            optimizers[purpose] = optimizer_of(self.config, self.weights, self.flat.freeze(frozen))
            differentiated[purpose] = [parameter.requires_grad for parameter in parameters]
        epochs = self.config.local_epochs if epochs is None else epochs
        for purpose, batch in self.data.alternating_epochs(epochs, sides):
            if batch.first:
                for parameter, needed in zip(parameters, differentiated[purpose], strict=True):
                    parameter.requires_grad_(needed)
            x, y = self._begin(batch)
            self.differentiate(x, y)
            optimizers[purpose].step(self.gradient, learning_rate)
            self._steps += 1
        self._end()
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
            yield self._begin(batch)
        self._end()

    def _say_own_loop(self) -> None:
        if self.lane is not None:
            self.lane.lanes.say(
                f"clients-at-once: method {self.config.method} has its own training loop; its steps are taken one by one"
            )

    def train_mode(self) -> None:
        """Put the module into training mode, except BatchNorm layers with frozen statistics."""
        set_mode(self.module, training=True)
        for layer in self.flat.frozen_batchnorms:
            layer.eval()

    def _begin(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's (x, y), and set `indices`. An epoch's first batch resets the mean loss."""
        if batch.first:
            self.flat.epoch_loss.zero_()
            self._counted = 0
            self._epoch += 1
        self.indices = batch.indices
        return batch.x, batch.y

    def _end(self) -> None:
        """End a training. Raise UserError if its last epoch's mean loss is not finite, or larger than the server accepts."""
        if self.lane is not None:
            self.lane.pause()
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
        alone = self.flat.batchnorms if len(y) == 1 and self.module.training else ()
        for layer in alone:
            layer.eval()
        self._reported = None
        value = self.task.loss(self.logits(self.module, x), y) if objective is None else objective(self.module, x, y)
        if not isinstance(value, Tensor) or value.ndim:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(key="objective", rule=f"must return a scalar tensor, the batch's mean, got {got}")
        # there is no gradient if all trainable parameters of the user's model are frozen
        if value.requires_grad:
            self.backward(value)
        for layer in alone:
            layer.train()
        value = value.detach()
        if counted:
            loss = value if self._reported is None else torch.where(value.isfinite(), self._reported, value)
            self.flat.epoch_loss += loss * len(y)
            self._counted += len(y)
        return value

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients to those of the tensors that it depends on, as `loss.backward()` does.

        Small gradients would be 0 in float16. So this precision differentiates the loss times a power of two, which is
        halved as long as a gradient is not finite.
        """
        if self.config.precision != "float16":
            loss.backward()  # type: ignore[no-untyped-call]
            return
        leaves: list[Tensor] = []
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            todo += [further for further, _ in node.next_functions]
        while True:
            scaled = loss * self._loss_scale
            found = torch.autograd.grad(scaled, leaves, retain_graph=True, allow_unused=True)
            pairs = [(leaf, slope) for leaf, slope in zip(leaves, found, strict=True) if slope is not None]
            if self._loss_scale <= 1 or all(bool(slope.isfinite().all()) for _, slope in pairs):
                break
            self._loss_scale /= 2
        with torch.no_grad():
            for leaf, slope in pairs:
                own = slope / self._loss_scale
                leaf.grad = own if leaf.grad is None else leaf.grad.add_(own)

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

    def optimizer(self, vector: Tensor, part: slice = slice(None)) -> Optimizer:
        """Return the run's optimizer for a vector [d] on the device, or a part of it. What the user's model fixes stays."""
        fixed = self.flat.freeze(frozenset())
        return optimizer_of(self.config, vector[part], None if fixed is None else fixed[part])

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the task's mean loss, a scalar. Inside an objective, this value counts in `last_loss`."""
        value = self.task.loss(logits.float(), y)
        self._reported = value.detach()
        return value

    # What a network answers

    def samples(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return (x, y) of chosen training samples, without augmentation."""
        return self.data.chosen(self._indices(indices))

    def _indices(self, indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.asarray(indices, np.int64)).to(self.device)

    def network(self, model: Model) -> nn.Module:
        """Return a second network with a model's values: evaluation mode, without gradients."""
        return self.flat.network(model)

    def classifier(self, module: nn.Module | None = None) -> Any:
        """Return the part of a network that holds its classifier. Raises UserError if no single module does."""
        return (self.module if module is None else module).get_submodule(classifier_path(self.layout))

    def logits(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return logits float32 [n, C], computed in the run's precision."""
        half = HALVES.get(self.config.precision)
        if half is None:
            return module(x).float()  # type: ignore[no-any-return]
        with torch.autocast(self.device.type, half):
            logits: Tensor = module(x)
        return logits.float()

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features float32 [n, f], logits float32 [n, C]); features: the classifier's input."""
        seen: list[Tensor] = []
        hook = self.classifier(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            # a new hook would be compiled for each batch
            with uncompiled():
                logits = self.logits(module, x)
        finally:
            hook.remove()
        return seen[-1].flatten(1).float(), logits

    def _load_for_evaluation(self, model: Model) -> None:
        """Put a model's values into the module, in evaluation mode."""
        self.load(model)
        set_mode(self.module, training=False)

    @torch.no_grad()
    def features(self, model: Model) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return (features float32 [n, f], labels int64 [n]) of all training data: evaluation mode, no augmentation."""
        self._load_for_evaluation(model)
        features, labels = [], []
        for x, y in self.data.in_order("train"):
            features.append(self.forward(self.module, x)[0])
            labels.append(y)
        return torch.cat(features).cpu().numpy(), torch.cat(labels).cpu().numpy()

    @torch.no_grad()
    def sample_losses(
        self, model: Model, samples: NDArray[np.int64] | None = None, module: nn.Module | None = None
    ) -> NDArray[np.float32]:
        """Return each training sample's loss at a model, in evaluation mode, float32 [n].

        samples: positions of the samples, default all; module: the part of the network that gives the logits, default
        all of it.
        """
        self._load_for_evaluation(model)
        network = self.module if module is None else module
        chosen = None if samples is None else self._indices(samples)
        losses = []
        for x, y in self.data.in_order("train", chosen):
            outputs = self.logits(network, x)
            if self.task.cross_entropy:
                losses.append(cross_entropy(outputs, y, reduction="none"))
            else:
                losses += [self.task.loss(outputs[i : i + 1], y[i : i + 1]).reshape(1) for i in range(len(y))]
        return torch.cat(losses).cpu().numpy()

    def fisher(self, model: Model, samples: int = 0) -> Vector:
        """Return the mean over training samples of the squared gradient of each sample's loss, float32 [d].

        samples: the number of samples, drawn without replacement from the stream "fisher"; 0 means all.
        """
        self._load_for_evaluation(model)
        n = len(self.data.train_labels)
        indices = np.arange(n)
        if 0 < samples < n:
            stream = rng.generator(self.config.seed, "fisher", self.round, self.client_id)
            indices = np.sort(stream.choice(n, samples, replace=False))
        with gradient_checkpointing.paused(self.module):
            return fisher_diagonal(self.module, self.task, indices, self.samples)

    def loss_gradient(self, model: Model) -> Vector:
        """Return the gradient of the mean loss over all training data at `model`, float32 [d]; evaluation mode."""
        self._load_for_evaluation(model)
        self.gradient.zero_()
        n = len(self.data.train_labels)
        for x, y in self.data.in_order("train"):
            self.backward(self.task.total(self.logits(self.module, x), y) / n)
        return self.vector(self.gradient)

    def evaluate(self, model: Model) -> tuple[float, float]:
        """Return (mean loss, headline) on the test data. NaN means no test data."""
        headline = self.task.headline.name
        loss, metrics = self.measure(model, (headline,))
        return loss, metrics[headline]

    @torch.no_grad()
    def measure(self, model: Model, names: Sequence[str], part: Part = "test") -> tuple[float, dict[str, float]]:
        """Return the mean loss and the named metrics on test or validation data, in evaluation mode.

        NaN means no data of this kind. names: metrics of the task, and ONE_CLASS. A metric that fails is NaN too, with
        its reason in `metric_errors`.
        """
        targets = self.data.parts[part][1]
        if not len(targets):
            return math.nan, dict.fromkeys(names, math.nan)
        self._load_for_evaluation(model)
        outputs, losses = [], []
        for x, y in self.data.in_order(part):
            outputs.append(self.module(x).float())
            losses.append(self.task.total(outputs[-1], y).double())
        loss = losses[0]
        for more in losses[1:]:
            loss = loss + more
        if self.lane is not None:
            self.lane.pause()
        answers = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        metrics, errors = tasks.measure(self.task, answers, targets, [n for n in names if n != ONE_CLASS.name])
        if ONE_CLASS.name in names:
            metrics[ONE_CLASS.name] = tasks.one_class(self.task, answers, targets)
        self.metric_errors |= errors
        return float(loss) / len(targets), metrics
