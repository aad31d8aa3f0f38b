"""CFL: FedAvg that splits its clients in two whenever they pull the model apart, and goes on with a model for each part.

Sattler, Mueller, Samek: "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under Privacy
Constraints", IEEE TNNLS 2020. (The clustering by gradients that later papers mean; by losses: `ifca`.)

One cluster at first. Delta_i = w_i - the model client i was sent. In a cluster of more than two, all of whose members took part
in a round after `start`: where ||mean Delta|| < eps1 and max ||Delta_i|| > eps2 it is split in two by complete linkage on
-cos(Delta_i, Delta_j). Then every cluster adds the mean Delta of its members to its model, unweighted.

Deviations: the authors' notebook and FL-bench store positions within the cluster as client ids after a split, so that a second
one is wrong; ours are client ids. Partial participation is not in the paper: only clusters whose members all took part are split,
others wait; a client that never took part is sent the first cluster's model, and then joins the cluster of largest cos(Delta_i,
mean Delta) among those with members in the round. Norms are absolute: eps1 and eps2 depend on the model's size and the learning
rate. Statistics take the plain mean.
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
from strategies import aggregate
from strategies.base import LocalUpdate, Method, PersonalizedStrategy, Uploads, all_tensors, local_epochs
from strategies.blocks import blocks, in_order

# norm that a cosine divides by at least
_SMALLEST = 1e-8


@dataclass(frozen=True)
class CFLParams:
    """Parameters of CFL, table `cfl`."""

    eps1: float = key(0.4, "A cluster whose mean update is shorter may be split (epsilon_1); 0: never.", NOT_NEGATIVE)
    eps2: float = key(1.6, "It is split if an update is longer (epsilon_2).", NOT_NEGATIVE)
    start: int = key(20, "Rounds before the first split.", NOT_NEGATIVE, counts_rounds=True)


def products(U: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Inner products of rows [n, d], float64 [n, n]."""

    def part(span: tuple[int, int]) -> NDArray[np.float64]:
        x = U[:, slice(*span)].astype(np.float64)
        product: NDArray[np.float64] = x @ x.T
        return product

    return sum(in_order(part, blocks(0, U.shape[1])), np.zeros((len(U), len(U))))


def cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cosines [n, n] of inner products [n, n]; norms count as at least 1e-8."""
    norms = np.maximum(np.sqrt(np.diag(gram)), _SMALLEST)
    cosine: NDArray[np.float64] = gram / np.outer(norms, norms)
    return cosine


def split(updates: NDArray[np.floating[Any]], eps1: float, eps2: float) -> tuple[list[int], list[int]] | None:
    """Split clients where they stand still together but not each; None if there is no need, or not more than two of them.

    updates: [n, d]. Returns positions, sorted, the part of position 0 first: where ||mean update|| < eps1 and the longest is longer
    than eps2, the two parts of complete linkage on -cos.
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

    def models(self) -> list[Model]:
        """The clusters' models; at first one."""
        if "models" not in self.memory:
            return [self.global_model]
        return [
            Model(params, buffers)
            for params, buffers in zip(self.memory["models"], self.memory["statistics"], strict=True)
        ]

    def cluster_of(self, client_id: int) -> int:
        """A client's cluster, the first for those that never took part."""
        mine = self.personal.get(client_id)
        return 0 if mine is None else int(mine["cluster"][0])

    def model_for(self, client_id: int) -> Model:
        """The model of the client's cluster."""
        return self.models()[self.cluster_of(client_id)]

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Let new clients join, split clusters, then average in each."""
        models = self.models()
        self.join(uploads, models)
        if round > self.params.start:
            self.split_all(uploads, models)
        clusters = np.array([self.cluster_of(i) for i in uploads.ids])
        for k in range(len(models)):
            rows = np.flatnonzero(clusters == k)
            if len(rows):
                W, B = (stack if len(rows) == len(stack) else stack[rows] for stack in (uploads.W, uploads.B))
                models[k] = Model(aggregate.weighted_mean(W), aggregate.weighted_mean(B))
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
        """Put clients that never took part into the cluster that moves as they do; their update then counts from its model."""
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
        """The cluster, of those with members in the round, along whose mean update each new client's points most."""
        if not len(moving) or not new:
            return np.zeros(len(new), np.int64)
        means = [aggregate.weighted_mean(uploads.W[known == k]) - models[k].params for k in moving]
        updates = uploads.W[new] - models[0].params
        cosine = cosines(products(np.concatenate([updates, means])))
        nearest: NDArray[np.int64] = moving[cosine[: len(new), len(new) :].argmax(axis=1)]
        return nearest

    def split_all(self, uploads: Uploads, models: list[Model]) -> None:
        """Split the clusters that need it, of those whose members are all here; the second part is a new cluster."""
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

    def has_global_model(self) -> bool:
        """While there is one cluster."""
        return len(self.models()) == 1


FIGURES = (Groups("cluster", "Clusters of clients", "cluster", "Which cluster a client's model is of."),)
METHOD = Method(
    "cfl",
    CFLParams,
    CFL,
    LocalUpdate[CFLParams],
    all_tensors,
    figures=FIGURES,
    dp_epochs=local_epochs,
    not_private="its server compares single clients' updates",
)
