"""FedAMP: every client is pulled towards a mixture of all clients' models in which those like its own weigh most.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021 (Algorithm 1).

Server: with A(x) = 1 - e^(-x/sigma), client i's cloud model is u_i = sum_j xi_ij w_j, xi_ij = alpha_K A'(||w_i - w_j||^2) for
j != i and xi_ii = 1 - their sum. Client: keeps its own w_i and trains its loss + lambda/(2 alpha_K) ||w - u_i||^2 from there; u_i
is the centre of the pull and nothing else. w_i is the personal model: evaluated, exported, hashed and collected.

Deviations: xi_ii is taken as printed, negative or not, and a run in which it is negative warns once; `scaling = "convex"` (ours)
scales others' weights that sum to more than 1. Partial participation: the server keeps every client's last w_i; u_i mixes it
with the last round's uploads. A client that never took part is sent the initial model, and starts from it. w_i keeps its own
BatchNorm statistics; the cloud model's are mixed with the same weights. Distances grow with the model, so sigma has to: with
sigma = 1 and far-apart clients xi is the identity and training is local.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.figures import Matrix
from fl_app.keys import NOT_NEGATIVE, POSITIVE, POSITIVE_RATIO, key
from fl_app.layout import Model
from strategies import aggregate
from strategies.base import (
    OWN_MODEL,
    ClientState,
    LocalUpdate,
    Method,
    PersonalizedStrategy,
    RoundContext,
    Uploads,
    all_tensors,
    local_epochs,
)
from strategies.fedprox import proximal

log = logging.getLogger("corolla")


@dataclass(frozen=True)
class FedAMPParams:
    """Parameters of FedAMP, table `fedamp`."""

    alpha: float = key(1.0, "Step size of the attention (alpha_K): how much weight others get at all.", POSITIVE)
    sigma: float = key(1.0, "Squared distance at which a client's weight has fallen to 1/e.", POSITIVE)
    lam: float = key(
        1.0,
        "Strength of the pull to the cloud model (lambda): training adds lambda/(2 alpha) ||w - u||^2.",
        NOT_NEGATIVE,
    )
    alpha_decay: float = key(0.1, "Factor on alpha every `alpha-decay-every` rounds.", POSITIVE_RATIO)
    alpha_decay_every: int = key(
        0,
        "Rounds between two decays of alpha; 0: it stays as it is. FedCAC's tables: 30.",
        NOT_NEGATIVE,
        counts_rounds=True,
    )
    scaling: Literal["none", "convex"] = key(
        "none",
        "A client's own weight xi_ii: 1 - the others' sum as printed, negative or not; `convex` scales that sum to 1.",
    )

    def alpha_in(self, round: int) -> float:
        """alpha_K of a round, counted from 1."""
        if not self.alpha_decay_every:
            return self.alpha
        return self.alpha * self.alpha_decay ** ((round - 1) // self.alpha_decay_every)


def attention(W: aggregate.Stack, *, sigma: float, alpha: float, convex: bool = True) -> NDArray[np.float64]:
    """Weights of all clients in each client's cloud model, xi, float64 [N, N]; rows sum to 1.

    W: float32 [N, d]; sigma, alpha > 0. A row whose other clients would weigh more than 1 together is scaled to sum 1 where
    `convex`; else the client's own weight is negative. Raises ValueError if sigma or alpha is not a positive number.
    """
    return own_share(attraction(aggregate.squared_distances(W), sigma=sigma, alpha=alpha), convex)


def attraction(distances: NDArray[np.float64], *, sigma: float, alpha: float) -> NDArray[np.float64]:
    """alpha_K A'(x) = alpha_K/sigma e^(-x/sigma) of squared distances [N, N], float64 [N, N], diagonal 0."""
    for name, value in (("sigma", sigma), ("alpha", alpha)):
        if not 0 < value < np.inf:
            raise ValueError(f"{name} must be a number > 0, got {value}")
    weights: NDArray[np.float64] = alpha / sigma * np.exp(-distances / sigma)
    np.fill_diagonal(weights, 0)
    return weights


def own_share(weights: NDArray[np.float64], convex: bool) -> NDArray[np.float64]:
    """Give what the others' weights [N, N] leave of 1 to the client itself; `convex`: it leaves at least 0."""
    if convex:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    rest = 1 - weights.sum(axis=1)
    np.fill_diagonal(weights, np.maximum(rest, 0) if convex else rest)
    return weights


class FedAMP(PersonalizedStrategy[FedAMPParams]):
    """Server half: keeps every client's own model and its cloud model; there is no global one."""

    warned = False

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Mix the round's uploads for all clients that ever took part."""
        p, alpha = self.params, self.params.alpha_in(round + 1)  # for the round that comes
        weights = attention(uploads.W, sigma=p.sigma, alpha=alpha, convex=p.scaling == "convex")
        self.warn_of_negative(round, uploads.ids, weights)
        params, buffers = aggregate.mix(uploads.W, weights), aggregate.mix(uploads.B, weights)
        for i, client_id in enumerate(uploads.ids):
            cloud = {"cloud-params": params[i], "cloud-buffers": buffers[i]}
            self.keep_for(client_id, params=uploads.W[i], buffers=uploads.B[i], **cloud)
            self.note(client_id, "attention", np.round(weights[i], 6).tolist())
        for client_id in self.personal.keys() - set(uploads.ids):
            own = self.personal[client_id]
            cloud = self.cloud_of(Model(own["params"], own["buffers"]), uploads, alpha)
            self.keep_for(client_id, params=own["params"], buffers=own["buffers"], **cloud)

    def cloud_of(self, own: Model, uploads: Uploads, alpha: float) -> dict[str, NDArray[np.float32]]:
        """Cloud model of a client that was not in the round: its last model among the round's uploads."""
        p = self.params
        distances = np.zeros((len(uploads.ids) + 1,) * 2)
        distances[0, 1:] = [aggregate.squared_distance(own.params, w) for w in uploads.W]
        weights = own_share(attraction(distances, sigma=p.sigma, alpha=alpha), p.scaling == "convex")[:1]
        mixed = [
            aggregate.mix(np.concatenate([mine[None], stack]), weights)[0]
            for mine, stack in ((own.params, uploads.W), (own.buffers, uploads.B))
        ]
        return {"cloud-params": mixed[0], "cloud-buffers": mixed[1]}

    def warn_of_negative(self, round: int, ids: list[int], weights: NDArray[np.float64]) -> None:
        """Warn, once in a run, of clients that are mixed with a negative weight of their own."""
        negative = [ids[i] for i in np.flatnonzero(np.diag(weights) < 0)]
        if negative and not self.warned:
            self.warned = True
            log.warning(
                "round %d: fedamp: the weights of the other clients sum to more than 1 for clients %s, whose own weight is "
                "negative; fedamp.alpha <= fedamp.sigma / (N - 1) avoids it, fedamp.scaling = convex scales them",
                round,
                negative,
            )

    def model_for(self, client_id: int) -> Model:
        """Return the client's cloud model, the initial model if it never took part."""
        mine = self.personal.get(client_id)
        return self.global_model if mine is None else Model(mine["cloud-params"], mine["cloud-buffers"])

    def personal_model(self, client_id: int) -> Model:
        """Return the client's own model."""
        return self.last_personal(client_id)

    def has_global_model(self) -> bool:
        """Tell that there is none."""
        return False


class FedAMPUpdate(LocalUpdate[FedAMPParams]):
    """Client half: its own model, and a proximal term to the cloud model."""

    @classmethod
    def tested(cls, params: FedAMPParams) -> str:
        """The client's own model."""
        return OWN_MODEL

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedAMPParams]) -> Model:
        """Minimise the loss + lambda/(2 alpha_K) ||w - u||^2 from the client's own model, u being what it received."""
        weight = ctx.params.lam / ctx.params.alpha_in(ctx.round)
        own = self.personal(start, state, ctx)
        after = ctx.trainer.train(own, correction=proximal(ctx, weight, start.params))
        self.keep_personal(after, state)
        return after


FIGURES = (
    Matrix(
        "attention",
        "Attention between clients",
        "weight of the column's client",
        "How much of each client's model, the columns, is in the cloud model of another, a row.",
        heading="Attention",
        value="weight",
    ),
)

METHOD = Method(
    "fedamp",
    FedAMPParams,
    FedAMP,
    FedAMPUpdate,
    all_tensors,
    figures=FIGURES,
    dp_epochs=local_epochs,
    not_private="its server compares single clients' models",
)
