"""APPLE: each client trains its part of a mixture of all clients' models, and learns the mixture's weights.

Luo, Wu: "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022.

Client i has a core model w_i, which the server keeps, and a directed relationship vector p_i [N], which it keeps itself.
It receives the core models of others. Its personal model is theta = sum_j p_ij w_j. Every batch makes two updates
(Algorithm 1), with g the gradient of f at theta:

    w_i  <- w_i  - eta p_ii g
    p_ij <- p_ij - eta_p (<g, w_j> + lambda(t) mu (p_ij - p0_j))

The second is the gradient of f plus lambda(t) mu/2 ||p_i - p0||^2. p0_j is client j's share of all training samples, and
the first p_i. lambda falls from 1 to 0 in the rounds t up to L, by a cosine:

    lambda(t) = (1 + cos(pi (t - 1) / L)) / 2, then 0

The client sends w_i. The client is evaluated with theta, of the received core models before training, and with its
trained core model after it.

Readings and deviations:

- p_ii is about 1/N at first, which slows w_i down. PFLlib multiplies eta by N: `core-rate = 0`.
- A core model that a client is not sent counts as the initial model, which it is until its client has trained. In the
  authors' code a client keeps the last copy that it received.
- `models` limits the core models that a client is sent, as the paper's M. Those that it never was sent come first, then
  those with the largest |p_ij|. The authors draw the latter, in proportion to b ** |p_ij|, where b grows with the rounds.
  Their code never marks a core model as sent, so it draws all uniformly.
- The authors' regularizer has no 1/2, so its slope is twice this one. Their p_i has a momentum of 0.9.
- PFLlib divides <g, w_j> by the number of parameters, and learns p only with `dr_learning_rate` above 0.
- w_i has the run's momentum and weight decay. p_i takes plain steps.
- BatchNorm's running statistics are the client's own, gathered by theta. They travel with w_i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    NOT_NEGATIVE,
    ClientState,
    Diverged,
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
    key,
    log,
)

# down: int64 [M] and float32 [M, d], others' core models, and float64 [N]; up: float64 [N]
IDS, MODELS, PRIOR, RELATIONS = "ids", "models", "prior", "relations"
_SEEN = "seen"


@dataclass(frozen=True)
class APPLEParams:
    """Parameters of APPLE, table `apple`."""

    relation_rate: float = key(0.01, "Learning rate of the relationship vector p (eta_p); 0: it stays.", NOT_NEGATIVE)
    core_rate: float = key(
        1.0,
        "Factor on `learning-rate` for the core model. 1: as printed. 0: the number of clients (PFLlib).",
        NOT_NEGATIVE,
    )
    mu: float = key(0.1, "Pull of p to the clients' shares of samples (mu).", NOT_NEGATIVE)
    loosen_rounds: int = key(20, "Rounds after which this pull has faded out (L).", NOT_NEGATIVE, counts_rounds=True)
    models: int = key(0, "Other clients' core models that a client is sent (M); 0: all.", NOT_NEGATIVE)


def mix(W: ArrayLike, p: ArrayLike) -> NDArray[np.floating[Any]]:
    """Return the personal model sum_j p_j w_j, [d], summed in float64 (Eq. 2).

    W: [N, d], core models; p: [N]. The result has W's dtype, at least float32. Raises ValueError for other shapes.
    """
    stack = np.asarray(W)
    if stack.ndim != 2 or np.shape(p) != stack.shape[:1]:
        raise ValueError(f"W must be [N, d] and p [N], got {list(stack.shape)} and {list(np.shape(p))}")
    total: NDArray[np.floating[Any]] = np.asarray(p, np.float64) @ stack.astype(np.float64)
    return total.astype(np.result_type(stack.dtype, np.float32))


def fade(round: int, loosen_rounds: int) -> float:
    """Return lambda of a round, counted from 1: from 1 to 0 by a cosine over so many rounds, then 0."""
    if round > loosen_rounds:
        return 0.0
    return (1 + math.cos(math.pi * (round - 1) / loosen_rounds)) / 2


class APPLE(PersonalizedStrategy[APPLEParams]):
    """Server half. Kept per client: its core model, `params` and `buffers`, and `relations` float64 [N], p_i.

    With `models` also `seen` bool [N], the clients whose core models it has been sent.
    """

    late = Late(
        aged="clients weigh the core models, and the server does not",
        moved="clients upload their relations too, which fedbuff does not move",
    )
    holds = Holds(models=True)

    def summary(self) -> None:
        """Log the run's settings; warn that clients receive each other's models."""
        super().summary()
        count = self.params.models or self.config.num_training - 1
        if count:
            log.warning("apple: clients are sent other clients' models, up to %d each and round", count)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the core model and p."""
        return replace(super().form(state, turn), extras={RELATIONS: ("<f8", (self.config.num_clients,))})

    def offered(self, state: State, client_id: int, turn: Turn) -> list[int]:
        """Return the ids of the core models that a client is sent, sorted."""
        # in a later round that is only previewed, no client is known
        known = set(state.clients) or set(range(self.config.num_clients if turn.round > 1 else 0))
        others = sorted(known - {client_id})
        most = self.params.models
        if not most or len(others) <= most:
            return others
        mine, nothing = state.clients.get(client_id, {}), np.zeros(self.config.num_clients)
        seen, p = mine.get(_SEEN, nothing), mine.get(RELATIONS, nothing)
        return sorted(sorted(others, key=lambda j: (seen[j], -abs(p[j]), j))[:most])

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the client's own core model, at first the initial one; the clients' shares of samples, and others' core models."""

        def beside() -> dict[str, NDArray[Any]]:
            extras: dict[str, NDArray[Any]] = {PRIOR: self.prior(turn)}
            if others := self.offered(state, client_id, turn):
                extras |= {IDS: np.array(others), MODELS: np.stack([state.model_of(j).params for j in others])}
            return extras

        return Sent(state.model_of(client_id), OnDemand(beside))

    def prior(self, turn: Turn) -> NDArray[np.float64]:
        """Return p0, float64 [N]: the clients' shares of all training samples, 0 for clients that never train."""
        sizes = [float(turn.declared.get(i, {}).get("train-samples", 1)) for i in range(self.config.num_clients)]
        trains = np.isin(np.arange(len(sizes)), sorted(self.config.unseen), invert=True)
        prior = np.maximum(sizes, 1)
        if self.config.max_size_weight:
            prior = np.minimum(prior, self.config.max_size_weight * float(np.median(prior[trains])))
        prior[~trains] = 0
        shares: NDArray[np.float64] = prior / prior.sum()
        return shares

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Keep the core models, the relations, and who was sent which core models."""
        kept = {}
        for row, i in enumerate(uploads.ids):
            p, seen = (
                uploads.extras[RELATIONS][row],
                {_SEEN: self.seen_by(state, i, turn)} if self.params.models else {},
            )
            kept[i] = {"params": uploads.W[row], "buffers": uploads.B[row], RELATIONS: p, **seen}
            turn.note(i, RELATIONS, {str(j): float(np.round(p[j], 6)) for j in uploads.ids})
        return state.next(clients=kept)

    def seen_by(self, state: State, client_id: int, turn: Turn) -> NDArray[np.bool_]:
        """Return the clients whose core models a client of this round has been sent, in this round or before, bool [N]."""
        late = turn.started_from.get(client_id)
        sent = self.offered(state, client_id, turn) if late is None else late.extras.get(IDS, np.zeros(0, np.int64))
        before = state.clients.get(client_id, {}).get(_SEEN, np.zeros(self.config.num_clients, bool))
        return before | np.isin(np.arange(len(before)), sent)

    def exported(self, client_id: int | None = None) -> None:
        """Return None: there is no global model, and only the client makes its mixture."""


class APPLEUpdate(LocalUpdate[APPLEParams]):
    """Client half. State: `apple.relations` float64 [N], p_i."""

    def relations(self, state: ClientState, ctx: RoundContext[APPLEParams]) -> NDArray[np.float64]:
        """Return p_i, float64 [N]."""
        kept = state.arrays.get("apple.relations")
        return ctx.extras[PRIOR] if kept is None else kept

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[APPLEParams]) -> Model:
        """Return the mixture of a core model with the received ones."""
        p = self.relations(state, ctx)
        ids, rows = zip(*core_models(model.params, ctx), strict=True)
        return Model(mix(np.stack(rows), [p[each].sum() for each in ids]).astype(np.float32), model.buffers)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[APPLEParams]) -> Model:
        """Train the core model and p on the same batches. Return the core model."""
        import torch

        c, trainer, own = ctx.params, ctx.trainer, ctx.client_id
        p, p0 = self.relations(state, ctx).copy(), ctx.extras[PRIOR]
        trainer.load(start)
        core = trainer.weights.clone()
        _, *others = core_models(start.params, ctx)
        models = [([own], core), *((ids, trainer.tensor(w)) for ids, w in others)]
        step, rate = trainer.optimizer(core).step, trainer.learning_rate * (c.core_rate or float(np.count_nonzero(p0)))
        pull = fade(ctx.round, c.loosen_rounds) * c.mu
        for x, y in trainer.batches():
            share = float(p[own])
            theta = torch.zeros_like(core)
            for ids, w in models:
                theta.add_(w, alpha=float(p[ids].sum()))
            trainer.weights.copy_(theta)
            trainer.differentiate(x, y)
            if c.relation_rate:
                slope = np.empty(len(p))
                slopes = torch.stack([w @ trainer.gradient for _, w in models]).cpu().numpy()
                for (ids, _), along in zip(models, slopes, strict=True):
                    slope[ids] = along
                slope += pull * (p - p0)
                p -= c.relation_rate * trainer.clip_factor(slope) * slope
            step(trainer.gradient.mul_(share), rate)
        if not np.isfinite(p).all():
            raise Diverged(
                f"training diverged: apple's relations are not finite (apple.relation-rate {c.relation_rate:g})"
            )
        state.arrays["apple.relations"] = p
        trainer.weights.copy_(core)
        return trainer.read()

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[APPLEParams]) -> Upload:
        """Send the core model and p."""
        return replace(super().upload(before, after, state, ctx), extras={RELATIONS: self.relations(state, ctx)})


def core_models(
    own: NDArray[np.float32], ctx: RoundContext[APPLEParams]
) -> list[tuple[list[int], NDArray[np.float32]]]:
    """Return the core models that a client knows, float32 [d], each with the ids of its clients.

    The first is the client's own, [d]. The last is the initial model, for all clients whose core models it was not sent.
    """
    sent = ctx.extras.get(IDS, np.zeros(0, np.int64)).tolist()
    received = zip(([j] for j in sent), ctx.extras.get(MODELS, ()), strict=True)
    rest = sorted(set(range(len(ctx.extras[PRIOR]))) - {ctx.client_id, *sent})
    return [([ctx.client_id], own), *received, *([(rest, ctx.initial().params)] if rest else [])]


def tested(params: APPLEParams) -> str:
    """Return the sentence on the mixture."""
    return (
        "before training, the mixture of the received core models is tested; after training, the mixture with the core model "
        "and the weights that the client trained"
    )


FIGURES = (
    Matrix(
        RELATIONS,
        "Directed relationships",
        "weight of the column's core model",
        "The weights p that each client (rows) learned for the core models (columns) in its personal model.",
        heading="Relationships",
        value="weight",
    ),
)
METHOD = Method(
    "apple",
    APPLEParams,
    APPLE,
    APPLEUpdate,
    all_tensors,
    figures=FIGURES,
    needs_whole=True,
    needs_all="it weighs every core model by its client's share of all samples",
    not_private="it sends clients each other's models",
    tested=tested,
    overview=Overview(
        group="Parameters among similar clients",
        travels="model up, all models down",
        stays="relationship vector",
        server="4(d+b) + 8N a client",
        disk="8N",
        unseen="initial model mixed with all",
        use="few clients that may see each other's models",
    ),
)
