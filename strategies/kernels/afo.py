"""AFO: an optimizer of the server that moves the global model towards the clients' mean, with momentum or adaptive steps.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021. `momentum`
is FedAvgM: Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335, 2019.

It is no method but the key `server-optimizer`, for every method whose server sets a mean global model
(`ServerHalf.averages`). The clients' training does not change. With delta = mean - w (Algorithm 2):

    momentum:  m <- beta1 m + delta                       w <- w + eta m
    others:    m <- beta1 m + (1 - beta1) delta           w <- w + eta m / (sqrt(v) + tau)
      adagrad: v <- v + delta^2
      yogi:    v <- v - (1 - beta2) delta^2 sign(v - delta^2)
      adam:    v <- beta2 v + (1 - beta2) delta^2

m is 0 and v is tau^2 at first. Moments have no bias correction, as in the paper.

Readings: the mean is the method's own: weighted, or by the key `robust`. The paper's is uniform. BatchNorm's running
statistics take the plain mean. The paper's experiments set beta1 = 0 for adagrad; here the key `server-beta1` sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app.errors import MethodError

KINDS = ("none", "momentum", "adagrad", "adam", "yogi")
MOMENTUM = 1.0
"""The learning rate of `momentum` if `server-learning-rate` is 0: that of FedAvg. The others' is `ADAPTIVE`."""
ADAPTIVE = 0.01

Floats = NDArray[np.floating[Any]]
State = Mapping[str, Floats]


def server_step(
    w: ArrayLike,
    mean: ArrayLike,
    state: State | None,
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
