"""A method with a loop of its own and a second model: both are trained on the same batches, one is sent, one stays.

The sent model w takes plain SGD steps, as in FedAvg without momentum. The client's own model v takes steps on its loss plus
distill times KL(w || v) on the batch, w being the model it received, in evaluation mode. The client is evaluated with v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from corolla.method import (
    NOT_NEGATIVE,
    OWN_MODEL,
    ClientState,
    FedAvg,
    LocalUpdate,
    Method,
    Model,
    RoundContext,
    all_tensors,
    key,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Params:
    """Table `twins`."""

    distill: float = key(1.0, "Weight of what the own model learns from the received one.", NOT_NEGATIVE)


class TwinsUpdate(LocalUpdate[Params]):
    """Client half."""

    @classmethod
    def tested(cls, params: Params) -> str:
        """The client's own model."""
        return OWN_MODEL

    def train(self, start: Model, state: ClientState, ctx: RoundContext[Params]) -> Model:
        """Step both models on every batch; return the one that is sent."""
        trainer = ctx.trainer
        teacher = trainer.network(start)

        def learn(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = trainer.forward(module, x)[1]
            known, own = trainer.forward(teacher, x)[1].log_softmax(1), logits.log_softmax(1)
            return trainer.loss(logits, y) + ctx.params.distill * (known.exp() * (known - own)).sum(1).mean()

        own = self.personal(start, state, ctx)
        sent = start
        for x, y in trainer.batches():
            trainer.load(sent)
            trainer.module.train()
            trainer.differentiate(x, y, counted=False)
            trainer.step()
            sent = trainer.read()
            trainer.load(own)
            trainer.module.train()
            trainer.differentiate(x, y, learn)
            trainer.step()
            own = trainer.read()
        self.keep_personal(own, state)
        return sent


METHOD = Method("twins", Params, FedAvg[Params], TwinsUpdate, all_tensors)
