"""Multi-label classification: several yes-or-no labels per sample, by binary cross-entropy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_app.metrics import Metric
from fl_app.tasks import scoring
from fl_app.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor


class MultiLabel(Task):
    """Targets float32 [n, L] of 0 and 1, outputs logits [n, L].

    auc: mean over the labels with both positive and negative samples. f1: at probability 1/2, mean over the labels that
    are true or predicted (macro). Each is NaN if there is no label to average.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("auc", ratio=True, undefined="no label varies"),
        Metric("f1", ratio=True, undefined="no label is true or predicted"),
    )

    def check(self, y: NDArray[Any]) -> str:
        """Return "" if all targets are 0 or 1, else the rule for an error."""
        return "" if np.isin(y, (0, 1)).all() else "hold zeros and ones"

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross-entropy, mean over samples and labels."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(outputs, y)

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> Mapping[str, float]:
        """Return metrics by name."""
        truth, logits = scoring.array(y) == 1, scoring.array(outputs)
        found: dict[str, float] = {}
        for name in names:
            per_label = scoring.f1_scores(truth, logits > 0) if name == "f1" else scoring.aucs(truth, logits)
            found[name] = scoring.mean_defined(per_label)
        return found

    def predict(self, outputs: Tensor) -> Tensor:
        """Return each label's probability [n, L]."""
        return outputs.sigmoid()
