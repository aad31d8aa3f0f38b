"""FLUTE: a shared body under local heads, which penalties and a server step drive towards neural collapse.

Liu, Shen, Yang: "Federated Representation Learning in the Under-Parameterized Regime", ICML 2024: the general FLUTE of §7.2 and
Algorithm 2, its variant FLUTE* with `body-epochs` below `local-epochs`.

Client, with its own head (H [C, k] and a bias): loss CE + lambda_nc NC(H) + lambda_h ||H||_F^2, and while the body trains
+ lambda_f times the batch's mean of ||z||^2, z the features. NC(H) = ||HH^T/||HH^T||_F - T||_F, T the collapsed target of the
classes that the client has (Observation B.3). `local-epochs` minus `body-epochs` on the head alone, then the rest on everything.
Then, once, H <- H - (eta_r/N) grad NC(H), N the clients of a round: the server's step of Algorithm 2, whose R = sum_i NC(H_i)
separates, so that a client takes it itself and sends neither head nor set of classes. Server: FedAvg on the body. Without
weights, eta_r = 0 and `body-epochs` >= `local-epochs` it is FedPer, bit for bit.

Decisions and deviations: the head first, as in the authors' code (FLUTE* in print: everything first). T spans all C classes, as
in Observation B.3 and the code (§7.2 also calls a client's number of classes m). The mean of ||z||^2 is Eq. 10's; the code sums
over the batch, with 0.0005 for a batch of 10. R is the mean over the round's clients, as in the code, hence eta_r/N (in print a
sum). Bodies are averaged by samples (uniformly in print). Momentum starts anew in each phase. Running statistics belong to the
body: those the head's epochs gather are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_app.errors import UserError
from fl_app.keys import AT_LEAST_ONE, NOT_NEGATIVE, key
from fl_app.layout import Layout, Model, Slot
from strategies.base import (
    ClientState,
    Correction,
    LocalUpdate,
    Method,
    Objective,
    RoundContext,
    all_but_classifier,
)
from strategies.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class FLUTEParams:
    """Parameters of FLUTE, table `flute`; the authors' code's values, the paper prints none."""

    body_epochs: int = key(
        1,
        "Epochs on everything, after those on the head; `local-epochs` or more: no epochs on the head alone.",
        AT_LEAST_ONE,
    )
    collapse_weight: float = key(
        0.25, "Weight of NC(H), the head's distance from neural collapse (lambda_nc).", NOT_NEGATIVE
    )
    head_weight: float = key(0.0025, "Weight of ||H||_F^2 (lambda_h).", NOT_NEGATIVE)
    feature_weight: float = key(
        0.005, "Weight of the batch's mean of ||z||^2, z the features (lambda_f).", NOT_NEGATIVE
    )
    head_learning_rate: float = key(0.5, "Step size of the server's step on the heads (eta_r).", NOT_NEGATIVE)


def target(head: Tensor, present: Tensor) -> Tensor:
    """Gram matrix of a collapsed head, T = (uu^T) * (I - 11^T/C)/sqrt(C - 1) (FLUTE Observation B.3), [C, C], norm 1 for u = 1.

    head: [C, k], of which the dtype and device count, C >= 2; present: bool [C], u, the classes the client has.
    """
    import torch

    num_classes = head.shape[0]
    u = present.to(head)
    centred = torch.eye(num_classes, dtype=head.dtype, device=head.device) - 1 / num_classes
    return u[:, None] * u * centred / math.sqrt(num_classes - 1)


def collapse(head: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Distance of a head from neural collapse, NC(H) = ||HH^T/||HH^T||_F - T||_F, and its gradient (FLUTE Eq. 10).

    head: [C, k], C >= 2; present: bool [C], the classes the client has. Returns (scalar, [C, k]); the gradient is 0 where HH^T
    or NC is.
    """
    return distance(head, target(head, present))


def distance(head: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """As `collapse`, goal being the target [C, C]."""
    gram = head @ head.T
    norm = gram.norm()
    known = norm > 0
    scale = norm.where(known, norm.new_ones(()))
    P = gram / scale
    R = P - goal
    value = R.norm()
    R = R / value.where(value > 0, value.new_ones(()))
    gradient = 2 * ((R - (P * R).sum() * P) @ head) / scale
    return value, gradient * known


class FLUTEUpdate(LocalUpdate[FLUTEParams]):
    """Client half. The head stays local; what is kept of it is after the server's step, which "after" does not see."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FLUTEParams]) -> Model:
        """Train the head, then everything."""
        epochs = ctx.config.local_epochs
        body_epochs = min(ctx.params.body_epochs, epochs)
        pull = on_head(ctx)
        if epochs > body_epochs:
            start = ctx.trainer.train(
                start, epochs=epochs - body_epochs, purpose="train-head", frozen=ctx.shared, correction=pull
            )
        return ctx.trainer.train(start, epochs=body_epochs, objective=with_features(ctx), correction=pull)

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[FLUTEParams]) -> None:
        """Take the server's step on the head, and keep it."""
        import torch

        # N if nobody is missing, which every client can tell
        by_plan = ctx.config.drawn(ctx.config.num_training)
        rate = ctx.params.head_learning_rate / by_plan
        if rate:
            slot = weight_of(ctx.layout)
            params = after.params.copy()
            head = torch.from_numpy(params[slot.start : slot.stop].reshape(slot.shape))
            head -= rate * collapse(head, torch.from_numpy(ctx.trainer.class_counts > 0))[1]
            after = Model(params, after.buffers)
        super().keep_local(after, state, ctx)


def on_head(ctx: RoundContext[FLUTEParams]) -> Correction | None:
    """Gradient of lambda_nc NC(H) + lambda_h ||H||_F^2; None, no operation at all, for weights 0."""
    import torch

    p, slot = ctx.params, weight_of(ctx.layout)
    if not p.collapse_weight and not p.head_weight:
        return None
    weights = ctx.trainer.weights
    present = torch.from_numpy(ctx.trainer.class_counts > 0).to(weights.device)
    goal = target(weights[slot.start : slot.stop].view(slot.shape), present)

    def pull(weights: Tensor, gradient: Tensor) -> None:
        head, slope = (vector[slot.start : slot.stop].view(slot.shape) for vector in (weights, gradient))
        if p.collapse_weight:
            slope.add_(distance(head, goal)[1], alpha=p.collapse_weight)
        if p.head_weight:
            slope.add_(head, alpha=2 * p.head_weight)

    return pull


def with_features(ctx: RoundContext[FLUTEParams]) -> Objective | None:
    """CE + lambda_f mean ||z||^2; None for weight 0."""
    trainer, weight = ctx.trainer, ctx.params.feature_weight
    if not weight:
        return None

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z, logits = trainer.forward(module, x)
        return trainer.loss(logits, y) + weight * z.square().sum(1).mean()

    return loss


def weight_of(layout: Layout) -> Slot:
    """Return where the classifier's weight [C, k] lies. Raises UserError if it does not train."""
    found = next((slot for slot in layout.params if slot.name in layout.classifier and len(slot.shape) == 2), None)
    if found is None:
        raise UserError("train: flute trains the last Linear layer's weight, which must be among what trains")
    return found


def shared(layout: Layout, params: Any) -> frozenset[str]:
    """The body travels. Raises UserError for a model without a last Linear layer, or one with a single class."""
    body = all_but_classifier(layout)
    if weight_of(layout).shape[0] < 2:
        raise UserError("model: flute needs at least 2 classes, its classifier has 1")
    return body


METHOD = Method("flute", FLUTEParams, FedAvg[FLUTEParams], FLUTEUpdate, shared, needs_classes=True, sums=True)
