"""FedConcat: clients with similar labels train an encoder together; then one classifier is trained on all encoders.

Diao, Li, He: "Exploiting Label Skews in Federated Learning with Model Concatenation", AAAI 2024.

Before round 1, k-means groups the clients by their label shares p_i into K clusters. Rounds 1..R run FedAvg within each
cluster, from one initial model. In rounds R + 1..T all K bodies are fixed and in evaluation mode. Their features, the
inputs of their classifiers, are put side by side, [n, Kf], and enter a new classifier. All clients train it for
`classifier-batches` batches a round. The server takes the unweighted mean, as all clients take the same number of
steps.

Up to round R clients are evaluated with their cluster's model, then with the concatenated one. With K = 1 rounds 1..R
are FedAvg, bit for bit.

Deviations:

- In the authors' code the clusters' states alias one network's tensors. So on a CPU a later cluster of round 1 starts
  from the first client's trained model. Here all clusters start from the initial model.
- The authors' bodies stay in training mode in the second phase; their network has no BatchNorm. Here they do not, as
  clients' statistics would drift apart.
- Noise on the shares is left out.
- Clients that come later join the cluster of the nearest centre.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import rng
from fl_app.server.run_folder import client_facts
from strategies.base import (
    AT_LEAST_ONE,
    LINEAR,
    NO_TENSORS,
    NOT_NEGATIVE,
    NOTHING,
    ClientState,
    Expected,
    Exported,
    Groups,
    Holds,
    Late,
    Layout,
    LocalUpdate,
    Means,
    Method,
    Model,
    ModelFactory,
    Outliers,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    RunConfig,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    UserError,
    Vector,
    key,
    log,
)
from strategies.baselines import components
from strategies.baselines.ifca import cluster_means
from strategies.kernels import RULES, Stack, head_slots

if TYPE_CHECKING:
    from torch import Tensor, nn

Rows = NDArray[np.float64]
Labels = NDArray[np.int64]

_RESTARTS, _STEPS = 10, 300


def kmeans(rows: Rows, k: int, stream: np.random.Generator, cap: int = 0) -> Labels:
    """Return the cluster of every row, int64 [N]. Clusters are numbered in the order of their first rows.

    The result is the one of least inertia among ten k-means++ starts. rows: [N, C]. k is limited to the number of
    distinct rows; no cluster is empty. cap: the most rows in a cluster; 0: any number. If k clusters of this size
    cannot hold all rows, the bound is the smallest size that can.
    """
    k = min(k, len(np.unique(rows, axis=0)))
    cap = max(cap, math.ceil(len(rows) / k)) if cap else len(rows)
    best, least = np.zeros(len(rows), np.int64), math.inf
    for _ in range(_RESTARTS):
        labels = _settled(rows, _far_apart(rows, k, stream), cap)
        inertia = float(np.square(rows - centres_of(rows, labels)[labels]).sum())
        if inertia < least:
            best, least = labels, inertia
    _, first, inverse = np.unique(best, return_index=True, return_inverse=True)
    ranks: Labels = np.argsort(np.argsort(first))[inverse.reshape(-1)].astype(np.int64)
    return ranks


def centres_of(rows: Rows, labels: Labels) -> Rows:
    """Return the means of clusters 0, 1, ..., float64 [k, C]."""
    return np.stack([rows[labels == k].mean(axis=0) for k in range(int(labels.max()) + 1)])


def squared_distances(rows: Rows, centres: Rows) -> Rows:
    """Return the squared distances of rows [N, C] from centres [k, C], float64 [N, k]."""
    apart: Rows = np.square(rows[:, None] - centres).sum(axis=2)
    return apart


def _far_apart(rows: Rows, k: int, stream: np.random.Generator) -> Rows:
    """Return k distinct rows by k-means++. Each is drawn in proportion to its squared distance from the nearest row
    drawn before.
    """
    chosen = [int(stream.integers(len(rows)))]
    while len(chosen) < k:
        nearest = squared_distances(rows, rows[chosen]).min(axis=1)
        chosen.append(int(stream.choice(len(rows), p=nearest / nearest.sum())))
    return rows[chosen]


def _settled(rows: Rows, centres: Rows, cap: int) -> Labels:
    """Return the labels after Lloyd's steps from centres [k, C], taken until no row moves."""
    labels = np.full(len(rows), -1)
    for _ in range(_STEPS):
        apart = squared_distances(rows, centres)
        moved = _filled(_assigned(apart, cap), apart)
        if (moved == labels).all():
            break
        labels, centres = moved, centres_of(rows, moved)
    return labels


def _assigned(apart: Rows, cap: int) -> Labels:
    """Return each row's nearest of k centres, given squared distances [N, k].

    If a cluster would have more than `cap` rows, return the assignment with the least sum of squared distances within
    that bound.
    """
    labels: Labels = apart.argmin(axis=1)
    if np.bincount(labels).max() <= cap:
        return labels
    from scipy.optimize import linear_sum_assignment

    places: Labels = linear_sum_assignment(np.repeat(apart, cap, axis=1))[1]
    return places // cap


def _filled(labels: Labels, apart: Rows) -> Labels:
    """Return labels without an empty cluster. Each gets the row farthest from its centre, among rows not alone in their cluster."""
    labels, k = labels.copy(), apart.shape[1]
    for empty in np.flatnonzero(np.bincount(labels, minlength=k) == 0).tolist():
        own = apart[np.arange(len(labels)), labels]
        alone = np.bincount(labels, minlength=k)[labels] == 1
        labels[np.where(alone, -1, own).argmax()] = empty
    return labels


Shares = NDArray[np.float64]
# prefixes of tensor names: of the run's model, and of the classifier on all encoders
MODEL, JOINT = "model.", "joint."
# travels both ways, float32 [KfC + C]
CLASSIFIER = components.CLASSIFIER
# sent down once, then kept on the client's disk: float32 [K, d - h], [K, b]
ENCODERS, STATISTICS = (
    components.ENCODERS,
    "encoder-statistics",
)


@dataclass(frozen=True)
class FedConcatParams:
    """Parameters of FedConcat, table `fedconcat`."""

    clusters: int = key(5, "Clusters of clients (K); each trains one encoder.", AT_LEAST_ONE)
    encoder_rounds: int = key(
        20,
        "Rounds that train encoders (R), fewer than `num-server-rounds`; authors: 50, then 1,000 for the classifier.",
        AT_LEAST_ONE,
        counts_rounds=True,
    )
    classifier_batches: int = key(
        3,
        "Batches on which a client trains the classifier in each later round; 0: E epochs.",
        NOT_NEGATIVE,
        trains_on=lambda batches, n, size: min(n, batches * size) if batches else n,
    )
    start: Literal["fresh", "concatenated"] = key(
        "fresh", "Initial classifier: drawn from the run's seed, or the clusters' classifiers side by side."
    )
    size_cap: int = key(0, "Most clients in a cluster; 0: any number.", NOT_NEGATIVE)

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for every setting that does not fit the run."""
        if self.encoder_rounds >= config.num_server_rounds:
            rule = f"must be below num-server-rounds ({config.num_server_rounds}), the classifier trains after them"
            yield UserError(key="fedconcat.encoder-rounds", rule=rule, value=self.encoder_rounds)
        if not config.report_class_counts:
            rule = "fedconcat clusters clients by their class counts, must be true"
            yield UserError(key="report-class-counts", rule=rule, value=False)
        if 0 < self.size_cap * self.clusters < config.num_clients:
            rule = f"must let {self.clusters} clusters hold {config.num_clients} clients"
            yield UserError(key="fedconcat.size-cap", rule=rule, value=self.size_cap)


# Kernels ----------------------------------------------------------------------------------------------------------------


def clusters(shares: ArrayLike, k: int, seed: int, cap: int = 0) -> NDArray[np.int64]:
    """Return each client's cluster, int64 [N], by k-means: the best of ten k-means++ starts.

    shares: [N, C], the share of each class in a client's labels; k: clusters, cut to the number of distinct rows; cap:
    most clients in a cluster, 0 for any number. If k clusters of that size cannot hold all clients, the cap rises as
    far as needed. Clusters are numbered by their lowest clients.
    """
    return kmeans(np.asarray(shares, np.float64), k, rng.generator(seed, "fedconcat"), cap)


def network(factory: ModelFactory, params: FedConcatParams) -> nn.Module:
    """Return a network with the run's model, `model`, and a classifier on K encoders of its kind, `joint`.

    `grown` selects the part that answers.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    class Growing(nn.Module):
        """The run's model, until `grown` (no or one module) holds encoders; then `joint` on these encoders."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            classes, width = head_slots(Layout.of(model))[0].shape
            self.model = model
            joint = {"weight": torch.zeros(classes, params.clusters * width), "bias": torch.zeros(classes)}
            self.joint = nn.ParameterDict({name: nn.Parameter(zeros) for name, zeros in joint.items()})
            # a list, so that the fixed encoders do not count as the module's own tensors
            self.grown: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            if not self.grown:
                answer: Tensor = self.model(x)
                return answer
            z: Tensor = self.grown[0](x)
            return functional.linear(z, self.joint["weight"][:, : z.shape[1]], self.joint["bias"])

    return Growing(factory(0))


def exported(make: Callable[[], nn.Module], names: frozenset[str]) -> nn.Module:
    """Return the concatenated network that has tensors of these names."""
    encoders = {name.split(".")[1] for name in names if name.startswith(f"{components.ENCODERS}.")}
    return components.concatenation([make() for _ in encoders])


def body(layout: Layout) -> frozenset[str]:
    """Return the names of an encoder's tensors within its model."""
    return shared(layout, None) - layout.classifier


def split(classifier: NDArray[Any], layout: Layout) -> tuple[Stack, Vector]:
    """Return the weight [C, Kf] and the bias [C] of a classifier [KfC + C]."""
    classes = head_slots(layout)[0].shape[0]
    return classifier[:-classes].reshape(classes, -1), classifier[-classes:]


def shared(layout: Layout, params: object) -> frozenset[str]:
    """Return the names of the run's model. Once there is a classifier on all encoders, it travels instead."""
    return frozenset(name for name in layout.names if name.startswith(MODEL))


# Halves -----------------------------------------------------------------------------------------------------------------


class FedConcat(PersonalizedStrategy[FedConcatParams]):
    """Server half. Kept per client: `cluster` int64 [1], and `equipped` bool [1], whether it has the encoders.

    Memory: `centres` float64 [K, C], `models` float32 [K, d] and `statistics` [K, b]; later `classifier` [KfC + C].
    """

    means = Means(RULES)
    late = Late(moved="in its second phase clients upload a classifier, which fedbuff does not move")
    # models of different clusters differ; classifiers trained on few batches lie apart: 3.1 times the usual distance was seen
    outliers = Outliers(tolerance=2.0, models=False, extras={"classifiers": CLASSIFIER})
    holds = Holds(models=True)

    def grown(self, round: int) -> bool:
        """Return whether the encoders are fixed in a round."""
        return max(self.state.round, round) > self.params.encoder_rounds

    def models(self, state: State) -> list[Model]:
        """Return the clusters' models; before clustering, a copy of the initial model for each possible cluster."""
        if "models" not in state.memory:
            return [state.model] * min(self.params.clusters, self.config.num_clients or self.params.clusters)
        return [
            Model(params, buffers)
            for params, buffers in zip(state.memory["models"], state.memory["statistics"], strict=True)
        ]

    def classifier(self) -> Vector:
        """Return the classifier on all encoders, or its initial values before it has been trained."""
        if CLASSIFIER in self.state.memory:
            return self.state.memory[CLASSIFIER]
        if self.params.start == "concatenated":
            return components.sum_of_classifiers(self.layout, self.models(self.state))
        return components.fresh_classifier(
            self.layout, len(self.models(self.state)), rng.torch_seed(self.config.seed, "model:fedconcat")
        )

    def encoders(self) -> tuple[Stack, Stack]:
        """Return all bodies, float32 [K, d - h], and their statistics [K, b]."""
        bodies = [self.layout.take(model, body(self.layout)) for model in self.models(self.state)]
        return np.stack([each.params for each in bodies]), np.stack([each.buffers for each in bodies])

    def shares_of(self, client_id: int, turn: Turn) -> Shares:
        """Return the share of each class in a connected client's labels, [C]; zeros if it reported no counts."""
        counts = client_facts(client_id, turn.declared.get(client_id, {})).get("class-counts")
        of_all = np.zeros(head_slots(self.layout)[0].shape[0]) if counts is None else np.array(counts, np.float64)
        shares: Shares = of_all / max(of_all.sum(), 1)
        return shares

    def cluster_of(self, state: State, client_id: int, turn: Turn) -> int:
        """Return a client's cluster: for a new client, the one with the nearest centre."""
        if client_id in state.clients:
            return int(state.clients[client_id]["cluster"][0])
        if "centres" not in state.memory:
            return 0
        return int(squared_distances(self.shares_of(client_id, turn)[None], state.memory["centres"]).argmin())

    def placed(self, state: State, turn: Turn) -> State:
        """Return the state in which all connected clients have a cluster. Before that, all clusters have the initial model."""
        new = [i for i in turn.connected if i not in state.clients and i in turn.declared]
        if not new or "centres" in state.memory:
            chosen = np.array([self.cluster_of(state, i, turn) for i in new])
            return state.next(clients=_kept(new, chosen, equipped=False))
        shares, p = np.stack([self.shares_of(i, turn) for i in new]), self.params
        chosen = clusters(shares, p.clusters, self.config.seed, p.size_cap)
        log.info("fedconcat: clients per cluster %s", np.bincount(chosen).tolist())
        centres, first = centres_of(shares, chosen), state.model
        stacks = {"models": first.params, "statistics": first.buffers}
        stacks = {name: np.tile(vector, (len(centres), 1)) for name, vector in stacks.items()}
        return state.next(clients=_kept(new, chosen, equipped=False), memory={"centres": centres, **stacks})

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the model of the client's cluster. Once the encoders are fixed, return the classifier in its place.

        A client that lacks the encoders is sent them, too.
        """
        if not self.grown(turn.round):
            return Sent(self.models(state)[self.cluster_of(state, client_id, turn)])
        mine = state.clients.get(client_id)
        if mine is not None and mine["equipped"][0]:
            return Sent(NOTHING, {CLASSIFIER: self.classifier()})
        bodies, statistics = self.encoders()
        return Sent(NOTHING, {CLASSIFIER: self.classifier(), ENCODERS: bodies, STATISTICS: statistics})

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: a model, later a classifier."""
        if not self.grown(turn.round):
            return super().form(state, turn)
        return Expected.of(NO_TENSORS, extras={CLASSIFIER: ("<f4", self.classifier().shape)})

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average models per cluster, weighted by samples; average classifiers without weights."""
        state = self.placed(state, turn)
        averaging, chosen = turn.average, np.array([self.cluster_of(state, i, turn) for i in uploads.ids])
        for client_id, k in zip(uploads.ids, chosen.tolist(), strict=True):
            turn.note(client_id, "cluster", k)
        if self.grown(turn.round):
            classifier = averaging.mean(uploads.extras[CLASSIFIER], uploads.once)
            return state.next(clients=_kept(uploads.ids, chosen, equipped=True), memory={CLASSIFIER: classifier})
        before, weights = self.models(state), self.weights(uploads)
        params = cluster_means(uploads.W, weights, chosen, np.stack([m.params for m in before]), averaging)
        buffers = cluster_means(uploads.B, weights, chosen, np.stack([m.buffers for m in before]), averaging)
        return state.next(memory={"models": params, "statistics": buffers})

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return all encoders and the classifier on them, once the encoders are fixed. No client has a model of its own."""
        if client_id is not None or not self.grown(self.state.round):
            return None
        bodies, statistics = self.encoders()
        return Model(np.concatenate([bodies.reshape(-1), self.classifier()]), statistics.reshape(-1))


def _kept(ids: list[int], chosen: NDArray[np.int64], *, equipped: bool) -> dict[int, dict[str, NDArray[Any]]]:
    """Return the arrays kept for clients of these clusters. equipped: whether they have the encoders."""
    return {i: {"cluster": np.array([k]), "equipped": np.array([equipped])} for i, k in zip(ids, chosen, strict=True)}


class FedConcatUpdate(LocalUpdate[FedConcatParams]):
    """Client half. State, once there is a classifier on all encoders: the encoders."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedConcatParams]) -> Model:
        """Return the cluster's model; or the new classifier, and let the network answer with the encoders."""
        module, trainer, layout = ctx.trainer.module, ctx.trainer, ctx.layout
        grown: Any = module.grown
        grown.clear()
        if CLASSIFIER not in ctx.extras:
            return super().merge(received, state, ctx)
        state.arrays.update({name: ctx.extras[name] for name in (ENCODERS, STATISTICS) if name in ctx.extras})
        weight, bias = split(ctx.extras[CLASSIFIER], layout)
        count = weight.shape[1] // head_slots(layout)[0].shape[1]
        # arrays of size 0 do not travel
        none = np.zeros((count, 0), np.float32)
        bodies = zip(*(state.arrays.get(name, none) for name in (ENCODERS, STATISTICS)), strict=True)
        start, names = ctx.initial(), body(layout)
        networks: list[Any] = [trainer.network(layout.put(start, Model(*each), names)) for each in bodies]
        grown.append(components.bodies_of([network.model for network in networks]))
        tensors = layout.tensors(start)
        joint = np.zeros_like(tensors[JOINT + "weight"])
        joint[:, : weight.shape[1]] = weight
        return layout.model({**tensors, JOINT + "weight": joint, JOINT + "bias": bias})

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedConcatParams]) -> Model:
        """Train the cluster's model, or the classifier."""
        if CLASSIFIER not in ctx.extras:
            return ctx.trainer.train(start, frozen=ctx.local)
        return ctx.trainer.train(start, frozen=ctx.shared, max_batches=ctx.params.classifier_batches)

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[FedConcatParams], epochs: int) -> Model:
        """Tune the part that trains in this phase."""
        frozen = ctx.shared if CLASSIFIER in ctx.extras else ctx.local
        return ctx.trainer.train(start, epochs=epochs, purpose="finetune", frozen=frozen)

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[FedConcatParams]) -> None:
        """Keep no trained tensor."""

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedConcatParams]) -> Upload:
        """Send the cluster's model, or the classifier."""
        if CLASSIFIER not in ctx.extras:
            return super().upload(before, after, state, ctx)
        return Upload(NOTHING, extras={CLASSIFIER: classifier_in(after, ctx)}, num_examples=ctx.num_samples)


def classifier_in(model: Model, ctx: RoundContext[FedConcatParams]) -> Vector:
    """Return the classifier within a model, float32 [KfC + C]."""
    tensors, width = ctx.layout.tensors(model), split(ctx.extras[CLASSIFIER], ctx.layout)[0].shape[1]
    return np.concatenate([tensors[JOINT + "weight"][:, :width].reshape(-1), tensors[JOINT + "bias"]])


def concatenated(server: FedConcat, layout: Layout) -> Layout:
    """Return the layout of the concatenated network."""
    return components.concatenated(components.part(server.full_layout, MODEL), len(server.models(server.state)))


def concatenated_model(model: Model, state: ClientState, ctx: RoundContext[FedConcatParams]) -> Model:
    """Return the cluster's model, or the concatenated one."""
    if CLASSIFIER not in ctx.extras:
        return ctx.layout.take(model, ctx.shared)
    bodies, statistics = (
        state.arrays.get(name, np.zeros(0, np.float32)).reshape(-1) for name in (ENCODERS, STATISTICS)
    )
    return Model(np.concatenate([bodies, classifier_in(model, ctx)]), statistics)


FIGURES = (
    Groups(
        "cluster", "Clusters of clients", "cluster", "Clients with similar labels, which train an encoder together."
    ),
)
METHOD = Method(
    "fedconcat",
    FedConcatParams,
    FedConcat,
    FedConcatUpdate,
    shared,
    compose=network,
    exported=Exported(exported, concatenated, concatenated_model),
    figures=FIGURES,
    needs_classes=True,
    needs_all="fedconcat puts clients into clusters by their label counts",
    not_private="it sends label counts, and its server groups clients by them",
    needs=LINEAR,
    overview=Overview(
        group="Several global models",
        travels="model; later classifier, and encoders down once",
        server="4K(d+b)",
        disk="4K(d−h+b)",
        epochs="E; later 3 batches",
        unseen="model of the cluster nearest by labels; later the concatenated one",
        use="clear label groups, one model for all at the end",
    ),
)
