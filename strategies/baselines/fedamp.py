"""FedAMP: every client is pulled towards a mixture of all clients' models, in which similar models weigh most.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021
(Algorithm 1).

The server computes client i's cloud model u_i:

    u_i   = sum_j xi_ij w_j
    xi_ij = alpha_K A'(||w_i - w_j||^2) for j != i,    A(x) = 1 - e^(-x/sigma)
    xi_ii = 1 - sum of xi_ij over j != i

The client keeps its own w_i, and trains from there. Its loss has the additional term lambda/(2 alpha_K) ||w - u_i||^2:
u_i is the centre of the pull and nothing else. w_i is the personal model: it is evaluated, exported, hashed and
collected.

Deviations:

- xi_ii is taken as printed, negative or not. A run in which it is negative warns once. `scaling = "convex"` (ours)
  scales the others' weights if their sum exceeds 1.
- Partial participation: the server keeps every client's last w_i. Its u_i mixes it with the uploads of the
  last round before it is sent. A client that never took part is sent the initial model, and starts from it.
- w_i keeps its own BatchNorm statistics. The cloud model's statistics are mixed with the same weights.

Distances grow with the model, so sigma must grow too. With sigma = 1 and clients that are far apart, xi is the identity
and training is local.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    NOT_NEGATIVE,
    OWN_MODEL,
    POSITIVE,
    POSITIVE_RATIO,
    ClientState,
    Expected,
    Holds,
    Late,
    LocalUpdate,
    Matrix,
    Method,
    Model,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    Sent,
    State,
    Turn,
    Uploads,
    all_tensors,
    key,
    listed,
    local_epochs,
    log,
)
from strategies.base.state import UploadBuffer
from strategies.baselines.fedprox import proximal
from strategies.kernels import Stack, aggregate

# absent clients that get their cloud models together
_AT_ONCE = 64


@dataclass(frozen=True)
class FedAMPParams:
    """Parameters of FedAMP, table `fedamp`."""

    alpha: float = key(
        1.0, "Step size of the attention (alpha_K). The other clients' weights are proportional to it.", POSITIVE
    )
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
    neighbours: int = key(
        0,
        "Number of other clients in each cloud model, those with the most attention; 0: all, as in the paper.",
        NOT_NEGATIVE,
    )
    scaling: Literal["none", "convex"] = key(
        "none",
        "A client's own weight xi_ii. `none`: 1 minus the others' sum, as printed, even if negative. `convex`: a sum above 1 "
        "becomes 1.",
    )

    def alpha_in(self, round: int) -> float:
        """Return alpha_K of a round, counted from 1."""
        if not self.alpha_decay_every:
            return self.alpha
        return self.alpha * self.alpha_decay ** ((round - 1) // self.alpha_decay_every)


def attention(W: Stack, *, sigma: float, alpha: float, convex: bool = True, neighbours: int = 0) -> NDArray[np.float64]:
    """Return the weights of all clients in each client's cloud model, xi, float64 [N, N]. Rows sum to 1.

    W: float32 [N, d]. sigma, alpha > 0. convex: scale a row to sum 1 if its other clients would weigh more than 1
    together. If not, the client's own weight is negative there. neighbours: the number of other clients with a weight;
    0: all. Raises ValueError if sigma or alpha is not a positive number.
    """
    weights = attraction(aggregate.squared_distances(W), sigma=sigma, alpha=alpha)
    return own_share(strongest(weights, neighbours), convex)


def attraction(distances: NDArray[np.float64], *, sigma: float, alpha: float) -> NDArray[np.float64]:
    """Return alpha_K A'(x) = alpha_K/sigma e^(-x/sigma) of squared distances [N, N], float64 [N, N], with diagonal 0."""
    weights = pull(distances, sigma=sigma, alpha=alpha)
    np.fill_diagonal(weights, 0)
    return weights


def pull(distances: NDArray[np.float64], *, sigma: float, alpha: float) -> NDArray[np.float64]:
    """Return alpha_K A'(x) of squared distances, float64 of the same shape.

    Raises ValueError unless sigma and alpha are numbers > 0.
    """
    for name, value in (("sigma", sigma), ("alpha", alpha)):
        if not 0 < value < np.inf:
            raise ValueError(f"{name} must be a number > 0, got {value}")
    weights: NDArray[np.float64] = alpha / sigma * np.exp(-distances / sigma)
    return weights


def strongest(weights: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the weights [M, N] with all but the `count` largest of each row set to 0; count 0: keep all.

    Ties go to the lower position.
    """
    if not 0 < count < weights.shape[1]:
        return weights
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, np.take_along_axis(weights, order, axis=1), axis=1)
    return kept


def own_share(weights: NDArray[np.float64], convex: bool) -> NDArray[np.float64]:
    """Return the weights [M, N] with each client's own weight on the diagonal: 1 minus the others' sum.

    convex: sums above 1 are scaled to 1.
    """
    weights, rest = shared_out(weights, convex)
    np.fill_diagonal(weights, rest)
    return weights


def shared_out(weights: NDArray[np.float64], convex: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the others' weights [M, N], and 1 minus their sum as the client's own weight, [M].

    convex: sums above 1 are scaled to 1.
    """
    if convex:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    rest = 1 - weights.sum(axis=1)
    return weights, np.maximum(rest, 0) if convex else rest


class FedAMP(PersonalizedStrategy[FedAMPParams]):
    """Server half: keeps every client's own model, and the cloud models of the last round's clients. There is no global model.

    An absent client's cloud model changes with every round, and is computed when the client is sent it.
    """

    late = Late(aged="an upload's weights follow from its distances to the others")
    # the stack: the cloud models
    holds = Holds(models=True, made=1, kept=1)
    warned = False
    # the last round's uploads, and the absent clients' cloud models that were computed last
    _last: tuple[Stack, Stack] | None = None
    _computed: Mapping[int, Model] = MappingProxyType({})

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Mix the round's uploads for its clients."""
        p, alpha = self.params, self.params.alpha_in(turn.round + 1)  # of the next round
        convex = p.scaling == "convex"
        weights = attention(uploads.W, sigma=p.sigma, alpha=alpha, convex=convex, neighbours=p.neighbours)
        self.warn_of_negative(turn.round, uploads.ids, weights)
        params = aggregate.mix(uploads.W, weights, out=self.stack_like(uploads.W))
        buffers = aggregate.mix(uploads.B, weights)
        # those that are absent keep their own model alone
        kept = {
            i: {"params": own["params"], "buffers": own["buffers"]}
            for i, own in state.clients.items()
            if "cloud-params" in own
        }
        for i, client_id in enumerate(uploads.ids):
            cloud = {"cloud-params": params[i], "cloud-buffers": buffers[i]}
            kept[client_id] = {"params": uploads.W[i], "buffers": uploads.B[i], **cloud}
            turn.note(client_id, "attention", np.round(weights[i], 6))
        after = state.next(clients=kept)
        some_absent = len(after.clients) > len(uploads.ids)
        self._last, self._computed = (uploads.W, uploads.B) if some_absent else None, {}
        return after

    def _with_cloud(self) -> list[int]:
        """Return the last round's clients, sorted."""
        return sorted(i for i, kept in self.state.clients.items() if "cloud-params" in kept)

    def _absent(self, client_id: int) -> Model:
        """Return the cloud model of a client that was not in the last round."""
        if client_id not in self._computed:
            absent = sorted(self.state.clients.keys() - set(self._with_cloud()))
            # few at a time: their models are read into memory
            width = _AT_ONCE if len(self.state.clients) >= aggregate.MANY else 1
            start = absent.index(client_id) // width * width
            ids = absent[start : start + width]
            owns, alpha = [self.state.model_of(i) for i in ids], self.params.alpha_in(self.state.round + 1)
            W, B = self._last_uploads()
            clouds = [self.cloud_of(owns[0], W, B, alpha)] if width == 1 else self.clouds_of(owns, W, B, alpha)
            self._computed = dict(zip(ids, clouds, strict=True))
        return self._computed[client_id]

    def _last_uploads(self) -> tuple[Stack, Stack]:
        """Return the last round's uploads, in a resumed run from the models kept for its clients."""
        if self._last is None:
            limit, ids = self.config.server_memory_limit * 1e9, self._with_cloud()
            stacks = UploadBuffer.of(ids, Expected.of(self.layout), limit, self.folder.path)
            for row, client_id in enumerate(ids):
                stacks.W[row], stacks.B[row] = (
                    self.state.clients[client_id]["params"],
                    self.state.clients[client_id]["buffers"],
                )
            self._last = stacks.W, stacks.B
        return self._last

    def cloud_of(self, own: Model, W: Stack, B: Stack, alpha: float) -> Model:
        """Return the cloud model of a client that was not in the round: its last model mixed with the round's uploads."""
        p = self.params
        distances = np.zeros((1, len(W) + 1))
        distances[0, 1:] = aggregate.distances_of_pairs([(own.params, w) for w in W])
        attracted = strongest(attraction(distances, sigma=p.sigma, alpha=alpha), p.neighbours)
        weights = own_share(attracted, p.scaling == "convex")
        mixed = [
            aggregate.mix(np.concatenate([mine[None], stack]), weights)[0]
            for mine, stack in ((own.params, W), (own.buffers, B))
        ]
        return Model(mixed[0], mixed[1])

    def clouds_of(self, owns: list[Model], W: Stack, B: Stack, alpha: float) -> list[Model]:
        """Return `cloud_of` several clients, by one matrix product for all of them."""
        p = self.params
        V = np.stack([own.params for own in owns])
        pulls = pull(aggregate.distances_between(V, W), sigma=p.sigma, alpha=alpha)
        others, shares = shared_out(strongest(pulls, p.neighbours), p.scaling == "convex")
        params, buffers = (aggregate.mix(stack, others) for stack in (W, B))
        own_share = shares.astype(np.float32)[:, None]
        params += own_share * V
        buffers += own_share * np.stack([own.buffers for own in owns])
        return [Model(params[k], buffers[k]) for k in range(len(owns))]

    def warn_of_negative(self, round: int, ids: list[int], weights: NDArray[np.float64]) -> None:
        """Warn, once in a run, of clients with a negative weight of their own."""
        negative = [ids[i] for i in np.flatnonzero(np.diag(weights) < 0)]
        if negative and not self.warned:
            self.warned = True
            log.warning(
                "round %d: fedamp: clients %s have a negative weight of their own, because the others' weights sum to more "
                "than 1; fedamp.alpha <= fedamp.sigma / (N - 1) avoids this, fedamp.scaling = convex scales the sum to 1",
                round,
                f"[{listed(list(map(str, negative)))}]",
            )

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the client's cloud model; the initial model if it never took part."""
        mine = state.clients.get(client_id)
        if mine is None:
            return Sent(state.model)
        cloud = "cloud-params" in mine
        return Sent(Model(mine["cloud-params"], mine["cloud-buffers"]) if cloud else self._absent(client_id))

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return a client's own model. There is no global one."""
        return None if client_id is None else self.state.model_of(client_id)


class FedAMPUpdate(LocalUpdate[FedAMPParams]):
    """Client half: its own model, with a proximal term to the cloud model."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedAMPParams]) -> Model:
        """Minimise the loss + lambda/(2 alpha_K) ||w - u||^2 from the client's own model. u is the received model."""
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
        "Share of each client's model (column) in another client's cloud model (row).",
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
    tested=OWN_MODEL,
    overview=Overview(
        group="Parameters among similar clients",
        stays="own model",
        server="8(d+b) a client",
        disk="4(d+b)",
        unseen="initial model",
        use="few clients, clear groups",
    ),
)
