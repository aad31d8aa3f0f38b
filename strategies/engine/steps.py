"""Steps between a round's uploads and the method, and after it: two lists that a run's config makes.

Outlier screening (screening.py) comes before them: it sees the uploads where they were collected, and remembers earlier rounds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fl_app.config import RunConfig
from fl_app.layout import Model
from strategies.base.declared import CHANGE_MODEL, declares_means
from strategies.base.server_half import ServerHalf
from strategies.base.state import State, StepAfter, StepBefore, UploadBuffer, Uploads
from strategies.kernels import afo
from strategies.kernels.robust import capped

# the beginning of the names of the server optimizer's moments in `memory`
_NAMES = "server-optimizer."


def before(config: RunConfig) -> list[StepBefore]:
    """Return the steps that change a round's uploads before the method sees them, in their order."""
    found: list[StepBefore] = []
    if config.max_size_weight:
        found.append(partial(_bounded, config.max_size_weight))
    if config.staleness:
        found.append(_aged)
    return found


def after(config: RunConfig) -> list[StepAfter]:
    """Return the steps that change the models that the method has made, in their order."""
    return [] if config.server_optimizer == "none" else [partial(_moved, config)]


def _bounded(factor: float, uploads: Uploads, buffer: UploadBuffer) -> Uploads:
    """Bound each client's number of samples in means by a factor times the round's median (key `max-size-weight`)."""
    sizes = capped(uploads.sizes, factor)
    bounded = np.divide(sizes, uploads.sizes, out=np.ones_like(sizes), where=uploads.sizes > 0)
    return replace(uploads, sizes=sizes, bounded=bounded)


def _aged(uploads: Uploads, buffer: UploadBuffer) -> Uploads:
    """Let the weights of late uploads shrink with their age (key `staleness-decay`)."""
    if not buffer.factors:
        return uploads
    factors = np.array([buffer.factors.get(i, 1.0) for i in uploads.ids])
    return replace(uploads, sizes=uploads.sizes * factors, factors=factors)


def _moved(c: RunConfig, before: State, after: State) -> State:
    """Move the global model from the sent one towards the mean that the method has set (key `server-optimizer`).

    The moments are in `memory`. Statistics stay the mean's.
    """
    params, moments = afo.server_step(
        before.model.params,
        after.model.params,
        {name: before.memory[_NAMES + name] for name in ("m", "v") if _NAMES + name in before.memory},
        kind=c.server_optimizer,
        learning_rate=c.server_learning_rate or (afo.MOMENTUM if c.server_optimizer == "momentum" else afo.ADAPTIVE),
        beta1=c.server_beta1,
        beta2=c.server_beta2,
        tau=c.server_tau,
    )
    kept = {_NAMES + name: moment for name, moment in moments.items()}
    return after.next(Model(params, after.model.buffers), memory=kept)


def moves_mean(half: type[ServerHalf[Any]]) -> bool:
    """Return whether a method declares `Means.sets_model`, and no later override may set another model."""
    # FedAvg[Params] is FedAvg
    return half.means.sets_model and declares_means(getattr(half, "__origin__", half), *CHANGE_MODEL)
