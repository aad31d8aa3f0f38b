"""MOON: FedAvg in which clients learn features close to the global model's and far from their own last model's.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021.

Client: it receives w_g and runs SGD on CE + mu l. Features are the classifier's input: z of the model in
training, z_g of w_g, and z_prev of w_prev. w_prev is the model that the client trained in its last participation.

    l = mean_s -log(exp(cos(z, z_g)/tau) / (exp(cos(z, z_g)/tau) + exp(cos(z, z_prev)/tau)))

Gradients pass through z alone. The client keeps and sends its trained model. Server: FedAvg. mu = 0 is FedAvg, bit for
bit. So is a client's first participation, which has no w_prev.

Deviations:

- There is no projection head. The paper puts one of two layers below the classifier of all methods it compares. A
  user's model may end in such layers.
- l is computed as softplus((cos(z, z_prev) - cos(z, z_g))/tau), which a small tau cannot overflow.
- w_g and w_prev are in evaluation mode.
- w_prev is used at any age. One earlier model is kept, the default of the authors' code.
- Each batch takes two more forward passes.
- The reported training loss is CE's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.base import (
    FEATURES,
    NOT_NEGATIVE,
    POSITIVE,
    ClientState,
    LocalUpdate,
    Method,
    Model,
    Objective,
    Overview,
    RoundContext,
    all_but_local_statistics,
    key,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class MOONParams(GlobalModelParams):
    """Parameters of MOON, table `moon`."""

    mu: float = key(
        1.0,
        "Weight of the contrastive loss beside the cross-entropy (mu); 0 is FedAvg. The authors' best: 5 (CIFAR-10), 1 "
        "(CIFAR-100, Tiny-ImageNet).",
        NOT_NEGATIVE,
    )
    temperature: float = key(0.5, "Divisor of the similarities (tau).", POSITIVE)


def contrastive_loss(z: Tensor, z_global: Tensor, z_previous: Tensor, *, temperature: float) -> Tensor:
    """Return the mean of -log of the share of (z, z_global) in a softmax over two pairs, a scalar.

    The other pair is (z, z_previous); the softmax is of cosines / temperature. z, z_global, z_previous: floating
    [n, f]; temperature > 0. Take the gradient of z alone. Norms count as at least 1e-8.
    """
    from torch.nn.functional import cosine_similarity, logsigmoid

    nearer = cosine_similarity(z, z_global) - cosine_similarity(z, z_previous)
    return -logsigmoid(nearer / temperature).mean()


class MOONUpdate(LocalUpdate[MOONParams]):
    """Client half: cross-entropy and contrastive loss. It keeps its trained model."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[MOONParams]) -> Model:
        """Train near the received model and far from the client's own last one."""
        after = ctx.trainer.train(start, objective=self.objective(start, state, ctx))
        if ctx.params.mu:
            state.arrays["moon.params"], state.arrays["moon.buffers"] = after.params, after.buffers
        return after

    def objective(self, start: Model, state: ClientState, ctx: RoundContext[MOONParams]) -> Objective | None:
        """Return CE + mu l; None, no operation at all, for mu 0 and without an earlier model."""
        p, trainer = ctx.params, ctx.trainer
        if not p.mu or "moon.params" not in state.arrays:
            return None
        received = trainer.network(start)
        previous = trainer.network(Model(state.arrays["moon.params"], state.arrays["moon.buffers"]))

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z, logits = trainer.forward(module, x)
            z_global, z_previous = (trainer.forward(network, x)[0] for network in (received, previous))
            contrast = contrastive_loss(z, z_global, z_previous, temperature=p.temperature)
            return trainer.loss(logits, y) + p.mu * contrast

        return loss


METHOD = Method(
    "moon",
    MOONParams,
    FedAvg[MOONParams],
    MOONUpdate,
    all_but_local_statistics,
    sums=True,
    needs=FEATURES,
    overview=Overview(
        group="One global model for all",
        stays="last model",
        disk="4(d+b)",
        epochs="E, 3 E forward",
        use="images with features that drift",
    ),
)
