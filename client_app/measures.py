"""What is measured of a model: accuracy on the test data, features and gradient of the training data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from fl_app.layout import Vector

if TYPE_CHECKING:
    from client_app.trainer import LocalTrainer


@torch.no_grad()
def accuracy(trainer: LocalTrainer) -> tuple[float, float]:
    """Return (mean cross-entropy, accuracy) of the loaded model, in its mode, on the test data, of which there must be some."""
    n, device = len(trainer.data.test_labels), trainer.device
    loss = torch.zeros((), device=device, dtype=torch.float64)
    correct = torch.zeros((), device=device, dtype=torch.int64)
    for x, y in trainer.data.test():
        logits = trainer.module(x)
        loss += cross_entropy(logits, y, reduction="sum").double()
        correct += (logits.argmax(1) == y).sum()
    return float(loss) / n, int(correct) / n


@torch.no_grad()
def features(trainer: LocalTrainer) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return (features float32 [n, f], labels int64 [n]) of the training data at the loaded model, in its mode."""
    pairs = [(trainer.forward(trainer.module, x)[0], y) for x, y in trainer.data.train()]
    return (torch.cat([z for z, _ in pairs]).cpu().numpy(), torch.cat([y for _, y in pairs]).cpu().numpy())


def loss_gradient(trainer: LocalTrainer) -> Vector:
    """Return the gradient of the mean cross-entropy over the training data at the loaded model, in its mode, float32 [d]."""
    trainer.gradient.zero_()
    n = len(trainer.data.train_labels)
    for x, y in trainer.data.train():
        loss = cross_entropy(trainer.logits(trainer.module, x), y, reduction="sum") / n
        loss.backward()  # type: ignore[no-untyped-call]
    return trainer.vector(trainer.gradient)
