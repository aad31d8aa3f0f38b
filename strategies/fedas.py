"""FedAS: FedPer whose clients align what they receive with their own features, and count by their gradients' information.

Yang, Huang, Ye: "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.

Client, with its own last model v (none at first: no alignment): mu_c, the mean features under v of its training data of class c;
then from the received body `alignment-epochs` of plain SGD on sum over the batch's classes of the mean over samples and features
of (z - mu_c)^2; then E epochs of body and own classifier. F = sum over batches of ||gradient of the mean loss||^2, all tensors,
in evaluation mode. It uploads the body and F. Server: sum F_i w_i / sum F_j, uniform where all are 0. The client is evaluated
with v.

Deviations: every client aligns the body that was sent (the authors align the server's one object in place, so that each client
goes on from the one before). FL-bench compares class means instead of samples with means, and takes the global classifier for the
own. Alignment has no momentum or weight decay, and moves BatchNorm's statistics as all training does; statistics take the weights
of the mean. F grows with the number of batches: it weighs by data too.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app.figures import Scalars
from fl_app.keys import NOT_NEGATIVE, POSITIVE, key
from fl_app.layout import Model
from fl_app.wire import Upload, WireError
from strategies.base import OWN_MODEL, ClientState, LocalUpdate, Method, RoundContext, Uploads, all_but_classifier
from strategies.fedavg import FedAvg
from strategies.robust import capped

if TYPE_CHECKING:
    from torch import Tensor, nn

INFORMATION = "fisher-trace"  # up, a number: F


@dataclass(frozen=True)
class FedASParams:
    """Parameters of FedAS, table `fedas`."""

    alignment_epochs: int = key(
        1, "Epochs of aligning the received body with the client's own features; 0: none.", NOT_NEGATIVE
    )
    alignment_learning_rate: float = key(0.01, "Learning rate of the alignment; never decays.", POSITIVE)


def fisher_weights(traces: ArrayLike) -> NDArray[np.float64]:
    """Weights of the clients' models, float64 [N] of sum 1: their share of all information; equal ones where there is none.

    traces: [N], numbers >= 0.
    """
    given = np.asarray(traces, np.float64)
    total = given.sum()
    return given / total if total > 0 else np.full(len(given), 1 / len(given))


def prototypes(
    features: NDArray[np.floating[Any]], labels: NDArray[np.int64], num_classes: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Mean features per class, float32 [C, f], 0 for those without samples, and which have any, bool [C].

    features: [n, f]; labels: int64 [n].
    """
    counts = np.bincount(labels, minlength=num_classes)
    sums = np.zeros((num_classes, features.shape[1]))
    np.add.at(sums, labels, features)
    return (sums / np.maximum(counts, 1)[:, None]).astype(np.float32), counts > 0


def alignment_loss(z: Tensor, y: Tensor, means: Tensor) -> Tensor:
    """Sum over the batch's classes of the mean over samples and features of (z - mean of the class)^2, a scalar.

    z: floating [n, f]; y: int64 [n]; means: [C, f], of every class in the batch.
    """
    counts = y.bincount(minlength=len(means))[y]
    return ((z - means[y]).square().mean(dim=1) / counts).sum()


class FedAS(FedAvg[FedASParams]):
    """Server half: bodies weighted by information."""

    def check(self, upload: Upload) -> None:
        """Information is a number >= 0."""
        value = upload.metrics.get(INFORMATION)
        if type(value) is not float or not 0 <= value < math.inf:
            raise WireError(f"{INFORMATION} must be a number >= 0, got {value!r}")

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """By information; `max-size-weight` bounds it as it does samples: it is a client's own word, too."""
        traces = np.array([float(metrics[INFORMATION]) for metrics in uploads.metrics])
        if self.config.max_size_weight:
            traces = capped(traces, self.config.max_size_weight)
        return fisher_weights(traces)


class FedASUpdate(LocalUpdate[FedASParams]):
    """Client half. State: the client's own model, whole."""

    @classmethod
    def tested(cls, params: FedASParams) -> str:
        """The client's own model."""
        return OWN_MODEL

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Model:
        """The received body under the client's own classifier."""
        return ctx.layout.put(self.personal(ctx.initial(), state, ctx), received, ctx.shared)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Model:
        """Align, then train everything."""
        after = ctx.trainer.train(self.aligned(start, state, ctx))
        self.keep_personal(after, state)
        return after

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> None:
        """Nothing more: the classifier is in the client's own model."""

    def aligned(self, start: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Model:
        """Train the received body towards the own model's features; as it is without one."""
        import torch

        p, trainer = ctx.params, ctx.trainer
        if "personal.params" not in state.arrays or not p.alignment_epochs:
            return start
        z, y = trainer.features(self.personal(start, state, ctx))
        means = torch.from_numpy(prototypes(z, y, len(trainer.class_counts))[0]).to(trainer.weights.device)

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return alignment_loss(trainer.forward(module, x)[0], y, means)

        trainer.load(start)
        for images, labels in trainer.batches(p.alignment_epochs, "fedas.alignment"):
            trainer.differentiate(images, labels, loss, counted=False)
            with torch.no_grad():
                trainer.weights.add_(trainer.gradient, alpha=-p.alignment_learning_rate)
        return trainer.read()

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Upload:
        """Send the body and its information."""
        plain = super().upload(before, after, state, ctx)
        return dataclasses.replace(plain, metrics={**plain.metrics, INFORMATION: information(after, ctx)})


def information(model: Model, ctx: RoundContext[Any]) -> float:
    """Sum over batches of the training data, in order, of the squared norm of the mean loss's gradient, in evaluation mode."""
    trainer, n, size = ctx.trainer, ctx.num_samples, ctx.config.batch_size
    trainer.load(model)
    trainer.module.eval()
    total = trainer.weights.new_zeros(()).double()
    for at in range(0, n, size):
        trainer.differentiate(*trainer.samples(np.arange(at, min(at + size, n))), counted=False)
        total += trainer.gradient.double().square().sum()
    return float(total)


FIGURES = (
    Scalars(
        INFORMATION, "Information of the clients' gradients", "trace", "Sum over batches of squared gradient norms."
    ),
)
METHOD = Method(
    "fedas",
    FedASParams,
    FedAS,
    FedASUpdate,
    all_but_classifier,
    figures=FIGURES,
    needs_classes=True,
    not_private="its server weights models by what each client reports of itself",
)
