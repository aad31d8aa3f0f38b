"""Trained and travelling tensors: the keys `train` and `share`, patterns over tensor names such as `*.adapter.*`.

Tensors that do not train are not part of the model that methods see. Their values become constants of the network,
outside of the layout. They never travel. Every node checks that its constants equal the server's.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.errors import ConfigurationError, listed
from fl_app.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor, nn

# the open contexts of mixed precision, of this thread
_mixed = threading.local()
# Scalar in every download of a run that has constants.
HASH = "frozen-sha256"


def matching(key: str, patterns: str, names: Iterable[str]) -> frozenset[str]:
    """Return the names that a key's patterns match; all if there are no patterns. A module's name matches its tensors.

    Raises UserError for a pattern that matches none.
    """
    every = list(names)
    found: set[str] = set()
    for pattern in split_names(patterns):
        matched = _matched(pattern, every)
        if not matched:
            raise ConfigurationError(
                key=key, rule=f"no tensor of the model matches {pattern!r}; there are {listed(every)}"
            )
        found |= matched
    return frozenset(found) if patterns else frozenset(every)


def _matched(pattern: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}


def trained(module: nn.Module, patterns: str) -> frozenset[str] | None:
    """Return the names of a module's tensors that patterns match, also if one matches none. None: there are no patterns."""
    names = Layout.of(module).names
    return frozenset().union(*(_matched(pattern, names) for pattern in split_names(patterns))) if patterns else None


def freeze(module: nn.Module, patterns: str, dtype: str = "float32") -> None:
    """Turn all tensors that no pattern matches into constants. Raises UserError if no parameter is left.

    dtype: of the matrices among them (`frozen-dtype`), "float32" or "bfloat16". Vectors, such as a norm's, stay float32.
    With "bfloat16" all calls of the module are in mixed precision (autocast).
    """
    import torch

    layout = Layout.of(module)
    still = layout.names - matching("train", patterns, [slot.name for slot in (*layout.params, *layout.buffers)])
    if still >= {slot.name for slot in layout.params}:
        raise ConfigurationError(key="train", rule=f"no parameter of the model matches {patterns!r}")
    digest = hashlib.sha256()
    tensors = dict(module.state_dict(keep_vars=True))
    still |= {
        name for name, tensor in tensors.items() if any(tensor is tensors[other] for other in still)
    }  # tied to one
    numbers, stored = {name: id(tensor) for name, tensor in tensors.items()}, dict[int, torch.Tensor]()
    for name in sorted(still):
        # let go of each before the next one is converted
        tensor = tensors.pop(name).detach()
        if dtype != "float32" and tensor.is_floating_point() and tensor.dim() > 1:
            tensor = stored.setdefault(numbers[name], tensor.to(getattr(torch, dtype)))
        digest.update(name.encode())
        # as bytes without a copy
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        if owner._parameters.pop(own, None) is not None:
            owner.register_buffer(own, tensor)
        elif tensor.dtype != owner.get_buffer(own).dtype:
            owner._buffers[own] = tensor
    if stored:
        module.register_forward_pre_hook(_begin_mixed)
        module.register_forward_hook(_end_mixed, always_call=True)
    module.frozen_names = still  # type: ignore[assignment]
    module.frozen_sha256 = digest.hexdigest() if still else ""  # type: ignore[assignment]


def _begin_mixed(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    import torch

    context = contextlib.ExitStack()
    context.enter_context(torch.autocast(inputs[0].device.type, torch.bfloat16))
    vars(_mixed).setdefault("contexts", []).append(context)


def _end_mixed(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    vars(_mixed)["contexts"].pop().close()


def widen(module: nn.Module) -> None:
    """Turn constants that are bfloat16 into float32, for use outside of a run. Their hash stays that of the run."""
    import torch

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (_begin_mixed, _end_mixed)]:
            del hooks[number]
            module._forward_hooks_always_called.pop(number, None)
    names: frozenset[str] = getattr(module, "frozen_names", frozenset())
    for path, owner in module.named_modules():
        for own, buffer in owner._buffers.items():
            if buffer is not None and buffer.dtype == torch.bfloat16 and f"{path}.{own}".lstrip(".") in names:
                owner._buffers[own] = buffer.float()


def travelling(config: RunConfig, layout: Layout, shared: frozenset[str]) -> frozenset[str]:
    """Return the names of the tensors that travel: those that the method shares and `share` matches.

    Raises UserError if the method shares tensors and none of them is left.
    """
    left = shared & matching("share", config.share, [slot.name for slot in (*layout.params, *layout.buffers)])
    if shared and not left:
        raise ConfigurationError(
            key="share", rule=f"no tensor that method {config.method} sends matches {config.share!r}"
        )
    return left
