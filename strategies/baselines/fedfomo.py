"""FedFomo: each client is sent other clients' models, and mixes those that beat its own on data it holds out.

Zhang, Sapra, Fidler, Yeung, Alvarez: "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.

Client: it holds out a fifth of its training data for the whole run; L is the loss there. It keeps theta0, the model
that its last training began with, and w, the result. It receives M others' models. The candidates theta_n are w and
these models:

    a_n = max(0, L(theta0) - L(theta_n)) / (||theta_n - theta0|| + 1e-5), divided by their sum

The client starts from sum_n a_n theta_n, or from theta0 if all a_n are 0. It trains E epochs on the rest of its data.
It uploads w and the others' scores, signed.

Server: affinity P_i += scores. Client i is next sent the M others of highest P_i among those seen. Each slot goes to a
random one with probability epsilon. **Clients receive each other's models: that is the method.**

Deviations:

- If no model gains, the client starts from theta0, as in the paper and the authors' code. PFLlib and FL-bench keep w.
- Only clients that have trained are offered. PFLlib offers all.
- A client's first round starts from the initial model, unmixed. A client with one sample holds none out.
- epsilon falls by `exploration-decay` every round, to 0.
- Norms are over parameters; statistics take the same weights.
- The client is evaluated with the mixture before training and with w after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import rng
from strategies.base import (
    BELOW_ONE,
    NOT_NEGATIVE,
    RATIO,
    ClientState,
    Expected,
    Holds,
    Late,
    LocalUpdate,
    Matrix,
    Method,
    Model,
    OnDemand,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    all_tensors,
    declared,
    key,
    log,
)
from strategies.kernels import aggregate

# down: float32 [M - 1, d], [M - 1, b]; up: float32 [M]
MODELS, STATISTICS, SCORES = (
    "models",
    "model-statistics",
    "scores",
)

_APART = 1e-5  # added to distances


@dataclass(frozen=True)
class FedFomoParams:
    """Parameters of FedFomo, table `fedfomo`."""

    models: int = key(
        5, "Other clients' models that a client is sent (M); only clients that have trained count.", NOT_NEGATIVE
    )
    validation_ratio: float = key(
        0.2,
        "Share of a client's training data that is held out to judge models.",
        BELOW_ONE,
        trains_on=lambda ratio, n, _: n - num_held_out(ratio, n),
    )
    exploration: float = key(0.3, "Probability that one of the models sent is a random client's (epsilon).", RATIO)
    exploration_decay: float = key(0.05, "Amount by which epsilon falls every round, down to 0.", NOT_NEGATIVE)


def scores(baseline_loss: float, losses: ArrayLike, distances: ArrayLike) -> NDArray[np.float64]:
    """Return the models' scores, signed, float64 [M]: loss gained over the baseline per distance from it.

    losses, distances: [M].
    """
    gains: NDArray[np.float64] = baseline_loss - np.asarray(losses, np.float64)
    return gains / (np.asarray(distances, np.float64) + _APART)


def model_weights(baseline_loss: float, losses: ArrayLike, distances: ArrayLike) -> NDArray[np.float64]:
    """Return the models' weights in the mixture, float64 [M]: not negative, of sum 1, or all 0 if no model gains.

    losses: [M], on the client's held-out data; distances: [M], >= 0, of the models from the baseline.
    """
    gains: NDArray[np.float64] = np.maximum(scores(baseline_loss, losses, distances), 0)
    return gains / gains.sum() if gains.any() else gains


def most_liked(
    affinity: NDArray[np.floating[Any]],
    others: Sequence[int],
    count: int,
    stream: np.random.Generator,
    exploration: float,
) -> list[int]:
    """Return `count` of the others (cut to their number): the highest affinity first, in a tie the lower id.

    affinity: [N], by client id; others: client ids. Each place goes with probability `exploration` to a random client
    among those not yet chosen.
    """
    ranking = sorted(others, key=lambda i: (-affinity[i], i))
    chosen: list[int] = []
    for _ in range(min(count, len(others))):
        at = int(stream.integers(len(ranking))) if stream.random() < exploration else 0
        chosen.append(ranking.pop(at))
    return chosen


class FedFomo(PersonalizedStrategy[FedFomoParams]):
    """Server half. Kept per client: its last upload, `params` and `buffers`, and `affinity` float32 [N]."""

    late = Late(never="its scores are about the models that were offered in its own round")
    holds = Holds(models=True)

    def summary(self) -> None:
        """Log the run's settings; warn that clients receive each other's models."""
        super().summary()
        if self.params.models:
            log.warning("fedfomo: clients are sent other clients' models, up to %d each and round", self.params.models)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the model and the scores."""
        extras = {SCORES: ("<f4", (self.params.models,))} if self.params.models else {}
        return replace(super().form(state, turn), extras=extras)

    def offered(self, state: State, client_id: int, turn: Turn) -> list[int]:
        """Return the ids of the models that a client is sent, in order; none before its own first upload."""
        if client_id not in state.clients:
            return []
        p, round = self.params, turn.round
        others = sorted(state.clients.keys() - {client_id})
        stream = rng.generator(self.config.seed, "fedfomo", round, client_id)
        exploration = max(0.0, p.exploration - p.exploration_decay * (round - 1))
        return most_liked(state.clients[client_id]["affinity"], others, p.models, stream, exploration)

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the models offered, the first one as the model. Without any it is the client's own, at first the initial one."""
        first, *more = [state.model_of(i) for i in self.offered(state, client_id, turn) or [client_id]]
        own = state.model_of(client_id)
        # the client mixes the offered models into its own last upload
        reference = {declared.PARAMETERS: own.params, declared.STATISTICS: own.buffers}
        if not more:
            return Sent(first, reference=reference)

        def stacks() -> dict[str, NDArray[Any]]:
            return {MODELS: np.stack([m.params for m in more]), STATISTICS: np.stack([m.buffers for m in more])}

        return Sent(first, OnDemand(stacks), reference)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Keep the uploads, and add the scores to the affinities."""
        scored = uploads.extras.get(SCORES, np.zeros((len(uploads.ids), 0), np.float32))
        kept = {}
        for row, client_id in enumerate(uploads.ids):
            mine = state.clients.get(client_id)
            affinity = np.zeros(self.config.num_clients, np.float32) if mine is None else mine["affinity"].copy()
            for other, score in zip(self.offered(state, client_id, turn), scored[row], strict=False):
                affinity[other] += score
            kept[client_id] = {"params": uploads.W[row], "buffers": uploads.B[row], "affinity": affinity}
            turn.note(
                client_id, "affinity", {str(i): float(np.round(affinity[i], 6)) for i in np.flatnonzero(affinity)}
            )
        return state.next(clients=kept)

    def exported(self, client_id: int | None = None) -> None:
        """Return None: there is no global model, and only the client can make its mixture."""


class FedFomoUpdate(LocalUpdate[FedFomoParams]):
    """Client half. State: `fedfomo.start.*`, theta0, and `fedfomo.own.*`, w."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedFomoParams]) -> Model:
        """Return the mixture of the client's last model and the others', by their gains on held-out data."""
        held = held_out(ctx)
        ctx.trainer.leave_out(held)
        if "fedfomo.own.params" not in state.arrays:
            return super().merge(received, state, ctx)
        baseline, own = (
            Model(state.arrays[f"fedfomo.{which}.params"], state.arrays[f"fedfomo.{which}.buffers"])
            for which in ("start", "own")
        )
        others = [ctx.layout.put(own, other, ctx.shared) for other in others_sent(received, ctx)]
        judged = held if len(held) else None
        loss, *losses = (
            float(ctx.trainer.sample_losses(m, judged).mean(dtype=np.float64)) for m in (baseline, own, *others)
        )
        candidates = [own, *others]
        squared = aggregate.distances_of_pairs([(m.params, baseline.params) for m in candidates])
        distances = list(map(math.sqrt, squared))
        state.arrays["fedfomo.scores"] = scores(loss, losses, distances)[1:].astype(np.float32)
        weights = model_weights(loss, losses, distances)
        chosen = np.flatnonzero(weights)
        if not len(chosen):
            return baseline
        used = weights[chosen][None]
        params, buffers = (np.stack([getattr(candidates[k], part) for k in chosen]) for part in ("params", "buffers"))
        return Model(aggregate.mix(params, used)[0], aggregate.mix(buffers, used)[0])

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedFomoParams]) -> Model:
        """Train on the data that are not held out; keep the start and the result."""
        after = ctx.trainer.train(start)
        for which, model in (("start", start), ("own", after)):
            state.arrays[f"fedfomo.{which}.params"], state.arrays[f"fedfomo.{which}.buffers"] = (
                model.params,
                model.buffers,
            )
        return after

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedFomoParams]) -> Upload:
        """Send w and the scores of the others' models, 0 where none was sent."""
        plain = super().upload(before, after, state, ctx)
        scored = state.arrays.pop("fedfomo.scores", np.zeros(0, np.float32))
        places = np.zeros(ctx.params.models, np.float32)
        places[: len(scored)] = scored
        return replace(plain, extras={SCORES: places} if len(places) else {})


def others_sent(received: Model, ctx: RoundContext[FedFomoParams]) -> list[Model]:
    """Return the other clients' models in a message."""
    if not ctx.params.models:
        return []
    more = ctx.extras.get(MODELS, np.zeros((0, 0), np.float32))
    # arrays of size 0 do not travel
    statistics = ctx.extras.get(STATISTICS, np.zeros((len(more), 0), np.float32))
    return [received, *(Model(params, buffers) for params, buffers in zip(more, statistics, strict=True))]


def num_held_out(ratio: float, n: int) -> int:
    """Return the number of a client's n training samples that `held_out` returns."""
    return min(max(1, round(ratio * n)), n - 1) if ratio else 0


def held_out(ctx: RoundContext[Any]) -> NDArray[np.int64]:
    """Return the training samples that a client judges models by, int64, sorted, the same in all rounds.

    It is at least one sample, but none for a client with a single sample or if `validation-ratio` is 0.
    """
    if not ctx.params.validation_ratio:
        return np.zeros(0, np.int64)
    n = ctx.num_samples
    count = num_held_out(ctx.params.validation_ratio, n)
    return np.sort(rng.generator(ctx.config.seed, "fedfomo-held-out", 0, ctx.client_id).choice(n, count, replace=False))


FIGURES = (
    Matrix(
        "affinity",
        "Affinity of clients",
        "affinity to the column's client",
        "A client's gain (rows) from other clients' models (columns) on data it held out, summed over rounds.",
        heading="Affinity",
        value="affinity",
    ),
)
METHOD = Method(
    "fedfomo",
    FedFomoParams,
    FedFomo,
    FedFomoUpdate,
    all_tensors,
    figures=FIGURES,
    not_private="it sends clients each other's models",
    overview=Overview(
        group="Parameters among similar clients",
        travels="model up, M others' down",
        stays="held-out data, θ⁰",
        server="4(d+b) + 4N a client",
        disk="8(d+b)",
        epochs="0.8 E",
        unseen="initial model",
        use="clients that may see each other's models",
    ),
)
