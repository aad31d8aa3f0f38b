"""Steps between a round's uploads and the method, and after it: two lists that a run's config makes.

Outlier screening (screening.py) comes before them: it sees the uploads where they were collected, and remembers earlier rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app.config import RunConfig
from fl_app.errors import MethodError
from fl_app.layout import Model
from strategies.base.declared import CHANGE_MODEL, declares_means
from strategies.base.server_half import ServerHalf
from strategies.base.state import State, StepAfter, StepBefore, UploadBuffer, Uploads
from strategies.kernels import capped

KINDS = ("none", "momentum", "adagrad", "adam", "yogi")
MOMENTUM = 1.0
"""The learning rate of `momentum` if `server-learning-rate` is 0: that of FedAvg. The others' is `ADAPTIVE`."""
ADAPTIVE = 0.01

Floats = NDArray[np.floating[Any]]
Moments = Mapping[str, Floats]


def server_step(
    w: ArrayLike,
    mean: ArrayLike,
    state: Moments | None,
    *,
    kind: str,
    learning_rate: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> tuple[Floats, dict[str, Floats]]:
    """Return the next global model, [d], and the next state (Reddi et al., Algorithm 2; Hsu et al., FedAvgM).

    w: [d], the model sent. mean: [d], the uploads' mean. state: `m` [d] and, except for momentum, `v` [d], as the last
    step returned it; None or empty before the first step. kind: one of `KINDS`; "none" returns the mean and no state.
    The work is in float64. The results have w's dtype, at least float32. Raises UserError for another kind, and ValueError
    unless w and mean have one shape.
    """
    before, target = np.asarray(w), np.asarray(mean)
    dtype = np.result_type(before.dtype, np.float32)
    if kind not in KINDS:
        raise MethodError(key="server-optimizer", rule=f"must be one of {', '.join(KINDS)}", value=kind)
    if before.shape != target.shape:
        raise ValueError(f"w and mean must have one shape, got {list(before.shape)} and {list(target.shape)}")
    if kind == "none":
        return target.astype(dtype), {}
    start = before.astype(np.float64)
    delta = target.astype(np.float64) - start
    old = state or {"m": np.zeros_like(delta), "v": np.full_like(delta, tau * tau)}
    m = beta1 * old["m"].astype(np.float64) + (delta if kind == "momentum" else (1 - beta1) * delta)
    if kind == "momentum":
        return (start + learning_rate * m).astype(dtype), {"m": m.astype(dtype)}
    v, square = old["v"].astype(np.float64), delta * delta
    if kind == "adagrad":
        v = v + square
    elif kind == "yogi":
        v = v - (1 - beta2) * square * np.sign(v - square)
    else:
        v = beta2 * v + (1 - beta2) * square
    step = learning_rate * m / (np.sqrt(v) + tau)
    return (start + step).astype(dtype), {"m": m.astype(dtype), "v": v.astype(dtype)}


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
    params, moments = server_step(
        before.model.params,
        after.model.params,
        {name: before.memory[_NAMES + name] for name in ("m", "v") if _NAMES + name in before.memory},
        kind=c.server_optimizer,
        learning_rate=c.server_learning_rate or (MOMENTUM if c.server_optimizer == "momentum" else ADAPTIVE),
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
