"""Multi-label classification: each of several labels holds or not, by binary cross-entropy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fl_app.metrics import Metric
from fl_app.tasks.task import Task
from fl_app.tasks.torchmetrics_part import functional

if TYPE_CHECKING:
    from torch import Tensor


class MultiLabel(Task):
    """Targets float32 [n, L] of 0 and 1, outputs logits [n, L].

    AUC: mean over the labels that some samples have and some have not; NaN if there is none. F1: macro, at probability 1/2. Both
    are torchmetrics'.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("auc", ratio=True), Metric("f1", ratio=True))
    by_torchmetrics: ClassVar[frozenset[str]] = frozenset({"auc", "f1"})

    def check(self, y: NDArray[Any]) -> str:
        """Want zeros and ones."""
        return "" if np.isin(y, (0, 1)).all() else "hold zeros and ones"

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross-entropy, mean over samples and labels."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(outputs, y)

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> Mapping[str, float]:
        """Return metrics by name."""
        torchmetrics = functional("classification")
        found: dict[str, float] = {}
        probabilities, truth = outputs.sigmoid(), y.long()
        both = (truth.amin(0) == 0) & (truth.amax(0) == 1)
        with warnings.catch_warnings():
            # about labels that all samples have, or none: they are left out here
            warnings.simplefilter("ignore")
            for name in names:
                if name == "f1":
                    found[name] = float(
                        torchmetrics.multilabel_f1_score(probabilities, truth, y.shape[1], average="macro")
                    )
                elif not both.any():
                    found[name] = math.nan
                elif y.shape[1] == 1:  # torchmetrics wants two labels at least
                    found[name] = float(torchmetrics.binary_auroc(probabilities[:, 0], truth[:, 0]))
                else:
                    per_label = torchmetrics.multilabel_auroc(probabilities, truth, y.shape[1], average="none")
                    found[name] = float(per_label[both].mean())
        return found

    def predict(self, outputs: Tensor) -> Tensor:
        """Return each label's probability [n, L]."""
        return outputs.sigmoid()
