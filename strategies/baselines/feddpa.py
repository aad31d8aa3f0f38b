"""FedDPA: parameters with much Fisher information stay personal; penalties hold the norms of both parts' updates.

Yang, Huang, Ye: "Dynamic Personalized Federated Learning with Adaptive Differential Privacy", NeurIPS 2023. This is the
method WITHOUT its differential privacy: updates are neither clipped nor noised, there is no accountant, and nothing
here is private. It is not the method of the same name that adapts language models.

Client: w_prev is its trained vector of its last participation, and M the mask from then, empty at first.

1. It starts from w_prev on M and from w_g elsewhere.
2. It trains M alone on CE + lambda1/2 ||u - u0||_2, then the rest alone on CE + lambda2/2 | ||v - v0||_2 - C_b |. u and
   v are all elements in M and outside, u0 and v0 their values at the start. No norm is squared.
3. It takes the diagonal Fisher information of the result, scaled to [0, 1] in every tensor. The part above tau is the
   next M.
4. It uploads everything.

Server: FedAvg. With tau = 1, and lambda2 = 0 or `constraint = none`, the method is FedAvg, bit for bit.
`constraint = none` is FedOBP with this M.

Decisions and deviations, where the paper and the authors' code differ:

- Fisher information squares each sample's gradient, as in the code. Eq. 4 prints the squared gradient of the whole
  log-likelihood, which is near 0 at a trained model.
- M holds values above tau, as in the code; in print at least tau.
- One norm covers all elements, centred on the start, as in the text. The code has one norm per tensor, and centres both
  penalties on w_g.
- A tensor of equal Fisher values has nothing personal. The code zeroes it: 0/0.
- Training is in training mode. The code's is in evaluation mode, after its Fisher pass.
- The phases follow each other, as in the code. Algorithm 1 alternates them per epoch.
- M is computed after training. The paper computes it when the next model comes, from the same model and data, so M is
  the same and evaluations cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.transport import wire
from strategies import fedobp
from strategies.base import (
    NOT_NEGATIVE,
    RATIO,
    ClientState,
    Correction,
    LocalUpdate,
    Means,
    Method,
    Model,
    Overview,
    RoundContext,
    Scalars,
    State,
    Turn,
    Upload,
    Uploads,
    all_tensors,
    key,
)
from strategies.baselines.fedavg import FedAvg
from strategies.kernels import RULES, masks

if TYPE_CHECKING:
    from torch import Tensor

SHARE = "personal-share"


@dataclass(frozen=True)
class FedDPAParams:
    """Parameters of FedDPA, table `feddpa`."""

    threshold: float = key(0.4, "Fisher information above which a parameter is personal (tau); 1: none is.", RATIO)
    threshold_meaning: Literal["value", "quantile"] = key(
        "value",
        "tau is a value after min-max scaling per tensor (the paper), or a quantile of every tensor (FedOBP's table).",
    )
    constraint: Literal["adaptive", "none"] = key(
        "adaptive",
        "Train personal and shared parameters in two phases with penalties, or all together without (FedOBP's table).",
    )
    personal_weight: float = key(
        0.05, "Weight of the personal update's norm (lambda1, its Tables 5 and 6).", NOT_NEGATIVE
    )
    shared_weight: float = key(
        0.1,
        "Weight of the distance between the shared update's norm and `bound` (lambda2; the code swaps its value "
        "with that of lambda1).",
        NOT_NEGATIVE,
    )
    bound: float = key(0.5, "Norm that the shared update is drawn to (C_b).", NOT_NEGATIVE)
    fisher_samples: int = key(0, "Training samples for the Fisher information; 0: all.", NOT_NEGATIVE)


def personal_mask(
    fisher: NDArray[np.floating[Any]], sizes: Sequence[int], *, threshold: float, meaning: str
) -> NDArray[np.bool_]:
    """Return the personal parameters, bool [d]: Fisher information above the threshold, layer by layer (FedDPA §3.2).

    fisher: float [d], not negative; sizes: elements per layer, summing to d; threshold: in [0, 1]; meaning: "value"
    compares the layer scaled to [0, 1] by its minimum and maximum, "quantile" takes the layer's quantile, interpolated
    linearly. A layer of equal values has nothing personal.

    Raises ValueError on shapes that do not fit, arguments out of range and values that are not finite.
    """
    if fisher.shape != (sum(sizes),):
        raise ValueError(f"fisher has shape {fisher.shape}, sizes sum to {sum(sizes)}")
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be in [0, 1], got {threshold}")
    if meaning not in ("value", "quantile"):
        raise ValueError(f"meaning must be one of value, quantile, got {meaning!r}")
    if not np.isfinite(fisher).all():
        raise ValueError(f"fisher must be finite, got {np.count_nonzero(~np.isfinite(fisher))} values that are not")
    mask = np.zeros(fisher.size, bool)
    start = 0
    for size in sizes:
        layer = fisher[start : start + size].astype(np.float64)
        spread = np.ptp(layer) if size else 0
        if spread > 0 and meaning == "value":
            mask[start : start + size] = (layer - layer.min()) / spread > threshold
        elif spread > 0:
            mask[start : start + size] = fedobp.select(layer, (size,), quantile=threshold)
        start += size
    return mask


def constraint_gradient(update: Tensor, weight: float, bound: float = 0.0) -> Tensor:
    """Return the gradient of weight/2 | ||update||_2 - bound |, of its shape [d]; 0 for a zero update.

    With bound 0 the penalty is weight/2 ||update||_2. Below the bound a descent step makes the update longer.
    """
    norm = update.norm()
    factor: Tensor = weight / 2 * (norm - bound).sign() / norm.where(norm > 0, norm.new_ones(()))
    return update * factor


class FedDPA(FedAvg[FedDPAParams]):
    """Server half: FedAvg, and a record of each client's personal share."""

    means = Means(RULES, streams=True, sets_model=True)

    def check(self, upload: Upload) -> None:
        """Raise WireError for a personal share outside [0, 1]."""
        wire.number(upload.metrics, SHARE, 0, 1)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average, and note the personal shares."""
        for client_id, metrics in zip(uploads.ids, uploads.metrics, strict=True):
            turn.note(client_id, SHARE, wire.number(metrics, SHARE))
        return super().update(state, uploads, turn)


class FedDPAUpdate(LocalUpdate[FedDPAParams]):
    """Client half. State: `feddpa.own` (trained vector of the last participation) and `feddpa.mask` (M, packed)."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedDPAParams]) -> Model:
        """Return the received model with the client's own values on M."""
        if "feddpa.own" not in state.arrays:
            return received
        return Model(np.where(self.mask(state, ctx), state.arrays["feddpa.own"], received.params), received.buffers)

    def mask(self, state: ClientState, ctx: RoundContext[FedDPAParams]) -> NDArray[np.bool_]:
        """Return M, bool [d]; empty before the first participation."""
        d = ctx.layout.d
        return masks.unpack(state.arrays["feddpa.mask"], d) if "feddpa.mask" in state.arrays else np.zeros(d, bool)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedDPAParams]) -> Model:
        """Train, under the constraints if configured, and choose M for the next participation."""
        p, trainer = ctx.params, ctx.trainer
        if p.constraint == "none":
            after = trainer.train(start)
        else:
            mask, after = self.mask(state, ctx), start
            if mask.any():
                pull = constraint(ctx, start, p.personal_weight)
                after = trainer.train(start, purpose="train-personal", correction=pull, frozen=~mask)
            after = trainer.train(after, correction=constraint(ctx, after, p.shared_weight, p.bound), frozen=mask)
        fisher = trainer.fisher(after, p.fisher_samples)
        mask = personal_mask(fisher, ctx.layout.sizes, threshold=p.threshold, meaning=p.threshold_meaning)
        state.arrays["feddpa.own"], state.arrays["feddpa.mask"] = after.params, masks.pack(mask)
        return after

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedDPAParams]) -> Upload:
        """Send everything, and for the record the share that is personal from the next participation on."""
        plain = super().upload(before, after, state, ctx)
        share = masks.popcount(state.arrays["feddpa.mask"]) / ctx.layout.d
        return replace(plain, metrics={**plain.metrics, SHARE: share})


def constraint(ctx: RoundContext[Any], start: Model, weight: float, bound: float = 0.0) -> Correction | None:
    """Return a correction that adds `constraint_gradient` of the movement since `start` to every step.

    For weight 0 it returns None, no operation at all. Parameters that a phase freezes have not moved, so the norm is
    that of the others.
    """
    if not weight:
        return None
    center = ctx.trainer.tensor(start.params)

    def pull(weights: Tensor, gradient: Tensor) -> None:
        gradient.add_(constraint_gradient(weights - center, weight, bound))

    return pull


FIGURES = (
    Scalars(
        SHARE,
        "How much is personal",
        "share of the parameters (%)",
        "Share of a client's parameters whose Fisher information is above the threshold after its training.",
        percent=True,
    ),
)

METHOD = Method(
    "feddpa",
    FedDPAParams,
    FedDPA,
    FedDPAUpdate,
    all_tensors,
    figures=FIGURES,
    needs_whole=True,
    sums=True,
    global_beside_personal=True,
    overview=Overview(
        group="A part of the model",
        stays="informative parameters",
        disk="4d + ⌈d/8⌉",
        epochs="2 E + 1",
        use="as fedobp, by Fisher information",
    ),
)
