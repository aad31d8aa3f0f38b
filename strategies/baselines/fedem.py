"""FedEM: clients share several models; each learns the mixture of them that fits its data, and predicts with it.

Marfoq, Neglia, Bellet, Kameni, Vidal: "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021.

There are M components theta_m with different initial draws. A client has weights pi, 1/M at first.

Client: the E-step covers all its training samples, in evaluation mode:

    q_sm = softmax over m of (ln pi_m - loss_s(theta_m))
    pi_m <- mean_s q_sm

The M-step trains every component for E epochs of SGD, each with its own batch order and momentum. A batch's loss is the
mean of q_sm loss_s(theta_m). The client sends all components.

Server: the mean per component, weighted by samples. Prediction: sum_m pi_m softmax(logits_m). M = 1 is FedAvg, bit for
bit.

Deviations:

- The mean is over the round's clients. The authors' is over all, with the old model for absent clients, which damps
  every step.
- pi stays on the client, and q is recomputed. FL-bench mixes logits and resets pi every round. It also matches q to a
  shuffled batch by sorted position, hence to other samples.
- Statistics travel with their component.
- The network's output is ln of the mixture's probabilities. The reported training loss is the last component's,
  weighted by q.
- Fine-tuning trains the mixture as one network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    AT_LEAST_ONE,
    ClientState,
    Exported,
    Layout,
    LocalUpdate,
    Method,
    Model,
    ModelFactory,
    Objective,
    Overview,
    RoundContext,
    key,
)
from strategies.baselines import components
from strategies.baselines.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor, nn

# the mixture's buffer, float32 [M]; it never travels
WEIGHTS = "pi"


@dataclass(frozen=True)
class FedEMParams:
    """Parameters of FedEM, table `fedem`."""

    components: int = key(3, "Models that are mixed (M); 1 is FedAvg.", AT_LEAST_ONE)


def responsibilities(losses: ArrayLike, pi: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the components' shares in every sample, q float64 [n, M], and in all samples, pi float64 [M].

    losses: [n, M], of each sample under each component; pi: [M], before, not negative, of sum 1. The rows of q sum to
    1.
    """
    with np.errstate(divide="ignore"):
        scores = np.log(np.asarray(pi, np.float64)) - np.asarray(losses, np.float64)
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    q: NDArray[np.float64] = likely / likely.sum(axis=1, keepdims=True)
    return q, q.mean(axis=0)


def mixture(models: Sequence[nn.Module]) -> nn.Module:
    """Return a network that answers ln sum_m pi_m softmax(logits_m), float32 [n, C]; for M = 1 the component's logits.

    Its state dict holds components.<m>.<name in the model>, and `pi`, at first equal weights. `corolla export` writes
    it.
    """
    import torch
    from torch import nn

    class Mixture(nn.Module):
        """Components side by side, and their weights."""

        pi: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.components = nn.ModuleList(models)
            self.register_buffer(WEIGHTS, torch.full((len(models),), 1 / len(models)))

        def forward(self, x: Tensor) -> Tensor:
            logits: list[Tensor] = [component(x) for component in self.components]
            if len(logits) == 1:
                return logits[0]
            likelihoods = torch.stack([each.float().log_softmax(1) for each in logits])
            return (likelihoods + self.pi.log()[:, None, None]).logsumexp(0)

    return Mixture()


def network(factory: ModelFactory, params: FedEMParams) -> nn.Module:
    """Return the mixture of M models."""
    return mixture([factory(m) for m in range(params.components)])


def shared(layout: Layout, params: object) -> frozenset[str]:
    """Return the names of all tensors but the mixture's weights."""
    return layout.names - {WEIGHTS}


def stream(component: int) -> str:
    """Return the name of the random stream of a component's batches."""
    return f"train-{component}" if component else "train"


class FedEM(FedAvg[FedEMParams]):
    """Server half: FedAvg on all components at once."""

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return all components with equal weights, the model of a client that never took part. Only clients have their own."""
        if client_id is not None:
            return None
        pi = np.full(self.params.components, 1 / self.params.components, np.float32)
        return self.full_layout.model({**self.layout.tensors(self.state.model), WEIGHTS: pi})


class FedEMUpdate(LocalUpdate[FedEMParams]):
    """Client half. State: pi, the only tensor that does not travel."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedEMParams]) -> Model:
        """Run the E-step, then every component's M-step."""
        import torch

        trainer, count = ctx.trainer, ctx.params.components
        if count == 1:
            return trainer.train(start)
        parts: Any = trainer.module.components
        losses = np.stack([trainer.sample_losses(start, module=part) for part in parts], axis=1)
        q, pi = responsibilities(losses, ctx.layout.tensors(start)[WEIGHTS])
        shares = torch.from_numpy(q.astype(np.float32)).to(trainer.weights.device)
        after = start
        for m, part in enumerate(parts):
            still = ctx.layout.names - (components.tensors_of(ctx.layout, m) - {WEIGHTS})
            after = trainer.train(
                after, purpose=stream(m), frozen=still, objective=self.weighted(ctx, part, shares[:, m])
            )
        return ctx.layout.model({**ctx.layout.tensors(after), WEIGHTS: pi.astype(np.float32)})

    def weighted(self, ctx: RoundContext[FedEMParams], part: nn.Module, shares: Tensor) -> Objective:
        """Return a component's loss, weighted by its share in each sample. shares: float32 [n], n samples in all."""
        from torch.nn.functional import cross_entropy

        trainer = ctx.trainer

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return (shares[trainer.indices] * cross_entropy(trainer.logits(part, x), y, reduction="none")).mean()

        return loss


METHOD = Method(
    "fedem",
    FedEMParams,
    FedEM,
    FedEMUpdate,
    shared,
    compose=network,
    needs_classes=True,
    sums=True,
    exported=Exported(layout=lambda server, layout: server.full_layout),
    overview=Overview(
        group="Several global models",
        travels="M models both ways",
        stays="weights π",
        server="4M(d+b)",
        disk="4M",
        epochs="M E, + M forward",
        unseen="all models, weighted equally",
        use="clients that mix kinds of data",
    ),
)
