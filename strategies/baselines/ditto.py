"""Ditto: FedAvg, plus a personal model per client that is pulled towards the global one.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

Client k receives w_g (Algorithm 1). It trains a copy of w_g and sends it, as in FedAvg. Then it trains its personal
model v_k:

    v_k <- v_k - eta (gradient of f_k(v_k) + lambda (v_k - w_g))

This is SGD on f_k(v) + lambda/2 ||v - w_g||^2, centred on the received model. Server: FedAvg. The client is evaluated
with v_k. All messages equal FedAvg's, bit for bit.

Deviations:

- v_k starts from the model that the client receives in its first round. Before that, the client is evaluated with the
  model it receives. The paper starts all v_k from the initial model, which is equal if all clients take part.
- The two trainings draw their batches from different random streams. The authors interleave them on the same batches.
- BatchNorm's running statistics are v_k's own and are not under the penalty.
- The mean is weighted by training samples, as in FedAvg.
- A round's reported training loss is v_k's.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.base import (
    NOT_NEGATIVE,
    OWN_MODEL,
    ClientState,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    all_tensors,
    key,
)
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.fedprox import proximal


@dataclass(frozen=True)
class DittoParams:
    """Parameters of Ditto, table `ditto`."""

    proximal_weight: float = key(
        0.1, "Pull of the personal model towards the received one (the paper's lambda); 0: purely local.", NOT_NEGATIVE
    )
    personal_epochs: int = key(
        0, "Epochs of the personal model per round (the paper's s); 0: `local-epochs`.", NOT_NEGATIVE
    )


class DittoUpdate(LocalUpdate[DittoParams]):
    """Client half: FedAvg's training, then the personal model's."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[DittoParams]) -> Model:
        """Train the copy that is sent, then the personal model, which stays in `state`."""
        p = ctx.params
        after = super().train(start, state, ctx)
        personal = ctx.trainer.train(
            self.personal(start, state, ctx),
            epochs=p.personal_epochs or None,
            purpose="train-personal",
            correction=proximal(ctx, p.proximal_weight, start.params),
        )
        self.keep_personal(personal, state)
        return after


METHOD = Method(
    "ditto",
    DittoParams,
    FedAvg[DittoParams],
    DittoUpdate,
    all_tensors,
    sums=True,
    dp_epochs=lambda config: config.local_epochs + (config.params.personal_epochs or config.local_epochs),
    global_beside_personal=True,
    tested=OWN_MODEL,
    overview=Overview(
        group="A global model and a personal one",
        stays="own model",
        disk="4(d+b)",
        epochs="2 E",
        use="both models are needed",
    ),
)
