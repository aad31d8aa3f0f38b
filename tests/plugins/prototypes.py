"""A method with server memory and download extras: clients' classifiers learn from everybody's mean features per class.

The server keeps in its memory, per class, the mean of the clients' mean features, weighted by samples and smoothed over the rounds,
and sends it beside the model. A client adds weight times the squared distance of its samples' features to their class's mean, for
the classes that have one, and sends sums and counts of its features in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corolla.method import (
    BELOW_ONE,
    NOT_NEGATIVE,
    ClientState,
    Expected,
    FedAvg,
    LocalUpdate,
    Method,
    Model,
    RoundContext,
    Upload,
    Uploads,
    all_tensors,
    key,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Params:
    """Table `prototypes`."""

    weight: float = key(0.1, "Weight of the distance to the class's mean features.", NOT_NEGATIVE)
    smoothing: float = key(0.5, "Part of the means that stays from round to round.", BELOW_ONE)


class Prototypes(FedAvg[Params]):
    """Server half."""

    def shape(self) -> tuple[int, int]:
        """Classes and features, from the classifier's weight [C, f]."""
        classes, features = next(s.shape for s in self.full_layout.params if s.name in self.full_layout.classifier)
        return classes, features

    def expected(self) -> Expected:
        """Sums and counts beside the model."""
        classes, features = self.shape()
        extras = {"sums": ("<f4", (classes, features)), "counts": ("<i8", (classes,))}
        return dataclasses.replace(super().expected(), extras=extras)

    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """The means, zeros and unseen at first."""
        classes, features = self.shape()
        return {
            "means": self.memory.get("means", np.zeros((classes, features), np.float32)),
            "seen": self.memory.get("seen", np.zeros(classes, np.uint8)),
        }

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Average the models and move the means."""
        super().personalize(round, uploads)
        counts = uploads.extras["counts"].sum(0)
        new = uploads.extras["sums"].astype(np.float64).sum(0) / np.maximum(counts, 1)[:, None]
        before = self.download_extras(0)
        part = np.where(before["seen"] == 1, self.params.smoothing, 0)[:, None]
        mixed = part * before["means"] + (1 - part) * new
        self.memory["means"] = np.where(counts[:, None] > 0, mixed, before["means"]).astype(np.float32)
        self.memory["seen"] = (before["seen"] | (counts > 0)).astype(np.uint8)
        self.note_round("classes-seen", int(self.memory["seen"].sum()))


class PrototypesUpdate(LocalUpdate[Params]):
    """Client half."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[Params]) -> Model:
        """Pull features towards the means that were sent."""
        import torch

        means, seen = (torch.tensor(ctx.extras[name], device=ctx.trainer.weights.device) for name in ("means", "seen"))

        def objective(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            features, logits = ctx.trainer.forward(module, x)
            distance = ((features - means[y]) ** 2).mean(1) * seen[y]
            return ctx.trainer.loss(logits, y) + ctx.params.weight * distance.mean()

        return ctx.trainer.train(start, objective=objective if ctx.params.weight else None)

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[Params]) -> Upload:
        """Add sums of features and counts per class."""
        features, labels = ctx.trainer.features(after)
        counts = ctx.trainer.class_counts
        sums = np.zeros((len(counts), features.shape[1]), np.float32)
        np.add.at(sums, labels, features)
        return dataclasses.replace(super().upload(before, after, state, ctx), extras={"sums": sums, "counts": counts})


METHOD = Method("prototypes", Params, Prototypes, PrototypesUpdate, all_tensors)
