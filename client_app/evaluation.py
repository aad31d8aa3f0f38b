"""What is measured of a model: metrics on the test data; features, losses and gradient of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_app.errors import UserError
from fl_app.layout import Model, Vector
from fl_app.tasks import Task

if TYPE_CHECKING:
    from client_app.device_model import LoadedModel


@torch.no_grad()
def tested(trainer: LoadedModel, names: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the named metrics of the loaded model, in its mode, on the test data, of which there must be some.

    Raises UserError if the task does not measure what it names.
    """
    targets, task = trainer.data.test_labels, trainer.task
    loss = torch.zeros((), device=trainer.device, dtype=torch.float64)
    outputs = []
    for x, y in trainer.data.test():
        outputs.append(trainer.module(x).float())
        loss += task.total(outputs[-1], y).double()
    found = task.measure(torch.cat(outputs), targets, names)
    if missing := [name for name in names if name not in found]:
        raise UserError(f"task {trainer.config.task}: measure did not return {missing[0]}")
    return float(loss) / len(targets), {name: float(found[name]) for name in names}


@torch.no_grad()
def features(trainer: LoadedModel) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return (features float32 [n, f], labels int64 [n]) of the training data at the loaded model, in its mode."""
    pairs = [(trainer.forward(trainer.module, x)[0], y) for x, y in trainer.data.train()]
    return (torch.cat([z for z, _ in pairs]).cpu().numpy(), torch.cat([y for _, y in pairs]).cpu().numpy())


@torch.no_grad()
def sample_losses(
    trainer: LoadedModel, model: Model, samples: NDArray[np.int64] | None = None, module: nn.Module | None = None
) -> NDArray[np.float32]:
    """Return each training sample's loss at a model, in evaluation mode, float32 [n].

    samples: which ones, default all; module: what of the network gives the logits, default all of it.
    """
    trainer.showing(model)
    chosen = None if samples is None else torch.from_numpy(np.asarray(samples, np.int64)).to(trainer.device)
    logits = partial(trainer.logits, trainer.module if module is None else module)
    losses = [one_by_one(trainer.task, logits(x), y) for x, y in trainer.data.train(chosen)]
    return torch.cat(losses).cpu().numpy()


def one_by_one(task: Task, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the losses of a batch's samples, float32 [n]; outputs: float32 [n, ...]; y: the targets."""
    if task.cross_entropy:
        return cross_entropy(outputs, y, reduction="none")
    return torch.stack([task.loss(outputs[i : i + 1], y[i : i + 1]) for i in range(len(y))])


def loss_gradient(trainer: LoadedModel) -> Vector:
    """Return the gradient of the mean loss over the training data at the loaded model, in its mode, float32 [d]."""
    trainer.gradient.zero_()
    n = len(trainer.data.train_labels)
    for x, y in trainer.data.train():
        loss = trainer.task.total(trainer.logits(trainer.module, x), y) / n
        loss.backward()  # type: ignore[no-untyped-call]
    return trainer.vector(trainer.gradient)
