"""Per-FedAvg: clients train one model so that it is good after a gradient step on their own data (MAML).

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020.

Client i starts from the received w (Algorithm 1). Each batch is cut in two halves, D and D', and makes a step:

    w~ = w - alpha gradient f(w, D)
    g  = gradient f(w~, D')
    first-order:   w <- w - beta g
    hessian-free:  w <- w - beta (g - alpha [gradient f(w + delta g, D) - gradient f(w - delta g, D)] / (2 delta))

The bracket over 2 delta is the Hessian at w times g, so that the second step follows the gradient of f(w~, D').

Server: the mean of the clients' w, unweighted. A client is evaluated after one step of size alpha from its model, with the
gradient of all its training data.

beta is `learning-rate`, with its schedule. alpha = 0 is FedAvg bit for bit, if all clients count equally.

Deviations:

- The paper draws three independent batches per step. Here D and D' are a batch's halves, so that an epoch sees each
  sample once. A single sample serves as both. The Hessian is taken on D: g is then exact for the pair of batches.
- A client makes `local-epochs` passes over its data, not tau steps.
- The run's momentum and weight decay act on the outer step. The inner step is plain, within `clip-norm`.
- All forward passes gather BatchNorm's running statistics. The step before evaluation leaves them as they are.
- The reported training loss is f(w~, D').
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    NOT_NEGATIVE,
    POSITIVE,
    ClientState,
    LocalUpdate,
    Means,
    Method,
    MethodError,
    Model,
    Overview,
    RoundContext,
    Uploads,
    Vector,
    all_but_local_statistics,
    key,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams
from strategies.kernels import RULES

if TYPE_CHECKING:
    from torch import Tensor

Values = TypeVar("Values", NDArray[np.float32], NDArray[np.float64], "Tensor")
# the paper's abbreviations are names too
VARIANTS = {"first-order": False, "FO": False, "fo": False, "hessian-free": True, "HF": True, "hf": True}


@dataclass(frozen=True)
class PerFedAvgParams(GlobalModelParams):
    """Parameters of Per-FedAvg, table `perfedavg`."""

    alpha: float = key(
        0.01, "Size of the step before evaluation, and of the inner step (alpha); 0: none.", NOT_NEGATIVE
    )
    variant: Literal["first-order", "hessian-free"] = key(
        "first-order", "The outer gradient without second derivatives, or with a difference in their place."
    )
    delta: float = key(1e-3, "Distance of the two gradients whose difference gives the Hessian (delta).", POSITIVE)


def meta_gradient(
    gradient_fn: Callable[[Values, Any, Any], Values],
    w: Values,
    x1: Any,
    y1: Any,
    x2: Any,
    y2: Any,
    *,
    alpha: float,
    variant: str,
    delta: float = 1e-3,
    clip_factor: Callable[[Values], float] = lambda _: 1.0,
) -> Values:
    """Return the outer step's gradient, [d] (Algorithm 1). Arguments as for `step`.

    clip_factor: gradient [d] -> a factor of the inner step.
    """
    if variant not in VARIANTS:
        raise MethodError(key="perfedavg.variant", rule=f"must be one of {', '.join(VARIANTS)}", value=variant)
    inner = gradient_fn(w, x1, y1)
    g = gradient_fn(w - alpha * clip_factor(inner) * inner, x2, y2)
    if not VARIANTS[variant] or not alpha:
        return g
    difference = gradient_fn(w + delta * g, x1, y1) - gradient_fn(w - delta * g, x1, y1)
    return g - (alpha / (2 * delta)) * difference


def step(
    gradient_fn: Callable[[Values, Any, Any], Values],
    w: Values,
    x1: Any,
    y1: Any,
    x2: Any,
    y2: Any,
    *,
    alpha: float,
    beta: float,
    variant: str,
    delta: float = 1e-3,
) -> Values:
    """Return w after one step of Algorithm 1, [d], of w's type and dtype.

    gradient_fn(w, x, y): the gradient [d] of the loss on a batch. w: [d], an array or a tensor. (x1, y1): the inner
    batch D. (x2, y2): the outer batch D'. alpha, beta: sizes of the inner and the outer step. variant: `first-order` (FO)
    or `hessian-free` (HF). delta: the distance of the Hessian's difference. Raises UserError for another variant.
    """
    return w - beta * meta_gradient(gradient_fn, w, x1, y1, x2, y2, alpha=alpha, variant=variant, delta=delta)


def mean_gradient(model: Model, ctx: RoundContext[PerFedAvgParams]) -> Vector:
    """Return the gradient of the mean loss over all training data, float32 [d], with the layers in training mode.

    In evaluation mode BatchNorm's statistics of a first round can make it larger than any step stands.
    """
    import torch

    trainer = ctx.trainer
    trainer.load(model)
    total, count = torch.zeros_like(trainer.weights), 0
    devices = [total.device] if total.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(ctx.rng("evaluation-step").integers(2**31)))
        for x, y in trainer.batches(1, "evaluation-step"):
            trainer.differentiate(x, y, counted=False)
            total.add_(trainer.gradient, alpha=len(y))
            count += len(y)
    return trainer.vector(total / max(count, 1))


class PerFedAvg(FedAvg[PerFedAvgParams]):
    """Server half: the plain mean."""

    means = Means(RULES, streams=True, sets_model=True)

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return equal weights for all uploads, less for late ones."""
        return uploads.once


class PerFedAvgUpdate(LocalUpdate[PerFedAvgParams]):
    """Client half: outer steps in training, one inner step for evaluation. It keeps nothing."""

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[PerFedAvgParams]) -> Model:
        """Return the model after one step of size alpha on all training data."""
        alpha = ctx.params.alpha
        if not alpha:
            return model
        slope = mean_gradient(model, ctx)
        return Model(model.params - np.float32(alpha * ctx.trainer.clip_factor(slope)) * slope, model.buffers)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[PerFedAvgParams]) -> Model:
        """Take an outer step for each batch."""
        p, trainer = ctx.params, ctx.trainer
        if not p.alpha:
            return trainer.train(start)
        trainer.load(start)
        optimizer = trainer.optimizer(trainer.weights)
        for x, y in trainer.batches():
            half = len(y) // 2
            inner = slice(0, max(half, 1))
            x1, y1, x2, y2 = x[inner], y[inner], x[half:], y[half:]
            w = trainer.weights.clone()

            def gradient(at: Tensor, x: Tensor, y: Tensor, outer: Tensor = y2) -> Tensor:
                trainer.weights.copy_(at)
                trainer.differentiate(x, y, counted=y is outer)
                return trainer.gradient.clone()

            slope = meta_gradient(
                gradient,
                w,
                x1,
                y1,
                x2,
                y2,
                alpha=p.alpha,
                variant=p.variant,
                delta=p.delta,
                clip_factor=trainer.clip_factor,
            )
            trainer.weights.copy_(w)
            optimizer.step(slope, trainer.learning_rate)
        return trainer.read()


def tested(params: PerFedAvgParams) -> str:
    """Return the sentence on the step that precedes each test."""
    if not params.alpha:
        return ""
    return "before and after training, a model is tested after one gradient step on the client's own training data"


METHOD = Method(
    "perfedavg",
    PerFedAvgParams,
    PerFedAvg,
    PerFedAvgUpdate,
    all_but_local_statistics,
    sums=True,
    global_beside_personal=True,
    tested=tested,
    overview=Overview(
        group="One global model for all",
        epochs="E, + 2",
        unseen="global model, after a step on its data",
        use="new clients that can take one step",
    ),
)
