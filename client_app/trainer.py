"""Local training and evaluation: a plain torch loop over the batches of client_app/batches.py.

The module's parameters and gradients are views into one flat vector each, so an SGD step, a proximal term and reading the
model are single operations.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from client_app.batches import Batches
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError
from fl_app.layout import Layout, Model, Slot, Vector


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
        self.layout = Layout.of(module)
        self.module = module.to(self.device)
        self.last_loss = float("nan")
        self._flatten()
        self._batchnorms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.batches = Batches(
            config, data, self.device, round=round, client_id=client_id, avoid_single=bool(self._batchnorms),
            memory_format=self._format,
        )  # fmt: skip

    def _flatten(self) -> None:
        """Make every parameter and gradient a view into `self.weights` and `self.gradient`.

        Convolution kernels [O, I, h, w] lie there as [O, h, w, I], channels last, which CPUs and tensor cores want; vectors
        are rearranged where they come in and go out.
        """
        parameters = list(self.module.parameters())
        self._trainable = [p.requires_grad for p in parameters]
        self._kernels = [slot for slot in self.layout.params if len(slot.shape) == 4]
        self._format = torch.channels_last if self._kernels else torch.contiguous_format
        self.weights = torch.empty(self.layout.d, device=self.device)
        self.gradient = torch.zeros(self.layout.d, device=self.device)
        for slot, parameter in zip(self.layout.params, parameters, strict=True):
            view = self._view(self.weights, slot)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self._view(self.gradient, slot)
        buffers = dict(self.module.named_buffers())
        self._buffers = [buffers[slot.name] for slot in self.layout.buffers]

    def _view(self, vector: torch.Tensor, slot: Slot) -> torch.Tensor:
        piece = vector[slot.start : slot.stop]
        if len(slot.shape) != 4:
            return piece.view(slot.shape)
        o, i, h, w = slot.shape
        return piece.view(o, h, w, i).permute(0, 3, 1, 2)

    def _inward(self, vector: Vector) -> torch.Tensor:
        """Return a vector in named_parameters order as the device holds it."""
        inward = torch.from_numpy(np.array(vector)).to(self.device)
        for slot in self._kernels:
            self._view(inward, slot).copy_(inward[slot.start : slot.stop].clone().view(slot.shape))
        return inward

    def _outward(self, vector: torch.Tensor) -> Vector:
        """Return a vector on the device in named_parameters order."""
        outward = vector.to("cpu", copy=True)
        for slot in self._kernels:
            outward[slot.start : slot.stop] = self._view(outward, slot).reshape(-1)
        result: Vector = outward.numpy()
        return result

    def load(self, model: Model) -> None:
        """Put a model's values into the module."""
        with torch.no_grad():
            self.weights.copy_(self._inward(model.params))
            values = torch.from_numpy(np.array(model.buffers)).to(self.device)
            for slot, buffer in zip(self.layout.buffers, self._buffers, strict=True):
                buffer.copy_(values[slot.start : slot.stop].view(slot.shape))

    def read(self) -> Model:
        """Copy the module's values out."""
        flat = [b.reshape(-1) for b in self._buffers]
        buffers = torch.cat(flat).cpu().numpy() if flat else np.zeros(0, np.float32)
        return Model(self._outward(self.weights), buffers)

    @property
    def learning_rate(self) -> float:
        """This round's learning rate."""
        return self.config.learning_rate * self.config.learning_rate_decay ** (self.round - 1)

    def train(
        self,
        start: Model,
        *,
        epochs: int | None = None,
        purpose: str = "train",
        proximal: tuple[float, Vector] | None = None,
        frozen: frozenset[str] = frozenset(),
    ) -> Model:
        """Run local SGD and return the trained model; `last_loss` is the last epoch's mean training loss.

        start: where training begins. epochs: default local-epochs. purpose: names the random stream. proximal: (mu, center
        float32 [d]) adds mu/2 ||w - center||^2 to the loss. frozen: tensors that neither train nor change.
        """
        self.load(start)
        center = None
        if proximal is not None:
            mu, vector = proximal
            center = self._inward(vector)
        still = self._freeze(frozen)
        velocity = torch.zeros_like(self.weights) if self.config.momentum else None
        self.module.train()
        epoch_loss, samples = torch.zeros((), device=self.device), 0
        for first_batch, x, y, _ in self.batches.epochs(epochs or self.config.local_epochs, purpose):
            if first_batch:
                epoch_loss, samples = torch.zeros((), device=self.device), 0
            loss = self.gradient_of_loss(x, y)
            epoch_loss += loss * len(y)
            samples += len(y)
            if center is not None:
                self.gradient.add_(self.weights - center, alpha=mu)
            if still is not None:
                self.gradient.masked_fill_(still, 0)
            self.step(velocity, still)
        self._freeze(frozenset())
        self.last_loss = float(epoch_loss) / max(samples, 1)
        trained = self.read()
        if frozen:  # statistics of frozen layers
            trained = self.layout.put(trained, self.layout.take(start, frozen), frozen)
        return trained

    def train_envelope(
        self,
        start: Model,
        *,
        weight: float,
        inner_steps: int,
        inner_learning_rate: float,
        epochs: int | None = None,
        purpose: str = "train",
    ) -> tuple[Model, Model]:
        """Descend on the Moreau envelope of the loss from w = theta = start; return (w, theta).

        Per batch: `inner_steps` times theta -= inner_learning_rate * (gradient of f(theta) + weight * (theta - w)), theta
        going on from the batch before; then w -= learning_rate * weight * (w - theta). Weight decay is part of f; there is
        no momentum. Only theta sees data: both models get its BatchNorm statistics. `last_loss` is the last epoch's mean
        of f before a batch's first step.
        """
        self.load(start)
        still = self._freeze(frozenset())
        outer = self.weights.clone()
        self.module.train()
        epoch_loss, samples = torch.zeros((), device=self.device), 0
        for first_batch, x, y, _ in self.batches.epochs(epochs or self.config.local_epochs, purpose):
            if first_batch:
                epoch_loss, samples = torch.zeros((), device=self.device), 0
            for k in range(inner_steps):
                loss = self.gradient_of_loss(x, y)
                if k == 0:
                    epoch_loss += loss * len(y)
                    samples += len(y)
                self.gradient.add_(self.weights - outer, alpha=weight)
                self.step(None, still, inner_learning_rate)
            outer.sub_(outer - self.weights, alpha=self.learning_rate * weight)
        self.last_loss = float(epoch_loss) / max(samples, 1)
        theta = self.read()
        return Model(self._outward(outer), theta.buffers), theta

    def gradient_of_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Leave the mean cross-entropy's gradient in `self.gradient`; return the loss (detached, on the device)."""
        self.gradient.zero_()
        alone = len(y) == 1 and bool(self._batchnorms)
        if alone:  # BatchNorm cannot normalise a single sample: use its running statistics
            for layer in self._batchnorms:
                layer.eval()
        loss = self._loss(x, y)
        if loss.requires_grad:  # not so when everything the user's model trains is frozen
            loss.backward()  # type: ignore[no-untyped-call]
        if alone:
            for layer in self._batchnorms:
                layer.train()
        return loss.detach()

    def _loss(self, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            logits = self.module(x)
        return cross_entropy(logits.float(), y, reduction=reduction)

    def loss_gradient(self, model: Model) -> Vector:
        """Return the gradient of the mean cross-entropy over all training data at `model`, float32 [d].

        In evaluation mode: BatchNorm uses and keeps its running statistics, nothing is augmented.
        """
        self.load(model)
        self.module.eval()
        self.gradient.zero_()
        n = len(self.batches.train_labels)
        for x, y in self.batches.train():
            (self._loss(x, y, "sum") / n).backward()  # type: ignore[no-untyped-call]
        return self._outward(self.gradient)

    def step(
        self, velocity: torch.Tensor | None, still: torch.Tensor | None = None, learning_rate: float | None = None
    ) -> None:
        """One SGD step on the flat vectors, as torch.optim.SGD does it (weight decay, then momentum).

        learning_rate: default this round's.
        """
        with torch.no_grad():
            update = self.gradient
            if self.config.weight_decay:
                update = update.add(self.weights, alpha=self.config.weight_decay)
                if still is not None:
                    update.masked_fill_(still, 0)
            if velocity is not None:
                update = velocity.mul_(self.config.momentum).add_(update)
            self.weights.add_(update, alpha=-(self.learning_rate if learning_rate is None else learning_rate))

    def _freeze(self, frozen: frozenset[str]) -> torch.Tensor | None:
        for slot, parameter, trainable in zip(self.layout.params, self.module.parameters(), self._trainable, strict=True):
            parameter.requires_grad_(trainable and slot.name not in frozen)  # autograd skips what need not be computed
        still = self.layout.indices(frozen)
        for slot, trainable in zip(self.layout.params, self._trainable, strict=True):
            still[slot.start : slot.stop] |= not trainable  # frozen by the user's model: no weight decay either
        return torch.from_numpy(still).to(self.device) if still.any() else None

    @torch.no_grad()
    def evaluate(self, model: Model) -> tuple[float, float]:
        """Return (mean cross-entropy, accuracy) on the test data; NaN where there is none."""
        n = len(self.batches.test_labels)
        if not n:
            return float("nan"), float("nan")
        self.load(model)
        self.module.eval()
        loss = torch.zeros((), device=self.device, dtype=torch.float64)
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        for x, y in self.batches.test():
            logits = self.module(x)
            loss += cross_entropy(logits, y, reduction="sum").double()
            correct += (logits.argmax(1) == y).sum()
        return float(loss) / n, int(correct) / n
