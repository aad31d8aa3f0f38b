"""FedDAC: important parameters shared among similar clients, the others among the clients nearest in weight space.

"FedDAC: dynamically adaptive, collaboration-enhanced personalized federated learning" (2025). The text we have lost its
formulas and the published code cannot settle them, so this is our reading of the description (docs/methods.md).

Client: responsiveness |(w_after - w_before) * w_after|, the top tau of every layer is important, one bit per parameter, as in
FedCAC. Server: mask overlap S; clients collaborate while their overlap reaches S_avg + sqrt(t/alpha) (S_max - S_avg), nobody
after round alpha. Important parameters: u_i = gamma w_i + (1 - gamma) sum_j S_ij w_j / sum_j S_ij over the collaborators and
i itself, S_ii = 1. Less important ones: v_i = sum_j p_ij w_j over the k clients of highest weight, p_ij proportional to
1/(||g_i - w_j||^2 + eps), g_i being client i's guidance model. The server merges u_i on the mask and v_i elsewhere.

Decisions where the paper is silent: gamma = 0.6 and the root are its code's. The influence of the global model on important
parameters, mentioned without a formula, is left out. `guidance = "trained"` takes g_i = w_i, whose distance to itself would
be 0 and its weight everything: it gets the distance to the nearest other client; `"one-step"` is FedDWA's guidance, one more
local epoch, sent as a second vector. The client itself is among the k, and first in a tie. There is no global model:
under partial participation overlap and distances are among the round's clients, a client is sent its last personalized
model, and the initial one if it never took part. BatchNorm statistics: plain mean over the collaborators, as in FedCAC.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.figures import Links, Matrix
from fl_app.keys import AT_LEAST_ONE, RATIO, key
from fl_app.layout import Model
from fl_app.wire import Expected, Upload
from strategies import aggregate, masks, scores
from strategies.base import (
    ClientState,
    LocalUpdate,
    Method,
    PersonalizedStrategy,
    RoundContext,
    Uploads,
    all_but_local_statistics,
)
from strategies.blocks import for_blocks
from strategies.fedcac import at_least, mask_overlap, threshold

# name of the second vector on the wire
GUIDANCE = "guidance"
_EPSILON = 1e-12  # added to squared distances


@dataclass(frozen=True)
class FedDACParams:
    """Parameters of FedDAC, table `feddac`."""

    tau: float = key(0.3, "Share of every layer's parameters that is important.", RATIO)
    alpha: int = key(
        200,
        "Round after which nobody collaborates on important parameters; the paper's T is 300.",
        AT_LEAST_ONE,
        counts_rounds=True,
    )
    self_weight: float = key(
        0.6, "Weight of the client's own important parameters (gamma, the authors' code's).", RATIO
    )
    neighbours: int = key(
        5, "Clients whose less important parameters are mixed, the client itself included (k).", AT_LEAST_ONE
    )
    guidance: Literal["trained", "one-step"] = key(
        "trained",
        "What distances are measured from: the trained model, or one more local epoch, uploaded as a second vector.",
    )
    collaboration: Literal["dynamic", "static", "none"] = key(
        "dynamic", "Threshold rising until round alpha, fixed at the mean overlap in all rounds, or nobody (Fig. 2)."
    )
    weighting: Literal["similarity", "none"] = key(
        "similarity", "Less important parameters weighted by distance, or the plain mean of all clients (Fig. 3)."
    )
    batchnorm_statistics: Literal["critical", "local"] = key(
        "critical", "BatchNorm running statistics averaged over the collaborators, or kept on the client."
    )


def collaborators(overlap: NDArray[np.float64], round: int, alpha: float) -> NDArray[np.bool_]:
    """Who shares important parameters with whom, bool [N, N], diagonal False; nobody for t > alpha or N = 1.

    overlap: float64 [N, N], symmetric; round t counted from 1; alpha >= 1. Raises ValueError if round or alpha is below 1.
    """
    if round < 1 or alpha < 1:
        raise ValueError(f"round and alpha must be at least 1, got round {round} and alpha {alpha}")
    if overlap.shape[0] < 2 or round > alpha:
        return np.zeros(overlap.shape, dtype=bool)
    return at_least(overlap, threshold(overlap, math.sqrt(round / alpha)))


def important_weights(
    overlap: NDArray[np.float64], chosen: NDArray[np.bool_], self_weight: float
) -> NDArray[np.float64]:
    """Weights of all clients in each client's important parameters, float64 [N, N]; rows sum to 1.

    chosen: bool [N, N], collaborators without the client itself. A client alone has exactly its own row of the identity.
    """
    own = np.eye(len(overlap))
    similarity = np.where(chosen, overlap, 0) * (1 - own) + own
    shared = similarity / similarity.sum(axis=1, keepdims=True)
    return np.where(chosen.any(axis=1, keepdims=True), self_weight * own + (1 - self_weight) * shared, own)


def neighbour_weights(distances: NDArray[np.float64], neighbours: int, *, own_distance: bool) -> NDArray[np.float64]:
    """Weights of all clients in each client's less important parameters, float64 [N, N]; rows sum to 1.

    distances: float64 [N, N], squared, of the guidance models (rows) from the clients' models. own_distance: the diagonal
    counts; if not, it is replaced by the distance to the nearest other client. At most `neighbours` (cut to N) per row are
    not 0, the largest ones; in a tie the client itself, then the lower id. Raises ValueError if neighbours is below 1.
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
    """Who goes into whose next model: chosen bool [N, N], collaborators; inside, outside: weights float64 [N, N] of all clients in
    each client's important and less important parameters; outside None: the plain mean.
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
    """Weights that follow from the masks' overlap and the vectors' distances; see `personalize`."""
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
    """FedDAC's server step: every client's next model, float32 [N, d].

    W: float32 [N, d], the clients' trained vectors; bits: uint8 [N, ceil(d/8)], their packed masks of important parameters,
    each with the same number of ones; round t from 1; guidance: float32 [N, d], or None: the trained vectors, with the
    client's own distance replaced. A single client gets its own vector. mixed: the weights, if they are known already; out:
    float32 [N, d], may be W itself.
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
    """Per client one weighted sum of all rows where its mask is set and another elsewhere, float32 [N, d].

    W: float32 [N, d]; bits: uint8 [N, ceil(d/8)] packed masks; inside, outside: float64 [N, N], row i holds client i's
    weights; outside None: the mean over all rows, as `weighted_mean` has it. A row of `inside` that is 1 for the client
    itself and 0 elsewhere copies the client's own values. out: float32 [N, d], may be W itself.
    """
    n, d = W.shape
    alone = (inside == np.eye(n)).all(axis=1)
    place = np.cumsum(~alone) - 1
    factors = inside[~alone].astype(np.float32)
    if outside is not None:
        factors = np.concatenate([outside.astype(np.float32), factors])
        place += n
    result = np.empty((n, d), dtype=np.float32) if out is None else out
    ones = np.ones(n)

    def block(start: int, stop: int) -> None:
        rows = W[:, start:stop]
        mixed = factors @ rows
        mean = aggregate.mean_block(rows, ones, float(n)).astype(np.float32) if outside is None else None
        packed = slice(start // 8, -(-stop // 8))
        for i in range(n):
            own = rows[i] if alone[i] else mixed[place[i]]
            aggregate.select(bits[i, packed], own, mixed[i] if mean is None else mean, result[i, start:stop])

    for_blocks(block, d)
    return result


class FedDAC(PersonalizedStrategy[FedDACParams]):
    """Server half: keeps every client's last personalized model; there is no global one."""

    compared_extras = MappingProxyType({"guidance models": GUIDANCE})

    def expected(self) -> Expected:
        """A mask in which exactly K parameters are important, and the one-step guidance model where it is asked for."""
        extras = {GUIDANCE: ("<f4", (self.layout.d,))} if self.params.guidance == "one-step" else {}
        return dataclasses.replace(
            super().expected(), num_params=self.layout.d, num_selected=self.num_important, extras=extras
        )

    @property
    def num_important(self) -> int:
        """K, equal for all clients."""
        return masks.num_selected(self.layout.sizes, self.params.tau)

    def personalize(self, round: int, uploads: Uploads) -> None:
        """`personalize` above with the configured ablations, for the round's participants."""
        assert uploads.bits is not None
        p, n = self.params, len(uploads.ids)
        overlap = mask_overlap(uploads.W, uploads.bits)
        chosen = self.choose(overlap, round)
        weights = mixing(uploads.W, overlap, chosen, p, uploads.extras.get(GUIDANCE))
        params = personalize(
            uploads.W, uploads.bits, round, alpha=p.alpha, self_weight=p.self_weight, mixed=weights, out=uploads.W
        )
        statistics = aggregate.group_means(uploads.B, chosen | np.eye(n, dtype=bool))
        for i, client_id in enumerate(uploads.ids):
            self.keep_for(client_id, params=params[i], buffers=statistics[i])
            self.note(client_id, "collaborators", [uploads.ids[j] for j in np.flatnonzero(chosen[i])])
            if weights.outside is not None:
                row = weights.outside[i]
                near = {str(uploads.ids[j]): float(np.round(row[j], 6)) for j in np.flatnonzero(row)}
                self.note(client_id, "neighbours", near)
        self.note_round("overlap", np.round(overlap, 6).tolist())

    def choose(self, overlap: NDArray[np.float64], round: int) -> NDArray[np.bool_]:
        """Collaborators by the configured rule, bool [N, N]."""
        if self.params.collaboration == "none" or len(overlap) < 2 or self.num_important == 0:
            return np.zeros(overlap.shape, dtype=bool)
        if self.params.collaboration == "static":
            return at_least(overlap, threshold(overlap, 0))
        return collaborators(overlap, round, self.params.alpha)

    def model_for(self, client_id: int) -> Model:
        """Return the client's last personalized model, the initial model if it has none."""
        return self.last_personal(client_id)

    def has_global_model(self) -> bool:
        """Tell that there is none."""
        return False


class FedDACUpdate(LocalUpdate[FedDACParams]):
    """Client half: plain training, the mask of important parameters, and the guidance model where it is asked for."""

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedDACParams]) -> Upload:
        """Send weights, packed mask and, for one-step guidance, the weights after one more epoch."""
        plain = super().upload(before, after, state, ctx)
        responsiveness = scores.sensitivity(before.params, after.params)
        mask = masks.pack(masks.top_k(responsiveness, ctx.layout.sizes, ctx.params.tau))
        extras = dict(plain.extras)
        if ctx.params.guidance == "one-step":
            extras[GUIDANCE] = ctx.trainer.train(after, epochs=1, purpose="feddac.guidance").params
        return dataclasses.replace(plain, mask=mask, extras=extras)


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
        "With how many others a client shares its important parameters in a round. While the threshold rises, until round "
        "alpha, clients start with many collaborators and keep the most similar ones; then they are alone.",
    ),
    Matrix(
        "neighbours",
        "Weights in the less important parameters",
        "weight of the column's client",
        "How much each client, a row, takes from the others, the columns, for its less important parameters.",
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
    not_private="its server compares single clients' models",
)
