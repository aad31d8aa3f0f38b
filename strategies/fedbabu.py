"""FedBABU: only the body is trained and averaged; the classifier stays as it was drawn, until a client tunes its copy of the model.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

Client (Algorithm 1): `local-epochs` of SGD on the received body under the run's initial classifier, the same on all clients and
in all rounds; no gradient, momentum or weight decay moves it. It sends the body. Server: mean of the bodies. Personalization
happens at evaluation only: `finetune-epochs` of SGD from the body and the initial classifier, dropped afterwards.
`accuracy-finetuned` is FedBABU's figure, `accuracy` that of the untuned model; a run without fine-tuning is warned of.

Deviations: the mean is weighted by training samples (the authors' clients are equal). BatchNorm's parameters and running
statistics belong to the body. Fine-tuning is at the round's learning rate, as in the authors' code, where it has decayed by then.
The classifier is never sent or stored: it follows from the seed, also where `initial-weights` gives the body.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from fl_app.config import RunConfig
from fl_app.keys import key
from fl_app.layout import Model
from strategies.base import ClientState, LocalUpdate, Method, RoundContext, all_but_classifier, local_epochs
from strategies.fedavg import FedAvg

log = logging.getLogger("corolla")


@dataclass(frozen=True)
class FedBABUParams:
    """Parameters of FedBABU, table `fedbabu`."""

    finetune: Literal["full", "head", "body"] = key(
        "full",
        "What `finetune-epochs` tune at evaluation: all tensors (authors' figures), the classifier, or the body.",
    )


class FedBABU(FedAvg[FedBABUParams]):
    """Server half: FedAvg on the bodies."""

    def summary(self) -> None:
        """Log what runs; warn where nothing is personalized."""
        super().summary()
        warn_without_finetuning(self.config)


def warn_without_finetuning(config: RunConfig) -> None:
    """Warn of a run whose method personalizes by fine-tuning alone, and which does none."""
    if not config.finetune_epochs:
        log.warning(
            "%s: finetune-epochs is 0, but fine-tuning at evaluation is all its personalization (authors: 5)",
            config.method,
        )


class FedBABUUpdate(LocalUpdate[FedBABUParams]):
    """Client half: train the body under the initial classifier; tune a copy to be evaluated. It keeps nothing."""

    local_from_file = False

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedBABUParams]) -> Model:
        """Train the body alone (Algorithm 1)."""
        return ctx.trainer.train(start, frozen=ctx.local)

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[FedBABUParams]) -> None:
        """Keep nothing: the classifier follows from the seed."""

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[FedBABUParams], epochs: int) -> Model:
        """Tune the received body and the initial classifier, or one of them."""
        still = {"full": frozenset[str](), "head": ctx.shared, "body": ctx.local}[ctx.params.finetune]
        return ctx.trainer.train(start, epochs=epochs, purpose="finetune", frozen=still)


METHOD = Method(
    "fedbabu",
    FedBABUParams,
    FedBABU,
    FedBABUUpdate,
    all_but_classifier,
    needs_whole=True,
    dp_epochs=local_epochs,
    sums=True,
)
