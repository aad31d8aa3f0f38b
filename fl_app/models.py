"""Networks with a name, and the call of a user's own model factory.

Every network maps images float32 [n, in_channels, image_size, image_size] to logits float32 [n, num_classes]. Image
sizes from 8 to 64 work for all of them, and larger ones too.

- `mlp`: flatten, 128, 64, classifier.
- `cnn`: McMahan et al. 2017 (FedAvg §3), FedOBP's network: conv 5x5-32, pool, conv 5x5-64, pool, fc 512, classifier;
  582,026 parameters for 1x28x28 and 878,538 for 3x32x32 (10 classes). The convolutions are unpadded. Below 16 pixels
  they do not fit, so there both are padded by 2.
- `resnet8`: FedCAC's network: ResNet stem, BasicBlocks 64/128/256; 1,235,274 parameters for 3 channels and 10 classes.
- `resnet10`, `resnet18`, `resnet34`: He et al. 2016, BasicBlocks 64/128/256/512, tensor names, shapes and
  initialization as in torchvision, so that its checkpoints fit. On images up to 32x32 the last stage sees a single
  pixel; BatchNorm then refuses to train on a batch of one.
- `resnet18-fedobp`: FedOBP's network (its Table 4): `resnet18` with torchvision's 1000 outputs, followed by the
  classifier without an activation between; 11,699,522 parameters for 3 channels and 10 classes.
- `transformer`: for tokens [T], 0 at a text's end, below the data's number of ids (20,000 if they tell none): embeddings of
  tokens and places, 64 units; two blocks with 4 heads, layer norm first and 128 hidden units; the mean over a text's tokens,
  classifier. 1,351,428 parameters for T = 64, 20,000 ids and 4 classes.
- `module:factory`: the user's own, called with the keywords in_channels, num_classes, image_size, and input_shape if
  the factory has this parameter.

Samples need not be square images: input_shape is their shape. For images, in_channels is the number of channels. For
series [T, C], in_channels is C and image_size is T. For rows [features], in_channels is the number of features and
image_size is 1. num_classes is the number of outputs for any task.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_app import plugins, rng, tracing
from fl_app.contents import Effects, trial
from fl_app.debugging import at
from fl_app.errors import ConfigurationError, UserError, describe, listed, size
from fl_app.known_names import MODELS, VOCABULARY
from fl_app.layout import Split
from fl_app.machine import available_memory
from fl_app.trainable_tensors import first_names, matching

NORMS = ("batch", "group")
MAX_GROUPS = 32
UNPADDED_CNN_SIZE = 16
SMALLEST_CNN_SIZE = 4


def build(
    name: str,
    *,
    in_channels: int,
    num_classes: int,
    image_size: int,
    norm: str = "batch",
    seed: int = 0,
    input_shape: tuple[int, ...] = (),
    input_dtype: str = "float32",
    classifier: str = "",
    tried: bool = False,
) -> nn.Module:
    """Return a model on the CPU, in train mode. Its weights depend only on (seed, name). It is marked with its `Split`.

    name: one of the module docstring's list. norm: `batch` or `group` (32 groups), used only by the ResNets.
    input_shape: of a sample; (): images [in_channels, image_size, image_size]. input_dtype: of the model's input.
    classifier: patterns over the names of the classifier's tensors; "": they are found. tried: the run's server has tried the
    model in training mode, so that this process need not.

    The global generators of torch, NumPy and `random` are seeded first and restored afterwards. Raises UserError for an
    unknown name or norm, for images that are too small, for a model that does not fit in the free memory, and for any
    error of a user's factory. Raises UserError also for a pattern that matches no tensor.
    """
    if norm not in NORMS:
        raise ConfigurationError(key="norm", rule=f"must be one of {', '.join(NORMS)}", value=norm)
    shape = input_shape or (in_channels, image_size, image_size)
    with rng.global_state_kept():
        if ":" in name:
            factory = plugins.load("model", name)
            # the batch with which it is tried
            _refuse_larger_than_memory(name, shape, num_classes, 8.0 * (math.prod(shape) + num_classes))
            example = torch.zeros((2, *shape), dtype=getattr(torch, input_dtype))

            def called() -> nn.Module:
                _seed(seed, name)
                return _call_factory(name, factory, in_channels, num_classes, image_size, example, classifier, tried)

            try:
                return called()
            except tracing.WrittenError as error:
                with tracing.writing():
                    module = called()
                Effects(written=error.names).mark(module)
                return module
        if name not in MODELS:
            raise ConfigurationError(
                key="model", rule=f"must be one of {', '.join(MODELS)} or module:factory", value=name
            )
        # data without a number of ids have their features in this place
        ids = in_channels if len(shape) == 1 and in_channels != shape[0] else VOCABULARY
        _refuse_larger_than_memory(name, shape, num_classes, _bytes_of(name, shape, num_classes, norm, ids))
        _seed(seed, name)
        module = _named(name, shape, num_classes, norm, ids)
        if classifier:
            module.eval()
            example = torch.zeros((2, *shape), dtype=getattr(torch, input_dtype))
            _mark(module, _named, (name, norm, str(ids)), example, num_classes, classifier)
            return module.train()
        # a pass would find the same (tests/fl_app/test_split.py)
        Split.of(module).marks(module)
        return module


def _named(name: str, shape: tuple[int, ...], num_classes: int, norm: str, ids: int = VOCABULARY) -> nn.Module:
    """Build one of MODELS. shape: of a sample. ids: how many token ids there are. Raises UserError for an unfit shape."""
    if name == "mlp":
        return _mlp(math.prod(shape), num_classes)
    if name == "transformer":
        if len(shape) != 1:
            raise ConfigurationError(
                key="model transformer", rule=f"needs tokens [T], but a sample has shape {list(shape)}"
            )
        return Transformer(shape[0], num_classes, ids)
    if len(shape) != 3:
        raise ConfigurationError(
            key=f"model {name}",
            rule=f"needs images, but a sample of the data has shape {list(shape)}; use mlp or your own model",
        )
    network = MODELS[name]
    if network.blocks:
        return ResNet(network.blocks, shape[0], num_classes, norm, network.extra)
    return _cnn(shape, num_classes)


@functools.lru_cache
def _bytes_of(name: str, shape: tuple[int, ...], num_classes: int, norm: str, ids: int) -> float:
    """Return the bytes of a model's parameters, from their shapes alone; inf if torch cannot count them."""
    try:
        with torch.device("meta"):
            return 4.0 * sum(
                parameter.numel() for parameter in _named(name, shape, num_classes, norm, ids).parameters()
            )
    except (RuntimeError, OverflowError, TypeError):
        return math.inf


def _refuse_larger_than_memory(name: str, shape: tuple[int, ...], num_classes: int, needed: float) -> None:
    """Raise UserError if a model does not fit in the free memory. A client may tell any shape of its data."""
    if needed > (free := available_memory()):
        what = f"samples of shape {list(shape)} and {num_classes} outputs"
        raise ConfigurationError(
            key=f"model {name}", rule=f"for {what} it needs {size(needed)} of memory, and {size(free)} are free"
        )


def _seed(seed: int, name: str) -> None:
    # Not torch.manual_seed: that one seeds the GPUs' generators too, which fork_rng does not restore here.
    torch.default_generator.manual_seed(rng.torch_seed(seed, f"model:{name}"))
    rng.seed_global(rng.torch_seed(seed, f"model:{name}"))


def _mlp(inputs: int, num_classes: int) -> nn.Module:
    layers: dict[str, nn.Module] = {
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(inputs, 128),
        "relu1": nn.ReLU(),
        "fc2": nn.Linear(128, 64),
        "relu2": nn.ReLU(),
        "classifier": nn.Linear(64, num_classes),
    }
    return nn.Sequential(OrderedDict(layers))


def _cnn(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    in_channels, *sides = shape
    if min(sides) < SMALLEST_CNN_SIZE:
        raise ConfigurationError(
            key="model cnn", rule=f"images must be at least {SMALLEST_CNN_SIZE} pixels wide", value=min(sides)
        )
    padding = 0 if min(sides) >= UNPADDED_CNN_SIZE else 2
    for _ in range(2):
        sides = [(side - 4 + 2 * padding) // 2 for side in sides]
    layers: dict[str, nn.Module] = {
        # McMahan's network applies ReLU before the pools: the same bits, but ReLU on four times the values.
        "conv1": nn.Conv2d(in_channels, 32, 5, padding=padding),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(32, 64, 5, padding=padding),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(64 * math.prod(sides), 512),
        "relu3": nn.ReLU(),
        "classifier": nn.Linear(512, num_classes),
    }
    return nn.Sequential(OrderedDict(layers))


def _norm(norm: str, channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(MAX_GROUPS, channels), channels) if norm == "group" else nn.BatchNorm2d(channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: [n, c, h, w] -> [n, channels, ceil(h / stride), ceil(w / stride)]."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: str) -> None:
        """Build the block; the shortcut is a 1x1 convolution where the shape changes."""
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = _norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = _norm(norm, channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), _norm(norm, channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(convolutions(x) + shortcut(x))."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(residual + shortcut)


class ResNet(nn.Module):
    """ResNet of BasicBlocks (He et al. 2016). Tensor names, shapes and initialization are those of torchvision.

    blocks: BasicBlocks per stage; stage k has 64 * 2^k channels, and all stages but the first halve the image. extra:
    units of `fc` if `classifier` follows it; 0: `fc` is the classifier.
    """

    def __init__(self, blocks: tuple[int, ...], in_channels: int, num_classes: int, norm: str, extra: int = 0) -> None:
        """Build stem, stages and classifier."""
        super().__init__()
        width = 64
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = _norm(norm, width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.num_stages = len(blocks)
        for k, num_blocks in enumerate(blocks):
            channels = 64 * 2**k
            first = BasicBlock(width, channels, 1 if k == 0 else 2, norm)
            rest = (BasicBlock(channels, channels, 1, norm) for _ in range(num_blocks - 1))
            self.add_module(f"layer{k + 1}", nn.Sequential(first, *rest))
            width = channels
        self.fc = nn.Linear(width, extra or num_classes)
        self.classifier = nn.Linear(extra, num_classes) if extra else None
        for module in self.modules():
            # normal numbers on the meta device would import a second and a half of torch (`_bytes_of`)
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, num_classes] for images [n, in_channels, h, w]."""
        # He et al. apply ReLU before the pool: the same bits, but ReLU on four times the values
        x = F.relu(self.maxpool(self.bn1(self.conv1(x))))
        for k in range(self.num_stages):
            x = self.get_submodule(f"layer{k + 1}")(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits if self.classifier is None else self.classifier(logits)


class Block(nn.Module):
    """Attention and two layers, each with a shortcut: [n, T, width] -> [n, T, width] (Vaswani et al. 2017, norm first)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        """Build the block."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.out = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, is_word: Tensor) -> Tensor:
        """Return the tokens' new values. is_word: bool [n, T], the tokens that others look at."""
        n, length, width = x.shape
        each = self.attention(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = each.permute(2, 0, 3, 1, 4).unbind()
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=is_word[:, None, None, :])
        x = x + self.mixed(found.transpose(1, 2).reshape(n, length, width))
        changed: Tensor = x + self.out(F.gelu(self.hidden(self.norm2(x))))
        return changed


class Transformer(nn.Module):
    """A classifier of token sequences [n, length]."""

    WIDTH, HEADS, HIDDEN, BLOCKS = 64, 4, 128, 2

    def __init__(self, length: int, num_classes: int, ids: int = VOCABULARY) -> None:
        """Build embeddings, blocks and classifier."""
        super().__init__()
        self.words, self.places = nn.Embedding(ids, self.WIDTH), nn.Embedding(length, self.WIDTH)
        self.blocks = nn.ModuleList(Block(self.WIDTH, self.HEADS, self.HIDDEN) for _ in range(self.BLOCKS))
        self.norm, self.classifier = nn.LayerNorm(self.WIDTH), nn.Linear(self.WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, num_classes] for tokens [n, length], as integers or floats."""
        ids = x.long()
        # a text without words is one of a single token 0
        is_word = (ids > 0) | (torch.arange(ids.shape[1], device=ids.device) == 0)
        values = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            values = block(values, is_word)
        weights = is_word.to(values.dtype)[:, :, None]
        logits: Tensor = self.classifier((self.norm(values) * weights).sum(dim=1) / weights.sum(dim=1))
        return logits


def _call_factory(
    name: str,
    factory: Callable[..., object],
    in_channels: int,
    num_classes: int,
    image_size: int,
    example: Tensor,
    classifier: str,
    tried: bool,
) -> nn.Module:
    more: dict[str, Any] = {}
    # what is built in may tell no parameters
    with contextlib.suppress(TypeError, ValueError):
        if "input_shape" in inspect.signature(factory).parameters:
            more["input_shape"] = tuple(example.shape[1:])
    try:
        module = factory(in_channels=in_channels, num_classes=num_classes, image_size=image_size, **more)
    except Exception as error:
        raise ConfigurationError(
            key=f"model {name}",
            rule=f"the factory raised {describe(error)}; it is called as factory(in_channels={in_channels}, "
            f"num_classes={num_classes}, image_size={image_size}){at(error)}",
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            key=f"model {name}",
            rule=f"the factory must return a torch.nn.Module, got {type(module).__module__}.{type(module).__qualname__}",
        )
    _check_tensors(name, module)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        # compiled code runs the hooks that methods add later
        dynamo.config.skip_nnmodule_hook_guards = False
    module.eval()
    output = _mark(module, factory, (name,), example, num_classes, classifier)
    _check_output(name, module, example, num_classes, output, tried)
    return module


# splits of networks that were built in this process, and what a pass changes, by what built them and their tensors' names
_SPLITS: dict[Hashable, tuple[Callable[..., object], Split, Effects]] = {}


def _mark(
    module: nn.Module,
    factory: Callable[..., object],
    arguments: tuple[str, ...],
    example: Tensor,
    num_classes: int,
    classifier: str,
) -> Tensor | None:
    """Mark a network, in evaluation mode, with its split and with what a pass changes. Return its output for a batch.

    It is None if the network was passed before.

    factory, arguments: what built the network. Equal ones share a split. classifier: patterns of the key.
    """
    names = tuple(name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    key = id(factory), arguments, tuple(example.shape), example.dtype, num_classes, classifier, names
    output: Tensor | None = None
    if key not in _SPLITS:
        written = frozenset[str]()
        with trial(module) as before:
            try:
                wanted = _wanted(module, classifier) if classifier else None
                output, found, written = tracing.traced(module, example, wanted)
            except (UserError, tracing.WrittenError):
                raise
            except Exception as error:
                found = Split(fault=f"its layers cannot be followed ({describe(error)})")
                if classifier:
                    found = Split(_wanted(module, classifier)())
            _SPLITS[key] = factory, found, Effects(written, frozenset(before.changed()))
    _, split, effects = _SPLITS[key]
    split.marks(module)
    effects.mark(module)
    return output


def _wanted(module: nn.Module, patterns: str) -> Callable[[], frozenset[str]]:
    """Return a function that gives the tensors that the key `classifier` names. It raises UserError if a pattern fits none."""
    return lambda: matching("classifier", patterns, first_names(module))


def _check_tensors(name: str, module: nn.Module) -> None:
    parameters = list(module.named_parameters())
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise ConfigurationError(
            key=f"model {name}", rule="has no trainable parameters; at least one must have requires_grad"
        )
    tracked = nn.modules.batchnorm._BatchNorm
    unknown = [n for n, m in module.named_modules() if isinstance(m, tracked) and m.running_mean is None]
    if unknown:
        raise ConfigurationError(
            key=f"model {name}",
            rule="BatchNorm must keep running statistics, because without them a sample's output depends "
            f"on the rest of its batch; track_running_stats is False in {listed(unknown)}",
        )
    floating = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
    for kind, tensors in (("parameters", parameters), ("floating-point buffers", floating)):
        dtypes = [f"{n} is {t.dtype}" for n, t in tensors if t.dtype != torch.float32]
        if dtypes:
            raise ConfigurationError(key=f"model {name}", rule=f"{kind} must be float32, but {listed(dtypes)}")
        devices = [f"{n} is on {t.device}" for n, t in tensors if t.device.type != "cpu"]
        if devices:
            raise ConfigurationError(
                key=f"model {name}", rule=f"must be built on the CPU (training moves it), but {listed(devices)}"
            )


def _check_output(name: str, module: nn.Module, example: Tensor, num_classes: int, output: object, tried: bool) -> None:
    """Raise UserError if a network does not give logits that train it.

    output: of the batch, None if it was not run yet. tried: whether it was tried in training mode.
    """
    shape, dtype = tuple(example.shape), str(example.dtype).removeprefix("torch.")
    want = [shape[0], num_classes]
    for mode in ("eval",) if tried else ("eval", "train"):
        try:
            if mode == "train":
                if (trained := tracing.in_training(module, example)) is None:
                    break
                output = trained.output
                trained.effects.mark(module)
            elif output is None:
                with torch.no_grad(), trial(module):
                    output = module(example)
        except tracing.WrittenError:
            raise
        except Exception as error:
            raise ConfigurationError(
                key=f"model {name}",
                rule=f"forward raised {describe(error)} on a {dtype} batch of shape {list(shape)} in {mode} "
                f"mode; it must return logits of shape {want}{at(error)}",
            ) from error
        if got := _instead_of_logits(output, want, module):
            raise ConfigurationError(
                key=f"model {name}",
                rule=f"in {mode} mode, a batch of shape {list(shape)} must give logits of shape {want}, got {got}",
            )
    module.train()


def _instead_of_logits(output: object, want: list[int], module: nn.Module) -> str:
    """Return what a network's output is, "" if it is logits of the wanted shape whose gradient trains the network."""
    if not isinstance(output, Tensor):
        inside = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        return f"a {type(output).__qualname__}{'' if inside is None else '; return its logits alone'}"
    if list(output.shape) != want:
        return str(list(output.shape))
    if not output.is_floating_point() or output.layout is not torch.strided:
        return f"values of {output.dtype} in the layout {output.layout}"
    if {name for name, p in module.named_parameters() if p.requires_grad} <= Split.of(module).unused:
        return "values whose gradient reaches no parameter"
    return ""
