"""Scores of predictions, in float64. An undefined score is NaN, and a mean leaves NaN out.

Only centred numbers and counts are summed, so that a score exceeds its range by the last bits at most.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
Truth = NDArray[np.bool_]


def array(values: Tensor) -> NDArray[Any]:
    """Return a tensor as an array on the CPU. Floating-point numbers become float64."""
    found: NDArray[Any] = values.detach().cpu().numpy()
    return found.astype(np.float64) if found.dtype.kind == "f" else found


def mean_defined(values: Floats) -> float:
    """Return the mean of the values that are not NaN; NaN if all are."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan


def one_of(labels: NDArray[np.int64], num_classes: int) -> Truth:
    """Return labels [n] as one-hot rows, bool [n, C]."""
    return np.equal(labels[:, None], np.arange(num_classes))


def recalls(truth: Truth, predicted: Truth) -> Floats:
    """Return each column's recall, float64 [C]; NaN for a column without a true sample. truth, predicted: bool [n, C]."""
    return _quotient((truth & predicted).sum(0, np.float64), truth.sum(0, np.float64))


def f1_scores(truth: Truth, predicted: Truth) -> Floats:
    """Return each column's F1 = 2 TP / (2 TP + FP + FN), float64 [C]; NaN for a column that is neither true nor predicted."""
    hits = (truth & predicted).sum(0, np.float64)
    return _quotient(2 * hits, truth.sum(0, np.float64) + predicted.sum(0, np.float64))


def _quotient(part: Floats, whole: Floats) -> Floats:
    """Return part / whole, NaN where the whole is 0."""
    found = np.full(len(whole), math.nan)
    np.divide(part, whole, out=found, where=whole > 0)
    return found


def aucs(truth: Truth, scores: Floats) -> Floats:
    """Return each column's area under the ROC curve, float64 [C]; NaN if its samples have one class, or a score is NaN.

    truth: bool [n, C]. scores: float64 [n, C]; only their order matters. Equal scores count half (Mann and Whitney
    1947).
    """
    return np.array([_auc(*column) for column in zip(truth.T, scores.T, strict=True)])


def _auc(truth: Truth, scores: Floats) -> float:
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives or np.isnan(scores).any():
        return math.nan
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # equal scores share the mean of their ranks, which start at 1
    ranks = np.cumsum(counts) - (counts - 1) / 2
    above = float(ranks[places][truth].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def log_odds(logits: Floats) -> Floats:
    """Return log(p / (1 - p)) of each class's probability p, float64 [n, C].

    It is a class's logit minus the log-sum-exp of the other classes' logits. Its order is that of p, even where p
    rounds to 1. logits: float64 [n, C].
    """
    n, num_classes = logits.shape
    none = np.full((n, 1), -math.inf)
    with np.errstate(invalid="ignore"):
        before = np.hstack([none, np.logaddexp.accumulate(logits, axis=1)[:, : num_classes - 1]])
        after = np.hstack([np.logaddexp.accumulate(logits[:, ::-1], axis=1)[:, ::-1][:, 1:], none])
        return np.asarray(logits - np.logaddexp(before, after))


def r2_scores(outputs: Floats, targets: Floats) -> Floats:
    """Return each column's R2 = 1 - sum of squared errors / sum of squared deviations, float64 [k]; NaN for a constant target.

    outputs, targets: float64 [n, k].
    """
    errors = np.square(outputs - targets).sum(0)
    spread = np.square(targets - targets.mean(0)).sum(0)
    # compare the values themselves: the mean of equal numbers may differ from them in the last bit
    varies = targets.max(0) > targets.min(0)
    return 1 - _quotient(errors, np.where(varies, spread, 0.0))
