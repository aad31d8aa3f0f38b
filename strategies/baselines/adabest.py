"""AdaBest: FedDyn's idea with bias estimates that decay, so that models do not grow and absent clients do not mislead.

Varno, Saghayi, Rafiee Sevyeri, Gupta, Matwin, Havaei: "AdaBest: Minimizing Client Drift in Federated Learning via Adaptive
Bias Estimation", ECCV 2022.

Client i keeps h_i [d], 0 at first, and the round t'_i of its last participation. In round t it runs E epochs of SGD with
the gradient of f minus h_i (Algorithm 1). Then, with theta_t the model it received:

    h_i <- h_i / (t - t'_i) + mu (theta_t - theta_i)

Server, over the round's clients, unweighted; m_t is the mean of their models, and m_0 the initial model:

    h <- beta (m_{t-1} - m_t)
    theta_{t+1} <- m_t - h

beta = 0 and mu = 0 is FedAvg bit for bit, if all clients count equally.

Deviations:

- In the authors' later library mu is divided by about the steps per epoch and applied when h is used. Here it is the
  paper's constant.
- Clients are evaluated with theta, the model they have. The authors plot the mean m_t too.
- BatchNorm's running statistics take the plain mean, without extrapolation.
- h_i is 0 for tensors that do not travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    NOT_NEGATIVE,
    ClientState,
    LocalUpdate,
    Means,
    Method,
    Model,
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
from strategies.baselines.scaffold import shifted
from strategies.kernels import RULES

Floats = NDArray[np.floating[Any]]
# memory, float32 [d]: the mean of the last round's models
_MEAN = "mean"


@dataclass(frozen=True)
class AdaBestParams(GlobalModelParams):
    """Parameters of AdaBest, table `adabest`."""

    mu: float = key(0.02, "Weight of a client's last movement in its bias estimate (mu).", NOT_NEGATIVE)
    beta: float = key(0.8, "Part of the mean's last movement that the server adds (beta).", NOT_NEGATIVE)


def server_step(mean: ArrayLike, previous: ArrayLike, *, beta: float) -> tuple[Floats, Floats]:
    """Return the next global model and h, both [d] (Algorithm 1).

    mean: [d], of the round's models. previous: [d], the last round's mean. The work is in float64; the results have the
    mean's dtype, at least float32. With beta 0 the model is the mean, exactly.
    """
    now = np.asarray(mean)
    dtype = np.result_type(now.dtype, np.float32)
    exact = now.astype(np.float64)
    h = beta * (np.asarray(previous, np.float64) - exact)
    return (exact - h).astype(dtype), h.astype(dtype)


def client_step(
    h: ArrayLike, received: ArrayLike, trained: ArrayLike, *, rounds: int, mu: float
) -> NDArray[np.float32]:
    """Return a client's next bias estimate, float32 [d].

    h: [d], before. received, trained: [d], the client's model before and after training. rounds: since its last
    participation, t - t'_i, at least 1.
    """
    moved = np.asarray(received, np.float64) - np.asarray(trained, np.float64)
    return (np.asarray(h, np.float64) / rounds + mu * moved).astype(np.float32)


class AdaBest(FedAvg[AdaBestParams]):
    """Server half. Memory: `mean` float32 [d], the last round's mean."""

    means = Means(RULES, streams=True)

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return equal weights for all uploads, less for late ones."""
        return uploads.once

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Move on from the mean by a part of its last movement."""
        previous, mean = state.memory.get(_MEAN, state.model.params), super().update(state, uploads, turn).model
        moved = server_step(mean.params, previous, beta=self.params.beta)[0] if self.params.beta else mean.params
        return state.next(Model(moved, mean.buffers), memory={_MEAN: mean.params})


class AdaBestUpdate(LocalUpdate[AdaBestParams]):
    """Client half. State: `adabest.bias` float32 [d], h_i, and `adabest.round` int64 [1], t'_i."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[AdaBestParams]) -> Model:
        """Train against the bias estimate, then renew it."""
        h = state.arrays.get("adabest.bias", np.zeros_like(start.params))
        after = ctx.trainer.train(start, correction=shifted(ctx, -h))
        if not ctx.params.mu:
            return after
        last = int(state.arrays["adabest.round"][0]) if "adabest.round" in state.arrays else ctx.round - 1
        estimate = client_step(h, start.params, after.params, rounds=ctx.round - last, mu=ctx.params.mu)
        state.arrays["adabest.bias"] = np.where(ctx.layout.indices(ctx.shared), estimate, np.float32(0))
        state.arrays["adabest.round"] = np.array([ctx.round])
        return after


METHOD = Method(
    "adabest",
    AdaBestParams,
    AdaBest,
    AdaBestUpdate,
    all_but_local_statistics,
    dp_epochs=local_epochs,
    sums=True,
    overview=Overview(
        group="One global model for all",
        stays="h_i",
        server="4d",
        disk="4d",
        use="as feddyn, with clients that seldom take part",
    ),
)
