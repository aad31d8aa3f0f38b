"""Networks made of several models side by side, and the names of each one's tensors in the whole."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from fl_app.layout import Layout, Slot

if TYPE_CHECKING:
    from torch import Tensor, nn

_COMPONENT = re.compile(r"(?:^|(?<=\.))components\.(\d+)\.")


def chosen_of(models: list[nn.Module]) -> nn.Module:
    """One network of several that answers with the one whose position is its attribute `chosen`, at first 0.

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
    """The first drawing of a model, whose last Linear layer is replaced by one of those of `count` drawings (`chosen_of`)."""
    module, layers = draw(0), list[tuple[str, "nn.Module"]]()
    for k in range(count):
        layers.append(last_linear(module if not k else draw(k)))
    parent, _, name = layers[0][0].rpartition(".")
    setattr(module.get_submodule(parent), name, chosen_of([layer for _, layer in layers]))
    return module


def last_linear(module: nn.Module) -> tuple[str, nn.Module]:
    """Name of a model's last Linear layer, and the layer; the model itself, "", if it has none below it."""
    from torch import nn

    linear = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
    return linear[-1] if linear else ("", module)


def component_of(name: str) -> int | None:
    """The position of the component that a tensor belongs to; None if it belongs to all."""
    found = _COMPONENT.search(name)
    return int(found[1]) if found else None


def tensors_of(layout: Layout, k: int) -> frozenset[str]:
    """Names of the tensors that the k-th component uses: its own, and those of all."""
    return frozenset(name for name in layout.names if component_of(name) in (k, None))


def alone(layout: Layout, k: int) -> Layout:
    """The layout of the k-th component as a model of its own, tensors named as in the user's."""

    def own(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        kept, start = list[Slot](), 0
        for slot in slots:
            if component_of(slot.name) in (k, None):
                kept.append(Slot(_COMPONENT.sub("", slot.name, count=1), slot.shape, start, start + math.prod(slot.shape)))
                start = kept[-1].stop
        return tuple(kept)

    def plain(names: frozenset[str]) -> frozenset[str]:
        return frozenset(_COMPONENT.sub("", name, count=1) for name in names)

    classifier, batchnorm = plain(layout.classifier), plain(layout.batchnorm)
    return dataclasses.replace(
        layout, params=own(layout.params), buffers=own(layout.buffers), classifier=classifier, batchnorm=batchnorm
    )
