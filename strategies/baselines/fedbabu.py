"""FedBABU: only the body is trained and averaged; the classifier stays as drawn until a client tunes its own copy.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

The client (Algorithm 1) runs `local-epochs` of SGD on the received body, under the run's initial classifier, and sends
the body. The classifier is the same on all clients and in all rounds: no gradient, momentum or weight decay moves it.
The server takes the mean of the bodies.

Personalization happens only at evaluation: `finetune-epochs` of SGD from the body and the initial classifier, dropped
afterwards. `accuracy-finetuned` is FedBABU's figure; `accuracy` is the figure of the untuned model. A run without
fine-tuning logs a warning.

Deviations:

- The mean is weighted by training samples; the authors' clients are equal.
- BatchNorm's parameters and running statistics belong to the body.
- Fine-tuning uses `finetune-learning-rate`. The authors use the last round's learning rate, after its decay.
- The classifier is never sent or stored. It follows from the seed, even if `initial-weights` gives the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strategies.base import (
    SPLIT,
    ClientState,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    RunConfig,
    all_but_classifier,
    key,
    local_epochs,
    log,
)
from strategies.baselines.fedavg import FedAvg


@dataclass(frozen=True)
class FedBABUParams:
    """Parameters of FedBABU, table `fedbabu`."""

    finetune: Literal["full", "head", "body"] = key(
        "full",
        "Tensors that `finetune-epochs` tune at evaluation: all (authors' figures), the classifier, or the body.",
    )


class FedBABU(FedAvg[FedBABUParams]):
    """Server half: FedAvg on the bodies."""

    def summary(self) -> None:
        """Log the run as every method does. Warn if nothing is personalized."""
        super().summary()
        warn_without_finetuning(self.config)


def warn_without_finetuning(config: RunConfig) -> None:
    """Log a warning if the run has no fine-tuning, for a method that personalizes by fine-tuning alone."""
    if not config.finetune_epochs:
        log.warning(
            "%s: finetune-epochs is 0, but fine-tuning at evaluation is all its personalization (authors: 5)",
            config.method,
        )


class FedBABUUpdate(LocalUpdate[FedBABUParams]):
    """Client half: train the body under the initial classifier; tune a copy for evaluation. It keeps nothing."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedBABUParams]) -> Model:
        """Train the body alone (Algorithm 1)."""
        return ctx.trainer.train(start, frozen=ctx.local)

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[FedBABUParams]) -> None:
        """Keep nothing: the classifier follows from the seed."""

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[FedBABUParams], epochs: int) -> Model:
        """Tune the received body and the initial classifier, or only one of them."""
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
    needs=SPLIT,
    local_from_file=False,
    overview=Overview(
        group="A part of the model",
        travels="body both ways",
        unseen="global part, the rest initial",
        use="clients that fine-tune, new clients too",
    ),
)
