"""A module as vectors: its parameters, their gradients and its statistics are one tensor each on the device.

The module's own tensors are views into these vectors. So an SGD step, a proximal term and reading the model are single
operations. Convolution kernels [O, I, h, w] are stored as [O, h, w, I], channels last, the layout that suits CPUs and
tensor cores. Vectors are rearranged on their way in and out. The stored order is called "the device's order".
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_app.config import RunConfig
from fl_app.contents import Contents
from fl_app.layout import Layout, Model, Slot, Vector
from fl_app.narrow_tensors import plain

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
# functions of a module by which it may have a mode of its own
_OF_MODE = ("train", "eval", "__setattr__")
# bytes of frozen tensors whose values are compared after a message
_CHECKED_BYTES = 16e6
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BatchNorm = nn.modules.batchnorm._BatchNorm


class FlatModule:
    """weights, gradient: float32 [d]; statistics: float32 [b], the floating-point buffers."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.layout = Layout.of(module)
        self.module = module.to(device)
        self._kernels = [slot for slot in self.layout.params if len(slot.shape) == 4]
        self.memory_format = torch.channels_last if self._kernels else torch.contiguous_format
        self._parameters = parameters = list(self.module.parameters())
        self._trainable = [p.requires_grad for p in parameters]
        # everything between kernels has the same order on the device
        ends = [0, *(end for slot in self._kernels for end in (slot.start, slot.stop)), self.layout.d]
        self._plain = [slice(*pair) for pair in zip(ends[::2], ends[1::2], strict=True) if pair[0] < pair[1]]
        self.weights = torch.empty(self.layout.d, device=device)
        self.gradient = torch.zeros(self.layout.d, device=device)
        for slot, parameter in zip(self.layout.params, parameters, strict=True):
            view = self._view(self.weights, slot)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self._view(self.gradient, slot)
        buffers = dict(self.module.named_buffers())
        self.statistics = torch.empty(self.layout.b, device=device)
        # the sum of an epoch's losses, for training
        self.epoch_loss = torch.zeros((), device=device)
        for slot in self.layout.buffers:
            view = self.statistics[slot.start : slot.stop].view(slot.shape)
            view.copy_(buffers[slot.name])
            buffers[slot.name].data = view
        self._gradients = [parameter.grad for parameter in parameters]
        loaded = {slot.name for slot in self.layout.buffers}
        counted = [name for name, buffer in buffers.items() if not buffer.is_floating_point()]
        # A pass through the network changes no constants (the key `train`) but BatchNorm's statistics.
        norms = {name: layer for name, layer in self.module.named_modules() if isinstance(layer, BatchNorm)}
        counted += [
            f"{name}.{own}".lstrip(".")
            for name, layer in norms.items()
            for own, buffer in layer.named_buffers(recurse=False)
            if buffer.is_floating_point() and f"{name}.{own}".lstrip(".") not in loaded
        ]
        self._others = [(buffers[name], buffers[name].clone()) for name in counted]
        frozen: frozenset[str] = getattr(module, "frozen_names", frozenset())
        # what `load` and `reset` do not set
        self._constants = [
            (n, buffers[n], _traces(buffers[n])) for n in sorted(frozen) if n in buffers and n not in counted
        ]
        self._sums = [_sum(tensor) for _, tensor, _ in self._constants]
        self._checked = 0
        self.frozen_batchnorms = [m for name, m in norms.items() if f"{name}.running_mean".lstrip(".") in frozen]
        self.batchnorms = [m for m in norms.values() if m not in self.frozen_batchnorms]
        # what cannot be looked into may have changed
        self._held = Contents(self.module, opaque=lambda _: object())

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the first values of everything that `load` does not set, for another client.

        These are: all that layers hold by name (hooks, the mode, parts, attributes), which parameters train, gradients,
        counters. Tensors outside of the layout, and what is within attributes, stay; see `is_restorable`.
        """
        self._held.restore()
        for parameter, trainable, gradient in zip(self._parameters, self._trainable, self._gradients, strict=True):
            parameter.requires_grad_(trainable)
            parameter.grad = gradient
        self.gradient.zero_()
        for buffer, first in self._others:
            buffer.copy_(first)

    @property
    def is_restorable(self) -> bool:
        """Whether `load` and `reset` restore the whole network.

        They cannot if a layer holds something that Python cannot look into, or whose contents have changed, such as a
        list or a tensor outside of the layout.
        """
        return self._held.is_restorable

    def written_constant(self) -> str:
        """Return the name of a frozen tensor (the key `train`) that something has written into, "" if there is none.

        The first call compares all values, and each later one those of about 16 MB, in turns.
        """
        for name, tensor, traces in self._constants:
            if _traces(tensor) != traces:
                return name
        left = _CHECKED_BYTES if self._checked else math.inf
        for _ in self._constants:
            at = self._checked % len(self._constants)
            name, tensor, _ = self._constants[at]
            if not torch.equal(_sum(tensor), self._sums[at]):
                return name
            self._checked, left = self._checked + 1, left - tensor.nbytes
            if left <= 0:
                break
        return ""

    def _view(self, vector: Tensor, slot: Slot) -> Tensor:
        piece = vector[slot.start : slot.stop]
        if len(slot.shape) != 4:
            return piece.view(slot.shape)
        o, i, h, w = slot.shape
        return piece.view(o, h, w, i).permute(0, 3, 1, 2)

    def tensor(self, vector: Vector | NDArray[np.bool_]) -> Tensor:
        """Return a float32 or bool [d] in named_parameters order as a tensor in the device's order."""
        source = _readable(vector)
        inward = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        self._put(inward, source)
        return inward

    def _put(self, inward: Tensor, source: Tensor) -> None:
        """Copy a tensor [d] in named_parameters order into one in the device's order."""
        source = source.to(self.device)
        if not self._kernels:
            inward.copy_(source)
            return
        for part in self._plain:
            inward[part].copy_(source[part])
        for slot in self._kernels:
            self._view(inward, slot).copy_(source[slot.start : slot.stop].view(slot.shape))

    def vector(self, tensor: Tensor) -> Vector:
        """Return a vector [d] on the device in named_parameters order."""
        outward = _copied(tensor)
        for slot in self._kernels:
            outward[slot.start : slot.stop] = self._view(outward, slot).reshape(-1)
        result: Vector = outward.numpy()
        return result

    def load(self, model: Model) -> None:
        """Put a model's values into the module."""
        with torch.no_grad():
            self._put(self.weights, _readable(model.params))
            if self.layout.b:
                self.statistics.copy_(_readable(model.buffers))

    def read(self) -> Model:
        """Copy the module's values out."""
        return Model(self.vector(self.weights), _copied(self.statistics).numpy())

    def network(self, model: Model) -> nn.Module:
        """Return a second network with a model's values: evaluation mode, without gradients."""
        # both have the same constants
        module = copy.deepcopy(self.module, {id(one): one for _, one, _ in self._constants})
        tensors = self.layout.tensors(model)
        with torch.no_grad():
            for name, own in (*module.named_parameters(), *module.named_buffers()):
                if name in tensors:
                    own.copy_(torch.from_numpy(np.array(tensors[name])))
        return module.requires_grad_(False).eval()

    def freeze(self, frozen: frozenset[str] | NDArray[np.bool_]) -> Tensor | None:
        """Exclude these parameters, and those that the user's model froze, from training. Autograd skips them.

        frozen: tensors by name, or parameters by position, bool [d]. Returns bool [d] in the device's order, True where
        nothing may change, or None if everything may.
        """
        by_name = isinstance(frozen, frozenset)
        if by_name and not frozen and all(self._trainable):
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            return None
        fixed = np.zeros(self.layout.d, bool) if by_name else np.array(frozen, bool)
        for slot, parameter, trainable in zip(self.layout.params, self._parameters, self._trainable, strict=True):
            part = fixed[slot.start : slot.stop]
            if by_name and slot.name in frozen:
                part[:] = True
            parameter.requires_grad_(trainable and not part.all())
            # parameters that do not train have no weight decay either
            part |= not trainable
        return self.tensor(fixed) if fixed.any() else None


def _traces(tensor: Tensor) -> tuple[int, int]:
    """Return what a write by PyTorch's operations changes, and another memory of the tensor."""
    return tensor._version, tensor.data_ptr()


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, which wraps. A write through `tensor.data` hardly leaves it as it is."""
    bits: Tensor = plain(tensor).detach()
    bits = bits.view(_INTEGERS[bits.element_size()]) if bits.is_floating_point() else bits
    return bits.sum(dtype=bits.dtype)


def _readable(vector: NDArray[Any]) -> Tensor:
    """Return an array as a tensor for reading only, without a copy if possible."""
    flags = vector.flags
    if not (flags.c_contiguous and flags.writeable):
        vector = np.require(vector, requirements=("C", "W"))
    return torch.from_numpy(vector)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", copy=True)


def set_mode(module: nn.Module, training: bool) -> None:
    """Put a module and its parts into training or evaluation mode, as `module.train(training)` does, in a tenth of its time.

    The functions of a module with its own `train`, `eval` or `__setattr__` are called.
    """
    own = module.__dict__
    if "train" in own or "eval" in own or _has_own_mode(type(module)):  # type: ignore[arg-type]  # a class is hashable
        module.train() if training else module.eval()
        return
    own["training"] = training
    for part in module._modules.values():
        if part is not None:
            set_mode(part, training)


@functools.lru_cache(maxsize=256)
def _has_own_mode(kind: type[nn.Module]) -> bool:
    """Return whether a class of modules replaces a function by which modules change their mode."""
    return any(getattr(kind, name) is not getattr(nn.Module, name) for name in _OF_MODE)


@torch.no_grad()
def mask_and_clip(gradient: Tensor, fixed: Tensor | None, clip_norm: float) -> None:
    """Zero the gradient of fixed parameters, and scale the rest down to a norm, as torch.nn.utils.clip_grad_norm_ does.

    clip_norm: the largest norm; 0 does not scale.
    """
    if fixed is not None:
        gradient.masked_fill_(fixed, 0)
    if clip_norm:
        gradient.mul_((clip_norm / (gradient.norm() + 1e-6)).clamp(max=1.0))


class SGD:
    """torch.optim.SGD's step on a flat vector: weight decay, then momentum.

    fixed: bool [d], the parameters that do not change.
    """

    def __init__(
        self, vector: Tensor, *, momentum: float, weight_decay: float, fixed: Tensor | None = None, clip_norm: float = 0
    ) -> None:
        moving = range(len(vector))
        # compute nothing for fixed parameters at either end
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

    def restart(self) -> None:
        """Reset the momentum to zero."""
        if self._velocity is not None:
            self._velocity.zero_()

    @property
    def state(self) -> list[Tensor]:
        """The momentum, if there is one."""
        return [] if self._velocity is None else [self._velocity]


class Adam:
    """The step of torch.optim.Adam, or of AdamW if `decoupled`, on a flat vector, with its default betas and epsilon.

    fixed: as for SGD.
    """

    def __init__(
        self,
        vector: Tensor,
        *,
        weight_decay: float,
        decoupled: bool,
        fixed: Tensor | None = None,
        clip_norm: float = 0,
    ) -> None:
        self._vector, self._weight_decay, self._fixed, self._clip_norm = vector, weight_decay, fixed, clip_norm
        self._decoupled = decoupled
        self._first, self._second = torch.zeros_like(vector), torch.zeros_like(vector)
        self._steps = 0

    @torch.no_grad()
    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector; `gradient` may be overwritten."""
        mask_and_clip(gradient, self._fixed, self._clip_norm)
        self._steps += 1
        if self._weight_decay and not self._decoupled:
            gradient = gradient.add(self._vector, alpha=self._weight_decay)
            if self._fixed is not None:
                gradient.masked_fill_(self._fixed, 0)
        elif self._weight_decay:
            shrunk = self._vector * (1 - learning_rate * self._weight_decay)
            self._vector.copy_(shrunk if self._fixed is None else torch.where(self._fixed, self._vector, shrunk))
        self._first.lerp_(gradient, 1 - BETA1)
        self._second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        size = self._second.sqrt().div_(math.sqrt(1 - BETA2**self._steps)).add_(EPSILON)
        self._vector.addcdiv_(self._first, size, value=-learning_rate / (1 - BETA1**self._steps))


def optimizer_of(config: RunConfig, vector: Tensor, fixed: Tensor | None) -> SGD | Adam:
    """Return a run's optimizer for a vector. fixed: bool [d], the parameters that do not change."""
    decay, clip = config.weight_decay, config.clip_norm
    if config.optimizer == "sgd":
        return SGD(vector, momentum=config.momentum, weight_decay=decay, fixed=fixed, clip_norm=clip)
    decoupled = config.optimizer == "adamw"
    return Adam(vector, weight_decay=decay, decoupled=decoupled, fixed=fixed, clip_norm=clip)
