"""IFCA: several global models; every client trains the one that already fits its data best.

Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020. Later papers
call it ClusterFL, the clustering by losses; `cfl` clusters by gradients.

There are K models with different initial draws. Client: it receives all of them and takes the one of least mean
training loss, in evaluation mode, the first in a tie. It trains this model for E epochs, and sends it with its number.
Server: the mean per model over the clients that chose it, weighted by samples. A model that no client chose stays. The
client is evaluated with the model of least training loss. K = 1 is FedAvg, bit for bit.

Deviations:

- Means are weighted by samples, as in the authors' FEMNIST code. Their MNIST code takes the plain mean.
- Their MNIST test picks the model by test loss. Ours never sees test data, as their FEMNIST test.
- `share-body`: one body under K classifiers, the paper's remark on weight sharing. The body is averaged over all
  clients.
- A model can starve, so sizes are logged.
- Models from one file of initial weights would be equal, so they are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    AT_LEAST_ONE,
    FEATURES,
    ClientState,
    Expected,
    Exported,
    Groups,
    LocalUpdate,
    Method,
    Model,
    ModelFactory,
    Outliers,
    Overview,
    RoundContext,
    State,
    Turn,
    Upload,
    Uploads,
    WireError,
    all_tensors,
    key,
    log,
)
from strategies.baselines import components
from strategies.baselines.fedavg import FedAvg
from strategies.kernels import PLAIN, Averaging

if TYPE_CHECKING:
    from torch import nn

CLUSTER = "cluster"  # up, int32 [1]: which model


@dataclass(frozen=True)
class IFCAParams:
    """Parameters of IFCA, table `ifca`."""

    clusters: int = key(4, "Models that clients choose from (K); authors: 2 to 4.", AT_LEAST_ONE)
    share_body: bool = key(False, "One body for all, and K classifiers on it.")


def cluster_means(
    W: NDArray[np.floating[Any]],
    sizes: ArrayLike,
    chosen: ArrayLike,
    models: NDArray[np.floating[Any]],
    averaging: Averaging = PLAIN,
) -> NDArray[np.floating[Any]]:
    """Return the next models, [K, d]: the mean over the clients that chose each, weighted by sizes.

    W: [N, d], trained models; sizes: [N]; chosen: [N], each client's choice in 0..K-1; models: [K, d], before, kept
    where no client chose; averaging: the rule for the means.
    """
    means = np.array(models, dtype=np.result_type(np.asarray(models).dtype, np.float32))
    stack, weights, which = np.asarray(W), np.asarray(sizes, np.float64), np.asarray(chosen)
    for k in np.unique(which).tolist():
        rows = which == k
        means[k] = averaging.among(rows).mean(stack if rows.all() else stack[rows], weights[rows])
    return means


def network(factory: ModelFactory, params: IFCAParams) -> nn.Module:
    """Return K models, or one body under K classifiers. The attribute `chosen` of `switch` selects which answers."""
    if params.share_body:
        return components.classifiers_of(factory, params.clusters)
    return components.chosen_of([factory(k) for k in range(params.clusters)])


def switch(module: nn.Module) -> Any:
    """Return the part of the network that has `chosen`."""
    return next(part for part in module.modules() if hasattr(part, "chosen"))


class IFCA(FedAvg[IFCAParams]):
    """Server half: its global model holds all models side by side."""

    # clients of different clusters send different models
    outliers = Outliers(tolerance=math.inf)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: one of the models, and its number."""
        return Expected.of(components.alone(self.layout, 0), extras={CLUSTER: ("<i4", (1,))})

    def check(self, upload: Upload) -> None:
        """Raise WireError if the choice is none of the models."""
        chosen = int(upload.extras[CLUSTER][0])  # type: ignore[call-overload]
        if not 0 <= chosen < self.params.clusters:
            raise WireError(f"{CLUSTER} must be in 0..{self.params.clusters - 1}, got {chosen}")

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average per model; average a shared body over all clients."""
        layout, chosen, averaging = self.layout, uploads.extras[CLUSTER][:, 0], turn.average
        names = [components.tensors_of(layout, k) for k in range(self.params.clusters)]
        models = [layout.take(state.model, own) for own in names]
        weights = self.weights(uploads)
        params = cluster_means(uploads.W, weights, chosen, np.stack([m.params for m in models]), averaging)
        buffers = cluster_means(uploads.B, weights, chosen, np.stack([m.buffers for m in models]), averaging)
        if self.params.share_body:
            one = layout.subset(names[0])
            body = frozenset(name for name in one.names if components.component_of(name) is None)
            everybody = Model(averaging.mean(uploads.W, weights), averaging.mean(uploads.B, weights))
            mixed = [
                one.put(Model(p, b), one.take(everybody, body), body) for p, b in zip(params, buffers, strict=True)
            ]
        else:
            mixed = [Model(p, b) for p, b in zip(params, buffers, strict=True)]
        whole = state.model
        for own, model in zip(names, mixed, strict=True):
            whole = layout.put(whole, model, own)
        for client_id, k in zip(uploads.ids, chosen.tolist(), strict=True):
            turn.note(client_id, "cluster", k)
        sizes = np.bincount(chosen, minlength=self.params.clusters).tolist()
        log.info("round %d: ifca: clients per model %s", turn.round, sizes)
        turn.note_round("cluster-sizes", sizes)
        return state.next(whole)

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return the model if there is only one."""
        return models(self)[0] if client_id is None and self.params.clusters == 1 else None


def models(server: IFCA) -> list[Model]:
    """Return the K models."""
    layout = server.layout
    return [layout.take(server.state.model, components.tensors_of(layout, k)) for k in range(server.params.clusters)]


class IFCAUpdate(LocalUpdate[IFCAParams]):
    """Client half. It keeps nothing."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Model:
        """Choose the model of least training loss, which answers from this call on; return all models."""
        part, trainer = switch(ctx.trainer.module), ctx.trainer
        losses = []
        for k in range(ctx.params.clusters if ctx.params.clusters > 1 else 0):
            part.chosen = k
            losses.append(trainer.sample_losses(received).mean(dtype=np.float64))
        # a diverged model counts as the worst
        part.chosen = int(np.argmin(np.nan_to_num(losses, nan=np.inf))) if losses else 0
        return received

    def others(self, ctx: RoundContext[IFCAParams]) -> frozenset[str]:
        """Return the names of the tensors of the models that were not chosen."""
        return ctx.layout.names - components.tensors_of(ctx.layout, switch(ctx.trainer.module).chosen)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Model:
        """Train the chosen model."""
        return ctx.trainer.train(start, frozen=self.others(ctx))

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[IFCAParams], epochs: int) -> Model:
        """Tune the chosen model."""
        return ctx.trainer.train(start, epochs=epochs, purpose="finetune", frozen=self.others(ctx))

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Upload:
        """Send the chosen model and its number."""
        plain = super().upload(before, after, state, ctx)
        chosen = np.array([switch(ctx.trainer.module).chosen], np.int32)
        return replace(plain, model=chosen_model(after, state, ctx), extras={CLUSTER: chosen})


def chosen_model(model: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Model:
    """Return the chosen model alone."""
    return ctx.layout.take(model, components.tensors_of(ctx.layout, switch(ctx.trainer.module).chosen))


FIGURES = (Groups("cluster", "Clusters of clients", "cluster", "The model that each client chose."),)
METHOD = Method(
    "ifca",
    IFCAParams,
    IFCA,
    IFCAUpdate,
    all_tensors,
    compose=network,
    side_by_side=lambda params: 0 if params.share_body else params.clusters,
    figures=FIGURES,
    not_private="its clients upload the number of the model that they train",
    needs=lambda params: FEATURES if params.share_body else "",
    exported=Exported(layout=lambda server, layout: components.alone(layout, 0), model=chosen_model, choices=models),
    overview=Overview(
        group="Several global models",
        travels="one up, K down",
        server="4K(d+b)",
        epochs="E, + K forward",
        unseen="all models; it keeps the one with the least training loss",
        use="few clear groups, clients that seldom take part",
    ),
)
