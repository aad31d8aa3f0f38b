"""FedRep: clients first train a personal head on the shared body, then the body under the fixed head.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021.

Client i starts from the received representation phi and its own head h_i (Algorithm 1). It trains h_i for tau epochs of
SGD with phi fixed, then phi with h_i fixed. It sends phi and keeps h_i. Server: the mean of the representations.

Deviations:

- The mean is weighted by training samples. The paper averages uniformly.
- The head is the model's classifier.
- Clients run epochs, not the theory's full gradient steps. By default one of E local epochs trains the body, as in the
  authors' code.
- BatchNorm's parameters and running statistics belong to the body. In the head's epochs the layers normalise by the
  batch, as in all training. So the head learns on the features that it meets in the body's epochs. The running
  statistics of the head's epochs are dropped; they move in the body's epochs only.
- The two phases draw their batches from different random streams.
- A round's reported training loss is that of the last body epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.base import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    SPLIT,
    ClientState,
    InEpochs,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    RunConfig,
    all_but_classifier,
    key,
)
from strategies.baselines.fedavg import FedAvg


@dataclass(frozen=True)
class FedRepParams(InEpochs):
    """Parameters of FedRep, table `fedrep`."""

    head_epochs: int = key(
        0, "Epochs on the head, body frozen (tau); 0: `local-epochs` - 1, at least one.", NOT_NEGATIVE
    )
    body_epochs: int = key(1, "Epochs on the body, head frozen, after those on the head.", AT_LEAST_ONE)


def head_epochs(config: RunConfig) -> int:
    """Return the number of epochs on the head in a round."""
    given: int = config.params.head_epochs
    return given or max(1, config.local_epochs - 1)


class FedRepUpdate(LocalUpdate[FedRepParams]):
    """Client half: two phases."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedRepParams]) -> Model:
        """Train the head, then the body."""
        p = ctx.params
        with_head = ctx.trainer.train(start, epochs=head_epochs(ctx.config), purpose="train-head", frozen=ctx.shared)
        return ctx.trainer.train(with_head, epochs=p.body_epochs, purpose="train-body", frozen=ctx.local)


METHOD = Method(
    "fedrep",
    FedRepParams,
    FedAvg[FedRepParams],
    FedRepUpdate,
    all_but_classifier,
    sums=True,
    dp_epochs=lambda config: head_epochs(config) + config.params.body_epochs,
    needs=SPLIT,
    overview=Overview(
        group="A part of the model",
        travels="body both ways",
        stays="classifier",
        disk="4h",
        unseen="global part, the rest initial",
        use="as fedper, little data per client",
    ),
)
