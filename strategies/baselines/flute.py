"""FLUTE: a shared body under local heads; penalties and a server step drive the heads towards neural collapse.

Liu, Shen, Yang: "Federated Representation Learning in the Under-Parameterized Regime", ICML 2024. This is the general
FLUTE of §7.2 and Algorithm 2. With `body-epochs` below `local-epochs` it is its variant FLUTE*.

Client: it has its own head, H [C, k] and a bias. The loss is CE + lambda_nc NC(H) + lambda_h ||H||_F^2. While the body
trains, the loss adds lambda_f times the batch's mean of ||z||^2, where z are the features.

    NC(H) = ||HH^T/||HH^T||_F - T||_F

T is the collapsed target of the classes that the client has (Observation B.3). For `local-epochs` minus `body-epochs`
the client trains the head alone, then everything for the rest. Then it takes one step H <- H - (eta_r/N) grad NC(H),
where N is the number of clients in a round. This is the server's step of Algorithm 2. Its R = sum_i NC(H_i) separates
into one term per client. So a client takes the step itself, and sends neither its head nor its set of classes.

Server: FedAvg on the body. Without weights, with eta_r = 0 and `body-epochs` >= `local-epochs`, it is FedPer, bit for
bit.

Decisions and deviations:

- The head trains first, as in the authors' code. FLUTE* in print trains everything first.
- T spans all C classes, as in Observation B.3 and the code. §7.2 also calls a client's number of classes m.
- The mean of ||z||^2 is Eq. 10's. The code sums over the batch, with 0.0005 for a batch of 10.
- R is the mean over the round's clients, as in the code, hence eta_r/N. In print it is a sum.
- Bodies are averaged by samples, in print uniformly.
- Momentum starts anew in each phase.
- Running statistics belong to the body. Those from the head's epochs are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import (
    AT_LEAST_ONE,
    LINEAR,
    NOT_NEGATIVE,
    ClientState,
    Correction,
    InEpochs,
    Layout,
    LocalUpdate,
    Method,
    Model,
    Objective,
    Overview,
    RoundContext,
    all_but_classifier,
    key,
    unfit,
)
from strategies.baselines.fedavg import FedAvg
from strategies.kernels import head_slots

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class FLUTEParams(InEpochs):
    """Parameters of FLUTE, table `flute`. Values are those of the authors' code; the paper prints none."""

    body_epochs: int = key(
        1,
        "Epochs on the whole model, after those on the head; `local-epochs` or more: no epochs on the head alone.",
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
    """Return the Gram matrix of a collapsed head, [C, C] (FLUTE Observation B.3).

    It is T = (uu^T) * (I - 11^T/C)/sqrt(C - 1), with norm 1 for u = 1. head: [C, k], C >= 2, gives only C, dtype and
    device; present: bool [C], u, the classes that the client has.
    """
    import torch

    num_classes = head.shape[0]
    u = present.to(head)
    centred = torch.eye(num_classes, dtype=head.dtype, device=head.device) - 1 / num_classes
    return u[:, None] * u * centred / math.sqrt(num_classes - 1)


def collapse(head: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return a head's distance from neural collapse, a scalar, and its gradient, [C, k] (FLUTE Eq. 10).

    The distance is NC(H) = ||HH^T/||HH^T||_F - T||_F. head: [C, k], C >= 2; present: bool [C], the classes that the
    client has. The gradient is 0 where HH^T or NC is 0.
    """
    return distance(head, target(head, present))


def distance(head: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `collapse`; goal: the target [C, C]."""
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
    """Client half. The head stays local.

    The client keeps the head as it is after the server's step; "after" is measured before that step.
    """

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

        # N of a round without missing clients, which every client can compute
        rate = ctx.params.head_learning_rate / ctx.config.cohort_size(ctx.config.num_training)
        if rate:
            slot = head_slots(ctx.layout)[0]
            params = after.params.copy()
            head = torch.from_numpy(params[slot.start : slot.stop].reshape(slot.shape))
            slope = collapse(head, torch.from_numpy(ctx.trainer.class_counts > 0))[1]
            head -= rate * ctx.trainer.clip_factor(slope) * slope
            after = Model(params, after.buffers)
        super().keep_local(after, state, ctx)


def on_head(ctx: RoundContext[FLUTEParams]) -> Correction | None:
    """Return a correction with the gradient of lambda_nc NC(H) + lambda_h ||H||_F^2.

    For weights of 0 it returns None, no operation at all.
    """
    import torch

    p, slot = ctx.params, head_slots(ctx.layout)[0]
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
    """Return the objective CE + lambda_f mean ||z||^2; None for weight 0."""
    trainer, weight = ctx.trainer, ctx.params.feature_weight
    if not weight:
        return None

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z, logits = trainer.forward(module, x)
        return trainer.loss(logits, y) + weight * z.square().sum(1).mean()

    return loss


def shared(layout: Layout, params: Any) -> frozenset[str]:
    """Return the names of the body's tensors. Raises UserError for a model with a single class."""
    if head_slots(layout)[0].shape[0] < 2:
        raise unfit("at least 2 classes", "its classifier has 1")
    return all_but_classifier(layout)


METHOD = Method(
    "flute",
    FLUTEParams,
    FedAvg[FLUTEParams],
    FLUTEUpdate,
    shared,
    needs_classes=True,
    sums=True,
    needs=LINEAR,
    overview=Overview(
        group="A part of the model",
        travels="body both ways",
        stays="classifier",
        disk="4h",
        unseen="global part, the rest initial",
        use="as fedper, few samples of many classes",
    ),
)
