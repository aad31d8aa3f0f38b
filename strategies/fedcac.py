"""FedCAC: similar clients share their critical parameters, and all clients share the others.

Wu, Liu, Niu, Zhu, Tang: "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
Cautiously Aggressive Collaboration", ICCV 2023.

Client: a parameter's sensitivity is |(w_after - w_before) * w_after| (Eq. 5). The top tau of every layer form the
critical mask (Eq. 6). The mask travels with the weights, one bit per parameter.

Server: the overlap of two masks measures how similar two clients' data are. Clients collaborate if their overlap
reaches a threshold (Eq. 8), which rises until round beta (Eq. 7). The server averages a client's critical parameters
over its collaborators (Eq. 10) and the rest over all clients (Eq. 9), and merges both (Eq. 11).

Deviations:

- The overlap is the share of common critical parameters. The printed formula is a distance.
- The threshold is capped at O_max.
- The server merges, so one model travels down, not two.
- The global mean is weighted by samples unless `weighting = "uniform"`.
- The paper has no partial participation. Here the overlap is taken among the round's clients. A client is sent its last
  customized critical parameters on top of the current global model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.privacy.sketch import overlaps
from strategies.base import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    RATIO,
    ClientState,
    Expected,
    Holds,
    Late,
    Links,
    LocalUpdate,
    Matrix,
    Means,
    Method,
    Model,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    RunConfig,
    Sent,
    State,
    Sums,
    Turn,
    Upload,
    Uploads,
    UserError,
    all_but_local_statistics,
    key,
    local_epochs,
    models_by_client,
)
from strategies.kernels import PLAIN, RULES, Averaging, aggregate, for_blocks, masks, scores
from strategies.kernels.linkage import ALONE, held, partition, regrouped

# names of arrays in private runs
GROUPS, PLACES, MEANS, STATISTICS, GROUP = "groups", "places", "means", "statistics", "group"


@dataclass(frozen=True)
class FedCACParams:
    """Parameters of FedCAC, table `fedcac`."""

    tau: float = key(0.5, "Share of every layer's parameters that is critical (tau, Eq. 6).", RATIO)
    beta: int = key(
        10,
        "Last round in which clients share critical parameters (beta, Eq. 7); the paper uses 20 to 34 % of T.",
        AT_LEAST_ONE,
        counts_rounds=True,
        begins_after=True,
    )
    weighting: Literal["samples", "uniform"] = key(
        "samples", "Weights of the global mean: training samples (authors' code) or equal (Eq. 9)."
    )
    selection: Literal["sensitivity", "random", "sensitivity-reverse"] = key(
        "sensitivity", "How critical parameters are chosen (ablation, Fig. 3)."
    )
    collaboration: Literal["time-varying", "none", "top"] = key(
        "time-varying",
        "Clients that share critical parameters: those that reach the threshold, none, or the `num-collaborators` most "
        "similar (Fig. 4).",
    )
    neighbours: int = key(
        0,
        "Limit on a client's collaborators when `collaboration = time-varying`; those of highest overlap stay. 0: "
        "all that reach the threshold, as in the paper.",
        NOT_NEGATIVE,
    )
    num_collaborators: int = key(1, "Collaborators per client when `collaboration = top`.", AT_LEAST_ONE)
    non_critical: Literal["all", "as-critical"] = key(
        "all",
        "Average non-critical parameters over all clients, or over the collaborators like critical ones (Table 3).",
    )
    vanishing_scores: Literal["ranked", "nonzero"] = key(
        "ranked",
        "Critical parameters of a layer whose smallest critical score is at most 1e-10: the top tau as elsewhere, or all "
        "scores above 1e-20 (authors' code).",
    )
    batchnorm_statistics: Literal["critical", "local"] = key(
        "critical",
        "BatchNorm running statistics averaged over the collaborators, or kept on the client (authors' code).",
    )

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error if a private run has options that do not work with disjoint clusters."""
        if config.private and (self.collaboration == "top" or self.non_critical != "all" or self.neighbours):
            rule = (
                "fedcac then has disjoint clusters of clients: fedcac.collaboration must not be top, "
                "fedcac.non-critical must be all, fedcac.neighbours must be 0"
            )
            yield UserError(key="private", rule=rule)
        key = "fedcac.vanishing-scores"
        if self.vanishing_scores != "ranked" and config.private:
            rule = "must be ranked in a private run, whose masks have one size"
            yield UserError(key=key, rule=rule, value=self.vanishing_scores)
        if self.vanishing_scores != "ranked" and self.selection != "sensitivity":
            yield UserError(key=key, rule="nonzero needs fedcac.selection = sensitivity", value=self.selection)


def collaborators(overlap: NDArray[np.float64], round: int, beta: int) -> NDArray[np.bool_]:
    """Return which clients share critical parameters in a round, bool [N, N] (FedCAC Eq. 7-8).

    overlap: float64 [N, N], symmetric; round: t, counted from 1; beta: at least 1. Row i is True at client i's
    collaborators; the diagonal is False. They are all clients with an overlap of at least
    O_avg + t/beta * (O_max - O_avg), capped at O_max. There are none for t > beta or N = 1. Raises ValueError if round
    or beta is below 1.
    """
    if round < 1 or beta < 1:
        raise ValueError(f"round and beta must be at least 1, got round {round} and beta {beta}")
    n = overlap.shape[0]
    if n < 2 or round > beta:
        return np.zeros((n, n), dtype=bool)
    return at_least(overlap, threshold(overlap, round / beta))


def with_vanishing(
    critical: NDArray[np.bool_], importance: NDArray[np.float32], sizes: Sequence[int]
) -> NDArray[np.bool_]:
    """Return the mask with the authors' rule for layers whose smallest critical score is at most 1e-10, bool [d].

    In them all scores above 1e-20 are critical; if there are none, all of the layer is. critical: bool [d], the top tau of
    every layer; importance: float32 [d]; sizes: elements per layer. A layer without critical parameters stays so.
    """
    mask, stop = critical.copy(), 0
    for size in sizes:
        layer, stop = slice(stop, stop + size), stop + size
        selected = importance[layer][critical[layer]]
        if selected.size and selected.min() <= 1e-10:
            nonzero = importance[layer] > 1e-20
            mask[layer] = nonzero if nonzero.any() else True
    return mask


def threshold(overlap: NDArray[np.float64], progress: float) -> float:
    """Return the overlap that a pair needs at `progress` in [0, 1] (FedCAC Eq. 7).

    It lies between the mean and the maximum over pairs.
    """
    pairs = overlap[~np.eye(overlap.shape[0], dtype=bool)]
    highest, mean = float(pairs.max()), float(pairs.mean(dtype=np.float64))
    return highest if progress >= 1 else min(highest, mean + progress * (highest - mean))


def at_least(overlap: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    """Return the pairs i != j with an overlap of at least the threshold (FedCAC Eq. 8), bool [N, N]."""
    return (overlap >= threshold) & ~np.eye(overlap.shape[0], dtype=bool)


def top_k_similar(overlap: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Return the `count` clients of highest overlap for each client, bool [N, N] (ablation, FedCAC Fig. 4).

    Ties go to the lower id.
    """
    n = overlap.shape[0]
    others = np.where(np.eye(n, dtype=bool), -np.inf, overlap)
    order = np.argsort(-others, axis=1, kind="stable")[:, : min(count, n - 1)]
    chosen = np.zeros((n, n), dtype=bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def personalize(
    W: aggregate.Stack,
    bits: masks.Bits,
    round: int,
    *,
    beta: int,
    weights: NDArray[np.float64] | None = None,
    chosen: NDArray[np.bool_] | None = None,
    non_critical: str = "all",
    out: aggregate.Stack | None = None,
    averaging: Averaging = PLAIN,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the global vector, float32 [d], and the personalized vectors, float32 [N, d] (FedCAC Eq. 7-11).

    W: float32 [N, d], the clients' trained vectors; bits: uint8 [N, ceil(d/8)], their packed critical masks, each with
    the same number of ones; round: t, counted from 1; weights: float64 [N], of the global mean, None for uniform;
    chosen: bool [N, N], row i marks client i's collaborators, None for Eq. 7-8; non_critical: "all", or "as-critical"
    (ablation, Table 3); out: float32 [N, d], takes the second result, may be W itself; averaging: the rule for the
    means over all clients and over collaborators.

    Raises ValueError on shapes that do not fit and on masks of unequal size.
    """
    if chosen is None:
        chosen = collaborators(mask_overlap(W, bits), round, beta)
    members = chosen | np.eye(W.shape[0], dtype=bool)
    weights = np.ones(W.shape[0]) if weights is None else weights
    if non_critical == "as-critical":
        return averaging.mean(W, weights), averaging.group_means(W, members, out=out)
    return collaborate(W, bits, members, weights, out=out, averaging=averaging)


def collaborate(
    W: aggregate.Stack,
    bits: masks.Bits,
    members: NDArray[np.bool_],
    weights: NDArray[np.float64],
    out: aggregate.Stack | None = None,
    averaging: Averaging = PLAIN,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the global mean, float32 [d], and the merged vectors, float32 [N, d] (FedCAC Eq. 9-11).

    A merged vector holds the mean of the client's group on its critical parameters, and the global mean elsewhere. W:
    float32 [N, d]; bits: uint8 [N, ceil(d/8)], packed masks; members: bool [N, N], row i marks the group of client i,
    itself included; weights: float64 [N], of the global mean; out: float32 [N, d], takes the second result, may be W
    itself; averaging: the rule for both means.

    Clients with equal groups share one mean, and a client alone keeps its own row. So small groups need no [N, N] x
    [N, d] product.
    """
    n, d = W.shape
    alone = members.sum(axis=1) == 1
    groups, group_of = np.unique(members[~alone], axis=0, return_inverse=True)
    group_index = np.full(n, -1)
    group_index[~alone] = group_of.reshape(-1)
    mean_of, group_means_of = averaging.over_all(W, weights), averaging.over_groups(W, groups)
    mean = np.empty(d, dtype=np.float32)
    personalized = np.empty((n, d), dtype=np.float32) if out is None else out

    def block(start: int, stop: int) -> None:
        rows = W[:, start:stop]
        mean[start:stop] = mean_of(rows)
        group = group_means_of(rows)
        packed = slice(start // 8, -(-stop // 8))
        for i in range(n):
            own = rows[i] if alone[i] else group[group_index[i]]
            aggregate.select(bits[i, packed], own, mean[start:stop], personalized[i, start:stop])

    for_blocks(block, d, n)
    return mean, personalized


def mask_overlap(W: aggregate.Stack, bits: masks.Bits, sizes_differ: bool = False) -> NDArray[np.float64]:
    """Return the overlap of the uploads' masks, float64 [N, N].

    If nothing is critical (K = 0), it is 0 off the diagonal. sizes_differ: masks may have different numbers of ones, and
    row i is then 1 - |M_i - M_j| / 2|M_i|, as in the authors' code. Raises ValueError if the shapes do not fit, or the
    masks have different numbers of ones without `sizes_differ`.
    """
    n, d = W.shape
    if bits.shape != (n, -(-d // 8)) or bits.dtype != np.uint8:
        raise ValueError(f"masks must be uint8 {(n, -(-d // 8))} for W {W.shape}, got {bits.dtype} {bits.shape}")
    if sizes_differ:
        common = masks.common_ones(bits)
        ones = common.diagonal()[:, None]
        shares: NDArray[np.float64] = 1 - (ones + ones.T - 2 * common) / (2 * np.maximum(ones, 1))
        return shares
    num_critical = masks.popcount(bits[0])
    if not num_critical and not bits.any():
        return np.eye(n)
    overlap = masks.overlap(bits, max(1, num_critical))
    if (overlap.diagonal() != 1).any():
        sizes = sorted({masks.popcount(own) for own in bits})
        raise ValueError(f"masks must have equally many ones, got {sizes}")
    return overlap


class FedCAC(PersonalizedStrategy[FedCACParams]):
    """Server half. Kept per client: its last personalized model and its mask."""

    means = Means(RULES)
    late = Late(aged="the means over a client's collaborators are unweighted")
    holds = Holds(models=True)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: a mask with exactly K critical parameters, or with any number."""
        selected = self.num_critical if self.params.vanishing_scores == "ranked" else -1
        return replace(super().form(state, turn), num_params=self.layout.d, num_selected=selected)

    @property
    def num_critical(self) -> int:
        """Return K, the number of critical parameters, equal for all clients."""
        return masks.num_selected(self.layout.sizes, self.params.tau)

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return the weights of the global mean: by samples, or all equal.

        A private run weights its groups' means by them too. In a plain run the collaborators' means (Eq. 10) are
        unweighted.
        """
        return uploads.sizes if self.params.weighting == "samples" else uploads.once

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Apply Eq. 7-11 to the round's clients."""
        assert uploads.bits is not None
        p, n = self.params, len(uploads.ids)
        # the rule must see the stack before results overwrite it
        averaging, weights = turn.average, self.weights(uploads)
        overlap = mask_overlap(uploads.W, uploads.bits, sizes_differ=p.vanishing_scores != "ranked")
        chosen = self.choose(overlap, turn.round)
        mean, personalized = personalize(
            uploads.W,
            uploads.bits,
            turn.round,
            beta=p.beta,
            weights=weights,
            chosen=chosen,
            non_critical=p.non_critical,
            out=uploads.W,
            averaging=averaging,
        )
        statistics = averaging.group_means(uploads.B, chosen | np.eye(n, dtype=bool))
        ids, kept = np.array(uploads.ids), models_by_client(uploads.ids, personalized, statistics)
        for i, client_id in enumerate(uploads.ids):
            kept[client_id] |= {"mask": uploads.bits[i], "round": np.array(turn.round)}
            turn.note(client_id, "collaborators", ids[chosen[i]])
        turn.note_round("collaborators", float(chosen.sum(axis=1).mean()))
        turn.note_round("overlap", np.round(overlap, 6))
        return state.next(Model(mean, averaging.mean(uploads.B, weights)), kept)

    # Private runs have a partition of the clients, not neighbourhoods (strategies/kernels/linkage.py)

    def sum_groups(self, ids: list[int]) -> Mapping[int, list[int]]:
        """Return the partition from the last regrouping.

        Before the first one all clients are one group. Its label is ALONE if no clients collaborate.
        """
        if GROUPS not in self.state.memory:
            return {ALONE if self._apart(1) else 0: ids}
        labels = self.state.memory[GROUPS]
        return {int(label): [i for i in ids if labels[i] == label] for label in np.unique(labels[ids])}

    def update_sums(self, state: State, sums: Sums, turn: Turn) -> State:
        """Apply Eq. 9-10 to the groups that were summed.

        Every `private-regroup` rounds, and when collaboration ends, form the next groups from the overlaps.
        """
        n, m, d, ids = self.config.num_clients, sums.sketch_bits, self.layout.d, np.array(sums.ids)
        groups = state.memory.get(GROUPS, np.full(n, ALONE if self._apart(1) else 0))
        places, means, now = held(sums.groups, groups), list(sums.means.values()), turn.round
        kept = {
            PLACES: places,
            MEANS: np.array([mean.params for mean in means]),
            STATISTICS: np.array([mean.buffers for mean in means]),
        }
        assert sums.bits is not None
        found = (
            overlaps(masks.common_ones(sums.bits), m, d, self.num_critical) if self.num_critical else np.eye(len(ids))
        )
        if (now - 1) % self.config.private_regroup == 0 or self._apart(now + 1):
            labels = np.full(n, ALONE)
            if not self._apart(now + 1):
                labels = regrouped(groups, ids, partition(found, threshold(found, (now + 1) / self.params.beta)))
            # all members of a sum must be sent the same mean
            kept[GROUPS] = self.keep_together(ids, labels, found)
        chosen = (places[ids][:, None] == places[ids]) & (places[ids] != ALONE) & ~np.eye(len(ids), dtype=bool)
        for row, client_id in zip(chosen, sums.ids, strict=True):
            turn.note(client_id, "collaborators", ids[row])
        turn.note_round("collaborators", float(chosen.sum(axis=1).mean()))
        turn.note_round("overlap", np.round(found, 6))
        return state.next(sums.mean, memory=kept)

    def _apart(self, round: int) -> bool:
        """Return whether no clients share critical parameters in a round."""
        return self.params.collaboration == "none" or self.num_critical == 0 or round > self.params.beta

    def _group(self, client_id: int) -> int:
        """Return the place of a client's group in a private run's last sums, ALONE without a group."""
        return int(self.state.memory[PLACES][client_id]) if PLACES in self.state.memory else ALONE

    def choose(self, overlap: NDArray[np.float64], round: int) -> NDArray[np.bool_]:
        """Return the collaborators by the configured rule, bool [N, N]."""
        if self.params.collaboration == "none" or overlap.shape[0] < 2 or self.num_critical == 0:
            return np.zeros(overlap.shape, dtype=bool)
        if self.params.collaboration == "top":
            return top_k_similar(overlap, self.params.num_collaborators)
        chosen = collaborators(overlap, round, self.params.beta)
        return chosen & top_k_similar(overlap, self.params.neighbours) if self.params.neighbours else chosen

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return Eq. 11 with the current global model: the client's own critical parameters, the global ones elsewhere.

        A client without stored parameters gets the global model. In a private run it gets its group's mean and statistics, too,
        and merges them itself.
        """
        mine, place = state.clients.get(client_id), self._group(client_id)
        if place != ALONE:
            group = {GROUP: state.memory[MEANS][place]}
            return Sent(Model(state.model.params, state.memory[STATISTICS][place]), group)
        if mine is None:
            return Sent(state.model)
        params = mine["params"]
        if self.params.non_critical == "all" and int(mine["round"]) != state.round:
            params = aggregate.merge(mine["mask"], params, state.model.params)
        return Sent(Model(params, mine["buffers"]))


class FedCACUpdate(LocalUpdate[FedCACParams]):
    """Client half: plain training, then scores, mask and packing.

    State, in private runs only: `fedcac.mask` (packed), `.params` and `.buffers`, as of its last upload.
    """

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedCACParams]) -> Model:
        """Return Eq. 11 in a private run: the group's mean on the client's own mask.

        Without a group the mask takes the client's last values.
        """
        start = super().merge(received, state, ctx)
        if "fedcac.mask" not in state.arrays:
            return start
        statistics = (
            start.buffers if GROUP in ctx.extras or not received.buffers.size else state.arrays["fedcac.buffers"]
        )
        critical = ctx.extras.get(GROUP, state.arrays["fedcac.params"])
        return Model(aggregate.merge(state.arrays["fedcac.mask"], critical, start.params), statistics)

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedCACParams]) -> Upload:
        """Send the weights and the packed critical mask (Eq. 5-6)."""
        plain = super().upload(before, after, state, ctx)
        if ctx.params.selection == "random":
            ranking = ctx.rng("fedcac.selection").random(ctx.layout.d, dtype=np.float32)
        else:
            ranking = scores.sensitivity(before.params, after.params)
            if ctx.params.selection == "sensitivity-reverse":
                ranking = -ranking
        chosen = masks.top_k(ranking, ctx.layout.sizes, ctx.params.tau)
        if ctx.params.vanishing_scores == "nonzero":
            chosen = with_vanishing(chosen, ranking, ctx.layout.sizes)
        mask = masks.pack(chosen)
        if ctx.config.private:
            own, state.arrays["fedcac.mask"] = plain.model, mask
            state.arrays["fedcac.params"], state.arrays["fedcac.buffers"] = own.params, own.buffers
        return replace(plain, mask=mask)


FIGURES = (
    Matrix(
        "overlap",
        "Overlap of critical parameters",
        "share of critical parameters in common",
        "The share of its critical parameters that a client has in common with another (Fig. 7 of its paper).",
        heading="Overlap of critical masks",
        value="overlap",
    ),
    Links(
        "collaborators",
        "Collaborators over rounds",
        "collaborators",
        "The number of others with which a client shares its critical parameters in a round. The threshold rises until "
        "round beta: clients start with many collaborators and keep the most similar ones. Then they are alone.",
    ),
)

METHOD = Method(
    "fedcac",
    FedCACParams,
    FedCAC,
    FedCACUpdate,
    all_but_local_statistics,
    figures=FIGURES,
    needs_whole=True,
    dp_epochs=local_epochs,
    sums=True,
    overview=Overview(
        group="Parameters among similar clients",
        travels="model; up + ⌈d/8⌉",
        server="4(d+b) + ⌈d/8⌉ a client",
        use="unknown groups of similar clients",
    ),
)
