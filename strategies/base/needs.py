"""What a method needs of the model's classifier, and the refusal of models that do not have it, in one place."""

from __future__ import annotations

from typing import Literal

from fl_app.errors import MethodError, UserError, listed
from fl_app.layout import Layout

Need = Literal["", "body and classifier", "features", "classifier as one linear layer"]
"""Each includes those before it.

- `body and classifier`: the names of the classifier's tensors, and tensors below it. Of both, some train.
- `features`: one module holds the classifier. Its input, flattened, is a sample's features.
- `classifier as one linear layer`: this module is a Linear layer with weight [C, k], and its output is the model's.
"""

SPLIT: Need = "body and classifier"
FEATURES: Need = "features"
LINEAR: Need = "classifier as one linear layer"


def refuse(layout: Layout, need: Need) -> None:
    """Raise UserError for a model without what a method needs, or if the key `train` leaves out all of a part."""
    if not need:
        return
    if not layout.classifier:
        check_head_trains(layout)
    if not layout.names - layout.classifier and layout.constants:
        raise MethodError(
            key="train",
            rule="this method trains body and classifier, but no tensor of the body, below the classifier, trains",
        )
    if why := _lacks(layout, need):
        raise unfit(need, f"{why}; the key classifier can name other tensors")
    if need == LINEAR:
        check_head_trains(layout, "weight")


def unfit(need: str, why: str) -> UserError:
    """Return the error for a model without what a method needs."""
    return UserError(key="model", rule=f"this method needs {need}, but {why}")


def _lacks(layout: Layout, need: Need) -> str:
    """Return why a model does not have what a method needs, "" if it does."""
    split, names = layout.split, listed(sorted(layout.classifier))
    if split.fault or not layout.classifier:
        return split.fault or "it has no classifier"
    if need != SPLIT and split.layer is None:
        return f"no single module holds its classifier {names}"
    training = {slot.name for slot in layout.params} - split.unused
    if not training & layout.classifier:
        return f"no parameters of its classifier {names} train"
    if not training - layout.classifier:
        return f"no parameters below its classifier {names} train"
    if need == LINEAR and not split.linear:
        return f"its output is not that of one Linear layer with plain parameters, its classifier being {names}"
    return ""


def classifier_path(layout: Layout) -> str:
    """Return the path of the module that holds the classifier. Raises UserError if no single module does."""
    if (path := layout.split.layer) is None:
        refuse(layout, FEATURES)
    assert path is not None
    return path


def all_but_classifier(layout: Layout, params: object = None) -> frozenset[str]:
    """Return the names of all tensors except the classifier's.

    Raises UserError if the model cannot be split, or if the key `train` leaves out all tensors of one part.
    """
    refuse(layout, SPLIT)
    return layout.names - layout.classifier


def check_head_trains(layout: Layout, *tensors: str) -> None:
    """Raise UserError if the key `train` leaves out tensors of the classifier.

    `tensors`: check only these of the layer's tensors (`weight`, `bias`). Default: all of them.
    """
    lacking = sorted(name for name in layout.constant_head if not tensors or name.rpartition(".")[2] in tensors)
    if lacking:
        said = f"'s {' and '.join(tensors)}" if tensors else ""
        raise MethodError(
            key="train", rule=f"this method needs to train the classifier{said}; the key leaves out {listed(lacking)}"
        )
