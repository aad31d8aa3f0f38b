"""FedDyn: each client adds a term to its loss that follows its own history, until local and global optima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021.

Client i keeps lambda_i [d], 0 at first. It runs E epochs of SGD with the gradient of f plus

    alpha (w - w_g + lambda_i)

This is FedProx with mu = alpha and centre w_g - lambda_i. Then it sets lambda_i <- lambda_i + (w_after - w_g).

Server, over the round's clients S of N, unweighted:

    h <- h + 1/N sum_S (w_i - w_g)
    w_g <- mean_S w_i + h

h is 0 at first, and always the mean of all N lambda_i. In the paper's letters the client keeps the gradient -alpha
lambda_i, and h is -alpha times ours.

Deviations:

- alpha is the same for all clients, as in the paper. The authors' code scales it by mean size / n_i.
- Clients are evaluated with the cloud model w_g, the model they have. The authors plot the mean of all clients' last
  models.
- Gradients are not clipped. The authors clip them at norm 10.
- BatchNorm's running statistics take the plain mean, without extrapolation. Prefer `norm = group`, since the features
  of w_g are not those of any trained model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    POSITIVE,
    ClientState,
    Late,
    LocalUpdate,
    Means,
    Method,
    Model,
    Outliers,
    Overview,
    RoundContext,
    State,
    Turn,
    Uploads,
    all_but_local_statistics,
    key,
    local_epochs,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams
from strategies.baselines.fedprox import proximal
from strategies.kernels import block_means, for_blocks, weighted_mean

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class FedDynParams(GlobalModelParams):
    """Parameters of FedDyn, table `feddyn`."""

    alpha: float = key(
        0.01,
        "Weight of the dynamic regularizer (alpha). The authors use 0.01 for CIFAR-10, FL-bench 0.1, PFLlib 1.",
        POSITIVE,
    )


def moved(mean: Floats, w_global: Floats, h: Floats, share: float) -> tuple[Floats, Floats]:
    """Return the next global model and the accumulated drift h, from the uploads' mean, all [d].

    w_global: the model sent; h: before; share: of the run's clients that took part.
    """
    drift = h + (mean - w_global) * share
    return mean + drift, drift


class FedDyn(FedAvg[FedDynParams]):
    """Server half. Memory: `h` float32 [d]."""

    # h must be the mean of the lambda_i of all clients, so no upload may be left out
    means = Means(streams=True)
    late = Late(
        aged="h must be the mean of whole updates", moved="h must be the mean of whole updates", reads_moves=True
    )
    # now and then drift moves all clients far: 3.3 times the usual distance where most have the same class
    outliers = Outliers(tolerance=2.0)

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return equal weights for all uploads."""
        return np.ones_like(uploads.sizes)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Extrapolate the mean by the clients' accumulated drift."""
        sent = state.model.params
        h = state.memory.get("h", np.zeros_like(sent))
        w, drift = np.empty_like(sent), np.empty_like(sent)
        n, mean_of = len(uploads.ids), block_means(uploads.W)

        def block(start: int, stop: int) -> None:
            at = slice(start, stop)
            share = n / self.config.num_training
            w[at], drift[at] = moved(mean_of(at), sent[at].astype(np.float64), h[at], share)

        for_blocks(block, sent.size, n)
        return state.next(Model(w, weighted_mean(uploads.B)), memory={"h": drift})


class FedDynUpdate(LocalUpdate[FedDynParams]):
    """Client half. State: `feddyn.drift` float32 [d], lambda_i.

    It is 0 for parameters that do not travel, as the server's h does not cover them.
    """

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedDynParams]) -> Model:
        """Train with the moved proximal centre, then update lambda_i."""
        drift = state.arrays.get("feddyn.drift", np.zeros_like(start.params))
        after = ctx.trainer.train(start, correction=proximal(ctx, ctx.params.alpha, start.params - drift))
        moved = drift + (after.params - start.params)
        state.arrays["feddyn.drift"] = np.where(ctx.layout.indices(ctx.shared), moved, np.float32(0))
        return after


METHOD = Method(
    "feddyn",
    FedDynParams,
    FedDyn,
    FedDynUpdate,
    all_but_local_statistics,
    dp_epochs=local_epochs,
    overview=Overview(
        group="One global model for all",
        stays="λ",
        server="4d",
        disk="4d",
        use="many rounds, drift, clients of equal weight",
    ),
)
