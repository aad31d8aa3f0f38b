"""MOON: FedAvg whose clients learn features close to the global model's and far from those of their own last model.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021.

Client, on receiving w_g: SGD on CE + mu l, with z the features of the model in training (the input of its last Linear layer), z_g
those of w_g, and z_prev those of w_prev, the model the client trained in its last participation:
l = mean_s -log(exp(cos(z, z_g)/tau) / (exp(cos(z, z_g)/tau) + exp(cos(z, z_prev)/tau))), gradients through z alone. It keeps and
sends what it trained. Server: FedAvg. mu = 0, and a client's first participation, which has no w_prev, are FedAvg, bit for bit.

Deviations: no projection head; the paper puts a two-layer one below the classifier of all methods it compares, a user's model may
end in such layers. l is computed as softplus((cos(z, z_prev) - cos(z, z_g))/tau), which a small tau cannot overflow. w_g and w_prev
are in evaluation mode. w_prev is used however old it is; one earlier model is kept, as by default in the authors' code. Two more
forward passes per batch. The reported training loss is CE's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_app.keys import NOT_NEGATIVE, POSITIVE, key
from fl_app.layout import Model
from strategies.base import ClientState, LocalUpdate, Method, Objective, RoundContext, all_where_features_are
from strategies.fedavg import FedAvg, GlobalModelParams

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
    temperature: float = key(0.5, "What similarities are divided by (tau).", POSITIVE)


def contrastive_loss(z: Tensor, z_global: Tensor, z_previous: Tensor, *, temperature: float) -> Tensor:
    """-log of the softmax share of the pair (z, z_global) beside (z, z_previous), of cosines / temperature: mean, a scalar.

    z, z_global, z_previous: floating [n, f]; temperature > 0. The gradient is to be taken of z alone. Norms count as at
    least 1e-8.
    """
    from torch.nn.functional import cosine_similarity, logsigmoid

    nearer = cosine_similarity(z, z_global) - cosine_similarity(z, z_previous)
    return -logsigmoid(nearer / temperature).mean()


class MOONUpdate(LocalUpdate[MOONParams]):
    """Client half: cross-entropy and contrastive loss; keeps what it trained."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[MOONParams]) -> Model:
        """Train between the received model and the last one of one's own."""
        after = ctx.trainer.train(start, objective=self.objective(start, state, ctx))
        if ctx.params.mu:
            state.arrays["moon.params"], state.arrays["moon.buffers"] = after.params, after.buffers
        return after

    def objective(self, start: Model, state: ClientState, ctx: RoundContext[MOONParams]) -> Objective | None:
        """CE + mu l; None, no operation at all, for mu 0 and before there is an earlier model."""
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


METHOD = Method("moon", MOONParams, FedAvg[MOONParams], MOONUpdate, all_where_features_are, sums=True)
