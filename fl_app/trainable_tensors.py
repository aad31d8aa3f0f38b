"""Trained and travelling tensors: the keys `train` and `share`, patterns over tensor names such as `*.adapter.*`.

Tensors that do not train are not part of the model that methods see. Their values become constants of the network,
outside of the layout. They never travel. Every node checks that its constants equal the server's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.errors import ConfigurationError, listed
from fl_app.layout import Layout

if TYPE_CHECKING:
    from torch import nn

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

    dtype: in which the matrices among them are stored (`frozen-dtype`), "float32" or "bfloat16". Vectors, such as a norm's,
    stay float32. The module computes with float32 (fl_app/narrow_tensors.py).
    """
    import torch

    from fl_app.narrow_tensors import NarrowTensor, plain

    layout = Layout.of(module)
    still = layout.names - matching("train", patterns, [slot.name for slot in (*layout.params, *layout.buffers)])
    if still >= {slot.name for slot in layout.params}:
        raise ConfigurationError(key="train", rule=f"no parameter of the model matches {patterns!r}")
    digest = hashlib.sha256()
    tensors = dict(module.state_dict(keep_vars=True))
    still |= {
        name for name, tensor in tensors.items() if any(tensor is tensors[other] for other in still)
    }  # tied to one
    stored = dict[tuple[object, ...], torch.Tensor]()
    for name in sorted(still):
        # let go of each before the next one is converted
        tensor = tensors.pop(name).detach()
        if dtype != "float32" and tensor.is_floating_point() and tensor.dim() > 1:
            memory = tensor.data_ptr(), tensor.shape, tensor.stride()
            if memory not in stored:
                stored[memory] = tensor.to(getattr(torch, dtype))
            tensor = stored[memory].as_subclass(NarrowTensor)
        digest.update(name.encode())
        # as bytes without a copy
        digest.update(plain(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        was_parameter = owner._parameters.pop(own, None) is not None
        if was_parameter:
            owner.register_buffer(own, None)
        if was_parameter or isinstance(tensor, NarrowTensor):
            # by its name: recurrent layers have a list of their tensors
            setattr(owner, own, tensor)
    module.frozen_names = still  # type: ignore[assignment]
    module.frozen_sha256 = digest.hexdigest() if still else ""  # type: ignore[assignment]


def widen(module: nn.Module) -> None:
    """Store all constants as float32, for use outside of a run. Their hash stays that of the run."""
    from fl_app.narrow_tensors import NarrowTensor, plain

    for owner in module.modules():
        for own, buffer in owner._buffers.items():
            if isinstance(buffer, NarrowTensor):
                setattr(owner, own, plain(buffer).float())


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
