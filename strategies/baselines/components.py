"""Networks of several models side by side, and the names of each model's tensors in the whole."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strategies.base import (
    Layout,
    Model,
    Slot,
    Split,
    Vector,
    classifier_path,
    packed,
)
from strategies.kernels import head_slots

if TYPE_CHECKING:
    from torch import Tensor, nn

ENCODERS, CLASSIFIER = "encoders", "classifier"  # of a concatenation

_COMPONENT = re.compile(r"(?:^|(?<=\.))components\.(\d+)\.")


def chosen_of(models: list[nn.Module]) -> nn.Module:
    """Return one network of several. The one at the position `chosen`, an attribute that is 0 at first, answers.

    Its tensors are named components.<position>.<name in the model>.
    """
    from torch import nn

    class OneOf(nn.Module):
        """Several networks, of which one answers."""

        def __init__(self) -> None:
            super().__init__()
            self.components = nn.ModuleList(models)
            self.chosen = 0

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.components[self.chosen](x)
            return answer

    return OneOf()


def classifiers_of(draw: Callable[[int], nn.Module], count: int) -> nn.Module:
    """Return the first drawing of a model, with the classifiers of `count` drawings in place of its own (`chosen_of`)."""
    module = draw(0)
    path, own = classifier_of(module)
    parent, _, name = path.rpartition(".")
    chosen = chosen_of([own, *(classifier_of(draw(k))[1] for k in range(1, count))])
    setattr(module.get_submodule(parent), name, chosen)
    own = frozenset(f"{path}.{name}" for name in chosen.state_dict())
    Split.of(module)._replace(classifier=own).marks(module)
    return module


def bodies_of(models: Sequence[nn.Module]) -> nn.Module:
    """Return one network of several. It gives the inputs of their classifiers, flattened and side by side.

    Its output is float32 [n, sum of widths]. The models lose these layers. Its tensors are named <position>.<name in
    the model>.
    """
    import torch
    from torch import nn

    class Tap(nn.Module):
        """Takes the place of a Linear layer. `features` is its last input."""

        features: Tensor

        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.outputs = outputs

        def forward(self, z: Tensor) -> Tensor:
            self.features = z.flatten(1)
            return z.new_zeros(*z.shape[:-1], self.outputs)

    class SideBySide(nn.ModuleList):
        """Models, and the taps that see their features."""

        def __init__(self) -> None:
            super().__init__(models)
            self.taps = list[Tap]()
            for model in models:
                name, layer = classifier_of(model)
                parent, _, own = name.rpartition(".")
                self.taps.append(Tap(layer.out_features))
                setattr(model.get_submodule(parent), own, self.taps[-1])

        def forward(self, x: Tensor) -> Tensor:
            for model in self:
                model(x)
            return torch.cat([tap.features for tap in self.taps], dim=1)

    return SideBySide()


def classifier_of(module: nn.Module) -> tuple[str, Any]:
    """Return the path of the module that holds a network's classifier, and this module.

    Raises UserError if there is none.
    """
    path = classifier_path(Layout.of(module))
    return path, module.get_submodule(path)


def component_of(name: str) -> int | None:
    """Return the position of the component that a tensor belongs to; None if it belongs to all."""
    found = _COMPONENT.search(name)
    return int(found[1]) if found else None


def tensors_of(layout: Layout, k: int) -> frozenset[str]:
    """Return the names of the tensors that the k-th component uses: its own, and those of all components."""
    return frozenset(name for name in layout.names if component_of(name) in (k, None))


def alone(layout: Layout, k: int) -> Layout:
    """Return the layout of the k-th component as a separate model. Tensors are named as in the user's model."""

    def own(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        kept = (slot for slot in slots if component_of(slot.name) in (k, None))
        return packed((_COMPONENT.sub("", slot.name, count=1), slot.shape) for slot in kept)

    def plain(names: frozenset[str]) -> frozenset[str]:
        return frozenset(_COMPONENT.sub("", name, count=1) for name in names)

    found = layout.split
    layer = None if found.layer is None else _COMPONENT.sub("", f"{found.layer}.", count=1).rstrip(".")
    return dataclasses.replace(
        layout,
        params=own(layout.params),
        buffers=own(layout.buffers),
        classifier=plain(layout.classifier),
        batchnorm=plain(layout.batchnorm),
        split=found._replace(classifier=plain(found.classifier), layer=layer, unused=plain(found.unused)),
    )


def side_by_side(layout: Layout, count: int) -> Layout:
    """Return the layout of the network that `chosen_of` makes of `count` models, given the layout of one."""

    def each(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return packed((f"components.{k}.{slot.name}", slot.shape) for k in range(count) for slot in slots)

    def named(names: frozenset[str]) -> frozenset[str]:
        return frozenset(f"components.{k}.{name}" for k in range(count) for name in names)

    return Layout(each(layout.params), each(layout.buffers), named(layout.classifier), named(layout.batchnorm))


def part(layout: Layout, prefix: str) -> Layout:
    """Return the layout of the tensors with names that begin with `prefix`, as a separate model, without the prefix."""
    bare = layout.subset(frozenset(name for name in layout.names if name.startswith(prefix)))

    def plain(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return tuple(dataclasses.replace(slot, name=slot.name.removeprefix(prefix)) for slot in slots)

    def named(names: frozenset[str]) -> frozenset[str]:
        return frozenset(name.removeprefix(prefix) for name in names)

    return Layout(plain(bare.params), plain(bare.buffers), named(bare.classifier), named(bare.batchnorm))


# One classifier on several bodies ---------------------------------------------------------------------------------------


def concatenation(models: Sequence[nn.Module]) -> nn.Module:
    """Return one classifier on the bodies of several models of one kind.

    Its state dict holds encoders.<k>.<name in the model>, classifier.weight [C, Kf] and classifier.bias [C]. The models
    lose their own classifiers.
    """
    from torch import nn

    layer = classifier_of(models[0])[1]
    classifier = nn.Linear(len(models) * layer.in_features, layer.out_features)
    return nn.Sequential(OrderedDict({ENCODERS: bodies_of(models), CLASSIFIER: classifier}))


def concatenated(layout: Layout, count: int) -> Layout:
    """Return the layout of the `concatenation` of `count` models, given the layout of one."""
    bare, (classes, width) = layout.subset(layout.names - layout.classifier), head_slots(layout)[0].shape

    def each(slots: tuple[Slot, ...]) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"{ENCODERS}.{k}.{slot.name}", slot.shape) for k in range(count) for slot in slots]

    own = [(f"{CLASSIFIER}.weight", (classes, count * width)), (f"{CLASSIFIER}.bias", (classes,))]
    batchnorm = frozenset(f"{ENCODERS}.{k}.{name}" for k in range(count) for name in bare.batchnorm)
    split = Split(frozenset(dict(own)), CLASSIFIER, linear=True)
    return Layout(
        packed([*each(bare.params), *own]), packed(each(bare.buffers)), split.classifier, batchnorm, split=split
    )


def fresh_classifier(layout: Layout, count: int, seed: int) -> Vector:
    """Return a new classifier on `count` models of a layout, float32 [KfC + C].

    It has PyTorch's initialization, drawn from a seed of torch's.
    """
    import torch
    from torch import nn

    classes, width = head_slots(layout)[0].shape
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layer = nn.Linear(count * width, classes)
    return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in layer.parameters()])


def sum_of_classifiers(layout: Layout, models: Sequence[Model]) -> Vector:
    """Return models' own classifiers as one on all of them, float32 [KfC + C]. Its logits are the sum of theirs."""
    classes, weight = head_slots(layout)[0].shape[0], head_slots(layout)[0].name
    own = [layout.tensors(model) for model in models]
    biases = [tensors[name].astype(np.float64) for tensors in own for name in layout.classifier - {weight}]
    bias = sum(biases, np.zeros(classes)).astype(np.float32)
    return np.concatenate([np.concatenate([tensors[weight] for tensors in own], axis=1).reshape(-1), bias])
