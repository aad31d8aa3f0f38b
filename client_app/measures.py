"""What is measured of a model: accuracy on the test data; on the training data features and the Fisher information's diagonal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fl_app import rng
from fl_app.layout import Vector

if TYPE_CHECKING:
    from client_app.trainer import LocalTrainer

_GRADIENT_BYTES = 2**28  # of the per-sample gradients that are held at a time


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


def fisher(trainer: LocalTrainer, samples: int = 0) -> Vector:
    """Mean over training samples of (d log p(y|x) / d w)^2 at the loaded model, in its mode, float32 [d].

    samples: how many, drawn without replacement from the stream "fisher"; 0: all.
    """
    n = len(trainer.data.train_labels)
    chosen = np.arange(n)
    if 0 < samples < n:
        stream = rng.generator(trainer.config.seed, "fisher", trainer.round, trainer.client_id)
        chosen = np.sort(stream.choice(n, samples, replace=False))
    module = trainer.module
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def sample_loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(module, values, (x[None],))
        return cross_entropy(logits.float(), y[None])

    gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0))
    total = np.zeros(trainer.layout.d)
    step = max(1, min(len(chosen), _GRADIENT_BYTES // max(4 * trainer.layout.d, 1)))
    for start in range(0, len(chosen), step):
        x, y = trainer.samples(chosen[start : start + step])
        found = gradients(parameters, x, y)
        for slot in trainer.layout.params:
            squares = found[slot.name].double().square_().sum(0)
            total[slot.start : slot.stop] += squares.reshape(-1).cpu().numpy()
    mean: Vector = (total / max(len(chosen), 1)).astype(np.float32)
    return mean
