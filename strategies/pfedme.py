"""pFedMe: clients descend on the Moreau envelope of their loss; its inner minimiser is their personal model.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

Client i, on receiving w_g (Algorithm 1): w = w_g; per batch it finds the personal model
theta ~ argmin f_i(theta) + lambda/2 ||theta - w||^2 by K gradient steps on that batch, then w <- w - eta lambda (w - theta),
lambda (w - theta) being the envelope's gradient. It sends w and is evaluated with the last theta. Server:
w_g <- (1 - beta) w_g + beta mean_i w_i, the mean over the round's clients, UNWEIGHTED as printed in Algorithm 1 (the authors'
code weights it by training samples).

eta is `outer-learning-rate`; eta lambda >= 1 would carry w past theta and is refused. alpha lambda >= 2 (alpha the inner learning
rate) lets the inner steps diverge even without a loss, which is warned of. `learning-rate` has no part in it.

The authors train all clients in every round and average a sample of them; here only the sample trains, an idle client's theta
waits. Deviations: `local-epochs` passes over the data instead of R single batches. theta starts from w_g in every round and
then goes on from one batch to the next, as in the authors' code (the paper leaves its start open). Inner steps are plain
gradient steps: `momentum` is not used, and a warning says so; `weight-decay` is part of f; `learning-rate-decay` acts on eta
alone. BatchNorm's running statistics are those theta's training gathers, sent along with w, and the server takes their plain
mean (an extrapolation with beta > 1 could make a variance negative).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.keys import AT_LEAST_ONE, POSITIVE, key
from fl_app.layout import Model, Vector
from strategies.aggregate import Stack
from strategies.base import (
    OWN_MODEL,
    ClientState,
    LocalUpdate,
    Method,
    PersonalizedStrategy,
    RoundContext,
    Uploads,
    all_tensors,
)
from strategies.robust import PLAIN, RULES, Averaging

log = logging.getLogger("corolla")


@dataclass(frozen=True)
class PFedMeParams:
    """Parameters of pFedMe, table `pfedme`."""

    proximal_weight: float = key(15.0, "Pull of theta towards w (the paper's lambda).", POSITIVE)
    inner_steps: int = key(5, "Gradient steps on theta per batch (K).", AT_LEAST_ONE)
    inner_learning_rate: float = key(0.05, "Step size of theta.", POSITIVE)
    outer_learning_rate: float = key(
        0.005,
        "Step size of w (eta), times `learning-rate-decay` and `schedule`; times `proximal-weight` below 1.",
        POSITIVE,
    )
    beta: float = key(1.0, "Server step towards the clients' mean (beta); above 1 extrapolates.", POSITIVE)

    def problems(self, config: RunConfig) -> Iterator[str]:
        """Refuse outer steps that carry w past theta."""
        if (step := self.outer_learning_rate * self.proximal_weight) >= 1:
            yield (
                f"pfedme.outer-learning-rate: times pfedme.proximal-weight ({self.proximal_weight:g}) must be below 1, got "
                f"{self.outer_learning_rate:g}, which makes {step:g}"
            )


def mix(
    previous: Vector,
    W: Stack,
    beta: float,
    averaging: Averaging = PLAIN,
    weights: NDArray[np.float64] | None = None,
) -> Vector:
    """Server step (1 - beta) w_g + beta mean_i w_i (Algorithm 1). Returns float32 [d].

    W: float32 [N, d]; weights: float64 [N] of the mean, None for uniform.
    """
    step: Vector = (1 - beta) * previous + beta * averaging.mean(W, weights)
    return step


class PFedMe(PersonalizedStrategy[PFedMeParams]):
    """Server half."""

    robust = RULES

    def summary(self) -> None:
        """Log what runs; warn of step sizes that overshoot and of what is ignored."""
        super().summary()
        p = self.params
        if p.inner_learning_rate * p.proximal_weight >= 2:
            log.warning(
                "pfedme: inner-learning-rate * proximal-weight = %g * %g = %g lets inner steps diverge; it must be below 2",
                p.inner_learning_rate,
                p.proximal_weight,
                p.inner_learning_rate * p.proximal_weight,
            )
        if self.config.momentum:
            log.warning("pfedme: momentum %g is not used, inner steps are plain gradient steps", self.config.momentum)

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """All uploads count the same."""
        return np.ones_like(uploads.sizes)

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Step towards the unweighted mean; plain mean of the statistics."""
        averaging, weights = self.averaging_of(uploads), self.weights(uploads)
        params = mix(self.global_model.params, uploads.W, self.params.beta, averaging, weights)
        self.global_model = Model(params, averaging.mean(uploads.B, weights))


class PFedMeUpdate(LocalUpdate[PFedMeParams]):
    """Client half: descent on the envelope."""

    @classmethod
    def tested(cls, params: PFedMeParams) -> str:
        """The client's own model."""
        return OWN_MODEL

    def train(self, start: Model, state: ClientState, ctx: RoundContext[PFedMeParams]) -> Model:
        """Return w, keep theta as the personal model."""
        p = ctx.params
        trainer = ctx.trainer
        eta = p.outer_learning_rate * ctx.config.rate_factor(ctx.round)
        trainer.load(start)
        theta, w = trainer.weights, trainer.weights.clone()
        for x, y in trainer.batches():
            for k in range(p.inner_steps):
                trainer.differentiate(x, y, counted=k == 0)
                trainer.gradient.add_(theta - w, alpha=p.proximal_weight)
                trainer.step(p.inner_learning_rate)
            w.sub_(w - theta, alpha=eta * p.proximal_weight)
        personal = trainer.read()
        self.keep_personal(personal, state)
        return Model(trainer.vector(w), personal.buffers)


METHOD = Method("pfedme", PFedMeParams, PFedMe, PFedMeUpdate, all_tensors, sums=True)
