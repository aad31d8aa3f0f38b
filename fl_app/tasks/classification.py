"""Classification: one of several classes, by cross-entropy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fl_app.metrics import Metric
from fl_app.tasks import scoring
from fl_app.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor


ACCURACY = Metric("accuracy", ratio=True, pooling="mean")


class Classification(Task):
    """Labels int64 [n], outputs logits [n, C].

    balanced-accuracy: mean recall of the classes that the samples have. macro-f1: mean over the classes that are true
    or predicted. auc: one class against the rest, mean over the classes with both positive and negative samples; NaN if
    there is no such class.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        ACCURACY,
        Metric("balanced-accuracy", ratio=True),
        Metric("macro-f1", ratio=True),
        Metric("auc", ratio=True, undefined="one class"),
    )
    usual: ClassVar[tuple[str, ...]] = ("accuracy",)
    has_classes: ClassVar[bool] = True

    @property
    def cross_entropy(self) -> bool:
        """Whether the loss is this class's, not a subclass's own."""
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
        labels, found = outputs.argmax(1), dict[str, float]()
        for name in names:
            if name == "accuracy":
                found[name] = int((labels == y).sum()) / len(y)
                continue
            truth = scoring.one_of(scoring.array(y), outputs.shape[1])
            if name == "auc":
                scores = scoring.aucs(truth, scoring.log_odds(scoring.array(outputs)))
            else:
                score = scoring.recalls if name == "balanced-accuracy" else scoring.f1_scores
                scores = score(truth, scoring.one_of(scoring.array(labels), outputs.shape[1]))
            found[name] = scoring.mean_defined(scores)
        return found

    def predict(self, outputs: Tensor) -> Tensor:
        """Return probabilities [n, C]."""
        return outputs.softmax(1)
