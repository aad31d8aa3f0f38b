"""FedDyn: every client adds a term to its loss that moves with its own history, so that local and global optima agree in the end.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR 2021.

Client i, with lambda_i [d] = 0 at first: E epochs of SGD whose gradient is that of f + alpha (w - w_g + lambda_i), which is FedProx
with mu = alpha and centre w_g - lambda_i; then lambda_i <- lambda_i + (w_after - w_g). Server, over the round's clients S of N:
h <- h + 1/N sum_S (w_i - w_g), w_g <- mean_S w_i + h, unweighted; h = 0 at first, and always the mean of all N lambda_i.
(In the paper's letters the gradient kept is -alpha lambda_i, and h is -alpha ours.)

Deviations: alpha is the same for all clients, as in the paper (the authors' code scales it by mean size / n_i). Evaluated is the
cloud model w_g, which is what a client has (the authors plot the mean of all clients' last models). No clipping of gradients (the
authors: norm 10). BatchNorm's running statistics take the plain mean, which is not extrapolated: prefer `norm = group`, since w_g's
features are not those of any model that was trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_app.keys import POSITIVE, key
from fl_app.layout import Model
from strategies.aggregate import mean_block, weighted_mean
from strategies.base import (
    ClientState,
    LocalUpdate,
    Method,
    RoundContext,
    Uploads,
    all_but_local_statistics,
    local_epochs,
)
from strategies.blocks import for_blocks
from strategies.fedavg import FedAvg, GlobalModelParams
from strategies.fedprox import proximal

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class FedDynParams(GlobalModelParams):
    """Parameters of FedDyn, table `feddyn`."""

    alpha: float = key(
        0.01, "Weight of the dynamic regularizer (alpha). The authors' for CIFAR-10; FL-bench 0.1, PFLlib 1.", POSITIVE
    )


def server_step(W: Floats, w_global: Floats, h: Floats, num_clients: int) -> tuple[Floats, Floats]:
    """Next global model and accumulated drift h, both [d], computed in float64 and returned as floating as W is.

    W: [N, d], uploads of the round; w_global: [d], what was sent; h: [d], before; num_clients: of the run, at least N.
    """
    W = np.asarray(W)
    mean = mean_block(W, np.ones(len(W)), len(W))
    drift = h + (mean - w_global) * (len(W) / num_clients)
    dtype = np.result_type(W.dtype, np.float32)
    return (mean + drift).astype(dtype), drift.astype(dtype)


class FedDyn(FedAvg[FedDynParams]):
    """Server half. Memory: `h` float32 [d]."""

    # what has drifted throws all clients far, now and then: 3.3 times where most have the same class
    spread = 2.0
    # h must be the mean of what the clients keep, whoever they are
    robust = frozenset()

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Extrapolate the mean by what all clients have drifted so far."""
        sent = self.global_model.params
        h = self.memory.get("h", np.zeros_like(sent))
        w, drift = np.empty_like(sent), np.empty_like(sent)

        def block(start: int, stop: int) -> None:
            at = slice(start, stop)
            w[at], drift[at] = server_step(
                uploads.W[:, at], sent[at].astype(np.float64), h[at], self.config.num_training
            )

        for_blocks(block, sent.size)
        self.global_model, self.memory["h"] = Model(w, weighted_mean(uploads.B)), drift


class FedDynUpdate(LocalUpdate[FedDynParams]):
    """Client half. State: `feddyn.drift` float32 [d], lambda_i: 0 where nothing travels, for there the server's h has no part."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedDynParams]) -> Model:
        """Train with the moved proximal term, and move it."""
        drift = state.arrays.get("feddyn.drift", np.zeros_like(start.params))
        after = ctx.trainer.train(start, correction=proximal(ctx, ctx.params.alpha, start.params - drift))
        moved = drift + (after.params - start.params)
        state.arrays["feddyn.drift"] = np.where(ctx.layout.indices(ctx.shared), moved, np.float32(0))
        return after


METHOD = Method("feddyn", FedDynParams, FedDyn, FedDynUpdate, all_but_local_statistics, dp_epochs=local_epochs)
