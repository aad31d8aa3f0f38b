"""APFL: every client trains its own model, and learns how much of it to mix with the global one.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020 (Algorithm 1).

Client i keeps v (its own model) and alpha in [0, 1]. Its personal model is vbar = alpha v + (1 - alpha) w. After it
receives w, every batch makes three updates. Their right-hand sides use the values from before the batch:

    w     <- w - eta gradient f(w)                                                      (Eq. 6)
    v     <- v - eta alpha gradient f(vbar)                                             (Eq. 7)
    alpha <- clip(alpha - eta (<v - w, gradient f(vbar)> + rho alpha), 0, 1)            (Eq. 10, on the round's first batch)

The client uploads w. The server is FedAvg's. Everything that travels equals FedAvg's, bit for bit: w uses FedAvg's
batches, and the forward pass of vbar sees the same dropout as that of w. The client is evaluated with vbar of the
received w before training, and with vbar of the trained w after it.

Deviations:

- The mean is weighted by samples (paper: uniform).
- rho comes from the authors' code, not from the paper; rho = 0 is Eq. 10.
- Parameters are mixed, as in the paper. The authors' code mixes outputs, and its gradient of alpha is the derivative of
  neither.
- v and w have separate momentum, and v has its own weight decay.
- BatchNorm's running statistics are two sets. The forward passes of w move the set that travels; those of vbar move a
  second set that stays with v.
- In a client's first round, v starts from the model received then.
- The reported training loss is that of vbar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    NOT_NEGATIVE,
    RATIO,
    ClientState,
    Diverged,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    Upload,
    all_tensors,
    key,
)
from strategies.baselines.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor

Values = TypeVar("Values", NDArray[np.float32], NDArray[np.float64], "Tensor")


@dataclass(frozen=True)
class APFLParams:
    """Parameters of APFL, table `apfl`."""

    alpha: float = key(0.5, "Share of the client's own model in its mixture, at first (alpha).", RATIO)
    alpha_updates: Literal["round", "first-epoch", "batch", "none"] = key(
        "round",
        "Batches on which alpha is learned: a round's first (paper), all of its first epoch (FL-bench), all (PFLlib), or none.",
    )
    alpha_decay: float = key(
        0.02, "Pull of alpha towards 0 (rho; authors' code); 0 is the paper's Eq. 10.", NOT_NEGATIVE
    )


def mixture(v: Values, w: Values, alpha: float) -> Values:
    """Return the personal model alpha v + (1 - alpha) w, as arrays or tensors.

    It is v itself at alpha = 1, and w itself at alpha = 0 and where the two are equal.
    """
    if alpha in (0, 1):
        return v if alpha else w
    return w + alpha * (v - w)


def next_alpha(
    alpha: float,
    v: Values,
    w: Values,
    gradient: Values,
    *,
    learning_rate: float,
    decay: float,
    clip_norm: float = math.inf,
) -> float:
    """Return the mixing weight after one gradient step, cut to [0, 1] (Eq. 10, and the authors' decay).

    v, w: own and shared parameters, arrays or tensors [d]. gradient: of the loss at their mixture, of the same type and
    shape. All are from before the step. clip_norm: the steepest slope that the step follows.
    """
    slope = float(((v - w) * gradient).sum()) + decay * alpha
    slope = min(max(slope, -clip_norm), clip_norm)
    return min(max(alpha - learning_rate * slope, 0.0), 1.0)


class APFLUpdate(LocalUpdate[APFLParams]):
    """Client half. State: `apfl.params` (v), `apfl.buffers` (the mixture's statistics), `apfl.alpha` (float64 [1])."""

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[APFLParams]) -> Model:
        """Return the client's own model mixed with a shared one."""
        if "apfl.params" not in state.arrays:
            return model
        own = mixture(state.arrays["apfl.params"], model.params, float(state.arrays["apfl.alpha"][0]))
        return Model(own, state.arrays["apfl.buffers"])

    def train(self, start: Model, state: ClientState, ctx: RoundContext[APFLParams]) -> Model:
        """Train w and v on the same batches. Return w; keep v and alpha in `state`."""
        import torch

        p, trainer = ctx.params, ctx.trainer
        v, alpha, mixed_statistics = self.own(start, state, ctx)
        trainer.load(start)
        w, statistics = trainer.weights.clone(), trainer.statistics.clone()
        step_w, step_v = trainer.optimizer(w).step, trainer.optimizer(v).step
        devices = [w.device] if w.is_cuda else []
        first, eta = True, trainer.learning_rate
        for x, y in trainer.batches():
            # the forward pass of w draws FedAvg's random numbers, and the mixture's draws the same ones
            with torch.random.fork_rng(devices):
                trainer.weights.copy_(mixture(v, w, alpha))
                trainer.statistics.copy_(mixed_statistics)
                trainer.differentiate(x, y)
                mixed_statistics.copy_(trainer.statistics)
            updates = {"round": first, "first-epoch": trainer.epoch == 1, "batch": True, "none": False}[p.alpha_updates]
            following = alpha
            # alpha is the only number of a batch that the host waits for
            if updates:
                g = trainer.gradient.double()
                own, shared = v.double(), w.double()
                following = next_alpha(
                    alpha,
                    own,
                    shared,
                    g,
                    learning_rate=eta,
                    decay=p.alpha_decay,
                    clip_norm=ctx.config.clip_norm or math.inf,
                )
            step_v(trainer.gradient.mul_(alpha), eta)
            trainer.weights.copy_(w)
            trainer.statistics.copy_(statistics)
            trainer.differentiate(x, y, counted=False)
            statistics.copy_(trainer.statistics)
            step_w(trainer.gradient, eta)
            first, alpha = False, following
        if not math.isfinite(alpha):
            raise Diverged(f"training diverged: apfl's alpha is {alpha} (learning-rate {eta:g})")
        trainer.weights.copy_(w)
        state.arrays["apfl.params"], state.arrays["apfl.buffers"] = trainer.vector(v), mixed_statistics.cpu().numpy()
        state.arrays["apfl.alpha"] = np.array([alpha])
        return trainer.read()

    def own(self, start: Model, state: ClientState, ctx: RoundContext[APFLParams]) -> tuple[Tensor, float, Tensor]:
        """Return v [d] on the device, alpha, and the mixture's statistics [b].

        In the client's first round v is the received model.
        """
        own, alpha = start, ctx.params.alpha
        if "apfl.params" in state.arrays:
            own, alpha = (
                Model(state.arrays["apfl.params"], state.arrays["apfl.buffers"]),
                float(state.arrays["apfl.alpha"][0]),
            )
        ctx.trainer.load(own)
        return ctx.trainer.weights.clone(), alpha, ctx.trainer.statistics.clone()

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[APFLParams]) -> Upload:
        """Return w, and alpha for the record."""
        plain = super().upload(before, after, state, ctx)
        return replace(plain, metrics={**plain.metrics, "alpha": float(state.arrays["apfl.alpha"][0])})


def tested(params: APFLParams) -> str:
    """Return the sentence on the mixed models."""
    return (
        "before training, the client's own model is tested in a mixture with the received model; after training, in a mixture "
        "with the shared model that the client trained"
    )


METHOD = Method(
    "apfl",
    APFLParams,
    FedAvg[APFLParams],
    APFLUpdate,
    all_tensors,
    sums=True,
    global_beside_personal=True,
    tested=tested,
    reports=("alpha",),
    overview=Overview(
        group="A global model and a personal one",
        stays="own model, its share",
        disk="4(d+b) + 8",
        epochs="2 E",
        use="clients that gain from sharing to different degrees",
    ),
)
