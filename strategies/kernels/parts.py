"""A part of a model: the elements of its vectors that one client holds, trains and uploads.

A server half says by `Method.submodel` which part each client holds. The base then expects uploads of that part, and
fills them up with the values of the model that the client was sent (`ServerHalf.sent_to`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fl_app.layout import Layout, Model, Slot


@dataclass(frozen=True)
class Part:
    """params: bool [d]; buffers: bool [b]; True where the client holds the element."""

    params: NDArray[np.bool_]
    buffers: NDArray[np.bool_]

    @cached_property
    def d(self) -> int:
        """Number of the part's parameters."""
        return int(np.count_nonzero(self.params))

    @cached_property
    def b(self) -> int:
        """Number of the part's buffer elements."""
        return int(np.count_nonzero(self.buffers))

    @classmethod
    def of_tensors(cls, layout: Layout, names: frozenset[str]) -> Part:
        """Return the part that consists of whole tensors."""
        buffers = np.zeros(layout.b, bool)
        for slot in layout.buffers:
            buffers[slot.start : slot.stop] = slot.name in names
        return cls(layout.indices(names), buffers)

    def among(self, slices: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return where slices [start, stop) of all buffers lie in the part's own, as `take` packs them."""
        places = np.concatenate([[0], np.cumsum(self.buffers)]).tolist()
        return tuple((places[start], places[stop]) for start, stop in slices)

    def take(self, model: Model) -> Model:
        """Return the part's elements of a model, packed in order."""
        return Model(model.params[self.params], model.buffers[self.buffers])

    def put(self, base: Model, part: Model) -> Model:
        """Return `base` with the part's elements replaced by those of `part`, as `take` returns them."""
        params, buffers = base.params.copy(), base.buffers.copy()
        params[self.params], buffers[self.buffers] = part.params, part.buffers
        return Model(params, buffers)


def head_slots(layout: Layout) -> tuple[Slot, Slot | None]:
    """Return the slots of the classifier's weight [C, k] and bias [C], the latter None without a bias.

    layout: of a model whose classifier is one linear layer (strategies/base/needs.py).
    """
    found = {len(slot.shape): slot for slot in layout.params if slot.name in layout.classifier}
    return found[2], found.get(1)
