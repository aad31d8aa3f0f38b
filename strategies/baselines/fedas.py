"""FedAS: FedPer in which clients align the received body with their own features, and count by gradient information.

Yang, Huang, Ye: "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.

1. The client has its own last model v; at first it has none, and does not align. mu_c is the mean of the features under
   v of its training data of class c.
2. Alignment: `alignment-epochs` of plain SGD from the received body, on the sum over the batch's classes of the mean
   over samples and features of (z - mu_c)^2.
3. Then the client trains the body and its own classifier for E epochs.
4. F = sum over batches of ||gradient of the mean loss||^2, over all tensors, in evaluation mode. The client uploads the
   body and F.
5. The server sets the body to sum F_i w_i / sum F_j. The mean is uniform if all F are 0.

The client is evaluated with v.

Deviations:

- Every client aligns the body that was sent. The authors align the server's one object in place, so that each client
  continues from the client before.
- FL-bench compares class means, not samples with means, and takes the global classifier for the client's own.
- Alignment has no momentum or weight decay. It moves BatchNorm's statistics, as all training does.
- Statistics take the weights of the mean.

F grows with the number of batches, so that it weights by the amount of data too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    FEATURES,
    NOT_NEGATIVE,
    OWN_MODEL,
    POSITIVE,
    ClientState,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    Scalars,
    Upload,
    Uploads,
    WireError,
    all_but_classifier,
    key,
)
from strategies.baselines.fedavg import FedAvg
from strategies.kernels import capped

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
    """Return the weights of the clients' models, float64 [N] of sum 1: each client's share of all information.

    They are equal if there is no information. traces: [N], numbers >= 0.
    """
    given = np.asarray(traces, np.float64)
    total = given.sum()
    return given / total if total > 0 else np.full(len(given), 1 / len(given))


def prototypes(
    features: NDArray[np.floating[Any]], labels: NDArray[np.int64], num_classes: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the mean features of each class, float32 [C, f], and which classes have samples, bool [C].

    A class without samples has zeros. features: [n, f]. labels: int64 [n].
    """
    counts = np.bincount(labels, minlength=num_classes)
    sums = np.zeros((num_classes, features.shape[1]))
    np.add.at(sums, labels, features)
    return (sums / np.maximum(counts, 1)[:, None]).astype(np.float32), counts > 0


def alignment_loss(z: Tensor, y: Tensor, means: Tensor) -> Tensor:
    """Return the sum over the batch's classes of the mean over samples and features of (z - mean of the class)^2, a scalar.

    z: floating [n, f]. y: int64 [n]. means: [C, f], with every class of the batch.
    """
    counts = y.bincount(minlength=len(means))[y]
    return ((z - means[y]).square().mean(dim=1) / counts).sum()


class FedAS(FedAvg[FedASParams]):
    """Server half: bodies weighted by information."""

    def check(self, upload: Upload) -> None:
        """Raise WireError unless the information is a number >= 0."""
        value = upload.metrics.get(INFORMATION)
        if type(value) is not float or not 0 <= value < math.inf:
            raise WireError(f"{INFORMATION} must be a number >= 0, got {value!r}")

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return weights by information. `max-size-weight` bounds it like sample counts, because clients report it themselves."""
        traces = np.array([float(metrics[INFORMATION]) for metrics in uploads.metrics])
        if self.config.max_size_weight:
            traces = capped(traces, self.config.max_size_weight)
        return fisher_weights(traces) * uploads.once


class FedASUpdate(LocalUpdate[FedASParams]):
    """Client half. State: the client's whole own model."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Model:
        """Return the received body under the client's own classifier."""
        return ctx.layout.put(self.personal(ctx.initial(), state, ctx), received, ctx.shared)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Model:
        """Align, then train everything."""
        after = ctx.trainer.train(self.aligned(start, state, ctx))
        self.keep_personal(after, state)
        return after

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> None:
        """Store nothing more: the classifier is in the client's own model."""

    def aligned(self, start: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Model:
        """Return the received body after training towards the own model's features; unchanged if there is no own model."""
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
            rate = p.alignment_learning_rate * trainer.clip_factor(trainer.gradient)
            with torch.no_grad():
                trainer.weights.add_(trainer.gradient, alpha=-rate)
        return trainer.read()

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedASParams]) -> Upload:
        """Return the body and its information."""
        plain = super().upload(before, after, state, ctx)
        return replace(plain, metrics={**plain.metrics, INFORMATION: information(after, ctx)})


def information(model: Model, ctx: RoundContext[Any]) -> float:
    """Return the sum over batches of the squared norm of the mean loss's gradient.

    The batches are those of the training data, in order. The model is in evaluation mode.
    """
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
    not_private="its server weights models by a number that each client reports",
    needs=FEATURES,
    tested=OWN_MODEL,
    overview=Overview(
        group="A part of the model",
        travels="body both ways",
        stays="own model",
        disk="4(d+b)",
        epochs="E + 1, + F",
        unseen="global part, the rest initial",
        use="as fedper, clients that seldom take part",
    ),
)
