"""A model as two flat vectors, and the map from tensor names and shapes to slices of them.

Methods compute with `Model`: `params` float32 [d] in the order of `named_parameters()`, and `buffers` float32 [b].
Buffers are the floating-point ones, such as BatchNorm's running mean and variance. Integer counters such as
`num_batches_tracked` do not travel. A "layer" of a paper is one parameter tensor, one slot here: a weight and its bias
are two layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Model:
    """params: float32 [d]; buffers: float32 [b]."""

    params: Vector
    buffers: Vector

    @property
    def nbytes(self) -> int:
        """Bytes of both vectors."""
        return self.params.nbytes + self.buffers.nbytes


@dataclass(frozen=True)
class Slot:
    """One tensor: `vector[start:stop].reshape(shape)`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


NOTHING = Model(np.zeros(0, np.float32), np.zeros(0, np.float32))
"""The empty model, sent where no model is needed."""


def packed(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Slot, ...]:
    """Return slots that lay out tensors one after the other. shapes: (name, shape) of each."""
    slots, start = [], 0
    for name, shape in shapes:
        stop = start + int(np.prod(shape, dtype=np.int64))
        slots.append(Slot(name, tuple(shape), start, stop))
        start = stop
    return tuple(slots)


@dataclass(frozen=True)
class Layout:
    """Names, shapes and slices of a model's parameters and buffers.

    classifier: names of the last Linear layer's tensors. batchnorm: names of BatchNorm's parameters and statistics.
    constants: sha256 of the frozen tensors, which are no part of the layout (fl_app/trainable_tensors.py); "" if there
    are none. constant_head: names of the frozen tensors of the last Linear layer.
    """

    params: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    classifier: frozenset[str] = frozenset()
    batchnorm: frozenset[str] = frozenset()
    constants: str = ""
    constant_head: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a torch module."""
        from torch import nn

        constant: frozenset[str] = getattr(module, "frozen_names", frozenset())
        last_linear: frozenset[str] = frozenset()
        batchnorm: set[str] = set()
        for prefix, child in module.named_modules():
            own = {f"{prefix}.{n}" if prefix else n for n, _ in child.named_parameters(recurse=False)}
            buffers = [n for n, b in child.named_buffers(recurse=False) if b.is_floating_point()]
            own |= {f"{prefix}.{n}" if prefix else n for n in buffers}
            if isinstance(child, nn.Linear):
                last_linear = frozenset(own)
            elif isinstance(child, nn.modules.batchnorm._BatchNorm):
                batchnorm |= own - constant
        return cls(
            packed((n, tuple(p.shape)) for n, p in module.named_parameters()),
            packed(
                (n, tuple(b.shape)) for n, b in module.named_buffers() if b.is_floating_point() and n not in constant
            ),
            last_linear - constant,
            frozenset(batchnorm),
            getattr(module, "frozen_sha256", ""),
            last_linear & constant,
        )

    @cached_property
    def d(self) -> int:
        """Number of trainable parameters."""
        return self.params[-1].stop if self.params else 0

    @cached_property
    def b(self) -> int:
        """Number of floating-point buffer elements."""
        return self.buffers[-1].stop if self.buffers else 0

    @cached_property
    def variances(self) -> tuple[Slot, ...]:
        """Slots of BatchNorm's running variances."""
        return tuple(s for s in self.buffers if s.name in self.batchnorm and s.name.endswith("running_var"))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per parameter tensor, in order."""
        return tuple(slot.size for slot in self.params)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all parameters and buffers."""
        return frozenset(slot.name for slot in self.params + self.buffers)

    def subset(self, names: frozenset[str]) -> Layout:
        """Return the layout of only the named tensors, packed in the same order."""
        return Layout(
            packed((s.name, s.shape) for s in self.params if s.name in names),
            packed((s.name, s.shape) for s in self.buffers if s.name in names),
            self.classifier & names,
            self.batchnorm & names,
        )

    def take(self, model: Model, names: frozenset[str]) -> Model:
        """Return the named tensors of `model` as a packed model (that of `subset(names)`)."""
        if names >= self.names:
            return model
        return Model(_take(model.params, self.params, names), _take(model.buffers, self.buffers, names))

    def put(self, base: Model, part: Model, names: frozenset[str]) -> Model:
        """Return `base` with the named tensors replaced by `part`, the packed model of `subset(names)`."""
        if names >= self.names:
            return part
        return Model(
            _put(base.params, self.params, part.params, names), _put(base.buffers, self.buffers, part.buffers, names)
        )

    def indices(self, names: frozenset[str]) -> NDArray[np.bool_]:
        """Return bool [d], True on the named parameter tensors."""
        mask = np.zeros(self.d, dtype=bool)
        for slot in self.params:
            mask[slot.start : slot.stop] = slot.name in names
        return mask

    def tensors(self, model: Model) -> dict[str, Vector]:
        """Return views of the tensors by name, each in its shape."""
        views = {s.name: model.params[s.start : s.stop].reshape(s.shape) for s in self.params}
        views |= {s.name: model.buffers[s.start : s.stop].reshape(s.shape) for s in self.buffers}
        return views

    def model(self, tensors: Mapping[str, NDArray[np.generic]]) -> Model:
        """Return the model of arrays by tensor name, the inverse of `tensors`."""

        def flat(slots: tuple[Slot, ...]) -> Vector:
            if not slots:
                return np.zeros(0, np.float32)
            return np.concatenate([np.asarray(tensors[s.name], np.float32).reshape(-1) for s in slots])

        return Model(flat(self.params), flat(self.buffers))


NO_TENSORS = Layout((), ())
"""The layout of `NOTHING`."""


def _take(vector: Vector, slots: tuple[Slot, ...], names: frozenset[str]) -> Vector:
    pieces = [vector[s.start : s.stop] for s in slots if s.name in names]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def _put(base: Vector, slots: tuple[Slot, ...], part: Vector, names: frozenset[str]) -> Vector:
    out, start = base.copy(), 0
    for slot in slots:
        if slot.name in names:
            out[slot.start : slot.stop] = part[start : start + slot.size]
            start += slot.size
    return out
