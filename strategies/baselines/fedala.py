"""FedALA: FedAvg in which a client starts from a learned, element-wise mixture of its last and the received model.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023.

P are the tensors of the last `layers` modules, and w_prev is the vector that the client trained when it last took part.
On P the client starts from w_prev + (w_g - w_prev) * A, and below P from w_g. Before training it learns A in [0, 1]^P,
ones at first, on a sample of its data:

    A <- clip(A - eta_A g * (w_g - w_prev), 0, 1)

Here g is the gradient of the loss at the mixture. A is learned for one epoch; the first time until the loss settles.
Then the client trains everything as in FedAvg. The server is FedAvg's. eta_A = 0 is FedAvg, bit for bit. Evaluations
learn A too, on the same sample, and do not keep it.

Decisions and deviations:

- `layers` counts modules: a weight and its bias are one (the authors' code counts tensors).
- A is learned in evaluation mode with the received statistics (the code: in the mode that the model was left in).
- The mean losses of the epochs decide when the loss has settled (the code: the losses of their last batches). Learning
  ends after `max-epochs` at the latest.
- A client learns from its second participation on (the code: once the sum of the first tensor's differences is not 0).
- A client learns only in its own rounds. The authors let all clients learn in every round, so that an idle client's old
  model drifts to the global one.
- The sample is drawn anew every round, from all data (the code: a contiguous block).
- Statistics are averaged (the code keeps them on the client).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_RATIO,
    ClientState,
    Layout,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    Trainer,
    all_tensors,
    key,
)
from strategies.baselines.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor, nn

    # values on P -> a batch's mean loss, and its gradient on P
    Gradient = Callable[[Tensor], tuple[Tensor, Tensor]]

# the number of last epochs that must have similar losses
_SETTLED = 10
# samples per computation of features
_CHUNK = 512


@dataclass(frozen=True)
class FedALAParams:
    """Parameters of FedALA, table `fedala`."""

    layers: int = key(1, "Number of last modules with parameters that start from a mixture (p); 0: all.", NOT_NEGATIVE)
    sample_share: float = key(0.8, "Share of the training samples that A is learned on (s).", POSITIVE_RATIO)
    weight_learning_rate: float = key(1.0, "Step size of A (eta); never decays. 0 is FedAvg.", NOT_NEGATIVE)
    threshold: float = key(
        0.1,
        "A client's first learning of A ends when the standard deviation of the last ten epochs' losses is below "
        "this (authors' code; the paper used 0.01).",
        POSITIVE,
    )
    max_epochs: int = key(100, "Most epochs of a client's first learning of A (ours).", AT_LEAST_ONE)


def mix(own: Tensor, received: Tensor, weights: Tensor) -> Tensor:
    """Return the mixture own + (received - own) * weights, of equal shapes: exactly `own` at weight 0 and `received` at 1."""
    between = own + (received - own) * weights
    return between.where(weights != 0, own).where(weights != 1, received)


def step(own: Tensor, received: Tensor, weights: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """Return the mixture's weights after a step: clip(weights - rate * gradient * (received - own), 0, 1).

    own, received, weights in [0, 1] and gradient (of the loss at the mixture) are tensors of equal shape. The result
    has that shape.
    """
    return (weights - rate * gradient * (received - own)).clamp(0, 1)


def settled(losses: Sequence[float], threshold: float, most: int) -> bool:
    """Return whether learning ends: after `most` epochs, or as soon as the loss has settled.

    losses: the mean loss of each epoch. They have settled if there are more than ten, and the standard deviation of the
    last ten is below `threshold`.
    """
    alike = len(losses) > _SETTLED and float(np.std(losses[-_SETTLED:])) < threshold
    return alike or len(losses) >= most


def mixed_from(layout: Layout, layers: int) -> int:
    """Return the first position of the last `layers` modules that own parameters. 0, or too many: all modules."""
    owners = [slot.name.rpartition(".")[0] for slot in layout.params]
    last = list(dict.fromkeys(owners))[-layers:]
    return layout.params[owners.index(last[0])].start


class FedALAUpdate(LocalUpdate[FedALAParams]):
    """Client half. State: `fedala.own` (the last trained values on P), `fedala.weights` (A), both in named_parameters order."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedALAParams]) -> Model:
        """Learn A, and return the mixture."""
        if "fedala.own" not in state.arrays or not ctx.params.weight_learning_rate:
            return received
        first, trainer = mixed_from(ctx.layout, ctx.params.layers), ctx.trainer

        def on_device(part: NDArray[np.float32]) -> Tensor:
            return trainer.tensor(np.concatenate([received.params[:first], part]))[first:]

        def off_device(part: Tensor) -> NDArray[np.float32]:
            whole = trainer.weights.clone()
            whole[first:] = part
            return trainer.vector(whole)[first:]

        own, theirs = on_device(state.arrays["fedala.own"]), on_device(received.params[first:])
        known = state.arrays.get("fedala.weights")
        weights = on_device(np.ones(ctx.layout.d - first, np.float32) if known is None else known)
        with held_below(trainer.module, first):
            weights = self.learn(
                own, theirs, weights, self.gradients(received, first, ctx), ctx, once=known is not None
            )
        state.arrays["fedala.weights"] = off_device(weights)
        return Model(np.concatenate([received.params[:first], off_device(mix(own, theirs, weights))]), received.buffers)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedALAParams]) -> Model:
        """Train everything as FedAvg does, and keep the result on P."""
        after = super().train(start, state, ctx)
        state.arrays["fedala.own"] = after.params[mixed_from(ctx.layout, ctx.params.layers) :]
        return after

    def learn(
        self,
        own: Tensor,
        received: Tensor,
        weights: Tensor,
        gradients: Sequence[tuple[int, Gradient]],
        ctx: RoundContext[FedALAParams],
        *,
        once: bool,
    ) -> Tensor:
        """Return A after one epoch (`once`), or after as many epochs as it takes to settle.

        gradients: for each batch its number of samples and its gradient as a function.
        """
        p = ctx.params
        losses: list[float] = []
        while True:
            total = own.new_zeros(())
            for size, gradient_at in gradients:
                loss, gradient = gradient_at(mix(own, received, weights))
                rate = p.weight_learning_rate
                if ctx.config.clip_norm:
                    rate *= ctx.trainer.clip_factor(gradient * (received - own))
                weights = step(own, received, weights, gradient, rate)
                total += loss * size
            if once:
                return weights
            losses.append(float(total) / sum(size for size, _ in gradients))
            if settled(losses, p.threshold, p.max_epochs):
                return weights

    def gradients(self, received: Model, first: int, ctx: RoundContext[FedALAParams]) -> list[tuple[int, Gradient]]:
        """Return for each batch of the round's sample its size, and a function: values on P -> mean loss and its gradient on P."""
        trainer, n = ctx.trainer, ctx.num_samples
        chosen = ctx.rng("ala").choice(n, max(1, int(ctx.params.sample_share * n)), replace=False)
        batches = [chosen[at : at + ctx.config.batch_size] for at in range(0, len(chosen), ctx.config.batch_size)]
        trainer.load(received)
        trainer.module.eval()
        features = None
        merged = frozenset(slot.name for slot in ctx.layout.params if slot.start >= first)
        # the fast path handles only the layer's own tensors, no constants of the key `train`
        plain = ctx.layout.split.linear and not ctx.layout.constant_head
        if trainer.task.cross_entropy and merged == ctx.layout.classifier and plain:
            features = head_inputs(trainer, chosen)
        if features is None:
            return [(len(batch), whole(trainer, first, batch)) for batch in batches]
        shape = trainer.classifier().weight.shape
        cuts = np.cumsum([len(batch) for batch in batches])[:-1].tolist()
        pairs = zip(*(part.tensor_split(cuts) for part in features), strict=True)
        return [(len(y), head(shape, z, y)) for z, y in pairs]


@contextmanager
def held_below(module: nn.Module, first: int) -> Iterator[None]:
    """Compute no gradients of the parameters before a position, inside the `with` block."""
    held: list[nn.Parameter] = []
    stop = 0
    for parameter in module.parameters():
        stop += parameter.numel()
        if stop <= first and parameter.requires_grad:
            parameter.requires_grad_(False)
            held.append(parameter)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


def head_inputs(trainer: Trainer, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor] | None:
    """Return the classifier's input, float32 [n, k], and the labels, at the loaded model.

    None if the layer's output is not the network's logits.
    """
    import torch

    module = trainer.module
    seen: list[Tensor] = []
    labels: list[Tensor] = []
    results: list[Tensor] = []
    hook = trainer.classifier().register_forward_hook(lambda _, inputs, output: results.extend((inputs[0], output)))
    try:
        with torch.no_grad():
            for at in range(0, len(chosen), _CHUNK):
                x, y = trainer.samples(chosen[at : at + _CHUNK])
                results.clear()
                logits = trainer.logits(module, x)
                if len(results) != 2 or results[0].ndim != 2 or not torch.equal(results[1].float(), logits):
                    return None
                seen.append(results[0].float())
                labels.append(y)
    finally:
        hook.remove()
    return torch.cat(seen), torch.cat(labels)


def head(shape: Sequence[int], z: Tensor, y: Tensor) -> Gradient:
    """Return a function: values of a Linear layer -> its mean cross-entropy and the gradient.

    shape: [C, k], of the layer's weight. The values may include a bias. z: features [n, k]. y: labels [n].
    """
    size = shape[0] * shape[1]

    def gradient_at(values: Tensor) -> tuple[Tensor, Tensor]:
        logits = z @ values[:size].view(shape[0], shape[1]).T + (values[size:] if len(values) > size else 0)
        log_likelihood = logits.log_softmax(1)
        right = log_likelihood.gather(1, y[:, None])
        residual = log_likelihood.exp()
        residual.scatter_add_(1, y[:, None], -right.new_ones(right.shape))
        residual /= len(y)
        gradient = values.new_empty(values.shape)
        gradient[:size] = (residual.T @ z).view(-1)
        if len(values) > size:
            gradient[size:] = residual.sum(0)
        return -right.mean(), gradient

    return gradient_at


def whole(trainer: Trainer, first: int, batch: NDArray[np.int64]) -> Gradient:
    """Return a function: values -> a batch's mean loss and its gradient on these values.

    They replace the loaded model's values from position `first` on. batch: positions of training samples.
    """

    def gradient_at(values: Tensor) -> tuple[Tensor, Tensor]:
        trainer.weights[first:] = values
        return trainer.differentiate(*trainer.samples(batch), counted=False), trainer.gradient[first:]

    return gradient_at


METHOD = Method(
    "fedala",
    FedALAParams,
    FedAvg[FedALAParams],
    FedALAUpdate,
    all_tensors,
    needs_whole=True,
    sums=True,
    global_beside_personal=True,
    overview=Overview(
        group="A global model and a personal one",
        stays="weights of its start",
        disk="8h",
        epochs="E, + 1 forward",
        use="a personal start at no extra traffic",
    ),
)
