"""IFCA: several global models; every client trains the one that already suits its data best.

Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020. (The clustering by losses
that later papers mean by ClusterFL; by gradients: `cfl`.)

K models of different initial draws. Client, on receiving all of them: takes the one of least mean training loss, in evaluation
mode (in a tie the first), trains it E epochs, sends it and which one it is. Server: mean per model weighted by samples over those
who chose it; a model nobody chose stays. The client is evaluated with the model of least training loss. K = 1 is FedAvg, bit for
bit.

Deviations: weighted by samples as in the authors' FEMNIST (MNIST: plain mean). Their MNIST test picks the model by test loss;
ours, as their FEMNIST, never sees test data. `share-body`: one body under K classifiers, the paper's remark on weight sharing;
the body is averaged over all. A model can starve: sizes are logged. Models from one file of initial weights would be equal, hence
refused.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app.figures import Groups
from fl_app.keys import AT_LEAST_ONE, key
from fl_app.layout import Layout, Model
from fl_app.wire import Expected, Upload, WireError
from strategies import components
from strategies.base import ClientState, Drawings, LocalUpdate, Method, RoundContext, Uploads, all_but_classifier
from strategies.fedavg import FedAvg
from strategies.robust import PLAIN, Averaging

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("corolla")

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
    """Next models [K, d]: the mean, weighted by sizes, over those who chose each; one that nobody chose stays.

    W: [N, d], trained models; sizes: [N]; chosen: [N], which one each is, in 0..K-1; models: [K, d], before; averaging: what
    replaces the means.
    """
    means = np.array(models, dtype=np.result_type(np.asarray(models).dtype, np.float32))
    stack, weights, which = np.asarray(W), np.asarray(sizes, np.float64), np.asarray(chosen)
    for k in np.unique(which).tolist():
        rows = which == k
        means[k] = averaging.among(rows).mean(stack if rows.all() else stack[rows], weights[rows])
    return means


def network(drawings: Drawings, params: IFCAParams) -> nn.Module:
    """K models, or one body under K classifiers, of which the attribute `chosen` of `switch` says which answers."""
    if params.share_body:
        return components.classifiers_of(drawings, params.clusters)
    return components.chosen_of([drawings(k) for k in range(params.clusters)])


def shared(layout: Layout, params: IFCAParams) -> frozenset[str]:
    """All tensors travel. Raises UserError for a model that cannot be split, where the body is to be shared."""
    if params.share_body:
        all_but_classifier(layout)
    return layout.names


def switch(module: nn.Module) -> Any:
    """The part of the network that has `chosen`."""
    return next(part for part in module.modules() if hasattr(part, "chosen"))


class IFCA(FedAvg[IFCAParams]):
    """Server half: all models are one, side by side."""

    # clients of different clusters send different models
    spread = math.inf

    def expected(self) -> Expected:
        """One of the models, and which."""
        return Expected.of(components.alone(self.layout, 0), extras={CLUSTER: ("<i4", (1,))})

    def check(self, upload: Upload) -> None:
        """The choice must be one of the models."""
        chosen = int(upload.extras[CLUSTER][0])  # type: ignore[call-overload]
        if not 0 <= chosen < self.params.clusters:
            raise WireError(f"{CLUSTER} must be in 0..{self.params.clusters - 1}, got {chosen}")

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Mean per model; a shared body's over all."""
        layout, chosen, averaging = self.layout, uploads.extras[CLUSTER][:, 0], self.averaging_of(uploads)
        names = [components.tensors_of(layout, k) for k in range(self.params.clusters)]
        models = [layout.take(self.global_model, own) for own in names]
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
        for own, model in zip(names, mixed, strict=True):
            self.global_model = layout.put(self.global_model, model, own)
        for client_id, k in zip(uploads.ids, chosen.tolist(), strict=True):
            self.note(client_id, "cluster", k)
        sizes = np.bincount(chosen, minlength=self.params.clusters).tolist()
        log.info("round %d: ifca: clients per model %s", round, sizes)
        self.note_round("cluster-sizes", sizes)

    def exported_layout(self, layout: Layout) -> Layout:
        """That of the user's own model."""
        return components.alone(layout, 0)

    def exported_global(self) -> Model:
        """The first model; asked for where it is the only one."""
        return self.layout.take(self.global_model, components.tensors_of(self.layout, 0))

    def has_global_model(self) -> bool:
        """Where there is one model."""
        return self.params.clusters == 1


class IFCAUpdate(LocalUpdate[IFCAParams]):
    """Client half; it keeps nothing."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Model:
        """Choose a model by its loss on the training data; from now on it is the one that answers."""
        part, trainer = switch(ctx.trainer.module), ctx.trainer
        losses = []
        for k in range(ctx.params.clusters if ctx.params.clusters > 1 else 0):
            part.chosen = k
            losses.append(trainer.sample_losses(received).mean(dtype=np.float64))
        # nobody follows what has diverged
        part.chosen = int(np.argmin(np.nan_to_num(losses, nan=np.inf))) if losses else 0
        return received

    def others(self, ctx: RoundContext[IFCAParams]) -> frozenset[str]:
        """Tensors of the models that were not chosen."""
        return ctx.layout.names - components.tensors_of(ctx.layout, switch(ctx.trainer.module).chosen)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Model:
        """Train the chosen model."""
        return ctx.trainer.train(start, frozen=self.others(ctx))

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[IFCAParams], epochs: int) -> Model:
        """Tune the chosen model."""
        return ctx.trainer.train(start, epochs=epochs, purpose="finetune", frozen=self.others(ctx))

    def export(self, model: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Model:
        """The chosen model alone."""
        return ctx.layout.take(model, ctx.layout.names - self.others(ctx))

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[IFCAParams]) -> Upload:
        """Send the chosen model, and which it is."""
        plain = super().upload(before, after, state, ctx)
        chosen = np.array([switch(ctx.trainer.module).chosen], np.int32)
        return dataclasses.replace(plain, model=self.export(after, state, ctx), extras={CLUSTER: chosen})


FIGURES = (Groups("cluster", "Clusters of clients", "cluster", "Which of the models a client chose."),)
METHOD = Method(
    "ifca",
    IFCAParams,
    IFCA,
    IFCAUpdate,
    shared,
    compose=network,
    figures=FIGURES,
    not_private="which model a client trains stands beside its upload",
)
