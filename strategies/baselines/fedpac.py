"""FedPAC: features of all clients are aligned to global class centroids; each client's head is a mixture of all heads.

Xu, Tong, Huang: "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023.

Client i receives the body theta, its head phi_i and the centroids c_y (Algorithm 1). z are the features. It

1. sends statistics at the received body: for each class k the vector h_ik = p_ik mu_ik, its share of samples times
   their mean features, and the variance term v_i = (E ||z||^2 - sum_k ||h_ik||^2) / n_i;
2. trains phi_i for `head-epochs` with theta fixed;
3. trains theta for E epochs with phi_i fixed, by cross-entropy + lambda/k mean ||z - c_y||^2 (Eq. 6);
4. sends theta, phi_i, its class means c_iy of z at the trained body, and their sample counts.

Server: the weighted means of the bodies and of the centroids (Eq. 7), and for each client the head
phi_i <- sum_j alpha_ij phi_j, where alpha_i solves the quadratic program (Eqs. 11, 12)

    min  sum_j alpha_j^2 v_j + || sum_j alpha_j (h_i - h_j) ||^2    with  alpha_j >= 0,  sum_j alpha_j = 1

`combine = false` and `weight = 0` is FedRep with the same epochs, bit for bit, if all clients train in every round. A client
that first trains in a later round starts here from the mean head, and in FedRep from the initial one.

Deviations:

- The program is solved exactly by an active set. The authors use a general solver and drop weights below 0.001.
- Only the round's clients get a new head, made of the round's heads. A client that never trained has the mean head.
- BatchNorm's parameters and statistics belong to the body; those of the head's epochs are dropped, as in FedRep.
- The authors' code trains the head for one epoch, the default, with a learning rate of its own: 0.1, and 0.01 for the body.
  `head-rate = 10` is this ratio. By default both have the run's learning rate.
- A class keeps its last centroid while no client of the round has it. Features of a class without any are not pulled;
  the authors' code pulls them to the client's own class mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    AT_LEAST_ONE,
    LINEAR,
    NOT_NEGATIVE,
    ClientState,
    Expected,
    Late,
    LocalUpdate,
    Matrix,
    Means,
    Method,
    Model,
    Outliers,
    Overview,
    RoundContext,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    WireError,
    all_tensors,
    key,
)
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.fedproto import (
    COMPARED,
    COUNTS,
    PROTOTYPES,
    check_counts,
    comparable_prototypes,
    extras_of,
    mean_prototypes,
    prototypes_of,
    pulled,
    sent_with_prototypes,
)

# up: float32 [C, k] and float64 [1]
SHARES, VARIANCE = "shares", "variance"
_HEAD = "head"


@dataclass(frozen=True)
class FedPACParams:
    """Parameters of FedPAC, table `fedpac`."""

    weight: float = key(1.0, "Weight of the distance of features to the centroids (lambda); 0: none.", NOT_NEGATIVE)
    head_epochs: int = key(1, "Epochs on the head, body frozen, before those on the body.", AT_LEAST_ONE)
    head_rate: float = key(1.0, "Factor on `learning-rate` in the head's epochs (authors' code: 10).", NOT_NEGATIVE)
    combine: bool = key(True, "Mix the round's heads for each client; false: a client keeps its own head.")


def statistics(
    features: NDArray[np.float32], labels: NDArray[np.int64], num_classes: int
) -> tuple[NDArray[np.float64], float]:
    """Return a client's h, float64 [C, k], and its variance term v >= 0 (Section 4.2).

    features: float32 [n, k]; labels: int64 [n].
    """
    n, exact = len(labels), features.astype(np.float64)
    h = np.zeros((num_classes, features.shape[1]))
    np.add.at(h, labels, exact)
    h /= n
    return h, max(0.0, ((exact**2).sum() / n - (h**2).sum()) / n)


def head_weights(S: ArrayLike, v: ArrayLike) -> NDArray[np.float64]:
    """Return each client's weights of all heads, float64 [N, N]: row i solves the program of client i (Eq. 12).

    S: [N, ...], the clients' statistics h. v: [N], their variance terms, >= 0. Rows are >= 0 and have the sum 1. Raises
    ValueError for another form of v.
    """
    h = np.asarray(S, np.float64).reshape(len(np.asarray(S)), -1)
    variances = np.asarray(v, np.float64)
    if variances.shape != (len(h),) or not (variances >= 0).all():
        raise ValueError(f"v must have {len(h)} numbers >= 0, as many as S has clients, got {variances.tolist()}")
    rows = []
    for own in h:
        apart = own - h
        rows.append(on_simplex(np.diag(variances) + apart @ apart.T))
    return np.array(rows).reshape(len(h), len(h))


def on_simplex(Q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the point x >= 0 of sum 1 with the smallest x'Qx, float64 [n].

    Q: float64 [n, n], symmetric, positive semidefinite. Its diagonal grows by 1e-12 of its largest element, so that one
    point is the smallest. x is y / sum y, where y >= 0 has the smallest y'Qy / 2 - sum y: an active set finds it
    (Lawson and Hanson, 1974).
    """
    n = len(Q)
    scale = float(np.abs(np.diag(Q)).max()) or 1.0
    A = Q / scale + 1e-12 * np.eye(n)
    y, free = np.zeros(n), np.zeros(n, bool)
    for _ in range(10 * n):
        slope = np.where(free, -np.inf, 1 - A @ y)
        entering = int(slope.argmax())
        if slope[entering] <= 1e-10:
            break
        free[entering] = True
        while True:
            solved = np.zeros(n)
            solved[free] = np.linalg.solve(A[np.ix_(free, free)], np.ones(int(free.sum())))
            if (solved[free] > 0).all():
                break
            # go as far as all stay >= 0, and fix those that reach 0
            falling = free & (solved <= 0)
            reach = float((y[falling] / (y[falling] - solved[falling])).min())
            y = y + reach * (solved - y)
            free &= y > 1e-15 * y.max(initial=1e-300)
        y = solved
    point: NDArray[np.float64] = y / y.sum()
    return point


class FedPAC(FedAvg[FedPACParams]):
    """Server half. Kept per client: `head` float32 [h]. Memory: `prototypes` float32 [C, k] and `counts` int64 [C]."""

    means = Means()
    late = Late(
        aged="the weights of heads follow from the clients' statistics",
        moved="clients upload statistics too, which fedbuff does not move",
    )
    outliers = Outliers(extras={COMPARED: PROTOTYPES}, comparable=comparable_prototypes)

    @cached_property
    def at_head(self) -> NDArray[np.bool_]:
        """Return the classifier's parameters, bool [d]."""
        return self.layout.indices(self.layout.classifier)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the model, the centroids, the statistics."""
        own = extras_of(self.full_layout)
        extras = {**own, SHARES: own[PROTOTYPES], VARIANCE: ("<f8", (1,))}
        return replace(super().form(state, turn), extras=extras)

    def check(self, upload: Upload) -> None:
        """Raise WireError for counts or a variance that cannot be the client's."""
        check_counts(upload)
        if upload.extras[VARIANCE][0] < 0:
            raise WireError(f"array {VARIANCE} must be >= 0, got {float(upload.extras[VARIANCE][0])!r}")

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the mean body under the client's head, and from the second round on the centroids."""
        model, mine = state.model, state.clients.get(client_id)
        if mine is not None:
            params = model.params.copy()
            params[self.at_head] = mine[_HEAD]
            model = Model(params, model.buffers)
        return sent_with_prototypes(model, state, turn, self.full_layout)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average bodies and centroids, and mix the heads."""
        heads = uploads.W[:, self.at_head].astype(np.float64)
        weights, kept = np.eye(len(uploads.ids)), {}
        if self.params.combine:
            weights = head_weights(uploads.extras[SHARES], uploads.extras[VARIANCE][:, 0])
        for client_id, row in zip(uploads.ids, weights, strict=True):
            kept[client_id] = {"head": (row @ heads).astype(np.float32)}
            if self.params.combine:
                shown = {str(j): float(np.round(w, 6)) for j, w in zip(uploads.ids, row, strict=True) if w > 0}
                turn.note(client_id, "head-weights", shown)
        means, _ = mean_prototypes(uploads.extras[PROTOTYPES], uploads.counts(COUNTS))
        counts = uploads.extras[COUNTS].sum(axis=0)
        before = state.memory.get(PROTOTYPES, np.zeros(means.shape, np.float32))
        known = state.memory.get(COUNTS, np.zeros_like(counts))
        now = {
            PROTOTYPES: np.where(counts[:, None] > 0, means.astype(np.float32), before),
            COUNTS: np.where(counts > 0, counts, known),
        }
        return super().update(state, uploads, turn).next(clients=kept, memory=now)


class FedPACUpdate(LocalUpdate[FedPACParams]):
    """Client half. It keeps nothing: the server has its head."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedPACParams]) -> Model:
        """Take the statistics, then train the head, then the body."""
        p, head = ctx.params, ctx.layout.classifier
        h, v = statistics(*ctx.trainer.features(start), len(ctx.trainer.class_counts))
        # `upload` takes them out again
        state.arrays["fedpac.shares"], state.arrays["fedpac.variance"] = h.astype(np.float32), np.array([v])
        with_head = ctx.trainer.train(
            start,
            epochs=p.head_epochs,
            purpose="train-head",
            frozen=ctx.layout.names - head,
            learning_rate=p.head_rate * ctx.trainer.learning_rate,
        )
        return ctx.trainer.train(
            with_head, purpose="train-body", frozen=head, objective=pulled(ctx, p.weight, "samples")
        )

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedPACParams]) -> Upload:
        """Send the model, the centroids at the trained body, and the statistics."""
        means, counts = prototypes_of(*ctx.trainer.features(after), len(ctx.trainer.class_counts))
        own = {SHARES: state.arrays.pop("fedpac.shares"), VARIANCE: state.arrays.pop("fedpac.variance")}
        plain = super().upload(before, after, state, ctx)
        return replace(plain, extras={PROTOTYPES: means, COUNTS: counts, **own})


FIGURES = (
    Matrix(
        "head-weights",
        "Weights of heads",
        "weight of the column's head",
        "The share of other clients' heads (columns) in a client's next head (rows).",
        heading="Head weights",
        value="weight",
    ),
)
METHOD = Method(
    "fedpac",
    FedPACParams,
    FedPAC,
    FedPACUpdate,
    all_tensors,
    figures=FIGURES,
    needs_classes=True,
    needs_whole=True,
    not_private="its server mixes single clients' heads",
    needs=LINEAR,
    overview=Overview(
        group="A part of the model",
        travels="model and centroids; up + statistics",
        server="4h a client",
        epochs="E + 1, + 2 forward",
        unseen="global model",
        use="as fedrep, clients that share classes",
    ),
)
