"""FLOCO: clients train a simplex of classifiers; each gets a region of it, near the clients with similar updates.

Grinwald, Wiesner, Nakajima: "Federated Learning over Connected Modes", NeurIPS 2024.

The classifier's weight becomes M endpoints W_1..W_M [C, f] beside one bias. The weight in use is sum_m alpha_m W_m.
Clients train body, bias and all endpoints by SGD, with one alpha per batch. The server averages all of it as FedAvg
does.

Before round tau, alpha is uniform on the simplex. From then on client i draws it around its centre c_i:

    c_i + r u / ||u||_1, with u uniform in [-1, 1]^M and r in [0, rho]

The client is evaluated, exported and hashed at its centre, sum_m c_m W_m. Before tau the centre is (1/M, ...).

Centres come from the endpoints' updates in round tau - 1. In that round all connected clients train, but only those
drawn are averaged. The updates' first M principal components kappa [N, M] are projected on scaled simplices {x >= 0,
sum x = z} and divided by their sum. z is the size at which the centres have the least Riesz energy (`subregions`). A
client that comes later first trains on the whole simplex. Then that update places it, with the mean, axes and z of
round tau - 1.

FLOCO+ (`personal-epochs`): a second simplex model stays on the client. It trains after the first, with lambda/2
||v - w_received||^2. The client is evaluated with it.

Deviations:

- The paper's subregion is an L1 ball in the simplex, drawn from uniformly. The draws of all published code leave the
  simplex and are not uniform. Ours are the code's draws; `sampling = simplex` projects them back.
- The sign of a principal component is arbitrary, but decides the centres. Ours takes +updates and makes each column's
  largest |score| positive. FL-bench projects +updates, Flower -updates.
- FLOCO+'s gradient is lambda (v - w). FL-bench and the authors' code have lambda v - w, by a slip of precedence.
- BatchNorm is averaged. The authors keep it local.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import rng
from strategies.base import (
    AT_LEAST_ONE,
    LINEAR,
    NOT_NEGATIVE,
    OWN_MODEL,
    ClientState,
    Exported,
    Late,
    Layout,
    LocalUpdate,
    Method,
    Model,
    Objective,
    Overview,
    RoundContext,
    Rule,
    Sent,
    Slot,
    State,
    Turn,
    Uploads,
    all_tensors,
    key,
    log,
    packed,
)
from strategies.baselines import components
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.fedprox import proximal
from strategies.kernels import one_thread

if TYPE_CHECKING:
    from torch import Tensor, nn

Matrix = NDArray[np.float64]
_TOTALS = np.linspace(1e-4, 1, 1000)  # values of z
# number of alphas drawn and moved to the device at a time
_AHEAD = 64


@dataclass(frozen=True)
class FLOCOParams:
    """Parameters of FLOCO, table `floco`."""

    endpoints: int = key(10, "Endpoints of the simplex of classifiers (M).", AT_LEAST_ONE)
    projection_round: int = key(
        10,
        "First round in which clients have their own regions (tau; paper: 250 of 500).",
        Rule(low=2),
        counts_rounds=True,
    )
    radius: float = key(0.1, "Radius of a client's region (rho).", NOT_NEGATIVE)
    personal_epochs: int = key(
        0, "FLOCO+: epochs of a second, personal simplex model per round; 0: none.", NOT_NEGATIVE
    )
    proximal_weight: float = key(1.0, "FLOCO+: pull of that model towards the received one (lambda).", NOT_NEGATIVE)
    sampling: Literal["authors", "simplex"] = key(
        "authors", "Draws around a centre: as in all published code, or projected back to the simplex."
    )


# Kernels: the simplex ---------------------------------------------------------------------------------------------------


def project_simplex(v: ArrayLike, total: float) -> Matrix:
    """Return the Euclidean projection of vectors [..., M] on {x >= 0, sum x = total}, float64."""
    values = np.asarray(v, np.float64)
    falling = -np.sort(-values, axis=-1)
    shifts = (np.cumsum(falling, axis=-1) - total) / np.arange(1, values.shape[-1] + 1)
    # number of entries above 0 in the result
    positive = np.maximum((falling > shifts).sum(axis=-1, keepdims=True), 1)
    projected: Matrix = np.maximum(values - np.take_along_axis(shifts, positive - 1, axis=-1), 0)
    return projected


def on_simplex(kappa: ArrayLike, total: float) -> Matrix:
    """Return the projection on the simplex of sum `total`, divided by its sum: rows [..., M] of sum 1."""
    projected = project_simplex(kappa, total)
    scaled: Matrix = projected / projected.sum(axis=-1, keepdims=True)
    return scaled


def subregions(kappa: ArrayLike) -> tuple[Matrix, float]:
    """Return the centres of the clients' regions, float64 [N, M], and the size z of their simplex.

    kappa: scores [N, M]. Rows of the centres are >= 0 and sum to 1. z is one of 1000 sizes: the one with the least
    Riesz energy of its centres, sum over pairs of 1 / max(||c_i - c_j||, 1e-4)^2. Ties go to the smaller size.
    """
    from scipy.spatial.distance import pdist

    scores = np.asarray(kappa, np.float64)
    best, least = float(_TOTALS[0]), math.inf
    for total in _TOTALS:
        energy = float((1 / np.maximum(pdist(on_simplex(scores, total), "sqeuclidean"), 1e-8)).sum())
        if energy < least:
            best, least = float(total), energy
    return on_simplex(scores, best), best


def principal_scores(X: Matrix, components: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return scores [N, M] of the rows of X on its first M principal axes, their mean [D], the axes [M, D].

    X: [N, D]; all are float64. Beyond the rank of X, scores and axes are 0. The largest |score| of each column is
    positive.
    """
    mean = X.mean(axis=0)
    left, lengths, right = np.linalg.svd(X - mean, full_matrices=False)
    rank = int((lengths > lengths[0] * max(X.shape) * np.finfo(np.float64).eps).sum())
    k = min(components, rank)
    scores, axes = np.zeros((len(X), components)), np.zeros((components, X.shape[1]))
    scores[:, :k], axes[:k] = left[:, :k] * lengths[:k], right[:k]
    flip = np.where(scores[np.abs(scores).argmax(axis=0), np.arange(components)] < 0, -1.0, 1.0)
    return scores * flip, mean, axes * flip[:, None]


def uniform_mixture(generator: np.random.Generator, endpoints: int) -> Matrix:
    """Return a point drawn uniformly from the simplex, float64 [M]."""
    drawn = generator.exponential(size=endpoints)
    point: Matrix = drawn / drawn.sum()
    return point


def mixture_around(centre: Matrix, generator: np.random.Generator, radius: float) -> Matrix:
    """Return a point near a centre [M], drawn as in the authors' code.

    Its L1 distance from the centre is at most `radius`. It is not always on the simplex.
    """
    direction = generator.uniform(-1, 1, len(centre))
    length = generator.uniform(0, radius)
    point: Matrix = centre + length * direction / np.abs(direction).sum()
    return point


# Kernels: the model -----------------------------------------------------------------------------------------------------


def endpoints_slot(layout: Layout) -> Slot:
    """Return the slot of the endpoints, [M, C, f]."""
    (slot,) = (slot for slot in layout.params if slot.name in layout.classifier and len(slot.shape) == 3)
    return slot


def collapsed_layout(layout: Layout) -> Layout:
    """Return the layout of the user's own model, given that of the simplex model."""
    wide = endpoints_slot(layout)
    return replace(layout, params=packed((s.name, s.shape[1:] if s is wide else s.shape) for s in layout.params))


def collapse(model: Model, layout: Layout, centre: Matrix) -> Model:
    """Return a simplex model at one point, sum_m c_m W_m, as the user's own model.

    layout: of the simplex model; centre: [M].
    """
    wide = endpoints_slot(layout)
    endpoints = model.params[wide.start : wide.stop].reshape(wide.shape[0], -1).astype(np.float64)
    used = (centre @ endpoints).astype(np.float32)
    return Model(np.concatenate([model.params[: wide.start], used, model.params[wide.stop :]]), model.buffers)


def centre_of(extras: Mapping[str, NDArray[Any]], endpoints: int) -> tuple[Matrix, bool]:
    """Return the point at which a client is evaluated, [M], and whether the client has a region of its own.

    No centre, or one of zeros, stands for no region yet. Then the point is the middle of the simplex.
    """
    sent = extras.get("centre")
    if sent is None or not sent.any():
        return np.full(endpoints, 1 / endpoints), False
    return sent.astype(np.float64), True


def simplex_network(module: nn.Module, params: FLOCOParams, seed: int) -> nn.Module:
    """Return the network with endpoints, from Xavier-normal draws, as the weight of its classifier, a Linear layer."""
    import torch
    from torch import nn
    from torch.nn import functional

    class SimplexLinear(nn.Linear):
        """Linear layer with a mixture of endpoints [M, C, f] as weight: by `alpha` [M] in training, else `centre`."""

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")  # draws nothing
            drawn = torch.empty(params.endpoints, *linear.weight.shape)
            for m, endpoint in enumerate(drawn):
                generator = torch.Generator().manual_seed(rng.torch_seed(seed, f"model:floco-{m}"))
                nn.init.xavier_normal_(endpoint, generator=generator)
            self.weight = nn.Parameter(drawn, requires_grad=linear.weight.requires_grad)
            self.bias = linear.bias
            self.alpha = self.centre = torch.full((params.endpoints,), 1 / params.endpoints)

        def forward(self, x: Tensor) -> Tensor:
            # weights are mixed in float32
            with torch.autocast(x.device.type, enabled=False):
                used = (self.alpha if self.training else self.centre) @ self.weight.flatten(1)
            return functional.linear(x, used.view(self.out_features, self.in_features), self.bias)

    path, linear = components.classifier_of(module)
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, SimplexLinear(linear))
    return module


# Halves ---------------------------------------------------------------------------------------------------------------


class FLOCO(FedAvg[FLOCOParams]):
    """Server half. Kept per client: `centre` float32 [M].

    Memory, from round tau - 1 on, to place clients that come later: `mean` float32 [MCf], `axes` float32 [M, MCf] and
    `total` float64 [1].
    """

    late = Late(reads_moves=True)

    def sample_clients(self, state: State, client_ids: list[int], turn: Turn) -> list[int]:
        """Return the drawn clients, or all clients in the round before the projection."""
        if turn.round == self.params.projection_round - 1:
            return client_ids
        return super().sample_clients(state, client_ids, turn)

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the global model, and from round tau on the client's centre, zeros if it has none."""
        if max(state.round, turn.round) < self.params.projection_round:
            return Sent(state.model)
        mine = state.clients.get(client_id)
        return Sent(
            state.model, {"centre": np.zeros(self.params.endpoints, np.float32) if mine is None else mine["centre"]}
        )

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average the drawn clients' uploads, and place clients.

        Round tau - 1 places all its clients; later rounds place those that have no place yet.
        """
        before_projection, received = turn.round == self.params.projection_round - 1, state.model
        # in round tau - 1 all clients train, but only the drawn ones are averaged
        drawn = frozenset(self.drawn(turn.connected, turn.round) if before_projection else uploads.ids)
        rows = [k for k, i in enumerate(uploads.ids) if i in drawn]
        after = state
        if rows:
            after = super().update(state, uploads if len(rows) == len(uploads.ids) else uploads.rows(rows), turn)
        else:
            log.warning("round %d: floco: no drawn client uploaded, so the global model stays", turn.round)
        with one_thread():
            if before_projection:
                return self.place_all(after, self.updates(uploads, received), uploads.ids, turn)
            return self.place_new(after, uploads, received) if turn.round >= self.params.projection_round else after

    def updates(self, uploads: Uploads, received: Model) -> Matrix:
        """Return the endpoints' movement in training, float64 [N, MCf]."""
        slot = endpoints_slot(self.layout)
        ends = slice(slot.start, slot.stop)
        moved: Matrix = uploads.W[:, ends].astype(np.float64) - received.params[ends]
        return moved

    def place_all(self, state: State, updates: Matrix, ids: list[int], turn: Turn) -> State:
        """Give every client a region, and keep the arrays that place later clients."""
        kappa, mean, axes = principal_scores(updates, self.params.endpoints)
        centres, total = subregions(kappa)
        kept = {i: {"centre": centre.astype(np.float32)} for i, centre in zip(ids, centres, strict=True)}
        memory = {"mean": mean.astype(np.float32), "axes": axes.astype(np.float32), "total": np.array([total])}
        largest = float(np.abs(kappa).max())
        log.info("floco: regions for %d clients, largest score %.3g, simplex of sum %.3g", len(ids), largest, total)
        turn.note_round("largest-score", largest)
        turn.note_round("simplex-sum", total)
        return state.next(clients=kept, memory=memory)

    def place_new(self, state: State, uploads: Uploads, received: Model) -> State:
        """Place clients without a region by their first update."""
        new, memory = [k for k, i in enumerate(uploads.ids) if i not in state.clients], state.memory
        if not new or "axes" not in memory:
            return state
        kappa = (self.updates(uploads, received)[new] - memory["mean"]) @ memory["axes"].astype(np.float64).T
        centres = zip(new, on_simplex(kappa, float(memory["total"][0])), strict=True)
        return state.next(clients={uploads.ids[k]: {"centre": centre.astype(np.float32)} for k, centre in centres})

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return the global model at the middle of the simplex, or at the client's centre.

        With FLOCO+ a client's model stays on the client.
        """
        if client_id is not None and self.params.personal_epochs:
            return None
        last = Turn(self.config, self.state.round)
        extras = {} if client_id is None else self.download(self.state, client_id, last).extras
        centre, _ = centre_of(extras, self.params.endpoints)
        return collapse(self.state.model, self.layout, centre)


class FLOCOUpdate(LocalUpdate[FLOCOParams]):
    """Client half. State, with FLOCO+ only: the personal simplex model."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FLOCOParams]) -> Model:
        """Set the point at which this message's models are evaluated; return the received model."""
        import torch

        layer: Any = ctx.trainer.classifier()
        centre = centre_of(ctx.extras, ctx.params.endpoints)[0]
        layer.alpha = layer.centre = torch.from_numpy(centre.astype(np.float32)).to(ctx.trainer.weights.device)
        return received

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FLOCOParams]) -> Model:
        """Train the simplex, and with FLOCO+ a personal one near the received model."""
        p = ctx.params
        after = ctx.trainer.train(start, objective=self.mixed_loss(ctx, "floco-alpha"))
        if p.personal_epochs:
            personal = ctx.trainer.train(
                self.personal(start, state, ctx),
                epochs=p.personal_epochs,
                purpose="train-personal",
                objective=self.mixed_loss(ctx, "floco-alpha-personal"),
                correction=proximal(ctx, p.proximal_weight, start.params),
            )
            self.keep_personal(personal, state)
        return after

    def mixed_loss(self, ctx: RoundContext[FLOCOParams], purpose: str) -> Objective:
        """Return the task's loss, with another mixture on every batch."""
        trainer = ctx.trainer
        layer: Any = trainer.classifier()
        alphas = mixtures(ctx, purpose)

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            layer.alpha = next(alphas)
            return trainer.loss(trainer.logits(module, x), y)

        return loss


def at_centre(model: Model, state: ClientState, ctx: RoundContext[FLOCOParams]) -> Model:
    """Return a simplex model at the client's centre, as the user's own model."""
    return collapse(model, ctx.layout, centre_of(ctx.extras, ctx.params.endpoints)[0])


def mixtures(ctx: RoundContext[FLOCOParams], purpose: str) -> Iterator[Tensor]:
    """Yield one mixture per batch, float32 [M] on the device: from the client's region, or else the simplex."""
    import torch

    p, generator = ctx.params, ctx.rng(purpose)
    centre, own = centre_of(ctx.extras, p.endpoints)

    def draw() -> Matrix:
        if not own:
            return uniform_mixture(generator, p.endpoints)
        point = mixture_around(centre, generator, p.radius)
        return project_simplex(point, 1) if p.sampling == "simplex" else point

    while True:
        ahead = np.stack([draw() for _ in range(_AHEAD)]).astype(np.float32)
        yield from torch.from_numpy(ahead).to(ctx.trainer.weights.device)


def tested(params: FLOCOParams) -> str:
    """Return the note that both curves test the client's own model, with FLOCO+ only."""
    return OWN_MODEL if params.personal_epochs else ""


METHOD = Method(
    "floco",
    FLOCOParams,
    FLOCO,
    FLOCOUpdate,
    all_tensors,
    wrap=simplex_network,
    needs_whole=True,
    not_private="its server compares single clients' updates",
    needs=LINEAR,
    tested=tested,
    exported=Exported(layout=lambda server, layout: collapsed_layout(layout), model=at_centre),
    overview=Overview(
        group="Several global models",
        travels="model, M classifiers",
        server="4M a client",
        unseen="global model at the simplex's centre",
        use="clients of graded similarity, one body",
    ),
)
