"""Classification: one of several classes, by cross-entropy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fl_app.metrics import Metric
from fl_app.tasks.task import Task
from fl_app.tasks.torchmetrics_part import functional

if TYPE_CHECKING:
    from torch import Tensor


ACCURACY = Metric("accuracy", ratio=True, pooling="mean")


class Classification(Task):
    """Labels int64 [n], outputs logits [n, C].

    Accuracy is counted; balanced accuracy (mean recall of the classes there are), macro F1 and AUC (one class against the rest,
    mean over the classes that have both) are torchmetrics', which takes a second to import: they are measured if asked for.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        ACCURACY,
        Metric("balanced-accuracy", ratio=True),
        Metric("macro-f1", ratio=True),
        Metric("auc", ratio=True),
    )
    usual: ClassVar[tuple[str, ...]] = ("accuracy",)
    by_torchmetrics: ClassVar[frozenset[str]] = frozenset({"balanced-accuracy", "macro-f1", "auc"})
    has_classes: ClassVar[bool] = True

    @property
    def cross_entropy(self) -> bool:
        """Whether the loss is this class's."""
        return type(self).loss is Classification.loss

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, y)

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the samples' cross-entropies."""
        if not self.cross_entropy:
            return super().total(outputs, y)
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, y, reduction="sum")

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> Mapping[str, float]:
        """Return metrics by name."""
        with warnings.catch_warnings():
            # torchmetrics warns of classes without samples, which are left out here.
            warnings.simplefilter("ignore")
            return {name: _MEASURES[name](outputs, y) for name in names}

    def predict(self, outputs: Tensor) -> Tensor:
        """Return probabilities [n, C]."""
        return outputs.softmax(1)


def _accuracy(outputs: Tensor, y: Tensor) -> float:
    return int((outputs.argmax(1) == y).sum()) / len(y)


def _balanced_accuracy(outputs: Tensor, y: Tensor) -> float:
    recalls = functional("classification").multiclass_recall(outputs, y, outputs.shape[1], average="none")
    return float(recalls[y.bincount(minlength=outputs.shape[1]) > 0].mean())


def _macro_f1(outputs: Tensor, y: Tensor) -> float:
    return float(functional("classification").multiclass_f1_score(outputs, y, outputs.shape[1], average="macro"))


def _auc(outputs: Tensor, y: Tensor) -> float:
    counts = y.bincount(minlength=outputs.shape[1])
    both = (counts > 0) & (counts < len(y))
    if not both.any():
        return math.nan
    per_class = functional("classification").multiclass_auroc(outputs.softmax(1), y, outputs.shape[1], average="none")
    return float(per_class[both].mean())


_MEASURES: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": _accuracy,
    "balanced-accuracy": _balanced_accuracy,
    "macro-f1": _macro_f1,
    "auc": _auc,
}
