"""The diagonal of the Fisher information: the mean over samples of the squared gradient of each sample's loss.

For usual layers it follows from their inputs and their outputs' gradients, in about one pass over the data. A sample's
gradient is a product of the two. For a Linear layer its square is a product as well, so it is never formed per sample.
Any other model is differentiated by torch.func, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import batch_norm, group_norm, unfold

from fl_app.layout import Vector
from fl_app.tasks import Classification, Task

# per-sample gradients held at a time: bytes, and samples
_MAX_GRADIENT_BYTES = 2**28
_MAX_SAMPLES = 64

_CROSS_ENTROPY = Classification()

Squares = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]
"""(layer, input, gradient of its output) -> the sum of the samples' squared gradients of `weight` and `bias`."""


def fisher_diagonal(
    module: nn.Module,
    task: Task,
    indices: NDArray[np.int64],
    samples: Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]],
) -> Vector:
    """Return the mean over samples of (d loss(x, y) / d w)^2, float32 [d] in named_parameters order.

    module: in evaluation mode. indices: int64 [n], the samples' positions. samples: returns (x, y) of positions.
    """
    layers = known_layers(module)
    parameters = list(module.parameters())
    sums = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in parameters]
    # by layer, only the largest parameter's gradients are held at once; otherwise those of all parameters
    sizes = [p.numel() for p in parameters]
    held = max(sizes, default=1) if layers else sum(sizes)
    step = max(1, min(_MAX_SAMPLES, _MAX_GRADIENT_BYTES // max(4 * held, 1)))
    for start in range(0, len(indices), step):
        x, y = samples(indices[start : start + step])
        squares = by_layer(module, layers, x, y, task) or by_sample(module, x, y, task)
        for total, part in zip(sums, squares, strict=True):
            total += part
    vector = torch.cat([total.reshape(-1) for total in sums]) / max(len(indices), 1)
    mean: Vector = vector.float().cpu().numpy()
    return mean


def by_sample(module: nn.Module, x: Tensor, y: Tensor, task: Task = _CROSS_ENTROPY) -> list[Tensor]:
    """Return each parameter's sum of the samples' squared gradients, for modules that torch.func can differentiate."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def sample_loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(module, values, (x[None],)).float(), y[None])

    found = vmap(grad(sample_loss), in_dims=(None, 0, 0))(parameters, x.detach(), y)
    return [found[name].square().sum(0) for name in parameters]


def by_layer(
    module: nn.Module, layers: dict[nn.Module, Squares], x: Tensor, y: Tensor, task: Task = _CROSS_ENTROPY
) -> list[Tensor]:
    """Return the same sums from the layers' inputs and outputs.

    Return [] if a layer, or the way it is used, is not of a known kind.
    """
    recorded = forward_recorded(module, layers, x) if layers else None
    if recorded is None:
        return []
    logits, passes = recorded
    slopes = torch.autograd.grad(task.total(logits.float(), y), [output for _, output in passes.values()])
    slope_of = dict(zip(passes, slopes, strict=True))
    squares: list[Tensor] = []
    with torch.no_grad():
        for layer, squares_of in layers.items():
            found = squares_of(layer, passes[layer][0], slope_of[layer])
            # the key `train` may have made the weight or the bias a constant
            squares += [found[name] for name, _ in layer.named_parameters(recurse=False)]
    return squares


def forward_recorded(
    module: nn.Module, layers: Iterable[nn.Module], x: Tensor
) -> tuple[Tensor, dict[nn.Module, tuple[Tensor, Tensor]]] | None:
    """Return the logits, and each layer's input and output.

    Return None unless each layer is used once, and each Linear layer on one vector per sample. The code after a layer
    gets a copy of its output, which it may overwrite.
    """
    passes: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    uses: list[nn.Module] = []

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        passes[layer] = inputs[0].detach(), output
        uses.append(layer)
        return output.clone()

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        logits: Tensor = module(x.detach().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    flat = all(z.ndim == 2 for layer, (z, _) in passes.items() if isinstance(layer, nn.Linear))
    used_once = len(uses) == len(passes) == len(hooks)
    return (logits, passes) if flat and used_once else None


def _linear(layer: nn.Linear, z: Tensor, slope: Tensor) -> dict[str, Tensor]:
    squared = slope.square()
    return {"weight": squared.T @ z.square(), "bias": squared.sum(0)}


def _convolution(layer: nn.Conv2d, z: Tensor, slope: Tensor) -> dict[str, Tensor]:
    patches = unfold(z, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    slope = slope.flatten(2)
    weight = _squared_products(slope, patches.transpose(1, 2)).view(layer.weight.shape)
    return {"weight": weight, "bias": slope.sum(2).square_().sum(0)}


def _squared_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of the squares of a_i b_i over i: [n, o, l], [n, l, k] -> [o, k]."""
    if a.is_cuda:
        return (a @ b).square_().sum(0)
    product, total = a.new_empty(a.shape[1], b.shape[2]), a.new_zeros(a.shape[1], b.shape[2])
    # one sample at a time fits the cache, which is five times as fast
    for left, right in zip(a, b, strict=True):
        torch.mm(left, right, out=product)
        total.addcmul_(product, product)
    return total


def _normalized(scaled: Tensor, slope: Tensor) -> dict[str, Tensor]:
    n, channels = slope.shape[:2]
    weight, bias = (t.reshape(n, channels, -1).sum(2).square_().sum(0) for t in (slope * scaled, slope))
    return {"weight": weight, "bias": bias}


def _batch_norm(layer: nn.BatchNorm2d, z: Tensor, slope: Tensor) -> dict[str, Tensor]:
    return _normalized(batch_norm(z, layer.running_mean, layer.running_var, eps=layer.eps), slope)


def _group_norm(layer: nn.GroupNorm, z: Tensor, slope: Tensor) -> dict[str, Tensor]:
    return _normalized(group_norm(z, layer.num_groups, eps=layer.eps), slope)


_KINDS: dict[type[nn.Module], Squares] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
}


def known_layers(module: nn.Module) -> dict[nn.Module, Squares]:
    """Return the layers that own parameters, in order, each with the function that computes its squares.

    Return {} if one of them is of another kind.
    """
    layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    owned = [id(p) for layer in layers for p in layer.parameters(recurse=False)]
    if len(set(owned)) != len(owned):
        return {}
    for layer in layers:
        usual = not isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.running_mean is not None
        if isinstance(layer, nn.Conv2d):
            usual = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        if type(layer) not in _KINDS or not usual:
            return {}
    return {layer: _KINDS[type(layer)] for layer in layers}
