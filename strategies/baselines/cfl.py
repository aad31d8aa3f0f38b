"""CFL: FedAvg that splits a cluster of clients in two when they pull its model apart; each part gets its own model.

Sattler, Mueller, Samek: "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under Privacy
Constraints", IEEE TNNLS 2020. Later papers refer to it as clustering by gradients; `ifca` clusters by losses.

All clients start in one cluster. Delta_i is client i's trained model w_i minus the model it was sent. After round
`start` the server tests every cluster that has more than two members, if all of them took part in the round. It splits
the cluster where ||mean Delta|| < eps1 and max ||Delta_i|| > eps2. The two parts come from complete linkage on
-cos(Delta_i, Delta_j). Then every cluster adds the unweighted mean Delta of its members to its model.

Deviations:

- After a split the authors' notebook and FL-bench store positions within the cluster as client ids, so a second split
  is wrong. Here they are client ids.
- The paper has no partial participation. Here a cluster can split only if all its members took part; otherwise it
  waits. A client that never took part is sent the first cluster's model. It then joins the cluster of largest
  cos(Delta_i, mean Delta), among those with members in the round.
- Norms are absolute: eps1 and eps2 depend on the model's size and the learning rate.
- Statistics take the plain mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    NOT_NEGATIVE,
    Exported,
    Groups,
    Holds,
    Late,
    LocalUpdate,
    Method,
    Model,
    Outliers,
    Overview,
    PersonalizedStrategy,
    Sent,
    State,
    Turn,
    Uploads,
    all_tensors,
    key,
    local_epochs,
)
from strategies.kernels import aggregate, in_order
from strategies.kernels.blocks import blocks

# norms in a cosine count as at least this
_SMALLEST = 1e-8


@dataclass(frozen=True)
class CFLParams:
    """Parameters of CFL, table `cfl`."""

    eps1: float = key(
        0.4, "A cluster may split if its mean update is shorter than this (epsilon_1); 0: none does.", NOT_NEGATIVE
    )
    eps2: float = key(1.6, "It splits if one of its updates is longer than this (epsilon_2).", NOT_NEGATIVE)
    start: int = key(20, "Rounds before the first split.", NOT_NEGATIVE, counts_rounds=True, begins_after=True)


def products(U: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return the inner products of rows [n, d], float64 [n, n]."""

    def part(span: tuple[int, int]) -> NDArray[np.float64]:
        x = U[:, slice(*span)].astype(np.float64)
        product: NDArray[np.float64] = x @ x.T
        return product

    return sum(in_order(part, blocks(0, U.shape[1])), np.zeros((len(U), len(U))))


def cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines [n, n] for inner products [n, n]. Norms count as at least 1e-8."""
    norms = np.maximum(np.sqrt(np.diag(gram)), _SMALLEST)
    cosine: NDArray[np.float64] = gram / np.outer(norms, norms)
    return cosine


def split(updates: NDArray[np.floating[Any]], eps1: float, eps2: float) -> tuple[list[int], list[int]] | None:
    """Split a cluster with a short mean update but a long single update; return None if it stays whole.

    updates: [n, d]. The cluster splits where n > 2, ||mean update|| < eps1 and the longest update exceeds eps2. Returns
    the two parts of complete linkage on -cos, as sorted positions; the part of position 0 comes first.
    """
    n = len(updates)
    if n < 3:
        return None
    gram = products(np.asarray(updates))
    still = max(float(gram.sum()), 0.0) ** 0.5 / n < eps1
    if not still or float(np.diag(gram).max()) ** 0.5 <= eps2:
        return None
    from scipy.cluster.hierarchy import linkage, to_tree
    from scipy.spatial.distance import squareform

    apart = np.clip(1 - cosines(gram), 0, 2)
    np.fill_diagonal(apart, 0)
    root = to_tree(linkage(squareform((apart + apart.T) / 2, checks=False), "complete"))
    parts = [sorted(side.pre_order()) for side in (root.get_left(), root.get_right())]
    first, second = sorted(parts)
    return first, second


class CFL(PersonalizedStrategy[CFLParams]):
    """Server half. Memory: `models` float32 [K, d] and `statistics` [K, b]. Kept per client: `cluster` int64 [1]."""

    late = Late(reads_moves=True)
    # clients of different clusters send different models
    outliers = Outliers(tolerance=math.inf)
    holds = Holds(models=True)

    def models(self) -> list[Model]:
        """Return the clusters' models; at first there is one."""
        state = self.state
        if "models" not in state.memory:
            return [state.model]
        return [
            Model(params, buffers)
            for params, buffers in zip(state.memory["models"], state.memory["statistics"], strict=True)
        ]

    def clusters(self) -> dict[int, int]:
        """Return the cluster of each client that took part."""
        return {i: int(own["cluster"][0]) for i, own in self.state.clients.items()}

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the model of the client's cluster."""
        mine = state.clients.get(client_id)
        return Sent(self.models()[0 if mine is None else int(mine["cluster"][0])])

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Assign new clients to clusters, split clusters, then average within each."""
        models, cluster_of = self.models(), self.clusters()
        self.join(uploads, models, cluster_of)
        if turn.round > self.params.start:
            self.split_all(uploads, models, cluster_of)
        clusters = np.array([cluster_of[i] for i in uploads.ids])
        for k in range(len(models)):
            rows = np.flatnonzero(clusters == k)
            if len(rows):
                W, B = (stack if len(rows) == len(stack) else stack[rows] for stack in (uploads.W, uploads.B))
                once = uploads.once[rows]
                models[k] = Model(aggregate.weighted_mean(W, once), aggregate.weighted_mean(B, once))
        for i, k in zip(uploads.ids, clusters.tolist(), strict=True):
            turn.note(i, "cluster", k)
        turn.note_round("cluster-sizes", np.bincount([*cluster_of.values()], minlength=len(models)).tolist())
        stacks = {
            "models": np.stack([m.params for m in models]),
            "statistics": np.stack([m.buffers for m in models]),
        }
        return state.next(models[0], {i: {"cluster": np.array([k])} for i, k in cluster_of.items()}, stacks)

    def join(self, uploads: Uploads, models: list[Model], cluster_of: dict[int, int]) -> None:
        """Assign clients that never took part to the cluster that moves in their direction.

        Their rows of `uploads.W` are shifted, so that their updates count from that cluster's model.
        """
        known = np.array([cluster_of.get(i, -1) for i in uploads.ids])
        new = np.flatnonzero(known < 0).tolist()
        chosen = self.nearest(uploads, models, new, known, np.unique(known[known >= 0]))
        for row, k in zip(new, chosen.tolist(), strict=True):
            cluster_of[uploads.ids[row]] = k
            if k:
                uploads.W[row] += models[k].params - models[0].params

    def nearest(
        self, uploads: Uploads, models: list[Model], new: list[int], known: NDArray[np.int64], moving: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return each new client's cluster, int64 [len(new)], by the largest cosine of its update to a mean update.

        known: int64 [N], each upload's cluster, -1 for new clients; moving: the clusters with members in the round.
        Without any, all new clients get cluster 0.
        """
        if not len(moving) or not new:
            return np.zeros(len(new), np.int64)
        means = [aggregate.weighted_mean(uploads.W[known == k]) - models[k].params for k in moving]
        cosine = cosines(products(np.concatenate([uploads.W[new] - models[0].params, means])))
        nearest: NDArray[np.int64] = moving[cosine[: len(new), len(new) :].argmax(axis=1)]
        return nearest

    def split_all(self, uploads: Uploads, models: list[Model], cluster_of: dict[int, int]) -> None:
        """Apply `split` to the clusters with all members in the round; the second part becomes a new cluster."""
        row_of = {i: row for row, i in enumerate(uploads.ids)}
        for k in range(len(models)):
            members = sorted(i for i, cluster in cluster_of.items() if cluster == k)
            if not members or any(i not in row_of for i in members):
                continue
            parts = split(
                uploads.W[[row_of[i] for i in members]] - models[k].params, self.params.eps1, self.params.eps2
            )
            if parts is not None:
                for position in parts[1]:
                    cluster_of[members[position]] = len(models)
                models.append(models[k])

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return a client's model, and the global one while there is one cluster."""
        return None if client_id is None and len(self.models()) > 1 else super().exported(client_id)


FIGURES = (Groups("cluster", "Clusters of clients", "cluster", "The cluster of each client's model."),)
METHOD = Method(
    "cfl",
    CFLParams,
    CFL,
    LocalUpdate[CFLParams],
    all_tensors,
    figures=FIGURES,
    dp_epochs=local_epochs,
    not_private="its server compares single clients' updates",
    exported=Exported(choices=CFL.models),
    overview=Overview(
        group="Several global models",
        server="4(d+b) a cluster",
        unseen="the first cluster's model",
        use="unknown number of groups, all clients take part",
    ),
)
