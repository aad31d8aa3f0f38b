"""The classifier of a model: where its tensors lie in the flat vector."""

from __future__ import annotations

from fl_app.layout import Layout, Slot


def head_slots(layout: Layout) -> tuple[Slot, Slot | None]:
    """Return the slots of the classifier's weight [C, k] and bias [C], the latter None without a bias.

    layout: of a model whose classifier is one linear layer (strategies/base/needs.py).
    """
    found = {len(slot.shape): slot for slot in layout.params if slot.name in layout.classifier}
    return found[2], found.get(1)
