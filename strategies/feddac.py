"""FedDAC: similar clients share important parameters; the others are mixed among the clients nearest in weight space.

"FedDAC: dynamically adaptive, collaboration-enhanced personalized federated learning" (2025). The text we have lost its
formulas, and the published code cannot settle them. So this is our reading of the description (docs/methods/feddac.md).

Client: a parameter's responsiveness is |(w_after - w_before) * w_after|. The top tau of every layer are important, one
bit per parameter, as in FedCAC.

Server: S is the overlap of the masks. Clients collaborate while their overlap reaches the threshold below; after round
alpha none do.

    S_avg + r (S_max - S_avg), with r = sqrt(t/alpha)

Important parameters mix client i's own values with those of its collaborators:

    u_i = gamma w_i + (1 - gamma) sum_j S_ij w_j / sum_j S_ij

The sums run over the collaborators and i itself, with S_ii = 1. Less important parameters are a mean over the k clients
of highest weight:

    v_i = sum_j p_ij w_j, with p_ij proportional to 1/(||g_i - w_j||^2 + eps)

g_i is client i's guidance model. The server merges u_i on the mask and v_i elsewhere.

Decisions where the paper is silent:

- gamma = 0.6 and the root come from its code. `time-factor = "linear"` is FedCAC's r = t/alpha.
- The paper mentions an influence of the global model on important parameters without a formula. It is left out.
- `guidance = "trained"` takes g_i = w_i. Its distance to itself would be 0 and take all the weight. So it gets the
  distance to the nearest other client.
- `guidance = "one-step"` is FedDWA's guidance: one more local epoch, sent as a second vector.
- The client itself may be one of the k, and comes first in a tie.
- There is no global model. Under partial participation overlap and distances are among the round's clients. A client is
  sent its last personalized model, or the initial one if it never took part.
- BatchNorm statistics take the plain mean over the collaborators, as in FedCAC.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    AT_LEAST_ONE,
    RATIO,
    ClientState,
    Expected,
    Holds,
    Late,
    Links,
    LocalUpdate,
    Matrix,
    Method,
    Model,
    Outliers,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    RunConfig,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    all_but_local_statistics,
    key,
    models_by_client,
)
from strategies.fedcac import at_least, mask_overlap, threshold
from strategies.kernels import aggregate, for_blocks, masks, scores

# name of the second vector on the wire
GUIDANCE = "guidance"
_EPSILON = 1e-12  # added to squared distances


@dataclass(frozen=True)
class FedDACParams:
    """Parameters of FedDAC, table `feddac`."""

    tau: float = key(0.3, "Share of every layer's parameters that is important.", RATIO)
    alpha: int = key(
        200,
        "Last round in which clients share important parameters; the paper's T is 300.",
        AT_LEAST_ONE,
        counts_rounds=True,
        begins_after=True,
    )
    self_weight: float = key(
        0.6, "Weight of the client's own important parameters (gamma, from the authors' code).", RATIO
    )
    neighbours: int = key(
        5, "Clients whose less important parameters are mixed, the client itself included (k).", AT_LEAST_ONE
    )
    guidance: Literal["trained", "one-step"] = key(
        "trained",
        "Model that distances are measured from: the trained one, or one after another local epoch, uploaded as a "
        "second vector.",
    )
    collaboration: Literal["dynamic", "static", "none"] = key(
        "dynamic",
        "Threshold for collaboration: rising until round alpha, or fixed at the mean overlap; `none`: no "
        "collaboration (Fig. 2).",
    )
    time_factor: Literal["root", "linear"] = key(
        "root",
        "How the threshold rises when `collaboration = dynamic`: with the root of t / alpha (authors' code), or with "
        "t / alpha, as FedCAC's.",
    )
    weighting: Literal["similarity", "none"] = key(
        "similarity", "Less important parameters weighted by distance, or the plain mean of all clients (Fig. 3)."
    )
    batchnorm_statistics: Literal["critical", "local"] = key(
        "critical", "BatchNorm running statistics averaged over the collaborators, or kept on the client."
    )


def collaborators(
    overlap: NDArray[np.float64], round: int, alpha: float, time_factor: str = "root"
) -> NDArray[np.bool_]:
    """Return which clients share important parameters, bool [N, N], diagonal False; none do for t > alpha or N = 1.

    overlap: float64 [N, N], symmetric; round: t, counted from 1; alpha: at least 1; time_factor: "root" or "linear".
    Raises ValueError if round or alpha is below 1.
    """
    if round < 1 or alpha < 1:
        raise ValueError(f"round and alpha must be at least 1, got round {round} and alpha {alpha}")
    if overlap.shape[0] < 2 or round > alpha:
        return np.zeros(overlap.shape, dtype=bool)
    progress = round / alpha
    return at_least(overlap, threshold(overlap, math.sqrt(progress) if time_factor == "root" else progress))


def important_weights(
    overlap: NDArray[np.float64], chosen: NDArray[np.bool_], self_weight: float
) -> NDArray[np.float64]:
    """Return the weights of all clients in each client's important parameters, float64 [N, N]; rows sum to 1.

    chosen: bool [N, N], collaborators without the client itself. A client without any gets exactly its row of the
    identity.
    """
    own = np.eye(len(overlap))
    similarity = np.where(chosen, overlap, 0) * (1 - own) + own
    shared = similarity / similarity.sum(axis=1, keepdims=True)
    return np.where(chosen.any(axis=1, keepdims=True), self_weight * own + (1 - self_weight) * shared, own)


def neighbour_weights(distances: NDArray[np.float64], neighbours: int, *, own_distance: bool) -> NDArray[np.float64]:
    """Return the weights of all clients in each client's less important parameters, float64 [N, N]; rows sum to 1.

    distances: float64 [N, N], squared, of the guidance models (rows) from the clients' models. own_distance: use the
    diagonal as it is; if False, replace it by the distance to the nearest other client. At most `neighbours` (cut to N)
    weights per row are not 0: the largest ones. In a tie the client itself comes first, then the lower id. Raises
    ValueError if neighbours is below 1.
    """
    if neighbours < 1:
        raise ValueError(f"neighbours must be at least 1, got {neighbours}")
    n = len(distances)
    own = np.eye(n, dtype=bool)
    if n > 1 and not own_distance:
        distances = np.where(own, np.where(own, np.inf, distances).min(axis=1, keepdims=True), distances)
    order = np.lexsort((~own, distances), axis=1)[:, : min(neighbours, n)]
    weights, chosen = np.zeros((n, n)), np.take_along_axis(distances, order, axis=1)
    inverse = 1 / (chosen + _EPSILON)
    np.put_along_axis(weights, order, inverse / inverse.sum(axis=1, keepdims=True), axis=1)
    return weights


@dataclass(frozen=True)
class Mixing:
    """The weights for every client's next model.

    chosen: bool [N, N], collaborators; inside: float64 [N, N], weights of all clients in each client's important
    parameters; outside: the same for less important ones, None for the plain mean.
    """

    chosen: NDArray[np.bool_]
    inside: NDArray[np.float64]
    outside: NDArray[np.float64] | None


def mixing(
    W: aggregate.Stack,
    overlap: NDArray[np.float64],
    chosen: NDArray[np.bool_],
    params: FedDACParams,
    guidance: aggregate.Stack | None = None,
) -> Mixing:
    """Return the weights, given the masks' overlap and the vectors' distances; see `personalize`."""
    outside = None
    if params.weighting == "similarity":
        distances = aggregate.squared_distances(W, guidance)
        outside = neighbour_weights(distances, params.neighbours, own_distance=guidance is not None)
    return Mixing(chosen, important_weights(overlap, chosen, params.self_weight), outside)


def personalize(
    W: aggregate.Stack,
    bits: masks.Bits,
    round: int,
    *,
    alpha: float,
    self_weight: float = 0.6,
    neighbours: int = 5,
    guidance: aggregate.Stack | None = None,
    mixed: Mixing | None = None,
    out: aggregate.Stack | None = None,
) -> NDArray[np.float32]:
    """Return every client's next model, float32 [N, d]: FedDAC's server step.

    W: float32 [N, d], the clients' trained vectors; bits: uint8 [N, ceil(d/8)], their packed masks of important
    parameters, each with the same number of ones; round: t, counted from 1; guidance: float32 [N, d], or None for the
    trained vectors with the client's own distance replaced; mixed: the weights, if known already; out: float32 [N, d],
    may be W itself. A single client gets its own vector.

    Raises ValueError on shapes that do not fit, masks of unequal size and arguments out of range.
    """
    if not 0 <= self_weight <= 1:
        raise ValueError(f"self_weight must be in [0, 1], got {self_weight}")
    if mixed is None:
        overlap = mask_overlap(W, bits)
        params = FedDACParams(self_weight=self_weight, neighbours=neighbours)
        mixed = mixing(W, overlap, collaborators(overlap, round, alpha), params, guidance)
    return mix_by_mask(W, bits, mixed.inside, mixed.outside, out=out)


def mix_by_mask(
    W: aggregate.Stack,
    bits: masks.Bits,
    inside: NDArray[np.float64],
    outside: NDArray[np.float64] | None,
    out: aggregate.Stack | None = None,
) -> NDArray[np.float32]:
    """Return one weighted sum of all rows where a client's mask is set and another elsewhere, float32 [N, d].

    W: float32 [N, d]; bits: uint8 [N, ceil(d/8)], packed masks; inside, outside: float64 [N, N], row i holds client i's
    weights where its mask is set, and elsewhere; outside None: the mean over all rows, as in `weighted_mean`; out:
    float32 [N, d], may be W itself. A row of `inside` that is 1 for the client itself and 0 elsewhere copies the
    client's own values.
    """
    n, d = W.shape
    alone = (inside == np.eye(n)).all(axis=1)
    place = np.cumsum(~alone) - 1
    weights = inside[~alone]
    if outside is not None:
        weights = np.concatenate([outside, weights])
        place += n
    sums = aggregate.sums_of(weights)
    result = np.empty((n, d), dtype=np.float32) if out is None else out
    ones = np.ones(n)

    def block(start: int, stop: int) -> None:
        rows = W[:, start:stop]
        mixed = sums(rows)
        mean = aggregate.mean_block(rows, ones, float(n)).astype(np.float32) if outside is None else None
        packed = slice(start // 8, -(-stop // 8))
        for i in range(n):
            own = rows[i] if alone[i] else mixed[place[i]]
            aggregate.select(bits[i, packed], own, mixed[i] if mean is None else mean, result[i, start:stop])

    for_blocks(block, d, n)
    return result


class FedDAC(PersonalizedStrategy[FedDACParams]):
    """Server half. Kept per client: its last personalized model. There is no global model."""

    late = Late(aged="an upload's weights follow from its distances to the others")
    outliers = Outliers(extras={"guidance models": GUIDANCE})
    holds = Holds(models=True)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: a mask with exactly K ones and, if configured, the one-step guidance model."""
        extras = {GUIDANCE: ("<f4", (self.layout.d,))} if self.params.guidance == "one-step" else {}
        return replace(
            super().form(state, turn), num_params=self.layout.d, num_selected=self.num_important, extras=extras
        )

    @property
    def num_important(self) -> int:
        """Return K, the number of important parameters, equal for all clients."""
        return masks.num_selected(self.layout.sizes, self.params.tau)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Apply `personalize` with the configured ablations to the round's clients."""
        assert uploads.bits is not None
        p, n = self.params, len(uploads.ids)
        overlap = mask_overlap(uploads.W, uploads.bits)
        chosen = self.choose(overlap, turn.round)
        weights = mixing(uploads.W, overlap, chosen, p, uploads.extras.get(GUIDANCE))
        params = personalize(
            uploads.W, uploads.bits, turn.round, alpha=p.alpha, self_weight=p.self_weight, mixed=weights, out=uploads.W
        )
        statistics = aggregate.group_means(uploads.B, chosen | np.eye(n, dtype=bool))
        ids = np.array(uploads.ids)
        for i, client_id in enumerate(uploads.ids):
            turn.note(client_id, "collaborators", ids[chosen[i]])
            if weights.outside is not None:
                row = weights.outside[i]
                near = {str(uploads.ids[j]): float(np.round(row[j], 6)) for j in np.flatnonzero(row)}
                turn.note(client_id, "neighbours", near)
        turn.note_round("overlap", np.round(overlap, 6))
        return state.next(clients=models_by_client(uploads.ids, params, statistics))

    def choose(self, overlap: NDArray[np.float64], round: int) -> NDArray[np.bool_]:
        """Return the collaborators by the configured rule, bool [N, N]."""
        if self.params.collaboration == "none" or len(overlap) < 2 or self.num_important == 0:
            return np.zeros(overlap.shape, dtype=bool)
        if self.params.collaboration == "static":
            return at_least(overlap, threshold(overlap, 0))
        return collaborators(overlap, round, self.params.alpha, self.params.time_factor)

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the client's last personalized model, or the initial model if it has none."""
        return Sent(state.model_of(client_id))

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return the model that a client is sent. There is no global one."""
        return None if client_id is None else super().exported(client_id)


class FedDACUpdate(LocalUpdate[FedDACParams]):
    """Client half: plain training, the mask of important parameters and, if configured, the guidance model."""

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedDACParams]) -> Upload:
        """Send the weights, the packed mask and, for one-step guidance, the weights after one more epoch."""
        plain = super().upload(before, after, state, ctx)
        responsiveness = scores.sensitivity(before.params, after.params)
        mask = masks.pack(masks.top_k(responsiveness, ctx.layout.sizes, ctx.params.tau))
        extras = dict(plain.extras)
        if ctx.params.guidance == "one-step":
            extras[GUIDANCE] = ctx.trainer.train(after, epochs=1, purpose="feddac.guidance").params
        return replace(plain, mask=mask, extras=extras)


def dp_epochs(config: RunConfig) -> int:
    """Return the epochs of plain steps in a round: `local-epochs`, and the guidance model's one."""
    return config.local_epochs + int(config.params.guidance == "one-step")


FIGURES = (
    Matrix(
        "overlap",
        "Overlap of important parameters",
        "share of important parameters in common",
        "The share of its important parameters that a client has in common with another.",
        heading="Overlap of important masks",
        value="overlap",
    ),
    Links(
        "collaborators",
        "Collaborators over rounds",
        "collaborators",
        "The number of others with which a client shares its important parameters in a round. The threshold rises "
        "until round alpha: clients start with many collaborators and keep the most similar ones. Then they are alone.",
    ),
    Matrix(
        "neighbours",
        "Weights in the less important parameters",
        "weight of the column's client",
        "The weight of each client (columns) in another client's less important parameters (rows).",
        heading="Weights of neighbours",
        value="weight",
    ),
)

METHOD = Method(
    "feddac",
    FedDACParams,
    FedDAC,
    FedDACUpdate,
    all_but_local_statistics,
    figures=FIGURES,
    needs_whole=True,
    dp_epochs=dp_epochs,
    not_private="its server compares single clients' models",
    overview=Overview(
        group="Parameters among similar clients",
        travels="model; up + ⌈d/8⌉",
        server="4(d+b) a client",
        unseen="initial model",
        use="as fedcac, without a global model",
    ),
)
