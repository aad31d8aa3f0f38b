"""A task of one's own: the progression of diabetes after a year, robust to outliers, judged by the mean absolute error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from corolla.task import Metric, Task

if TYPE_CHECKING:
    from torch import Tensor

# the targets lie between 25 and 346; the model learns them in hundreds
SCALE = 100.0


class Progression(Task):
    """Targets and outputs float32 [n, 1], outputs in hundreds."""

    metrics = (Metric("mae", higher_is_better=False, low=0), Metric("within-50", ratio=True))

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the Huber loss, mean over the batch."""
        from torch.nn.functional import huber_loss

        return huber_loss(outputs, y / SCALE)

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> Mapping[str, float]:
        """Return the mean absolute error, and the part of the patients it is at most 50 for."""
        error = (self.predict(outputs) - y).abs()
        found = {"mae": float(error.mean()), "within-50": float((error <= 50).float().mean())}
        return {name: found[name] for name in names}

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the progression in its own units."""
        return outputs * SCALE
