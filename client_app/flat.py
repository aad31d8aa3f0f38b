"""A module as vectors: its parameters, their gradients and its statistics, each one tensor on the device.

The module's own tensors are views into these vectors, so that an SGD step, a proximal term and reading the model are single
operations. Convolution kernels [O, I, h, w] lie there as [O, h, w, I], channels last, which CPUs and tensor cores want;
vectors are rearranged where they come in and go out. That order is "the device's order".
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_app.layout import Layout, Model, Slot, Vector

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class FlatModule:
    """weights, gradient: float32 [d]; statistics: float32 [b], the floating-point buffers."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.layout = Layout.of(module)
        self.module = module.to(device)
        self._kernels = [slot for slot in self.layout.params if len(slot.shape) == 4]
        self.memory_format = torch.channels_last if self._kernels else torch.contiguous_format
        parameters = list(self.module.parameters())
        self._trainable = [p.requires_grad for p in parameters]
        self.weights = torch.empty(self.layout.d, device=device)
        self.gradient = torch.zeros(self.layout.d, device=device)
        for slot, parameter in zip(self.layout.params, parameters, strict=True):
            view = self._view(self.weights, slot)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self._view(self.gradient, slot)
        buffers = dict(self.module.named_buffers())
        self.statistics = torch.empty(self.layout.b, device=device)
        for slot in self.layout.buffers:
            view = self.statistics[slot.start : slot.stop].view(slot.shape)
            view.copy_(buffers[slot.name])
            buffers[slot.name].data = view

    def _view(self, vector: Tensor, slot: Slot) -> Tensor:
        piece = vector[slot.start : slot.stop]
        if len(slot.shape) != 4:
            return piece.view(slot.shape)
        o, i, h, w = slot.shape
        return piece.view(o, h, w, i).permute(0, 3, 1, 2)

    def tensor(self, vector: Vector | NDArray[np.bool_]) -> Tensor:
        """Return a float32 or bool [d] in named_parameters order as the device holds it."""
        inward = torch.from_numpy(np.array(vector)).to(self.device)
        for slot in self._kernels:
            self._view(inward, slot).copy_(inward[slot.start : slot.stop].clone().view(slot.shape))
        return inward

    def vector(self, tensor: Tensor) -> Vector:
        """Return a vector [d] on the device in named_parameters order."""
        outward = tensor.to("cpu", copy=True)
        for slot in self._kernels:
            outward[slot.start : slot.stop] = self._view(outward, slot).reshape(-1)
        result: Vector = outward.numpy()
        return result

    def load(self, model: Model) -> None:
        """Put a model's values into the module."""
        with torch.no_grad():
            self.weights.copy_(self.tensor(model.params))
            self.statistics.copy_(torch.from_numpy(np.array(model.buffers)))

    def read(self) -> Model:
        """Copy the module's values out."""
        return Model(self.vector(self.weights), self.statistics.to("cpu", copy=True).numpy())

    def network(self, model: Model) -> nn.Module:
        """Return a second network with a model's values: evaluation mode, without gradients."""
        module = copy.deepcopy(self.module)
        tensors = self.layout.tensors(model)
        with torch.no_grad():
            for name, own in (*module.named_parameters(), *module.named_buffers()):
                if name in tensors:
                    own.copy_(torch.from_numpy(np.array(tensors[name])))
        return module.requires_grad_(False).eval()

    def freeze(self, frozen: frozenset[str] | NDArray[np.bool_]) -> Tensor | None:
        """Keep these parameters, and those the user's model froze, from training; autograd skips what need not be computed.

        frozen: tensors by name, or parameters by position, bool [d]. Returns bool [d] in the device's order, True where
        nothing may change, or None if everything may.
        """
        by_name = isinstance(frozen, frozenset)
        fixed = np.zeros(self.layout.d, bool) if by_name else np.array(frozen, bool)
        for slot, parameter, trainable in zip(
            self.layout.params, self.module.parameters(), self._trainable, strict=True
        ):
            part = fixed[slot.start : slot.stop]
            if by_name and slot.name in frozen:
                part[:] = True
            parameter.requires_grad_(trainable and not part.all())
            # what does not train has no weight decay either
            part |= not trainable
        return self.tensor(fixed) if fixed.any() else None


@torch.no_grad()
def mask_and_clip(gradient: Tensor, fixed: Tensor | None, clip_norm: float) -> None:
    """Zero the gradient of what is fixed; scale the rest down to a norm (0: do not), as torch.nn.utils.clip_grad_norm_ does."""
    if fixed is not None:
        gradient.masked_fill_(fixed, 0)
    if clip_norm:
        gradient.mul_((clip_norm / (gradient.norm() + 1e-6)).clamp(max=1.0))


class SGD:
    """torch.optim.SGD's step on a flat vector: weight decay, then momentum. fixed: bool [d], the parameters that do not change."""

    def __init__(
        self, vector: Tensor, *, momentum: float, weight_decay: float, fixed: Tensor | None = None, clip_norm: float = 0
    ) -> None:
        moving = range(len(vector))
        # of a large part that is fixed nothing need be computed
        if fixed is not None:
            free = (~fixed).nonzero()
            moving = range(int(free[0]), int(free[-1]) + 1) if len(free) else range(0)
            fixed = fixed[moving.start : moving.stop]
            if not bool(fixed.any()):
                fixed = None
        self._momentum, self._weight_decay, self._fixed, self._clip_norm = momentum, weight_decay, fixed, clip_norm
        self._part = slice(moving.start, moving.stop)
        self._vector = vector[self._part]
        self._velocity = torch.zeros_like(self._vector) if momentum else None

    @torch.no_grad()
    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector; `gradient` may be overwritten."""
        gradient = gradient[self._part]
        mask_and_clip(gradient, self._fixed, self._clip_norm)
        update = gradient
        if self._weight_decay:
            update = update.add(self._vector, alpha=self._weight_decay)
            if self._fixed is not None:
                update.masked_fill_(self._fixed, 0)
        if self._velocity is not None:
            update = self._velocity.mul_(self._momentum).add_(update)
        self._vector.add_(update, alpha=-learning_rate)


class AdamW:
    """torch.optim.AdamW's step on a flat vector, with its default betas and epsilon. fixed: as of SGD."""

    def __init__(
        self, vector: Tensor, *, weight_decay: float, fixed: Tensor | None = None, clip_norm: float = 0
    ) -> None:
        self._vector, self._weight_decay, self._fixed, self._clip_norm = vector, weight_decay, fixed, clip_norm
        self._first, self._second = torch.zeros_like(vector), torch.zeros_like(vector)
        self._steps = 0

    @torch.no_grad()
    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector; `gradient` may be overwritten."""
        mask_and_clip(gradient, self._fixed, self._clip_norm)
        self._steps += 1
        if self._weight_decay:
            shrunk = self._vector * (1 - learning_rate * self._weight_decay)
            self._vector.copy_(shrunk if self._fixed is None else torch.where(self._fixed, self._vector, shrunk))
        self._first.lerp_(gradient, 1 - BETA1)
        self._second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        size = self._second.sqrt().div_(math.sqrt(1 - BETA2**self._steps)).add_(EPSILON)
        self._vector.addcdiv_(self._first, size, value=-learning_rate / (1 - BETA1**self._steps))
