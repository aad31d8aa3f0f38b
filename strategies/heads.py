"""The classifier of a model: where its tensors lie in the flat vector."""

from __future__ import annotations

from fl_app.errors import UserError
from fl_app.layout import Layout, Slot
from strategies.base import check_head_trains


def head_slots(layout: Layout) -> tuple[Slot, Slot | None]:
    """Return the slots of the classifier's weight [C, k] and bias [C], the latter None without a bias.

    Raises UserError if the weight is no parameter that trains.
    """
    found = {len(slot.shape): slot for slot in layout.params if slot.name in layout.classifier}
    if 2 not in found:
        check_head_trains(layout, "weight")
        raise UserError(
            "model: this method needs the weight of the last Linear layer, which is not a separate parameter here"
        )
    return found[2], found.get(1)
