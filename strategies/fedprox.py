"""FedProx: FedAvg whose clients are held near the model they received by a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Client: SGD on h(w) = f(w) + mu/2 ||w - w_g||^2 (Eq. 2), w_g the model it received; a step is
w <- w - eta (gradient of f(w) + mu (w - w_g)). Server: FedAvg. mu = 0 is FedAvg, bit for bit.

Deviations: every client runs the same number of epochs (the paper's inexactness gamma and its stragglers are not simulated);
clients are sampled uniformly and averaged by samples, as in FedAvg (the paper samples by size and averages uniformly).
BatchNorm statistics are not under the penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_app.keys import NOT_NEGATIVE, key
from fl_app.layout import Model
from strategies.base import ClientState, LocalUpdate, Method, RunContext, everything
from strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FedProxParams:
    """Parameters of FedProx, table `fedprox`."""

    mu: float = key(0.01, "Weight of the proximal term mu/2 ||w - w_g||^2 (mu, Eq. 2); 0 is FedAvg.", NOT_NEGATIVE)


class FedProxUpdate(LocalUpdate[FedProxParams]):
    """Client half: the proximal term."""

    def train(self, start: Model, state: ClientState, ctx: RunContext[FedProxParams]) -> Model:
        """Train near the received model (Eq. 2)."""
        return ctx.trainer.train(start, proximal=(ctx.params.mu, start.params) if ctx.params.mu else None)


METHOD = Method("fedprox", FedProxParams, FedAvg[FedProxParams], FedProxUpdate, everything)
