"""FedRoD: one body under two classifiers: a generic one for balanced classes, and a personal one for the client's own.

Chen, Chao: "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022. Here is the
linear personal head; the paper's second version predicts it from the class distribution.

Client i receives body theta and generic head G. Its personal head P_i never leaves it. z are the features, and n_c is
the client's number of training samples of class c. Every batch makes two gradient steps at once:

    generic:   -log(n_y exp(g_y) / sum_c n_c exp(g_c)),  g = G z        balanced softmax; moves theta and G
    personal:  cross-entropy of  G z + P_i z                             moves P_i alone

The client sends theta and G. Server: FedAvg. The client is evaluated with G z + P_i z, which is one linear layer of the
weights G + P_i. `evaluate-global` measures G z.

With `balanced = false` everything that travels is FedAvg's, bit for bit.

Deviations:

- P_i is 0 at first, so that a client that has not trained predicts with G.
- The personal step uses the features and the generic logits of the same forward pass, before the generic step.
- P_i has the run's momentum and weight decay, separate from the model's.
- The reported training loss is the personal one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import (
    LINEAR,
    ClientState,
    LocalUpdate,
    Method,
    Model,
    Overview,
    RoundContext,
    all_but_local_statistics,
    key,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams
from strategies.kernels import head_slots

if TYPE_CHECKING:
    from torch import Tensor, nn

_HEAD = "fedrod.head"


@dataclass(frozen=True)
class FedRoDParams(GlobalModelParams):
    """Parameters of FedRoD, table `fedrod`."""

    balanced: bool = key(
        True, "Train body and generic head by the balanced softmax; false: by cross-entropy, as FedAvg."
    )


def balanced_softmax_loss(logits: Any, y: Any, counts: Any) -> Tensor:
    """Return the mean of -log(n_y exp(g_y) / sum_c n_c exp(g_c)), a scalar tensor: the balanced softmax.

    logits: floating [n, C]; y: int64 [n]; counts: [C], samples per class, >= 0. Arrays or tensors. A class without
    samples has no part in the sum. Equal counts give the cross-entropy.
    """
    import torch
    from torch.nn.functional import cross_entropy

    g = torch.as_tensor(logits)
    prior = torch.as_tensor(counts, dtype=g.dtype, device=g.device).log()
    return cross_entropy(g + prior, torch.as_tensor(y, device=g.device))


class FedRoDUpdate(LocalUpdate[FedRoDParams]):
    """Client half. State: `fedrod.head` float32 [h], P_i in the order of the classifier's parameters."""

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[FedRoDParams]) -> Model:
        """Return the model under G + P_i."""
        if _HEAD not in state.arrays:
            return model
        params = model.params.copy()
        params[ctx.layout.indices(ctx.layout.classifier)] += state.arrays[_HEAD]
        return Model(params, model.buffers)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedRoDParams]) -> Model:
        """Train theta and G by the balanced loss, and P_i by the client's own."""
        import torch
        from torch.nn.functional import linear

        trainer, (weight, bias) = ctx.trainer, head_slots(ctx.layout)
        at = ctx.layout.indices(ctx.layout.classifier)
        trainer.load(start)
        counts = torch.from_numpy(trainer.class_counts).to(trainer.weights.device)
        own = torch.zeros_like(trainer.weights)
        if _HEAD in state.arrays:
            own[torch.from_numpy(at)] = torch.from_numpy(state.arrays[_HEAD]).to(own.device)
        slope = torch.zeros_like(own)
        step, step_own = trainer.optimizer(trainer.weights).step, trainer.optimizer(own).step
        for x, y in trainer.batches():
            W = own[weight.start : weight.stop].view(weight.shape).clone().requires_grad_()
            b = None if bias is None else own[bias.start : bias.stop].clone().requires_grad_()

            def loss(module: nn.Module, x: Tensor, y: Tensor, W: Tensor = W, b: Tensor | None = b) -> Tensor:
                z, g = trainer.forward(module, x)
                generic = balanced_softmax_loss(g, y, counts) if ctx.params.balanced else trainer.loss(g, y)
                return generic + trainer.loss(g.detach() + linear(z.detach(), W, b), y)

            trainer.differentiate(x, y, loss)
            for slot, tensor in ((weight, W), (bias, b)):
                if slot is not None and tensor is not None and tensor.grad is not None:
                    slope[slot.start : slot.stop] = tensor.grad.flatten()
            step(trainer.gradient, trainer.learning_rate)
            step_own(slope, trainer.learning_rate)
        state.arrays[_HEAD] = trainer.vector(own)[at]
        return trainer.read()


def tested(params: FedRoDParams) -> str:
    """Return the sentence on the two heads."""
    return (
        "before training, the received model is tested with the client's personal head on top; after training, the trained "
        "model with the trained head"
    )


METHOD = Method(
    "fedrod",
    FedRoDParams,
    FedAvg[FedRoDParams],
    FedRoDUpdate,
    all_but_local_statistics,
    needs_classes=True,
    sums=True,
    global_beside_personal=True,
    needs=LINEAR,
    tested=tested,
    overview=Overview(
        group="A global model and a personal one",
        stays="second classifier",
        disk="4h",
        use="both a model for all classes and personal ones",
    ),
)
