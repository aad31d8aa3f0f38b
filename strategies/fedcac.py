"""FedCAC: critical parameters shared among similar clients, all others among everyone.

Wu, Liu, Niu, Zhu, Tang: "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously
Aggressive Collaboration", ICCV 2023.

Client: sensitivity |(w_after - w_before) * w_after| (Eq. 5), the top tau of every layer is its critical mask (Eq. 6), sent
with the weights, one bit per parameter. Server: mask overlap says whose data is alike; with a threshold that rises until
round beta (Eq. 7) it picks collaborators (Eq. 8), averages critical parameters over them (Eq. 10), the rest over all
(Eq. 9), and merges (Eq. 11).

Deviations: overlap is the share of common critical parameters (the printed formula is a distance); the threshold is capped
at O_max; the server merges, so one model travels down, not two; the global mean is weighted by samples unless
`weighting = "uniform"`. Under partial participation (the paper has none) overlap is taken among the round's clients, and a
client is sent its last customized critical parameters on top of the current global model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.figures import Links, Matrix
from fl_app.keys import AT_LEAST_ONE, RATIO, key
from fl_app.layout import Model
from fl_app.privacy.sketch import overlaps
from fl_app.wire import Expected, Upload
from strategies import aggregate, masks, scores
from strategies.base import (
    ClientState,
    LocalUpdate,
    Method,
    PersonalizedStrategy,
    RoundContext,
    Sums,
    Uploads,
    all_but_local_statistics,
    local_epochs,
)
from strategies.blocks import for_blocks
from strategies.linkage import ALONE, held, partition, regrouped
from strategies.robust import PLAIN, RULES, Averaging

GROUPS, SUMMED, PLACES, MEANS, STATISTICS, GROUP = (
    "groups",
    "summed",
    "places",
    "means",
    "statistics",
    "group",
)  # private runs


@dataclass(frozen=True)
class FedCACParams:
    """Parameters of FedCAC, table `fedcac`."""

    tau: float = key(0.5, "Share of every layer's parameters that is critical (tau, Eq. 6).", RATIO)
    beta: int = key(
        10,
        "Round after which critical parameters are trained alone (beta, Eq. 7); the paper's is 0.2 to 0.34 of T.",
        AT_LEAST_ONE,
        counts_rounds=True,
    )
    weighting: Literal["samples", "uniform"] = key(
        "samples", "Weights of the global mean: training samples (authors' code) or equal (Eq. 9)."
    )
    selection: Literal["sensitivity", "random", "sensitivity-reverse"] = key(
        "sensitivity", "How critical parameters are chosen (ablation, Fig. 3)."
    )
    collaboration: Literal["time-varying", "none", "top"] = key(
        "time-varying",
        "Who shares critical parameters: by threshold, nobody, or the `num-collaborators` most alike (Fig. 4).",
    )
    num_collaborators: int = key(1, "Collaborators per client when `collaboration = top`.", AT_LEAST_ONE)
    non_critical: Literal["all", "as-critical"] = key(
        "all", "Non-critical parameters from all clients, or from the collaborators like critical ones (Table 3)."
    )
    batchnorm_statistics: Literal["critical", "local"] = key(
        "critical",
        "BatchNorm running statistics averaged over the collaborators, or kept on the client (authors' code).",
    )

    def problems(self, config: RunConfig) -> Iterator[str]:
        """A private run has groups."""
        if config.private and (self.collaboration == "top" or self.non_critical != "all"):
            yield "private: has groups of clients: fedcac.collaboration must not be top, fedcac.non-critical must be all"


def collaborators(overlap: NDArray[np.float64], round: int, beta: int) -> NDArray[np.bool_]:
    """Who shares critical parameters with whom in a round (FedCAC Eq. 7-8).

    overlap: float64 [N, N], symmetric; round t counted from 1; beta >= 1. Returns bool [N, N], row i True at client i's
    collaborators, diagonal False. Everyone whose overlap reaches O_avg + t/beta * (O_max - O_avg), capped at O_max; nobody
    for t > beta or N = 1. Raises ValueError if round or beta is below 1.
    """
    if round < 1 or beta < 1:
        raise ValueError(f"round and beta must be at least 1, got round {round} and beta {beta}")
    n = overlap.shape[0]
    if n < 2 or round > beta:
        return np.zeros((n, n), dtype=bool)
    return at_least(overlap, threshold(overlap, round / beta))


def threshold(overlap: NDArray[np.float64], progress: float) -> float:
    """Overlap that a pair needs at `progress` in [0, 1], between the mean and the maximum over pairs (FedCAC Eq. 7)."""
    pairs = overlap[~np.eye(overlap.shape[0], dtype=bool)]
    highest, mean = float(pairs.max()), float(pairs.mean(dtype=np.float64))
    return highest if progress >= 1 else min(highest, mean + progress * (highest - mean))


def at_least(overlap: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    """Pairs i != j whose overlap reaches the threshold (FedCAC Eq. 8), bool [N, N]."""
    return (overlap >= threshold) & ~np.eye(overlap.shape[0], dtype=bool)


def most_alike(overlap: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The `count` clients of highest overlap per client, ties to the lower id (ablation, FedCAC Fig. 4), bool [N, N]."""
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
    """FedCAC's server step (Eq. 7-11).

    W: float32 [N, d], the clients' trained vectors; bits: uint8 [N, ceil(d/8)], their packed critical masks, each with the
    same number of ones; round t from 1; weights: float64 [N] of the global mean, None for uniform; chosen: bool [N, N], who
    shares critical parameters with whom, None for Eq. 7-8; non_critical: "all", or "as-critical" (ablation, Table 3);
    out: float32 [N, d] for the second result, may be W itself; averaging: what replaces means, over all and over collaborators.
    Returns (global float32 [d], personalized float32 [N, d]).
    Raises ValueError on shapes that do not fit and on masks of unequal size.
    """
    if chosen is None:
        chosen = collaborators(mask_overlap(W, bits), round, beta)
    members = chosen | np.eye(W.shape[0], dtype=bool)
    weights = np.ones(W.shape[0]) if weights is None else weights
    if non_critical == "as-critical":
        mean = averaging.mean(W, weights)
        return mean, averaging.group_means(W, members, out=out)
    return collaborate(W, bits, members, weights, out=out, averaging=averaging)


def collaborate(
    W: aggregate.Stack,
    bits: masks.Bits,
    members: NDArray[np.bool_],
    weights: NDArray[np.float64],
    out: aggregate.Stack | None = None,
    averaging: Averaging = PLAIN,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Global mean, and per client the mean of its group on its critical parameters (FedCAC Eq. 9-11).

    W: float32 [N, d]; bits: uint8 [N, ceil(d/8)] packed masks; members: bool [N, N], row i the group of client i, itself
    included; weights: float64 [N] for the global mean; out: float32 [N, d] for the second result, may be W itself; averaging:
    what replaces both means.
    Returns (float32 [d], float32 [N, d]).
    Clients with equal groups share one mean, a client alone takes its own row: no [N, N] x [N, d] product when the groups
    are small.
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

    for_blocks(block, d)
    return mean, personalized


def mask_overlap(W: aggregate.Stack, bits: masks.Bits) -> NDArray[np.float64]:
    """Overlap of the uploads' masks, float64 [N, N]; zeros off the diagonal when nothing is critical (K = 0).

    Raises ValueError if the shapes do not fit or the masks have different numbers of ones.
    """
    n, d = W.shape
    if bits.shape != (n, -(-d // 8)) or bits.dtype != np.uint8:
        raise ValueError(f"masks must be uint8 {(n, -(-d // 8))} for W {W.shape}, got {bits.dtype} {bits.shape}")
    num_critical = masks.popcount(bits[0])
    if not num_critical and not bits.any():
        return np.eye(n)
    overlap = masks.overlap(bits, max(1, num_critical))
    if (overlap.diagonal() != 1).any():
        sizes = sorted({masks.popcount(own) for own in bits})
        raise ValueError(f"masks must have equally many ones, got {sizes}")
    return overlap


class FedCAC(PersonalizedStrategy[FedCACParams]):
    """Server half: keeps, per client, its last personalized vector and its mask."""

    robust = RULES

    def expected(self) -> Expected:
        """A mask in which exactly K parameters are critical."""
        return dataclasses.replace(super().expected(), num_params=self.layout.d, num_selected=self.num_critical)

    @property
    def num_critical(self) -> int:
        """K, equal for all clients."""
        return masks.num_selected(self.layout.sizes, self.params.tau)

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """By samples, or all alike: the global mean. A private run's means of groups too; a plain run's (Eq. 10) are unweighted."""
        return uploads.sizes if self.params.weighting == "samples" else np.ones_like(uploads.sizes)

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Equations 7-11, for the round's participants."""
        assert uploads.bits is not None
        p, n = self.params, len(uploads.ids)
        # chosen before the stack is written to
        averaging, weights = self.averaging_of(uploads), self.weights(uploads)
        overlap = mask_overlap(uploads.W, uploads.bits)
        chosen = self.choose(overlap, round)
        mean, personalized = personalize(
            uploads.W,
            uploads.bits,
            round,
            beta=p.beta,
            weights=weights,
            chosen=chosen,
            non_critical=p.non_critical,
            out=uploads.W,
            averaging=averaging,
        )
        statistics = averaging.group_means(uploads.B, chosen | np.eye(n, dtype=bool))
        self.global_model = Model(mean, averaging.mean(uploads.B, weights))
        for i, client_id in enumerate(uploads.ids):
            self.keep_for(
                client_id, params=personalized[i], buffers=statistics[i], mask=uploads.bits[i], round=np.array(round)
            )
            self.note(client_id, "collaborators", [uploads.ids[j] for j in np.flatnonzero(chosen[i])])
        self.note_round("collaborators", float(chosen.sum(axis=1).mean()))
        self.note_round("overlap", np.round(overlap, 6).tolist())

    # Private runs: a partition instead of neighbourhoods (strategies/linkage.py)

    def sum_groups(self, ids: list[int]) -> Mapping[int, list[int]]:
        """The partition of the last regrouping; before there is one all are alike, unless nobody collaborates."""
        if GROUPS not in self.memory:
            return {ALONE if self._apart(1) else 0: ids}
        labels = self.memory[SUMMED]
        return {int(label): [i for i in ids if labels[i] == label] for label in np.unique(labels[ids])}

    def personalize_sums(self, round: int, sums: Sums) -> None:
        """Equations 9-10 over the groups that were summed up; every `private-regroup` rounds the next ones, from the overlaps."""
        n, m, d, ids = self.config.num_clients, sums.sketch_bits, self.layout.d, np.array(sums.ids)
        groups = self.memory.get(GROUPS, np.full(n, ALONE if self._apart(1) else 0))
        places, means = held(sums.groups, groups), list(sums.means.values())
        self.global_model = sums.mean
        self.memory[PLACES], self.memory[MEANS] = places, np.array([mean.params for mean in means])
        self.memory[STATISTICS] = np.array([mean.buffers for mean in means])
        assert sums.bits is not None
        found = (
            overlaps(masks.common_ones(sums.bits), m, d, self.num_critical) if self.num_critical else np.eye(len(ids))
        )
        if (round - 1) % self.config.private_regroup == 0 or self._apart(round + 1):
            labels = np.full(n, ALONE)
            if not self._apart(round + 1):
                parts = partition(found, threshold(found, (round + 1) / self.params.beta))
                labels = regrouped(groups, ids, parts)
            self.memory[GROUPS], self.memory[SUMMED] = labels, self.keep_together(ids, labels, found)
        chosen = (places[ids][:, None] == places[ids]) & (places[ids] != ALONE) & ~np.eye(len(ids), dtype=bool)
        for row, client_id in zip(chosen, sums.ids, strict=True):
            self.note(client_id, "collaborators", ids[row].tolist())
        self.note_round("collaborators", float(chosen.sum(axis=1).mean()))
        self.note_round("overlap", np.round(found, 6).tolist())

    def _apart(self, round: int) -> bool:
        """Whether nobody shares critical parameters in a round."""
        return self.params.collaboration == "none" or self.num_critical == 0 or round > self.params.beta

    def _group(self, client_id: int) -> int:
        """The place of a client's group in a private run's last sums, ALONE if it has none."""
        return int(self.memory[PLACES][client_id]) if PLACES in self.memory else ALONE

    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """In a private run the client merges: the mean of its group beside everyone's."""
        place = self._group(client_id)
        return {} if place == ALONE else {GROUP: self.memory[MEANS][place]}

    def choose(self, overlap: NDArray[np.float64], round: int) -> NDArray[np.bool_]:
        """Collaborators by the configured rule, bool [N, N]."""
        if self.params.collaboration == "none" or overlap.shape[0] < 2 or self.num_critical == 0:
            return np.zeros(overlap.shape, dtype=bool)
        if self.params.collaboration == "top":
            return most_alike(overlap, self.params.num_collaborators)
        return collaborators(overlap, round, self.params.beta)

    def model_for(self, client_id: int) -> Model:
        """Equation 11 with the current global model: own critical parameters, everyone's for the rest."""
        mine, place = self.personal.get(client_id), self._group(client_id)
        if mine is None:
            statistics = self.global_model.buffers if place == ALONE else self.memory[STATISTICS][place]
            return Model(self.global_model.params, statistics)
        params = mine["params"]
        if self.params.non_critical == "all" and int(mine["round"]) != self.round:
            params = aggregate.merge(mine["mask"], params, self.global_model.params)
        return Model(params, mine["buffers"])


class FedCACUpdate(LocalUpdate[FedCACParams]):
    """Client half: plain training, then scores, mask and packing.

    State, in private runs alone: `fedcac.mask` (packed), `.params` and `.buffers`, as of its last upload.
    """

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedCACParams]) -> Model:
        """Equation 11, in a private run: on the own mask the group's mean, or without a group what the client had there."""
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
        mask = masks.pack(masks.top_k(ranking, ctx.layout.sizes, ctx.params.tau))
        if ctx.config.private:
            own, state.arrays["fedcac.mask"] = plain.model, mask
            state.arrays["fedcac.params"], state.arrays["fedcac.buffers"] = own.params, own.buffers
        return dataclasses.replace(plain, mask=mask)


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
        "With how many others a client shares its critical parameters in a round. While the threshold rises, until round beta, "
        "clients start with many collaborators and keep the most similar ones; then they are alone.",
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
)
