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

from fl_app.figures import Groups
from fl_app.keys import NOT_NEGATIVE, key
from fl_app.layout import Model
from strategies.base import LocalUpdate, Method, Overview, PersonalizedStrategy, Uploads, all_tensors, local_epochs
from strategies.kernels import aggregate
from strategies.kernels.blocks import blocks, in_order

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

    # clients of different clusters send different models
    spread = math.inf
    reads_moves = True

    def models(self) -> list[Model]:
        """Return the clusters' models; at first there is one."""
        if "models" not in self.memory:
            return [self.global_model]
        return [
            Model(params, buffers)
            for params, buffers in zip(self.memory["models"], self.memory["statistics"], strict=True)
        ]

    def cluster_of(self, client_id: int) -> int:
        """Return a client's cluster: the first one if the client never took part."""
        mine = self.personal.get(client_id)
        return 0 if mine is None else int(mine["cluster"][0])

    def model_for(self, client_id: int) -> Model:
        """Return the model of the client's cluster."""
        return self.models()[self.cluster_of(client_id)]

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Assign new clients to clusters, split clusters, then average within each."""
        models = self.models()
        self.join(uploads, models)
        if round > self.params.start:
            self.split_all(uploads, models)
        clusters = np.array([self.cluster_of(i) for i in uploads.ids])
        for k in range(len(models)):
            rows = np.flatnonzero(clusters == k)
            if len(rows):
                W, B = (stack if len(rows) == len(stack) else stack[rows] for stack in (uploads.W, uploads.B))
                once = uploads.once[rows]
                models[k] = Model(aggregate.weighted_mean(W, once), aggregate.weighted_mean(B, once))
        self.memory |= {
            "models": np.stack([m.params for m in models]),
            "statistics": np.stack([m.buffers for m in models]),
        }
        self.global_model = models[0]
        for i, k in zip(uploads.ids, clusters.tolist(), strict=True):
            self.note(i, "cluster", k)
        self.note_round(
            "cluster-sizes", np.bincount([self.cluster_of(i) for i in self.personal], minlength=len(models)).tolist()
        )

    def join(self, uploads: Uploads, models: list[Model]) -> None:
        """Assign clients that never took part to the cluster that moves in their direction.

        Their rows of `uploads.W` are shifted, so that their updates count from that cluster's model.
        """
        new = [row for row, i in enumerate(uploads.ids) if i not in self.personal]
        known = np.array([-1 if row in new else self.cluster_of(i) for row, i in enumerate(uploads.ids)])
        moving = np.unique(known[known >= 0])
        chosen = self.nearest(uploads, models, new, known, moving)
        for row, k in zip(new, chosen.tolist(), strict=True):
            self.keep_for(uploads.ids[row], cluster=np.array([k]))
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
        updates = uploads.W[new] - models[0].params
        cosine = cosines(products(np.concatenate([updates, means])))
        nearest: NDArray[np.int64] = moving[cosine[: len(new), len(new) :].argmax(axis=1)]
        return nearest

    def split_all(self, uploads: Uploads, models: list[Model]) -> None:
        """Apply `split` to the clusters with all members in the round; the second part becomes a new cluster."""
        row_of = {i: row for row, i in enumerate(uploads.ids)}
        for k in range(len(models)):
            members = sorted(i for i in self.personal if self.cluster_of(i) == k)
            if not members or any(i not in row_of for i in members):
                continue
            parts = split(
                uploads.W[[row_of[i] for i in members]] - models[k].params, self.params.eps1, self.params.eps2
            )
            if parts is not None:
                for position in parts[1]:
                    self.keep_for(members[position], cluster=np.array([len(models)]))
                models.append(models[k])

    def held_models(self) -> list[Model]:
        """Return the clusters' models."""
        return self.models()

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
    overview=Overview(
        group="Several global models",
        server="4(d+b) a cluster",
        unseen="the first cluster's model",
        use="unknown number of groups, all clients take part",
    ),
)
