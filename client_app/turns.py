"""Training whose epochs alternate between sides of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_app.layout import Model

if TYPE_CHECKING:
    from client_app.trainer import LocalTrainer


def alternate(trainer: LocalTrainer, start: Model, sides: Mapping[str, NDArray[np.bool_]], epochs: int) -> Model:
    """Run `epochs` times an epoch on every side, by SGD, and return the trained model.

    sides: what is frozen, bool [d] in named_parameters order, by the purpose that names the side's random stream. Momentum is
    a side's own, over all its epochs.
    """
    trainer.load(start)
    trainer.train_mode()
    trainer.steps = trainer.epoch = 0
    parameters = list(trainer.module.parameters())
    optimizers, differentiated = {}, {}
    for purpose, frozen in sides.items():
        optimizers[purpose] = trainer.optimizer(trainer.weights, still=trainer.flat.hold(frozen))
        differentiated[purpose] = [parameter.requires_grad for parameter in parameters]
    for purpose, batch in trainer.data.turns(epochs, sides):
        if batch.first:
            for parameter, needed in zip(parameters, differentiated[purpose], strict=True):
                parameter.requires_grad_(needed)
        x, y = trainer.opened(batch)
        trainer.differentiate(x, y)
        optimizers[purpose].step(trainer.gradient, trainer.learning_rate)
        trainer.steps += 1
    trainer.check_loss()
    return trainer.trained()
