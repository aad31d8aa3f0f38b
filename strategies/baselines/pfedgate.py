"""pFedGate: each client keeps a small gate that looks at its data and scales the blocks of one common model.

Chen, Yao, Gao, Ding, Li: "Efficient Personalized Federated Learning via Sparse Model-Adaptation", ICML 2023.

Gate: SwitchNorm of the images -> Linear to L numbers -> BatchNorm -> sigmoid, mean over the batch: g [L], one number
per block.

Blocks: every tensor of n elements is cut into sub-blocks of ceil(n / `blocks`). The model in use is theta * g, with g
expanded to elements. With s < 1 blocks are dropped: g = 0, with the gradient straight through. Each tensor's first
block stays. The others are tried by falling round(10 g) and stay if they still fit into (s - s_min) of all elements,
s_min = min(max(1 / `blocks`, 0.1), s). Linear layers and other tensors are chosen from separately.

Client: E epochs of SGD on both, theta at the run's learning rate and the gate at its own. The gradients of each are cut
to norm 10. The gate stays on the client. Server: the mean of theta weighted by samples.

Deviations:

- A client is evaluated with g averaged over its training data, its gate in evaluation mode (the paper's "client
  level"). The code gates every test batch by the batch's own mean, so a prediction depends on the other samples in the
  batch.
- The code's adapted networks apply ReLU to the logits, and its server averages over all clients, stale ones included.
  Ours do not.
- With s < 1 all of theta travels, not only the kept blocks.
- The code takes an s below 1 / `blocks`, where the first blocks alone are a larger share. Ours refuses it.
- s = 1 is not FedAvg: g in (0, 1) scales every block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import rng
from strategies.base import (
    AT_LEAST_ONE,
    POSITIVE,
    POSITIVE_RATIO,
    ClientState,
    Exported,
    InEpochs,
    Layout,
    LocalUpdate,
    Method,
    MethodError,
    Model,
    ModelFactory,
    Outliers,
    Overview,
    RoundContext,
    RunConfig,
    UserError,
    key,
)
from strategies.baselines import components
from strategies.baselines.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor, nn

# prefix of the names of the model's tensors; name of the buffer g, float32 [L]
NETWORK, GATES = "network.", "g"

# largest norm of a gradient
_LONGEST = 10.0
# number of samples gated at a time
_CHUNK = 512


@dataclass(frozen=True)
class PFedGateParams(InEpochs):
    """Parameters of pFedGate, table `pfedgate`."""

    sparsity: float = key(
        1.0, "Share of the model that a client uses (s); at least 1 / `blocks`, a tensor's first block.", POSITIVE_RATIO
    )
    blocks: int = key(5, "Most sub-blocks of a tensor.", AT_LEAST_ONE)
    gate_learning_rate: float = key(0.1, "Learning rate of the gate; never decays.", POSITIVE)
    alternate: bool = key(False, "Train the gate for an epoch, then the model for one, instead of both on every batch.")

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for a share of the model below that of the first blocks, which always stay."""
        if self.alternate:
            yield from super().problems(config)
        if self.sparsity < 1 / self.blocks:
            why = f"because the first of pfedgate.blocks = {self.blocks} blocks of a tensor stays"
            rule = f"must be at least 1/{self.blocks}, {why}"
            yield UserError(key="pfedgate.sparsity", rule=rule, value=self.sparsity)


def sub_blocks(size: int, parts: int) -> list[int]:
    """Return the sizes of a tensor's sub-blocks, at most `parts`.

    Each has ceil(size / parts) elements; the last one has the rest.
    """
    each = math.ceil(size / parts)
    return [min(each, size - start) for start in range(0, size, each)]


def select_blocks(scores: ArrayLike, sizes: ArrayLike, capacity: float) -> list[int]:
    """Return the sorted positions of the blocks that are kept: all that still fit, by falling round(10 score).

    scores: [L]; sizes: [L], elements; capacity: elements. Ties keep their order.
    """
    order = np.argsort(-np.round(10 * np.asarray(scores, np.float64)), kind="stable")
    kept, left = list[int](), capacity * (1 + 1e-12)
    elements = np.asarray(sizes)
    for position in order.tolist():
        if elements[position] <= left:
            kept.append(position)
            left -= int(elements[position])
    return sorted(kept)


@dataclass(frozen=True)
class Blocks:
    """The cut of a model's tensors. sizes: per tensor; linear: whether a tensor belongs to a Linear layer."""

    sizes: tuple[tuple[int, ...], ...]
    linear: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Return the number of all blocks (L)."""
        return sum(map(len, self.sizes))

    def kept(self, g: NDArray[np.floating[Any]], sparsity: float, parts: int) -> NDArray[np.bool_]:
        """Return which blocks are used, bool [L]. g: [L]."""
        keep = np.ones(self.count, bool)
        if sparsity == 1:
            return keep
        least = min(max(1 / parts, 0.1), sparsity)
        first = np.concatenate([np.arange(len(own)) == 0 for own in self.sizes])
        linear = np.repeat(self.linear, [len(own) for own in self.sizes])
        sizes = np.concatenate([np.array(own) for own in self.sizes])
        for group in (linear, ~linear):
            others = np.flatnonzero(group & ~first)
            keep[others] = False
            keep[others[select_blocks(g[others], sizes[others], (sparsity - least) * sizes[group].sum())]] = True
        return keep


def gated(factory: ModelFactory, params: PFedGateParams) -> nn.Module:
    """Return the run's model behind a gate, with the parts `gate`, `g` (a buffer) and `network`.

    Raises UserError if the data are not images.
    """
    import torch
    from torch import nn
    from torch.func import functional_call

    if len(factory.inputs) != 3:
        raise MethodError(
            key="method pfedgate",
            rule=f"its gate looks at images, the data's samples have shape {list(factory.inputs)}",
        )
    channels, height, width = factory.inputs

    class SwitchNorm(nn.Module):
        """Switchable normalization of images (Luo et al. 2019): a learned mixture of instance, layer and batch statistics."""

        mean: Tensor
        variance: Tensor

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
            self.of_means, self.of_variances = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
            self.register_buffer("mean", torch.zeros(channels))
            self.register_buffer("variance", torch.ones(channels))

        def forward(self, x: Tensor) -> Tensor:
            variance, mean = torch.var_mean(x, (2, 3), correction=0)  # [n, C]
            means, squares = [mean, mean.mean(1, keepdim=True)], variance + mean**2
            variances = [variance, squares.mean(1, keepdim=True) - means[1] ** 2]
            batch_mean, batch_variance = self.mean, self.variance
            if self.training:
                batch_mean = mean.mean(0)
                batch_variance = squares.mean(0) - batch_mean**2
                with torch.no_grad():
                    self.mean.lerp_(batch_mean, 0.1)
                    self.variance.lerp_(batch_variance, 0.1)
            a, b = self.of_means.softmax(0), self.of_variances.softmax(0)
            middle = a[0] * means[0] + a[1] * means[1] + a[2] * batch_mean
            spread = b[0] * variances[0] + b[1] * variances[1] + b[2] * batch_variance
            scale = self.weight / (spread + 1e-5).sqrt()
            return x * scale[:, :, None, None] + (self.bias - middle * scale)[:, :, None, None]

    class Gated(nn.Module):
        """A network with parameters scaled by block."""

        g: Tensor

        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.blocks = blocks_of(network, params.blocks)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(rng.torch_seed(factory.seed, "model:pfedgate"))
                linear = nn.Linear(channels * height * width, self.blocks.count)
            self.gate = nn.Sequential(SwitchNorm(channels), nn.Flatten(), linear, nn.BatchNorm1d(self.blocks.count))
            self.register_buffer(GATES, torch.ones(self.blocks.count))
            self.network = network

        def gates(self, x: Tensor) -> Tensor:
            """Return the batch's g [L]."""
            value: Tensor = self.gate(x.float()).sigmoid().mean(0)
            return value

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                g = self.gates(x) if self.training else self.g
            if params.sparsity < 1:
                kept = torch.from_numpy(self.blocks.kept(g.detach().cpu().numpy(), params.sparsity, params.blocks)).to(
                    g.device
                )
                g = g + (g * kept - g).detach()
            used, start = {}, 0
            for (name, parameter), sizes in zip(self.network.named_parameters(), self.blocks.sizes, strict=True):
                own = g[start : start + len(sizes), None].expand(-1, sizes[0]).reshape(-1)[: parameter.numel()]
                product = parameter * own.view(parameter.shape)
                # kernels lie channels last, and those of a single channel lose this format in the product
                kernel = parameter.ndim == 4
                used[name] = product.to(memory_format=torch.channels_last) if kernel else product
                start += len(sizes)
            logits: Tensor = functional_call(self.network, used, (x,))
            return logits

    return Gated(factory(0))


def blocks_of(network: nn.Module, parts: int) -> Blocks:
    """Return the cut of a network's tensors."""
    from torch import nn

    owners = dict(network.named_modules())
    names = [(name, parameter.numel()) for name, parameter in network.named_parameters()]
    linear = (isinstance(owners[name.rpartition(".")[0]], nn.Linear) for name, _ in names)
    return Blocks(tuple(tuple(sub_blocks(size, parts)) for _, size in names), tuple(linear))


def shared(layout: Layout, params: object) -> frozenset[str]:
    """Return the names of the model's tensors; the gate's do not travel."""
    return frozenset(name for name in layout.names if name.startswith(NETWORK))


class PFedGate(FedAvg[PFedGateParams]):
    """Server half: FedAvg on the model without gates."""

    # gates scale BatchNorm's inputs: of three clients, one with a single sample was seen at 39 medians
    outliers = Outliers(tolerance=2.0)


class PFedGateUpdate(LocalUpdate[PFedGateParams]):
    """Client half. State: the gate, with its statistics and g."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[PFedGateParams]) -> Model:
        """Return the received model behind the client's own gate.

        A client without a gate takes the run's initial one, with g averaged over its data.
        """
        whole = super().merge(received, state, ctx)
        return whole if "local.params" in state.arrays else self.averaged(whole, ctx)

    def averaged(self, model: Model, ctx: RoundContext[PFedGateParams]) -> Model:
        """Return the model with g averaged over the client's training data, in evaluation mode."""
        import torch

        trainer, n = ctx.trainer, ctx.num_samples
        trainer.load(model)
        module: Any = trainer.module.eval()
        total = np.zeros(module.blocks.count)
        with torch.no_grad():
            for at in range(0, n, _CHUNK):
                x, y = trainer.samples(np.arange(at, min(at + _CHUNK, n)))
                total += module.gates(x).double().cpu().numpy() * len(y)
        return ctx.layout.model({**ctx.layout.tensors(model), GATES: (total / n).astype(np.float32)})

    def train(self, start: Model, state: ClientState, ctx: RoundContext[PFedGateParams]) -> Model:
        """Train the model and the gate."""
        p, trainer = ctx.params, ctx.trainer
        trainer.load(start)
        first = next(slot.start for slot in ctx.layout.params if slot.name.startswith(NETWORK))
        sides = {"gate": slice(0, first), "model": slice(first, None)}
        steps = {side: trainer.optimizer(trainer.weights, part=part).step for side, part in sides.items()}
        rates = {"gate": p.gate_learning_rate, "model": trainer.learning_rate}
        for moving, x, y in turns(ctx):
            trainer.differentiate(x, y)
            for side in moving:
                gradient = trainer.gradient[sides[side]]
                gradient.mul_((_LONGEST / (gradient.norm() + 1e-6)).clamp(max=1))
                steps[side](gradient, rates[side])
        return self.averaged(trainer.read(), ctx)

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[PFedGateParams], epochs: int) -> Model:
        """Tune the model under a frozen gate, which still gives every batch its own g."""
        return ctx.trainer.train(start, epochs=epochs, purpose="finetune", frozen=ctx.local)


def gated_model(model: Model, state: ClientState, ctx: RoundContext[PFedGateParams]) -> Model:
    """Return the model in use: theta * g."""
    module: Any = ctx.trainer.module
    g, p = ctx.layout.tensors(model)[GATES], ctx.params
    used = g * module.blocks.kept(g, p.sparsity, p.blocks)
    sizes = np.concatenate([np.array(own) for own in module.blocks.sizes])
    bare = ctx.layout.take(model, ctx.shared)
    return Model(bare.params * np.repeat(used, sizes), bare.buffers)


def turns(ctx: RoundContext[PFedGateParams]) -> Iterator[tuple[tuple[str, ...], Tensor, Tensor]]:
    """Yield the sides that a batch trains, and its (x, y)."""
    if not ctx.params.alternate:
        for x, y in ctx.trainer.batches():
            yield ("gate", "model"), x, y
        return
    for epoch in range(ctx.config.local_epochs):
        for side in ("gate", "model"):
            for x, y in ctx.trainer.batches(1, f"train-{side}-{epoch}"):
                yield (side,), x, y


METHOD = Method(
    "pfedgate",
    PFedGateParams,
    PFedGate,
    PFedGateUpdate,
    shared,
    compose=gated,
    sums=True,
    exported=Exported(layout=lambda server, layout: components.part(layout, NETWORK), model=gated_model),
    overview=Overview(
        group="A part of the model",
        stays="gate",
        disk="the gate",
        unseen="global part, the rest initial",
        use="one model with small adaptations; sparse models",
    ),
)
