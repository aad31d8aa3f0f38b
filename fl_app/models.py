"""The networks, and the bridge between a torch module and the flat vectors of fl_app.layout.

Every network maps images float32 [n, in_channels, image_size, image_size] to logits float32 [n, num_classes]. Image
sizes from 8 to 64 work for all of them, and larger ones too.

- `mlp`: flatten, 128, 64, classifier.
- `cnn`: McMahan et al. 2017 (FedAvg §3), FedOBP's network: conv 5x5-32, pool, conv 5x5-64, pool, fc 512, classifier;
  582,026 parameters for 1x28x28 and 878,538 for 3x32x32 (10 classes). The convolutions are unpadded; below 16 pixels
  they no longer fit, so there (and only there) both are padded by 2.
- `resnet8`: FedCAC's: ResNet stem, BasicBlocks 64/128/256; 1,235,274 parameters for 3 channels and 10 classes.
- `resnet10`, `resnet18`, `resnet34`: He et al. 2016, BasicBlocks 64/128/256/512, tensor names, shapes and
  initialization as in torchvision, so that its checkpoints fit. On images up to 32x32 the last stage sees a single
  pixel; BatchNorm then refuses to train on a batch of one.
- `resnet18-fedobp`: FedOBP's (its Table 4): `resnet18` with torchvision's 1000 outputs, and on them, without an activation
  between, the classifier; 11,699,522 parameters for 3 channels and 10 classes.
- `module:factory`: the user's, called with keywords in_channels, num_classes, image_size.

Vectors: `params` float32 [d] holds `named_parameters()` in order (a tied parameter once), `buffers` float32 [b] the
floating-point buffers; see Layout. Files are safetensors, one tensor per name of the layout.
"""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_app.catalogue import MODELS
from fl_app.errors import UserError
from fl_app.files import publish
from fl_app.layout import Layout, Model, Vector
from fl_app.rng import torch_seed

NORMS = ("batch", "group")
MAX_GROUPS = 32
UNPADDED_CNN_SIZE = 16
SMALLEST_CNN_SIZE = 4
MAX_LISTED = 5


def build(
    name: str, *, in_channels: int, num_classes: int, image_size: int, norm: str = "batch", seed: int = 0
) -> nn.Module:
    """Build a model on the CPU, in train mode, its weights a function of (seed, name) alone.

    name: a key of the module docstring's list. norm: `batch` or `group` (32 groups), used by the resnets only. Torch's
    global generator is left as it was. A user's factory must draw from torch's generator, not NumPy's, to be seeded.
    Raises UserError for an unknown name or norm, an image too small, and whatever a user's factory does wrong.
    """
    if norm not in NORMS:
        raise UserError(f"norm: must be one of {', '.join(NORMS)}, got {norm!r}")
    with torch.random.fork_rng(devices=[]):
        if ":" in name:
            factory = _import_factory(name)
            _seed(seed, name)
            return _call_factory(name, factory, in_channels, num_classes, image_size)
        network = MODELS.get(name)
        if network is None:
            raise UserError(f"model: must be one of {', '.join(MODELS)} or module:factory, got {name!r}")
        _seed(seed, name)
        if network.blocks:
            return ResNet(network.blocks, in_channels, num_classes, norm, network.extra)
        return {"mlp": _mlp, "cnn": _cnn}[name](in_channels, num_classes, image_size)


def _seed(seed: int, name: str) -> None:
    # Not torch.manual_seed: that one seeds the GPUs' generators too, which fork_rng does not restore here.
    torch.default_generator.manual_seed(torch_seed(seed, f"model:{name}"))


def _mlp(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(in_channels * image_size**2, 128)
    layers["relu1"] = nn.ReLU()
    layers["fc2"] = nn.Linear(128, 64)
    layers["relu2"] = nn.ReLU()
    layers["classifier"] = nn.Linear(64, num_classes)
    return nn.Sequential(layers)


def _cnn(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    if image_size < SMALLEST_CNN_SIZE:
        raise UserError(f"model cnn: images must be at least {SMALLEST_CNN_SIZE} pixels wide, got {image_size}")
    padding = 0 if image_size >= UNPADDED_CNN_SIZE else 2
    side = image_size
    for _ in range(2):
        side = (side - 4 + 2 * padding) // 2
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(in_channels, 32, 5, padding=padding)
    layers["relu1"] = nn.ReLU()
    layers["pool1"] = nn.MaxPool2d(2)
    layers["conv2"] = nn.Conv2d(32, 64, 5, padding=padding)
    layers["relu2"] = nn.ReLU()
    layers["pool2"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(64 * side**2, 512)
    layers["relu3"] = nn.ReLU()
    layers["classifier"] = nn.Linear(512, num_classes)
    return nn.Sequential(layers)


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
    """ResNet of BasicBlocks (He et al. 2016), tensor names, shapes and initialization as in torchvision.

    blocks: BasicBlocks per stage; stage k has 64 * 2^k channels and halves the image from the second stage on.
    extra: units of `fc` if `classifier` comes after it, 0: `fc` is the classifier.
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
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, num_classes] for images [n, in_channels, h, w]."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for k in range(self.num_stages):
            x = self.get_submodule(f"layer{k + 1}")(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits if self.classifier is None else self.classifier(logits)


def _import_factory(name: str) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"model {name}: cannot import {module_name} ({_said(error)}); the module must be importable on every node "
            "or lie in the app directory"
        ) from error
    try:
        factory: Callable[..., object] = getattr(module, attribute)
    except AttributeError as error:
        raise UserError(
            f"model {name}: {module_name} ({module.__file__}) has no {attribute}; expected a function of in_channels, "
            "num_classes and image_size"
        ) from error
    return factory


def _call_factory(
    name: str, factory: Callable[..., object], in_channels: int, num_classes: int, image_size: int
) -> nn.Module:
    try:
        module = factory(in_channels=in_channels, num_classes=num_classes, image_size=image_size)
    except Exception as error:
        raise UserError(
            f"model {name}: the factory raised {_said(error)}; it is called as factory(in_channels={in_channels}, "
            f"num_classes={num_classes}, image_size={image_size})"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model {name}: the factory must return a torch.nn.Module, got {type(module).__module__}."
            f"{type(module).__qualname__}"
        )
    _check_tensors(name, module)
    _check_output(name, module, (2, in_channels, image_size, image_size), num_classes)
    return module


def _check_tensors(name: str, module: nn.Module) -> None:
    parameters = list(module.named_parameters())
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise UserError(f"model {name}: has no trainable parameters; at least one must have requires_grad")
    floating = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
    for kind, tensors in (("parameters", parameters), ("floating-point buffers", floating)):
        dtypes = [f"{n} is {t.dtype}" for n, t in tensors if t.dtype != torch.float32]
        if dtypes:
            raise UserError(f"model {name}: {kind} must be float32, but {_listed(dtypes)}")
        devices = [f"{n} is on {t.device}" for n, t in tensors if t.device.type != "cpu"]
        if devices:
            raise UserError(f"model {name}: must be built on the CPU (training moves it), but {_listed(devices)}")


def _check_output(name: str, module: nn.Module, shape: tuple[int, ...], num_classes: int) -> None:
    module.eval()
    try:
        with torch.no_grad():
            output = module(torch.zeros(shape))
    except Exception as error:
        raise UserError(
            f"model {name}: forward raised {_said(error)} on a float32 batch of shape {list(shape)} in eval mode; it "
            f"must return logits of shape {[shape[0], num_classes]}"
        ) from error
    got = list(output.shape) if isinstance(output, Tensor) else f"a {type(output).__qualname__}"
    if got != [shape[0], num_classes]:
        want = [shape[0], num_classes]
        raise UserError(f"model {name}: a batch of shape {list(shape)} must give logits of shape {want}, got {got}")
    module.train()


def read(module: nn.Module) -> Model:
    """Copy a module's parameters and float buffers into vectors: params float32 [d], buffers float32 [b].

    One device-to-host copy per vector; the result shares no memory with the module.
    """
    return Model(_flat(module.parameters()), _flat(_float_buffers(module)))


def write(module: nn.Module, model: Model) -> None:
    """Copy vectors into a module in place, wherever it lives; the inverse of `read`.

    model: params float32 [d], buffers float32 [b]; read-only arrays are fine. One host-to-device copy per vector.
    """
    with torch.no_grad():
        _unflat(list(module.parameters()), model.params)
        _unflat(_float_buffers(module), model.buffers)


def _float_buffers(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def _flat(tensors: Iterable[Tensor]) -> Vector:
    pieces = [tensor.detach().reshape(-1) for tensor in tensors]
    if not pieces:
        return np.zeros(0, np.float32)
    vector: Vector = torch.cat(pieces).cpu().numpy()
    return vector


def _unflat(tensors: list[Tensor], vector: Vector) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    assert vector.shape == (sum(sizes),), f"vector has shape {vector.shape}, the module {sum(sizes)} elements"
    if not tensors:
        return
    # torch.tensor, not from_numpy: vectors off the wire or a memory map are read-only, about which from_numpy warns.
    source = torch.tensor(vector, device=tensors[0].device)
    for tensor, piece in zip(tensors, source.split_with_sizes(sizes), strict=True):
        tensor.copy_(piece.view(tensor.shape))


def initial_model(module: nn.Module, path: str) -> Model:
    """Read `initial-weights`, a safetensors file, into the vectors of `module`; the module itself stays as it is.

    Names and shapes must equal the module's; any floating dtype is converted to float32. Integer tensors (such as
    `num_batches_tracked`) and second names of tied parameters are ignored; buffers that a state dict never holds keep
    the module's values. A checkpoint for another number of classes needs a classifier of the right size first.
    Raises UserError if the file is missing or unreadable, does not fit (naming the tensors), or holds NaN or infinity.
    """
    layout, state = Layout.of(module), module.state_dict()
    own = {name: torch.from_numpy(array) for name, array in layout.tensors(read(module)).items() if name not in state}
    source = f"initial-weights {path}"
    found = {name: t for name, t in _load(path, source).items() if name in layout.names or name not in state}
    return _fit(source, own | found, layout)


def save_safetensors(path: str | Path, layout: Layout, model: Model) -> None:
    """Write a model by tensor name, atomically: `path` holds the old file or the whole new one, never a part.

    Raises OSError if the directory does not exist or cannot be written.
    """
    from safetensors.numpy import save

    publish(Path(path), lambda file: file.write_bytes(save(layout.tensors(model), metadata={"format": "pt"})))


def load_safetensors(path: str | Path, layout: Layout) -> Model:
    """Read what `save_safetensors` wrote: params float32 [d], buffers float32 [b]; integer tensors are ignored.

    Raises UserError if the file is missing or unreadable, does not fit the layout, or holds NaN or infinity.
    """
    return _fit(str(path), _load(path, str(path)), layout)


def _load(path: str | Path, source: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{source}: no such file; expected a safetensors file") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source}: not a readable safetensors file ({_said(error)})") from error


def _fit(source: str, tensors: Mapping[str, Tensor], layout: Layout) -> Model:
    slots = layout.params + layout.buffers
    missing = [f"{s.name} {list(s.shape)}" for s in slots if s.name not in tensors]
    unexpected = [f"{n} {list(t.shape)}" for n, t in tensors.items() if n not in layout.names and t.is_floating_point()]
    wrong = []
    for slot in slots:
        tensor = tensors.get(slot.name)
        if tensor is not None and (tuple(tensor.shape) != slot.shape or not tensor.is_floating_point()):
            kind = "" if tensor.is_floating_point() else f"{tensor.dtype} "
            wrong.append(f"{slot.name} {kind}{list(tensor.shape)}, expected {list(slot.shape)}")
    groups = {"missing": missing, "unexpected": unexpected, "wrong shape or type": wrong}
    if any(groups.values()):
        lines = [f"  {what} ({len(names)}): {_listed(names, '; ')}" for what, names in groups.items() if names]
        raise UserError(f"{source}: does not fit the model:\n" + "\n".join(lines))
    arrays = {slot.name: tensors[slot.name].to(torch.float32).numpy() for slot in slots}
    infinite = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if infinite:
        raise UserError(f"{source}: all values must be finite in float32, but not so in {_listed(infinite)}")
    return layout.model(arrays)


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return separator.join(names[:MAX_LISTED]) + more


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
