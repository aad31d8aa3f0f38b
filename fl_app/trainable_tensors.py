"""Trained and travelling tensors: the keys `train` and `share`, patterns over tensor names such as `*.adapter.*`.

Tensors that do not train are not part of the model that methods see. Their values become constants of the network,
outside of the layout. They never travel. Every node checks that its constants equal the server's.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.contents import Effects
from fl_app.errors import ConfigurationError, listed
from fl_app.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import nn

# Scalar in every download of a run that has constants.
HASH = "frozen-sha256"


def first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter and floating-point buffer by every name. A tied tensor has several names."""
    first: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in itertools.chain(*every)
        if tensor.is_floating_point()
    }


def matching(key: str, patterns: str, names: Iterable[str] | Mapping[str, str]) -> frozenset[str]:
    """Return the names that a key's patterns match; all if there are no patterns. A module's name matches its tensors.

    names: those that there are, or the names to return by those that patterns may match. Raises UserError for a pattern
    that matches none.
    """
    every = names if isinstance(names, Mapping) else {name: name for name in names}
    found: set[str] = set()
    for pattern in split_names(patterns):
        matched = _matched(pattern, every)
        if not matched:
            there = listed(list(dict.fromkeys(every.values())))
            raise ConfigurationError(key=key, rule=f"no tensor of the model matches {pattern!r}; there are {there}")
        found |= matched
    return frozenset(found if patterns else every.values())


def _matched(pattern: str, names: Mapping[str, str]) -> set[str]:
    return {first for name, first in names.items() if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}


def trained(module: nn.Module, patterns: str) -> frozenset[str] | None:
    """Return the names of a module's tensors that patterns match, also if one matches none. None: there are no patterns."""
    names = first_names(module)
    return frozenset().union(*(_matched(pattern, names) for pattern in split_names(patterns))) if patterns else None


def freeze(module: nn.Module, patterns: str, dtype: str = "float32") -> None:
    """Turn all tensors into constants that no pattern matches, or that the model itself keeps from training.

    dtype: in which the matrices among them are stored (`frozen-dtype`), "float32" or "bfloat16". Vectors, such as a norm's,
    stay float32, and buffers that no file has. The module computes with float32 (fl_app/narrow_tensors.py).

    Raises UserError if a pattern matches nothing that can train, if no parameter is left, if a pass of the trial batch wrote
    into a constant, or if no matrix is a constant that `dtype` would narrow.
    """
    import torch

    from fl_app.narrow_tensors import NarrowTensor, plain

    layout = Layout.of(module)
    fixed = frozenset(name for name, parameter in module.named_parameters() if not parameter.requires_grad)
    names, still = first_names(module), layout.names
    for pattern in split_names(patterns):
        matched = matching("train", pattern, names)
        if matched <= fixed:
            rule = f"the model keeps what {pattern!r} matches from training (requires_grad = False)"
            raise ConfigurationError(key="train", rule=rule, value=min(matched))
        still -= matched - fixed
    if still >= {slot.name for slot in layout.params}:
        raise ConfigurationError(key="train", rule=f"no parameter of the model matches {patterns!r}")
    if written := still & Effects.of(module).written:
        rule = "a pass through the model writes into this tensor, which is to stay as it is; let a pattern match it"
        raise ConfigurationError(key="train", rule=rule, value=min(written))
    digest = hashlib.sha256()
    # a tied tensor has several names
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= module.named_buffers(remove_duplicate=False)
    still |= {name for name, tensor in tensors.items() if any(tensor is tensors[other] for other in still)}
    stored = dict[tuple[object, ...], torch.Tensor]()
    for name in sorted(still):
        # let go of each before the next one is converted
        tensor = tensors.pop(name).detach()
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        # what no file has comes from the model's code, and its last bits from the processor
        is_derived = own in owner._non_persistent_buffers_set
        if dtype != "float32" and tensor.is_floating_point() and tensor.dim() > 1 and not is_derived:
            memory = tensor.data_ptr(), tensor.shape, tensor.stride()
            if memory not in stored:
                stored[memory] = tensor.to(getattr(torch, dtype))
            tensor = stored[memory].as_subclass(NarrowTensor)
        if not is_derived:
            digest.update(name.encode())
            # as bytes without a copy
            digest.update(plain(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        was_parameter = owner._parameters.pop(own, None) is not None
        if was_parameter:
            owner.register_buffer(own, None)
        if was_parameter or isinstance(tensor, NarrowTensor):
            # by its name: recurrent layers have a list of their tensors
            setattr(owner, own, tensor)
    if dtype != "float32" and not stored:
        raise ConfigurationError(key="frozen-dtype", rule="the model has no matrix that does not train", value=dtype)
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
