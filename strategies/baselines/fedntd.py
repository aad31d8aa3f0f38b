"""FedNTD: FedAvg with distillation: clients keep the global model's predictions for all classes but the true one.

Lee, Jeong, Shin, Bae, Yun: "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022.

Client: it receives w_g and runs SGD on CE + beta L. p and q are the softmax of the logits / tau over each sample's
C - 1 not-true classes, p of the model in training and q of w_g.

    L = tau^2 mean_s sum_{c != y} q_c (ln q_c - ln p_c)

Its gradient on the logits is tau (p_c - q_c) / n for c != y, and 0 for c = y. Server: FedAvg. beta = 0 is FedAvg, bit
for bit. So are two classes, where p = q = 1.

Deviations:

- The printed formula has no tau^2. The authors' code has it, and so has ours (equal at tau = 1).
- w_g predicts in evaluation mode, with the running statistics it came with. The authors' w_g stays as their last
  evaluation left it: also in evaluation mode, except in the first round.
- Each batch takes one more forward pass.
- The reported training loss is CE's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.base import (
    NOT_NEGATIVE,
    POSITIVE,
    ClientState,
    Layout,
    LocalUpdate,
    Method,
    Model,
    Objective,
    Overview,
    RoundContext,
    all_but_local_statistics,
    key,
    unfit,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class FedNTDParams(GlobalModelParams):
    """Parameters of FedNTD, table `fedntd`."""

    beta: float = key(1.0, "Weight of the distillation beside the cross-entropy (beta); 0 is FedAvg.", NOT_NEGATIVE)
    temperature: float = key(1.0, "Divisor of the logits before the softmax (tau).", POSITIVE)


def not_true_distillation(logits: Tensor, global_logits: Tensor, y: Tensor, *, temperature: float) -> Tensor:
    """Return temperature^2 times the divergence of not-true probabilities from the global model's, a scalar.

    logits, global_logits: floating [n, C], C >= 2, of the model in training and of the global one; y: int64 [n];
    temperature > 0. It is the sum over classes and the mean over samples. Take the gradient of `logits` alone.
    """
    import torch
    from torch.nn.functional import log_softmax

    other = torch.arange(logits.shape[1] - 1, device=logits.device)
    # int64 [n, C - 1]: every class but the true one
    other = other + (other >= y[:, None])
    log_p = log_softmax(logits.gather(1, other) / temperature, dim=1)
    log_q = log_softmax(global_logits.gather(1, other) / temperature, dim=1)
    divergence: Tensor = (log_q.exp() * (log_q - log_p)).sum(dim=1).mean()
    return temperature**2 * divergence


class FedNTDUpdate(LocalUpdate[FedNTDParams]):
    """Client half: cross-entropy and not-true distillation."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedNTDParams]) -> Model:
        """Train with the received model's not-true predictions as targets."""
        return ctx.trainer.train(start, objective=self.objective(start, ctx))

    def objective(self, start: Model, ctx: RoundContext[FedNTDParams]) -> Objective | None:
        """Return CE + beta L with `start` as the global model; None, no operation at all, for beta 0."""
        p, trainer = ctx.params, ctx.trainer
        if not p.beta:
            return None
        reference = trainer.network(start)

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = trainer.logits(module, x)
            apart = not_true_distillation(logits, trainer.logits(reference, x), y, temperature=p.temperature)
            return trainer.loss(logits, y) + p.beta * apart

        return loss


def shared(layout: Layout, params: FedNTDParams) -> frozenset[str]:
    """Return the names of all tensors, without local statistics.

    Raises UserError for a classifier of one class, which has no not-true class.
    """
    own = [slot for slot in layout.params if slot.name in layout.classifier]
    if own and all(slot.shape[:1] == (1,) for slot in own):
        raise unfit("at least 2 classes", "its classifier has 1")
    return all_but_local_statistics(layout, params)


METHOD = Method(
    "fedntd",
    FedNTDParams,
    FedAvg[FedNTDParams],
    FedNTDUpdate,
    shared,
    needs_classes=True,
    sums=True,
    overview=Overview(
        group="One global model for all",
        epochs="E, 2 E forward",
        use="classes missing on clients, no client state",
    ),
)
