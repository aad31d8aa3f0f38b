"""FedAMP: every client is pulled towards a mixture of all clients' models in which those like its own weigh most.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021.

Server: with A(x) = 1 - e^(-x/sigma), client i's cloud model is u_i = sum_j xi_ij w_j, xi_ij = alpha_K A'(||w_i - w_j||^2) for
j != i and xi_ii = 1 - their sum. Client: starts from u_i and trains its loss + lambda/(2 alpha_K) ||w - u_i||^2.

Deviations: where the others' weights sum to more than 1 (alpha_K too large for the paper's theory) they are scaled to sum 1
and xi_ii = 0, which is logged. Under partial participation attention is among the round's clients; a client is sent its last
cloud model, and the initial one if it never took part. BatchNorm statistics are mixed with the same weights. Distances grow
with the model, so sigma has to: with sigma = 1 and far-apart clients xi is the identity and training is local.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_app.keys import NOT_NEGATIVE, POSITIVE, key
from fl_app.layout import Model
from strategies import aggregate
from strategies.base import ClientState, LocalUpdate, Method, PersonalizedStrategy, RoundContext, Uploads, all_tensors
from strategies.fedprox import proximal

log = logging.getLogger("corolla")


@dataclass(frozen=True)
class FedAMPParams:
    """Parameters of FedAMP, table `fedamp`."""

    alpha: float = key(1.0, "Step size of the attention (alpha_K): how much weight others get at all.", POSITIVE)
    sigma: float = key(1.0, "Squared distance at which a client's weight has fallen to 1/e.", POSITIVE)
    lam: float = key(1.0, "Strength of the pull to the cloud model (lambda): training adds lambda/(2 alpha) ||w - u||^2.",
                     NOT_NEGATIVE)


def attention(W: aggregate.Stack, *, sigma: float, alpha: float) -> NDArray[np.float64]:
    """Weights of all clients in each client's cloud model, xi, float64 [N, N]; rows sum to 1.

    W: float32 [N, d]; sigma, alpha > 0. A row whose other clients would weigh more than 1 together is scaled, see `normalise`.
    Raises ValueError if sigma or alpha is not a positive number.
    """
    return normalise(attraction(W, sigma=sigma, alpha=alpha))


def attraction(W: aggregate.Stack, *, sigma: float, alpha: float) -> NDArray[np.float64]:
    """alpha_K A'(||w_i - w_j||^2) = alpha_K/sigma e^(-||w_i - w_j||^2/sigma), float64 [N, N], diagonal 0."""
    for name, value in (("sigma", sigma), ("alpha", alpha)):
        if not 0 < value < np.inf:
            raise ValueError(f"{name} must be a number > 0, got {value}")
    weights: NDArray[np.float64] = alpha / sigma * np.exp(-aggregate.squared_distances(W) / sigma)
    np.fill_diagonal(weights, 0)
    return weights


def normalise(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale rows that sum to more than 1 to sum 1, and give the rest of every row to the client itself."""
    weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    np.fill_diagonal(weights, np.maximum(1 - weights.sum(axis=1), 0))
    return weights


class FedAMP(PersonalizedStrategy[FedAMPParams]):
    """Server half: keeps every client's cloud model; there is no global one."""

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Mix the round's participants."""
        raw = attraction(uploads.W, sigma=self.params.sigma, alpha=self.params.alpha)
        scaled = [uploads.ids[i] for i in np.flatnonzero(raw.sum(axis=1) > 1)]
        if scaled:
            log.warning(
                "round %d: fedamp: the weights of the other clients sum to more than 1 for clients %s and are scaled to 1; "
                "fedamp.alpha <= fedamp.sigma / (N - 1) avoids it", round, scaled,
            )
        weights = normalise(raw)
        params, buffers = aggregate.mix(uploads.W, weights, out=uploads.W), aggregate.mix(uploads.B, weights)
        for i, client_id in enumerate(uploads.ids):
            self.keep_for(client_id, params=params[i], buffers=buffers[i])
            self.note(client_id, "attention", np.round(weights[i], 6).tolist())

    def model_for(self, client_id: int) -> Model:
        """Return the client's last cloud model, the initial model if it has none."""
        return self.last_personal(client_id)

    def has_global_model(self) -> bool:
        """Tell that there is none."""
        return False


class FedAMPUpdate(LocalUpdate[FedAMPParams]):
    """Client half: a proximal term to the cloud model."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedAMPParams]) -> Model:
        """Minimise the loss + lambda/(2 alpha_K) ||w - u||^2 from u; the trainer's mu/2 makes mu = lambda/alpha_K."""
        return ctx.trainer.train(start, correction=proximal(ctx, ctx.params.lam / ctx.params.alpha, start.params))


METHOD = Method("fedamp", FedAMPParams, FedAMP, FedAMPUpdate, all_tensors)
