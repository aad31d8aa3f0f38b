"""pFedSim: after a warm-up with FedAvg, each client's body is a mixture of all clients' bodies, weighted by how similar
their classifiers are.

Tan, Zhou, Liu, Wang, Yu: "pFedSim: Similarity-Aware Model Aggregation Towards Personalized Federated Learning",
arXiv:2305.15706, 2023.

Warm-up, the first `warmup` of the rounds: FedAvg. From then on the server keeps each client's last model: body theta_i and
classifier omega_i. Before a round it makes for client i

    theta_i <- sum_j Phi_ij theta_j / sum_j Phi_ij,    Phi_ij = -log(1 - s_ij)

s_ij is the cosine of the classifiers omega_i and omega_j, at least 0, and 0.9999 for j = i. The client receives this body
and its own classifier, trains both, and sends both.

`warmup = 1` is FedAvg, bit for bit.

Readings and deviations:

- The authors' code takes the mean of the cosines of the classifiers' rows, without biases: `similarity = rows`. Here the
  default is the cosine of the whole classifiers.
- The mixture is over all clients that have trained since the warm-up, with their last models. Every s_ij follows from
  these. FL-bench renews s_ij only if clients i and j are in the same round, and until then it is 0.
- A client that has not trained since then receives the warm-up's model, as do clients that never train.
- The paper's mixtures leave BatchNorm open. Its parameters and statistics are mixed as the body is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    LINEAR,
    RATIO,
    Holds,
    Late,
    LocalUpdate,
    Matrix,
    Means,
    Method,
    Model,
    Overview,
    Sent,
    State,
    Turn,
    Uploads,
    all_tensors,
    key,
    local_epochs,
)
from strategies.baselines.fedavg import FedAvg
from strategies.kernels import head_slots, mix

# the similarity of a client with itself, and the largest of others
_SELF = 0.9999


@dataclass(frozen=True)
class PFedSimParams:
    """Parameters of pFedSim, table `pfedsim`."""

    warmup: float = key(
        0.5,
        "Part of the rounds with one global model, before the personal ones; 1 is FedAvg.",
        RATIO,
        schedule_dependent=True,
    )
    similarity: Literal["classifier", "rows"] = key(
        "classifier", "Cosine of whole classifiers, or mean cosine of their weights' rows (authors' code)."
    )

    def warmup_rounds(self, rounds: int) -> int:
        """Return the number of rounds of the warm-up, of a run of so many."""
        return math.floor(self.warmup * rounds + 1e-9)


def similarity(heads: ArrayLike) -> NDArray[np.float64]:
    """Return the cosines of classifiers, at least 0, float64 [N, N]: symmetric, with diagonal 1 (Section 4).

    heads: [N, h]. The cosine with a classifier of zeros counts as 0. Raises ValueError for another shape.
    """
    rows = np.asarray(heads, np.float64)
    if rows.ndim != 2:
        raise ValueError(f"heads must be [N, h], got {list(rows.shape)}")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1)
    cosines = np.clip(unit @ unit.T, 0, 1)
    np.fill_diagonal(cosines, 1)
    return cosines


def mixing_weights(similarities: ArrayLike) -> NDArray[np.float64]:
    """Return the weights of all bodies for each client, float64 [N, N]: rows of sum 1, -log(1 - s) in proportion.

    similarities: [N, N], in [0, 1]; above 0.9999 they count as 0.9999.
    """
    phi = -np.log1p(-np.minimum(np.asarray(similarities, np.float64), _SELF))
    weights: NDArray[np.float64] = phi / phi.sum(axis=1, keepdims=True)
    return weights


class PFedSim(FedAvg[PFedSimParams]):
    """Server half. Kept per client after the warm-up: its last upload, `own.params` and `own.buffers`, and the model to
    send, `params` and `buffers`.
    """

    # after the warm-up there is no mean over clients
    means = Means()
    late = Late(aged="after the warm-up an upload's weights follow from its classifier")
    # the stacks: all last uploads together, and their mixtures; the uploads are kept
    holds = Holds(models=True, made=2, kept=1)

    @cached_property
    def at_head(self) -> NDArray[np.bool_]:
        """Return the classifier's parameters, bool [d]."""
        return self.layout.indices(self.layout.classifier)

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the client's mixture under its own classifier; before it has one, the global model."""
        return Sent(state.model_of(client_id))

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average in the warm-up; later keep the uploads, and mix the bodies of all clients for each."""
        if turn.round <= self.params.warmup_rounds(self.config.num_server_rounds):
            return super().update(state, uploads, turn)
        last = {i: (own["own.params"], own["own.buffers"]) for i, own in state.clients.items()}
        last |= {i: (uploads.W[row], uploads.B[row]) for row, i in enumerate(uploads.ids)}
        ids = sorted(last)
        W, B = (np.stack([last[i][part] for i in ids]) for part in (0, 1))
        found = self.similarities(W)
        weights = mixing_weights(found)
        mixed, statistics = mix(W, weights), mix(B, weights)
        mixed[:, self.at_head] = W[:, self.at_head]
        kept = {}
        for row, i in enumerate(ids):
            own = {"own.params": last[i][0], "own.buffers": last[i][1]}
            kept[i] = {"params": mixed[row], "buffers": statistics[row], **own}
            if i in uploads.ids:
                shown = {str(j): float(np.round(found[row, k], 6)) for k, j in enumerate(ids) if j in uploads.ids}
                turn.note(i, "classifier-similarity", shown)
        return state.next(clients=kept)

    def similarities(self, W: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the similarities of models, float64 [N, N]. W: float32 [N, d]."""
        if self.params.similarity == "classifier":
            return similarity(W[:, self.at_head])
        slot = head_slots(self.layout)[0]
        heads = W[:, slot.start : slot.stop].reshape(len(W), *slot.shape).astype(np.float64)
        lengths = np.linalg.norm(heads, axis=2, keepdims=True)
        unit = heads / np.where(lengths > 0, lengths, 1)
        cosines: NDArray[np.float64] = np.clip(np.einsum("ick,jck->ijc", unit, unit).mean(axis=2), 0, 1)
        np.fill_diagonal(cosines, 1)
        return cosines

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return a client's model, and the global one if the run ends in the warm-up."""
        return None if client_id is None and self.state.clients else super().exported(client_id)


FIGURES = (
    Matrix(
        "classifier-similarity",
        "Similarity of classifiers",
        "cosine of classifiers",
        "Cosines of the clients' classifiers, at least 0. They weigh the bodies that a client's next body is mixed of.",
        heading="Classifiers",
        value="similarity",
    ),
)
METHOD = Method(
    "pfedsim",
    PFedSimParams,
    PFedSim,
    LocalUpdate[PFedSimParams],
    all_tensors,
    figures=FIGURES,
    needs_whole=True,
    dp_epochs=local_epochs,
    not_private="its server compares single clients' classifiers",
    needs=LINEAR,
    overview=Overview(
        group="Parameters among similar clients",
        server="8(d+b) a client",
        unseen="the warm-up's global model",
        use="different classes per client, clear groups",
    ),
)
