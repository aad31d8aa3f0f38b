"""pFedMe: clients descend on the Moreau envelope of their loss; its inner minimiser is their personal model.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

Client i receives w_g and starts from w = w_g (Algorithm 1). For each batch it finds the personal model theta by K
gradient steps on that batch, then moves w:

    theta ~ argmin f_i(theta) + lambda/2 ||theta - w||^2
    w <- w - eta lambda (w - theta)

lambda (w - theta) is the envelope's gradient. The client sends w and is evaluated with the last theta.

Server: w_g <- (1 - beta) w_g + beta mean_i w_i. The mean is over the round's clients and UNWEIGHTED, as printed in
Algorithm 1. The authors' code weights it by training samples.

eta is `outer-learning-rate`. eta lambda >= 1 would carry w past theta and is refused. alpha is the inner learning rate.
With alpha lambda >= 2 the inner steps can diverge even without a loss, so a warning is logged. `learning-rate` is not
used.

The authors train all clients in every round and average a sample of them. Here only the sample trains, and an idle
client's theta waits.

Deviations:

- A client makes `local-epochs` passes over its data instead of R single batches.
- theta starts from w_g in every round and continues from batch to batch, as in the authors' code. The paper leaves its
  start open.
- Inner steps are plain gradient steps: `momentum` is not used, and a warning is logged. `weight-decay` is part of f.
  `learning-rate-decay` and `schedule` act on eta alone.
- BatchNorm's running statistics are those that theta's training gathers. They travel with w. The server takes their
  plain mean, as an extrapolation with beta > 1 could make a variance negative.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    AT_LEAST_ONE,
    OWN_MODEL,
    POSITIVE,
    ClientState,
    LocalUpdate,
    Means,
    Method,
    Model,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    RunConfig,
    State,
    Turn,
    Uploads,
    UserError,
    Vector,
    all_tensors,
    key,
    log,
)
from strategies.kernels import PLAIN, RULES, Averaging, Stack, SummedRows


@dataclass(frozen=True)
class PFedMeParams:
    """Parameters of pFedMe, table `pfedme`."""

    proximal_weight: float = key(15.0, "Pull of theta towards w (the paper's lambda).", POSITIVE)
    inner_steps: int = key(5, "Gradient steps on theta per batch (K).", AT_LEAST_ONE)
    inner_learning_rate: float = key(0.05, "Step size of theta.", POSITIVE)
    outer_learning_rate: float = key(
        0.005,
        "Step size of w (eta), scaled by `learning-rate-decay` and `schedule`. Its product with `proximal-weight` must "
        "be below 1.",
        POSITIVE,
    )
    beta: float = key(1.0, "Server step towards the clients' mean (beta); above 1 extrapolates.", POSITIVE)

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for outer steps that carry w past theta."""
        if (step := self.outer_learning_rate * self.proximal_weight) >= 1:
            yield UserError(
                key="pfedme.outer-learning-rate",
                rule=f"times pfedme.proximal-weight ({self.proximal_weight:g}) must be below 1",
                value=self.outer_learning_rate,
                hint=f", which makes {step:g}",
            )


def mix(
    previous: Vector,
    W: Stack | SummedRows,
    beta: float,
    averaging: Averaging = PLAIN,
    weights: NDArray[np.float64] | None = None,
) -> Vector:
    """Return the server step (1 - beta) w_g + beta mean_i w_i, float32 [d] (Algorithm 1).

    W: float32 [N, d]; weights: float64 [N] of the mean, None for uniform.
    """
    step: Vector = (1 - beta) * previous + beta * averaging.mean(W, weights)
    return step


class PFedMe(PersonalizedStrategy[PFedMeParams]):
    """Server half."""

    means = Means(RULES, streams=True, sets_model=True)

    def summary(self) -> None:
        """Log the run's settings; warn of step sizes that overshoot and of ignored keys."""
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
        """Return equal weights for all uploads."""
        return uploads.once

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Step towards the unweighted mean; take the plain mean of the statistics."""
        averaging, weights = turn.average, self.weights(uploads)
        params = mix(state.model.params, uploads.W, self.params.beta, averaging, weights)
        return state.next(Model(params, averaging.mean(uploads.B, weights)))


class PFedMeUpdate(LocalUpdate[PFedMeParams]):
    """Client half: descent on the envelope."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[PFedMeParams]) -> Model:
        """Return w; keep theta as the personal model."""
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


METHOD = Method(
    "pfedme",
    PFedMeParams,
    PFedMe,
    PFedMeUpdate,
    all_tensors,
    sums=True,
    global_beside_personal=True,
    tested=OWN_MODEL,
    overview=Overview(
        group="A global model and a personal one",
        stays="own model",
        disk="4(d+b)",
        epochs="5 E",
        use="as ditto, with compute to spare",
    ),
)
