"""FedMA: neurons of the clients' networks are matched before they are averaged, layer by layer.

Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni: "Federated Learning with Matched Averaging", ICLR 2020.

The hidden units of a layer have no order of their own: two networks that compute the same may have them in other places.
A pass has a round per layer, from the first. In the round of layer n clients train layer n and those above;
the layers below are global and fixed. From the uploads the server finds for each client j a permutation of layer n's
units, so that matched units have similar weights. It permutes the units and the inputs of layer n + 1, and averages layer
n. Each client receives the global layers up to n, and above them its own. In the classifier's round, whose units are the
classes, all layers are averaged. Then the next pass begins.

Averages are unweighted, except the classifier's. Its row of class c weighs client j by the samples n_jc of the class:

    w_c = sum_j n_jc w_jc / sum_j n_jc

A pass keeps the clients that are drawn for it. `one_shot = true` matches all layers from the first to the last in every
round, and averages them: no client trains under fixed layers, and every round draws its clients.

The permutations maximise the sum of squared lengths of the sums of matched units, over clients. Each is found with the
others fixed, by the Hungarian algorithm, in turn until none changes. This is the paper's maximum a posteriori matching
with as many global units as a client has.

Deviations:

- The global network has the clients' width. The paper's may grow: a unit that resembles no other becomes a new one.
- `mean = samples` weighs all averages by the clients' samples. So does a task without classes. A class's row is averaged
  without weights if no client of the round has the class.
- A unit's vector has its bias, and the scale and shift of its normalisation. BatchNorm's statistics move with it.
- A client that misses a round of the pass continues from the mean of the others' permuted networks. If clients come or go
  within a pass, its clients are drawn anew.
- A run may end within a pass, with a warning. It then has no global model.
- Networks are chains of Linear layers, convolutions and normalisation. Others, such as residual ones, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import tasks
from strategies.base import (
    LINEAR,
    ClientState,
    Expected,
    Holds,
    Late,
    Layout,
    LocalUpdate,
    Method,
    Model,
    ModelFactory,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    RunConfig,
    Sent,
    Slot,
    State,
    Turn,
    Upload,
    Uploads,
    all_tensors,
    key,
    log,
    models_by_client,
    unfit,
)
from strategies.baselines.fedproto import COUNTS, check_counts
from strategies.kernels import weighted_mean

if TYPE_CHECKING:
    from torch import nn

Floats = NDArray[np.floating[Any]]
# turns over all clients, at most
_TURNS = 50
_CHAIN = "a chain of layers"


@dataclass(frozen=True)
class FedMAParams:
    """Parameters of FedMA, table `fedma`."""

    one_shot: bool = key(False, "Match and average all layers in every round, in place of a layer per round.")
    mean: Literal["classes", "samples"] = key(
        "classes",
        "Averages: without weights, a class's row of the classifier by its samples (paper), or all weighted by samples.",
    )


@dataclass(frozen=True)
class Layer:
    """A layer of a chain: its weight, other tensors with a number per unit, and buffers with a number per unit."""

    weight: Slot
    others: tuple[Slot, ...] = ()
    buffers: tuple[Slot, ...] = ()

    @property
    def units(self) -> int:
        """Number of the layer's units."""
        return self.weight.shape[0]

    @property
    def names(self) -> frozenset[str]:
        """Names of the layer's tensors."""
        return frozenset(slot.name for slot in (self.weight, *self.others, *self.buffers))


def chain_of(layout: Layout) -> list[Layer]:
    """Return a network's layers, from the first to the classifier. Raises UserError if its tensors are no chain's."""
    chain: list[Layer] = []
    for slot in layout.params:
        if len(slot.shape) >= 2:
            if chain and slot.shape[1] % chain[-1].units:
                raise unfit(_CHAIN, f"{slot.name} has {slot.shape[1]} inputs, the layer below {chain[-1].units} units")
            chain.append(Layer(slot))
        elif chain and slot.shape == (chain[-1].units,):
            chain[-1] = Layer(chain[-1].weight, (*chain[-1].others, slot))
        else:
            raise unfit(
                _CHAIN, f"{slot.name} has the shape {list(slot.shape)}, which is no number per unit of a layer below"
            )
    for buffer in layout.buffers:
        module = buffer.name.rpartition(".")[0]
        owner = [k for k, layer in enumerate(chain) if any(s.name.rpartition(".")[0] == module for s in layer.others)]
        if not owner or buffer.shape != (chain[owner[0]].units,):
            raise unfit(_CHAIN, f"{buffer.name} belongs to no layer")
        layer = chain[owner[0]]
        chain[owner[0]] = Layer(layer.weight, layer.others, (*layer.buffers, buffer))
    if len(chain) < 2 or chain[-1].weight.name not in layout.classifier:
        raise unfit(_CHAIN, "its last layer must be its classifier, above another layer")
    return chain


def match(weights: Sequence[ArrayLike]) -> NDArray[np.int64]:
    """Return a permutation of each client's units, int64 [N, L]: weights[j][found[j]] are in the common order.

    weights: N arrays [L, d], a row per unit. The first client's permutation is a start only; all may change. No single
    permutation can increase the sum over units of ||sum_j w_j||^2 any more. Work is in float64. Raises ValueError
    unless all have one shape.
    """
    from scipy.optimize import linear_sum_assignment

    stacks = [np.asarray(each, np.float64) for each in weights]
    if not stacks or any(each.ndim != 2 or each.shape != stacks[0].shape for each in stacks):
        raise ValueError(f"weights must be arrays of one shape [L, d], got {[each.shape for each in stacks]}")
    n, units = len(stacks), len(stacks[0])
    found = np.tile(np.arange(units), (n, 1))
    total = stacks[0].copy()
    for j in range(1, n):
        found[j] = linear_sum_assignment(total @ stacks[j].T, maximize=True)[1]
        total += stacks[j][found[j]]
    for _ in range(_TURNS):
        changed = False
        for j in range(n):
            rest = total - stacks[j][found[j]]
            gains = rest @ stacks[j].T
            better = linear_sum_assignment(gains, maximize=True)[1]
            rows = np.arange(units)
            if gains[rows, better].sum() > gains[rows, found[j]].sum() * (1 + 1e-12) + 1e-12:
                found[j], changed = better, True
                total = rest + stacks[j][better]
        if not changed:
            break
    return found


def units_of(chain: Sequence[Layer], k: int, params: Floats) -> NDArray[np.float64]:
    """Return the vectors of a layer's units, float64 [L, d]: incoming weights, bias, scale and shift. k: the layer."""
    layer = chain[k]
    slots = (layer.weight, *layer.others)
    parts = [params[slot.start : slot.stop].reshape(layer.units, -1) for slot in slots]
    return np.concatenate(parts, axis=1).astype(np.float64)


def permuted(chain: Sequence[Layer], k: int, model: Model, order: NDArray[np.int64]) -> Model:
    """Return a model with the units of hidden layer k in another order: it computes the same.

    order: int64 [L]; unit i of the result is unit order[i] of the model.
    """
    params, buffers = model.params.copy(), model.buffers.copy()
    layer, above = chain[k], chain[k + 1].weight
    for slot in (layer.weight, *layer.others):
        own = params[slot.start : slot.stop].reshape(layer.units, -1)
        own[:] = own[order]
    for slot in layer.buffers:
        buffers[slot.start : slot.stop] = buffers[slot.start : slot.stop][order]
    inputs = params[above.start : above.stop].reshape(above.shape[0], layer.units, -1)
    inputs[:] = inputs[:, order]
    return Model(params, buffers)


def class_means(rows: ArrayLike, counts: ArrayLike) -> NDArray[np.float64]:
    """Return the means of the classes' rows over clients, float64 [C, k]: client j weighs n_jc / sum_j n_jc in row c.

    rows: [N, C, k]. counts: [N, C], training samples n_jc; a class without samples has the unweighted mean.
    """
    n = np.asarray(counts, np.float64)
    n = np.where(n.sum(axis=0) > 0, n, 1)
    means: NDArray[np.float64] = np.einsum("nck,nc->ck", np.asarray(rows, np.float64), n / n.sum(axis=0))
    return means


def weighs_classes(config: RunConfig) -> bool:
    """Return whether a run averages the classifier by the classes' samples, and clients send these counts."""
    return bool(config.params.mean == "classes" and tasks.of(config).has_classes)


class FedMA(PersonalizedStrategy[FedMAParams]):
    """Server half. Kept within a pass, per client: its next model, `params` and `buffers`."""

    late = Late(never="a round has a layer, and late uploads have another round's order of units")
    # the stacks: the permuted models, one by one and together
    holds = Holds(models=True, made=2)

    @cached_property
    def chain(self) -> list[Layer]:
        """Return the network's layers."""
        return chain_of(self.layout)

    def summary(self) -> None:
        """Log the run's settings; warn if the run ends within a pass."""
        super().summary()
        rounds, layers = self.config.num_server_rounds, len(self.chain)
        if rounds % layers and not self.params.one_shot:
            log.warning(
                "num-server-rounds: fedma has a round for each of the model's %d layers, and no global model within a pass; "
                "take a multiple of %d, got %d",
                layers,
                layers,
                rounds,
            )

    def sample_clients(self, state: State, client_ids: list[int], turn: Turn) -> list[int]:
        """Return the round's clients: a pass has one draw."""
        return self.drawn(client_ids, turn.round if self.params.one_shot else 1 + (turn.round - 1) // len(self.chain))

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the model, and the class counts if the classifier's mean needs them."""
        counts = {COUNTS: ("<i8", (self.chain[-1].units,))} if weighs_classes(self.config) else {}
        return replace(super().form(state, turn), extras=counts)

    def check(self, upload: Upload) -> None:
        """Raise WireError for counts that cannot be the client's."""
        if weighs_classes(self.config):
            check_counts(upload)

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the client's model of the pass: global layers below its own; else the mean of these."""
        return Sent(state.model_of(client_id))

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Match the round's layer, or all, and average."""
        models = [Model(w, b) for w, b in zip(uploads.W, uploads.B, strict=True)]
        last = len(self.chain) - 1
        at = position(turn.round, self.chain)
        hidden = range(last) if self.params.one_shot else range(at, min(at + 1, last))
        for k in hidden:
            orders = match([units_of(self.chain, k, model.params) for model in models])
            models = [permuted(self.chain, k, model, order) for model, order in zip(models, orders, strict=True)]
        mean = self.mean(models, uploads)
        if self.params.one_shot or at == last:
            return replace(state, model=mean, clients={})
        # the layers up to this one are global, those above are each client's own
        names = frozenset[str]().union(*(layer.names for layer in self.chain[: at + 1]))
        common = self.layout.take(mean, names)
        own = {i: self.layout.put(model, common, names) for i, model in zip(uploads.ids, models, strict=True)}
        kept = models_by_client(list(own), *zip(*((m.params, m.buffers) for m in own.values()), strict=True))
        return replace(state, model=mean, clients=kept)

    def mean(self, models: list[Model], uploads: Uploads) -> Model:
        """Return the mean of the permuted models."""
        W, B = np.stack([m.params for m in models]), np.stack([m.buffers for m in models])
        if not weighs_classes(self.config):
            weights = self.weights(uploads)
            return Model(weighted_mean(W, weights), weighted_mean(B, weights))
        params, last = weighted_mean(W), self.chain[-1]
        for slot in (last.weight, *last.others):
            rows = W[:, slot.start : slot.stop].reshape(len(W), last.units, -1)
            params[slot.start : slot.stop] = class_means(rows, uploads.counts(COUNTS)).reshape(-1)
        return Model(params, weighted_mean(B))

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return a client's model, and after a full pass the global one.

        Within a pass the layers above the last round's are each client's own.
        """
        passed = self.params.one_shot or (self.state.round > 0 and self.state.round % len(self.chain) == 0)
        return None if client_id is None and not passed else super().exported(client_id)


def position(round: int, chain: Sequence[Layer]) -> int:
    """Return the layer of a round, counted from 1: 0 in the first round of each pass."""
    return (round - 1) % len(chain)


class FedMAUpdate(LocalUpdate[FedMAParams]):
    """Client half: it trains the layers from the round's on. It keeps nothing."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedMAParams]) -> Model:
        """Train under the fixed global layers."""
        chain = chain_of(ctx.layout)
        at = 0 if ctx.params.one_shot else position(ctx.round, chain)
        return ctx.trainer.train(start, frozen=frozenset[str]().union(*(layer.names for layer in chain[:at])))

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedMAParams]) -> Upload:
        """Send the model, and the class counts if the classifier's mean needs them."""
        plain = super().upload(before, after, state, ctx)
        if not weighs_classes(ctx.config):
            return plain
        return replace(plain, extras={COUNTS: ctx.trainer.class_counts})


def checked(factory: ModelFactory, params: FedMAParams) -> nn.Module:
    """Return the run's model. Raises UserError unless its hidden units can change places without any effect."""
    import torch

    from fl_app import weights

    module = factory(0)
    layout, own = Layout.of(module), weights.read(module)
    chain, draw = chain_of(layout), np.random.default_rng(0)
    other = own
    for k in range(len(chain) - 1):
        other = permuted(chain, k, other, draw.permutation(chain[k].units))
    x = torch.from_numpy(draw.normal(size=(4, *factory.inputs)).astype(np.float32))
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            before = module(x)
            weights.write(module, other)
            same = torch.allclose(before, module(x), rtol=1e-3, atol=1e-4)
    except Exception as error:
        raise unfit(_CHAIN, f"it does not take numbers ({type(error).__name__})") from None
    finally:
        weights.write(module, own)
        module.train(training)
    if not same:
        raise unfit(_CHAIN, "its outputs change if the units of its hidden layers change places")
    return module


METHOD = Method(
    "fedma",
    FedMAParams,
    FedMA,
    FedMAUpdate,
    all_tensors,
    compose=checked,
    needs_all_layers="matches the units of all layers",
    not_private="its server matches single clients' models",
    needs=LINEAR,
    overview=Overview(
        group="One global model for all",
        travels="model; up + 8C",
        server="4(d+b) a client, within a pass",
        use="few rounds of long local training, plain networks",
    ),
)
