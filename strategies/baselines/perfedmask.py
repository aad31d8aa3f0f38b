"""PerFedMask: FedBABU in which clients train only as many layers as they can afford; the others are frozen.

Setayesh, Li, Wong: "PerFedMask: Personalized Federated Learning with Optimized Masking Vectors", ICLR 2023.

Every client has a mask over the body's layers (modules with parameters), fixed before round 1. It marks the layers that
the client trains: at most the share nu of all body parameters, but at least one layer.

Client: E epochs of SGD on its layers under the run's initial classifier; it sends them. Server, per tensor: the mean
over the clients that trained it, weighted by samples. A tensor that no client trained stays as it was. Personalization
happens at evaluation: all tensors are tuned for `finetune-epochs` (authors: 5) and dropped afterwards. nu = 1 trains
every layer, and is FedBABU, bit for bit.

Masks minimise a sum over clients. m_il is 1 if client i trains layer l, k_il = m_il / sum_j m_jl, and d_l are the
layers' sizes:

    sum_i [d max_l k_il - sum_l k_il d_l + the part of nu d that i leaves unused]

The authors improve the best of 1,000 random masks by a convex solver. We take that best.

Deviations:

- All clients have the same nu.
- Statistics are FedBABU's: all of the body's are averaged, those of frozen layers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import rng
from strategies.base import (
    POSITIVE_RATIO,
    SPLIT,
    ClientState,
    Layout,
    LocalUpdate,
    Means,
    Method,
    Model,
    Overview,
    RoundContext,
    Sent,
    State,
    Submodel,
    Turn,
    Upload,
    Uploads,
    all_but_classifier,
    key,
)
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.fedbabu import warn_without_finetuning
from strategies.kernels import Part, check_weights, for_blocks, weighted_mean

# sent down if not all layers train, uint8 [ceil(L/8)]: one packed bit per layer of the body
LAYERS = "layers"

_DRAWS = 1000


@dataclass(frozen=True)
class PerFedMaskParams:
    """Parameters of PerFedMask, table `perfedmask`."""

    capacity: float = key(
        1.0, "Share of the body's parameters that a client can train (nu); 1 is FedBABU.", POSITIVE_RATIO
    )
    masks: Literal["optimised", "random"] = key("optimised", "The best of 1,000 random masks, or a single random one.")


def layers_of(layout: Layout) -> list[str]:
    """Return the modules that own parameters, in order."""
    return list(dict.fromkeys(slot.name.rpartition(".")[0] for slot in layout.params))


def random_masks(sizes: ArrayLike, capacity: float, clients: int, stream: np.random.Generator) -> NDArray[np.bool_]:
    """Return random layers for clients to train, bool [N, L].

    In random order, each client takes every layer that still fits into capacity * sum(sizes). If none fits, it takes
    the smallest. sizes: [L], parameters per layer.
    """
    d = np.asarray(sizes, np.float64)
    order = stream.permuted(np.tile(np.arange(len(d)), (clients, 1)), axis=1)
    chosen, rows = np.zeros((clients, len(d)), bool), np.arange(clients)
    used, limit = np.zeros(clients), capacity * d.sum() * (1 + 1e-12)
    for column in order.T:
        fits = used + d[column] <= limit
        chosen[rows[fits], column[fits]] = True
        used += d[column] * fits
    chosen[~chosen.any(axis=1), int(d.argmin())] = True
    return chosen


def objective(masks: NDArray[np.bool_], sizes: ArrayLike, capacity: float) -> float:
    """Return the cost of masks, bool [N, L]: uneven shares of the layers, and unused capacity. sizes: [L]."""
    d, m = np.asarray(sizes, np.float64), np.asarray(masks, np.float64)
    shares = m / np.maximum(m.sum(axis=0), 1)
    unused = np.maximum(capacity * d.sum() - m @ d, 0)
    return float((d.sum() * shares.max(axis=1) - shares @ d + unused).sum())


def masked_mean(
    W: NDArray[np.floating[Any]], trained: ArrayLike, sizes: ArrayLike, previous: ArrayLike
) -> NDArray[np.floating[Any]]:
    """Return the mean over the clients that trained an element, weighted by sizes, [d]; else the previous value.

    W: [N, d]; trained: [N, d], not 0 where a client trained; sizes: [N]; previous: [d]. Where all clients trained, it
    is `weighted_mean`'s.
    """
    W = np.asarray(W)
    shares = check_weights(np.asarray(sizes, np.float64), len(W))[:, None] * (np.asarray(trained) != 0)
    totals = shares.sum(axis=0)
    sums = (W * shares).sum(axis=0, initial=-0.0)
    mean = np.where(totals > 0, sums / np.where(totals > 0, totals, 1), previous)
    result: NDArray[np.floating[Any]] = mean.astype(np.result_type(W.dtype, np.float32))
    return result


class PerFedMask(FedAvg[PerFedMaskParams]):
    """Server half. Masks follow from the seed and are not stored."""

    # a layer may have only one client that trains it
    means = Means()

    def summary(self) -> None:
        """Log the run's settings; warn if nothing is personalized."""
        super().summary()
        warn_without_finetuning(self.config)

    @cached_property
    def masks(self) -> NDArray[np.bool_]:
        """Return the layers of the body that each client trains, bool [N, L]."""
        p, n, layers = self.params, self.config.num_clients, layers_of(self.layout)
        sizes = np.zeros(len(layers))
        for slot in self.layout.params:
            sizes[layers.index(slot.name.rpartition(".")[0])] += slot.size
        stream = rng.generator(self.config.seed, "perfedmask")
        if p.capacity == 1:
            return np.ones((n, len(layers)), bool)
        draws = (random_masks(sizes, p.capacity, n, stream) for _ in range(_DRAWS if p.masks == "optimised" else 1))
        trains = sorted(set(range(n)) - self.config.unseen)
        return min(draws, key=lambda masks: objective(masks[trains], sizes, p.capacity))

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the global model, and the layers to train, unless all train."""
        return Sent(state.model, {} if self.params.capacity == 1 else {LAYERS: np.packbits(self.masks[client_id])})

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average each tensor over the clients that trained it."""
        layers, before = layers_of(self.layout), state.model.params
        owners = [layers.index(slot.name.rpartition(".")[0]) for slot in self.layout.params]
        layer_of = np.repeat(owners, self.layout.sizes)
        masks, params, weights = self.masks[uploads.ids], np.empty_like(before), self.weights(uploads)

        def block(start: int, stop: int) -> None:
            at = slice(start, stop)
            params[at] = masked_mean(uploads.W[:, at], masks[:, layer_of[at]], weights, before[at])

        for_blocks(block, before.size)
        return state.next(Model(params, weighted_mean(uploads.B, weights)))


def sent_tensors(layout: Layout, mask: NDArray[np.bool_]) -> frozenset[str]:
    """Return the names of the tensors of a body that a client uploads: the layers it trains, and all statistics.

    mask: bool [L], the layers it trains.
    """
    trained = {layer for layer, chosen in zip(layers_of(layout), mask, strict=True) if chosen}
    params = {slot.name for slot in layout.params if slot.name.rpartition(".")[0] in trained}
    return frozenset(params | {slot.name for slot in layout.buffers})


def sent(body: Layout, extras: Mapping[str, NDArray[Any]]) -> frozenset[str]:
    """Return the names of the tensors that a client with these extras uploads. body: the tensors that travel."""
    layers = len(layers_of(body))
    mask = np.ones(layers, bool) if LAYERS not in extras else np.unpackbits(extras[LAYERS])[:layers].astype(bool)
    return sent_tensors(body, mask)


def trained(body: Layout, extras: Mapping[str, NDArray[Any]]) -> Part:
    """Return the part of a body that a client with these extras uploads."""
    return Part.of_tensors(body, sent(body, extras))


class PerFedMaskUpdate(LocalUpdate[PerFedMaskParams]):
    """Client half: it trains its layers of the body under the initial classifier, and tunes a copy for evaluation.

    It keeps nothing.
    """

    def train(self, start: Model, state: ClientState, ctx: RoundContext[PerFedMaskParams]) -> Model:
        """Train the client's layers of the body."""
        return ctx.trainer.train(start, frozen=ctx.layout.names - sent(ctx.layout.subset(ctx.shared), ctx.extras))

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[PerFedMaskParams]) -> None:
        """Keep nothing: the classifier follows from the seed."""

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[PerFedMaskParams]) -> Upload:
        """Send the trained layers and all statistics."""
        plain = super().upload(before, after, state, ctx)
        return replace(plain, model=ctx.layout.take(after, sent(ctx.layout.subset(ctx.shared), ctx.extras)))


METHOD = Method(
    "perfedmask",
    PerFedMaskParams,
    PerFedMask,
    PerFedMaskUpdate,
    all_but_classifier,
    needs_whole=True,
    not_private="its server averages each layer over those clients that train it",
    needs=SPLIT,
    local_from_file=False,
    submodel=Submodel(trained, sent=False),
    overview=Overview(
        group="A part of the model",
        travels="trained layers up, body down",
        epochs="up to E",
        unseen="global part, the rest initial",
        use="as fedbabu, weak clients",
    ),
)
