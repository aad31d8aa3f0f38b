"""A client's module and data on its device, and the measurements made there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from client_app import at_once
from client_app.batches import Batches, Part
from client_app.fisher import fisher_diagonal
from client_app.flat import FlatModule, set_mode
from fl_app import rng, tasks
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError
from fl_app.layout import Model, Vector
from fl_app.metrics import ONE_CLASS
from fl_app.tasks import Task
from fl_app.tracing import uncompiled
from strategies.base import classifier_path

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of 16 bits, by the value of the key `precision`."""
LOSS_SCALE = 2.0**16
"""First factor on the loss for gradients in float16, as torch.amp.GradScaler has it."""


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


def _leaves_of(value: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass from a value sets."""
    found: list[Tensor] = []
    seen, todo = set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [further for further, _ in node.next_functions]
    return found


class LoadedModel:
    """One client's module, as flat vectors, with its data. It loads models and measures them."""

    def __init__(
        self, module: nn.Module | FlatModule, config: RunConfig, data: ClientData, round: int, client_id: int
    ) -> None:
        """module: the run's network, or the vectors that an earlier client made of it."""
        self.config, self.round, self.client_id = config, round, client_id
        self.device = resolve_device(config.device)
        at_once.use_stream(self.device)
        if self.device.type == "cuda":
            # torch's default for convolutions is TF32
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.precision == "tf32"
        if isinstance(module, FlatModule):
            self.flat = module
        elif config.dp_epsilon:
            # every message has its own network, which a lane must not keep
            self.flat = FlatModule(module, self.device)
        else:
            self.flat = at_once.kept(("flat", id(module)), lambda: FlatModule(module, self.device))
        self.flat.reset()
        self.module, self.layout = self.flat.module, self.flat.layout
        self.weights, self.gradient, self.statistics = self.flat.weights, self.flat.gradient, self.flat.statistics
        self.load, self.read, self.tensor, self.vector = (
            self.flat.load,
            self.flat.read,
            self.flat.tensor,
            self.flat.vector,
        )
        self._frozen_batchnorms, self._batchnorms = self.flat.frozen_batchnorms, self.flat.batchnorms
        self.data = Batches(
            config,
            data,
            self.device,
            round=round,
            client_id=client_id,
            avoid_single=bool(self._batchnorms),
            memory_format=self.flat.memory_format,
        )
        self.leave_out = self.data.leave_out
        self.task, self.num_classes = self.data.task, len(data.info.classes)
        self.headline = self.task.headline
        self._loss_scale = LOSS_SCALE
        # reasons why metrics failed, by name
        self.metric_errors: dict[str, str] = {}

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training samples per class, int64 [C]."""
        return np.bincount(self.data.train_labels.cpu().numpy(), minlength=self.num_classes)

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

    def load_for_evaluation(self, model: Model) -> None:
        """Put a model's values into the module, in evaluation mode."""
        self.load(model)
        set_mode(self.module, training=False)

    @torch.no_grad()
    def features(self, model: Model) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return (features float32 [n, f], labels int64 [n]) of all training data: evaluation mode, no augmentation."""
        self.load_for_evaluation(model)
        features, labels = [], []
        for x, y in self.data.train():
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
        self.load_for_evaluation(model)
        network = self.module if module is None else module
        chosen = None if samples is None else self._indices(samples)
        losses = [losses_by_sample(self.task, self.logits(network, x), y) for x, y in self.data.train(chosen)]
        return torch.cat(losses).cpu().numpy()

    def fisher(self, model: Model, samples: int = 0) -> Vector:
        """Return the mean over training samples of the squared gradient of each sample's loss, float32 [d].

        samples: the number of samples, drawn without replacement from the stream "fisher"; 0 means all.
        """
        self.load_for_evaluation(model)
        n = len(self.data.train_labels)
        indices = np.arange(n)
        if 0 < samples < n:
            stream = rng.generator(self.config.seed, "fisher", self.round, self.client_id)
            indices = np.sort(stream.choice(n, samples, replace=False))
        return fisher_diagonal(self.module, self.task, indices, self.samples)

    def loss_gradient(self, model: Model) -> Vector:
        """Return the gradient of the mean loss over all training data at `model`, float32 [d]; evaluation mode."""
        self.load_for_evaluation(model)
        self.gradient.zero_()
        n = len(self.data.train_labels)
        for x, y in self.data.train():
            self.backward(self.task.total(self.logits(self.module, x), y) / n)
        return self.vector(self.gradient)

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients to those of the tensors that it depends on, as `loss.backward()` does.

        Small gradients would be 0 in float16. So this precision differentiates the loss times a power of two, which is
        halved as long as a gradient is not finite.
        """
        if self.config.precision != "float16":
            loss.backward()  # type: ignore[no-untyped-call]
            return
        leaves = _leaves_of(loss)
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

    def evaluate(self, model: Model) -> tuple[float, float]:
        """Return (mean loss, headline) on the test data. NaN means no test data."""
        loss, metrics = self.measure(model, (self.headline.name,))
        return loss, metrics[self.headline.name]

    @torch.no_grad()
    def measure(self, model: Model, names: Sequence[str], part: Part = "test") -> tuple[float, dict[str, float]]:
        """Return the mean loss and the named metrics on test or validation data, in evaluation mode.

        NaN means no data of this kind. names: metrics of the task, and ONE_CLASS. A metric that fails is NaN too, with
        its reason in `metric_errors`.
        """
        targets = self.data.labels_of(part)
        num_samples = targets.shape[0]
        if not num_samples:
            return math.nan, dict.fromkeys(names, math.nan)
        self.load_for_evaluation(model)
        outputs, losses = [], []
        for x, y in self.data.in_order(part):
            outputs.append(self.module(x).float())
            losses.append(self.task.total(outputs[-1], y).double())
        loss = losses[0]
        for more in losses[1:]:
            loss = loss + more
        at_once.pause()
        answers = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        metrics, errors = tasks.measure(self.task, answers, targets, [n for n in names if n != ONE_CLASS.name])
        if ONE_CLASS.name in names:
            metrics[ONE_CLASS.name] = tasks.one_class(self.task, answers, targets)
        self.metric_errors |= errors
        return float(loss) / num_samples, metrics


def losses_by_sample(task: Task, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the losses of a batch's samples, float32 [n]; outputs: float32 [n, ...]; y: the targets."""
    if task.cross_entropy:
        return cross_entropy(outputs, y, reduction="none")
    return torch.stack([task.loss(outputs[i : i + 1], y[i : i + 1]) for i in range(len(y))])
