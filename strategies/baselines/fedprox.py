"""FedProx: FedAvg with a proximal term that holds clients near the model they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Client: SGD on h(w) = f(w) + mu/2 ||w - w_g||^2 (Eq. 2), where w_g is the model it received. A step is

    w <- w - eta (gradient of f(w) + mu (w - w_g))

Server: FedAvg. mu = 0 is FedAvg, bit for bit.

Deviations:

- Every client runs the same number of epochs. The paper's inexactness gamma and its stragglers are not simulated.
- Clients are sampled uniformly and averaged by samples, as in FedAvg. The paper samples by size and averages uniformly.
- BatchNorm statistics are not under the penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import (
    NOT_NEGATIVE,
    ClientState,
    Correction,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    Vector,
    all_but_local_statistics,
    key,
    local_epochs,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedProxParams(GlobalModelParams):
    """Parameters of FedProx, table `fedprox`."""

    mu: float = key(0.01, "Weight of the proximal term mu/2 ||w - w_g||^2 (mu, Eq. 2); 0 is FedAvg.", NOT_NEGATIVE)


def proximal(ctx: RoundContext[Any], weight: float, center: Vector) -> Correction | None:
    """Return a correction that adds the gradient of weight/2 ||w - center||^2 to every step.

    center: float32 [d], in named_parameters order. For weight 0 it returns None, no operation at all.
    """
    if not weight:
        return None
    middle = ctx.trainer.tensor(center)

    def pull(weights: Tensor, gradient: Tensor) -> None:
        gradient.add_(weights - middle, alpha=weight)

    return pull


class FedProxUpdate(LocalUpdate[FedProxParams]):
    """Client half: training with the proximal term."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedProxParams]) -> Model:
        """Train near the received model (Eq. 2)."""
        return ctx.trainer.train(start, correction=proximal(ctx, ctx.params.mu, start.params))


METHOD = Method(
    "fedprox",
    FedProxParams,
    FedAvg[FedProxParams],
    FedProxUpdate,
    all_but_local_statistics,
    dp_epochs=local_epochs,
    sums=True,
    overview=Overview(
        group="One global model for all",
        use="long local training that drifts apart",
    ),
)
