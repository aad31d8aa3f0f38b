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
from typing import TYPE_CHECKING, NamedTuple

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


class Split(NamedTuple):
    """The division of a network into body and classifier.

    classifier: names of the classifier's tensors.
    layer: path of the module that holds the classifier. Its input is a sample's features. None if there is no such module.
    linear: whether this module is a Linear layer with weight [C, k], and its output is the network's.
    unused: names of the parameters that no gradient reaches.
    fault: why the network cannot be split; "" if it can.
    """

    classifier: frozenset[str] = frozenset()
    layer: str | None = None
    linear: bool = False
    unused: frozenset[str] = frozenset()
    fault: str = ""

    def marks(self, module: nn.Module) -> None:
        """Write this split into a network, for `of`."""
        module.__dict__[_MARK] = self

    @classmethod
    def of(cls, module: nn.Module) -> Split:
        """Return the split that a network was marked with, or those of the networks inside it.

        A network without marks is split at its last Linear layer, in the order of registration.
        """
        marked = [(path, part.__dict__[_MARK]) for path, part in module.named_modules() if _MARK in part.__dict__]
        if not marked:
            return cls._registered_last(module)
        parts: list[Split] = [split.inside(path) for path, split in marked]
        return parts[-1]._replace(
            classifier=frozenset().union(*(part.classifier for part in parts)),
            unused=frozenset().union(*(part.unused for part in parts)),
        )

    def inside(self, path: str) -> Split:
        """Return the same split, of a network at a path of another one."""
        if not path:
            return self

        def below(names: frozenset[str]) -> frozenset[str]:
            return frozenset(f"{path}.{name}" for name in names)

        layer = None if self.layer is None else f"{path}.{self.layer}"
        return self._replace(classifier=below(self.classifier), layer=layer, unused=below(self.unused))

    @classmethod
    def _registered_last(cls, module: nn.Module) -> Split:
        from torch import nn

        linear = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        if not linear:
            return cls(fault="no Linear layer is in it")
        path, layer = linear[-1]
        own = [name for name, _ in layer.named_parameters(recurse=False)]
        own += [name for name, buffer in layer.named_buffers(recurse=False) if buffer.is_floating_point()]
        plain = "weight" in own
        return cls(frozenset(f"{path}.{name}".lstrip(".") for name in own), path, plain)


_MARK = "_corolla_split"


@dataclass(frozen=True)
class Layout:
    """Names, shapes and slices of a model's parameters and buffers.

    classifier: names of the classifier's tensors, those of the last layer before the output. batchnorm: names of
    BatchNorm's parameters and statistics. constants: sha256 of the frozen tensors, which are no part of the layout
    (fl_app/trainable_tensors.py); "" if there are none. constant_head: names of the classifier's frozen tensors. split:
    the network's division into body and classifier, with its frozen tensors.
    """

    params: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    classifier: frozenset[str] = frozenset()
    batchnorm: frozenset[str] = frozenset()
    constants: str = ""
    constant_head: frozenset[str] = frozenset()
    split: Split = Split()

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a torch module."""
        from torch import nn

        constant: frozenset[str] = getattr(module, "frozen_names", frozenset())
        split = Split.of(module)
        batchnorm: set[str] = set()
        for prefix, child in module.named_modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                own = {f"{prefix}.{n}" if prefix else n for n, _ in child.named_parameters(recurse=False)}
                buffers = [n for n, b in child.named_buffers(recurse=False) if b.is_floating_point()]
                own |= {f"{prefix}.{n}" if prefix else n for n in buffers}
                batchnorm |= own - constant
        params = packed((n, tuple(p.shape)) for n, p in module.named_parameters())
        statistics = packed(
            (n, tuple(b.shape)) for n, b in module.named_buffers() if b.is_floating_point() and n not in constant
        )
        there = {slot.name for slot in (*params, *statistics)}
        return cls(
            params,
            statistics,
            split.classifier & there,
            frozenset(batchnorm),
            getattr(module, "frozen_sha256", ""),
            split.classifier & constant,
            split,
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

    @cached_property
    def parts(self) -> dict[str, list[str]]:
        """Names of the tensors of body and classifier, and of unused parameters, which no gradient reaches, in order."""
        ordered = [slot.name for slot in self.params + self.buffers]
        return {
            "body": [name for name in ordered if name not in self.classifier],
            "classifier": [name for name in ordered if name in self.classifier],
            "unused": [name for name in ordered if name in self.split.unused],
        }

    def subset(self, names: frozenset[str]) -> Layout:
        """Return the layout of only the named tensors, packed in the same order."""
        return Layout(
            packed((s.name, s.shape) for s in self.params if s.name in names),
            packed((s.name, s.shape) for s in self.buffers if s.name in names),
            self.classifier & names,
            self.batchnorm & names,
            split=self.split,
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
