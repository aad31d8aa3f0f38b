"""Trained and travelling tensors: the keys `train` and `share`, patterns over tensor names such as `*.adapter.*`.

Tensors that do not train are not part of the model that methods see. Their values become constants of the network,
outside of the layout. They never travel. Every node checks that its constants equal the server's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

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
        matched = {name for name in every if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matched:
            raise ConfigurationError(
                key=key, rule=f"no tensor of the model matches {pattern!r}; there are {listed(every)}"
            )
        found |= matched
    return frozenset(found) if patterns else frozenset(every)


def freeze(module: nn.Module, patterns: str) -> None:
    """Turn all tensors that no pattern matches into constants. Raises UserError if no parameter is left."""
    layout = Layout.of(module)
    still = layout.names - matching("train", patterns, [slot.name for slot in (*layout.params, *layout.buffers)])
    if still >= {slot.name for slot in layout.params}:
        raise ConfigurationError(key="train", rule=f"no parameter of the model matches {patterns!r}")
    digest = hashlib.sha256()
    tensors = dict(module.state_dict(keep_vars=True))
    still |= {
        name for name, tensor in tensors.items() if any(tensor is tensors[other] for other in still)
    }  # tied to one
    for name in sorted(still):
        digest.update(name.encode())
        # as bytes without a copy
        digest.update(tensors[name].detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8))
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        if own in owner._parameters:
            value: Any = owner._parameters.pop(own)
            owner.register_buffer(own, value.detach())
    module.frozen_names = still  # type: ignore[assignment]
    module.frozen_sha256 = digest.hexdigest() if still else ""  # type: ignore[assignment]


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
