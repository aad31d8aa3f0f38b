"""A method with a loss of its own: FedAvg on the task's loss plus a penalty on confident predictions.

Pereyra et al.: "Regularizing Neural Networks by Penalizing Confident Output Distributions", 2017: the loss is the mean
cross-entropy minus beta times the mean entropy of the predictions. Weight 0 is FedAvg, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from corolla.method import NOT_NEGATIVE, ClientState, FedAvg, LocalUpdate, Method, Model, RoundContext, all_tensors, key

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Params:
    """Table `penalty`."""

    weight: float = key(0.1, "Weight of the predictions' entropy (beta).", NOT_NEGATIVE)


class PenaltyUpdate(LocalUpdate[Params]):
    """Client half."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[Params]) -> Model:
        """Train on the loss with the penalty."""

        def objective(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            _, logits = ctx.trainer.forward(module, x)
            log_p = logits.log_softmax(1)
            return ctx.trainer.loss(logits, y) + ctx.params.weight * (log_p.exp() * log_p).sum(1).mean()

        return ctx.trainer.train(start, objective=objective if ctx.params.weight else None)


METHOD = Method("penalty", Params, FedAvg[Params], PenaltyUpdate, all_tensors)
