"""Gradient checkpointing, where a network offers it: the backward pass computes activations again instead of keeping all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fl_app.errors import ConfigurationError, describe, listed

if TYPE_CHECKING:
    from torch import nn

# PyTorch's other kind gives no gradients if a part's input has none, as behind frozen embeddings
_KIND = {"use_reentrant": False}
# functions by which networks of transformers offer it, its earlier versions, and timm, with their arguments
_OFFERS: dict[str, dict[str, Any]] = {
    "activation_checkpointing_enable": {"activation_checkpointing_kwargs": _KIND},
    "gradient_checkpointing_enable": {"gradient_checkpointing_kwargs": _KIND},
    "set_grad_checkpointing": {},
}
_SWITCH = "set_grad_checkpointing"


def enable(module: nn.Module, model: str) -> None:
    """Switch gradient checkpointing on in all parts of a network that offer it. model: the network's name, for errors.

    Results stay the same. Raises UserError if no part offers it, or if BatchNorm layers would count each batch twice.
    """
    from torch import nn

    found, reasons = list[str](), list[str]()
    for path, part in module.named_modules():
        name = next((name for name in _OFFERS if callable(getattr(part, name, None))), "")
        if not name or any(_is_within(path, outer) for outer in found):
            continue
        try:
            getattr(part, name)(**_OFFERS[name])
        # a class of networks that inherits the function alone
        except (ValueError, AssertionError, NotImplementedError) as error:
            reasons.append(describe(error))
            continue
        found.append(path)
        # its hook on embeddings serves the other kind, and keeps the network from being pickled
        if hasattr(part, "_require_grads_hook"):
            part.disable_input_require_grads()
    if not found:
        why = f" ({listed(reasons)})" if reasons else ""
        rule = f"no part of the model has {' or '.join(list(_OFFERS)[1:])}{why}"
        raise ConfigurationError(key="gradient-checkpointing", rule=rule, value=model)
    frozen: frozenset[str] = getattr(module, "frozen_names", frozenset())
    twice = [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
        and f"{path}.running_mean" not in frozen
        and any(_is_within(path, outer) for outer in found)
    ]
    if twice:
        rule = f"BatchNorm layers would count each batch twice: {listed(twice)}"
        raise ConfigurationError(key="gradient-checkpointing", rule=rule, value=model)
    module.recomputes = tuple(found)  # type: ignore[assignment]


def _is_within(path: str, outer: str) -> bool:
    return not outer or f"{path}.".startswith(f"{outer}.")


@contextmanager
def paused(module: nn.Module) -> Iterator[None]:
    """Keep a network from computing anything again inside, where it would in evaluation mode too."""
    paths: tuple[str, ...] = getattr(module, "recomputes", ())
    parts: list[Any] = [module.get_submodule(path) for path in paths]
    switches = [part.set_grad_checkpointing for part in parts if callable(getattr(part, _SWITCH, None))]
    for switch in switches:
        switch(False)
    try:
        yield
    finally:
        for switch in switches:
            switch(True)
