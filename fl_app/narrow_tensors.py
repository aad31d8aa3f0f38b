"""Constants of a network that are stored as bfloat16 and computed as float32 (the key `frozen-dtype`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.nn import functional as F

# What asks for a tensor's form, moves it, or hands it on. Everything else computes.
_KEEPING = frozenset(
    "__get__ __set__ __len__ __hash__ __reduce_ex__ contiguous cpu cuda data_ptr detach dim element_size get_device "
    "is_complex is_contiguous is_floating_point is_pinned is_shared ndimension nelement numel pin_memory register_hook size "
    "storage_offset stride to untyped_storage".split()
)
_LOOKUPS = frozenset({F.embedding, torch.embedding})
# what autocast computes with few bits, whatever it gets
_CASTING = frozenset(
    "__matmul__ __rmatmul__ addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "linear matmul mm multi_head_attention_forward".split()
)


class NarrowTensor(Tensor):
    """A constant float32 tensor of any shape, with the precision and the memory of bfloat16.

    Every operation gets it as float32, for the time of the operation. The backward pass makes the float32 values again:
    only one operation's are in memory at a time. Products under autocast get it as bfloat16. A write changes what is
    stored. A deep copy is the tensor itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> NarrowTensor:
        """Return this one."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch whose arguments have such tensors."""
        named = dict(kwargs or {})
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return torch.float32
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _KEEPING and isinstance(args[0], cls):
                kept = func(*args, **named)
                converts = any(isinstance(value, torch.dtype) for value in (*args, *named.values()))
                is_stored = isinstance(kept, Tensor) and kept.dtype == torch.bfloat16 and not converts
                return kept.as_subclass(cls) if is_stored else kept
            # an operation in place writes into its first argument
            writes = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
            given = [plain(args[0]), *args[1:]] if writes else args
            named |= {"out": plain(named["out"])} if "out" in named else {}
            if func in _LOOKUPS:
                return _WideCall(lambda _: True)(func, given, named).float()
            found = _WideCall(lambda device: name in _CASTING and torch.is_autocast_enabled(device))(func, given, named)
            return args[0] if writes and found is given[0] else found


def plain(value: Any) -> Any:
    """Return the bfloat16 tensor that a stored one has its memory of; any other value as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor) if isinstance(value, NarrowTensor) else value


class _WideCall:
    """One call of a function, and the float32 values that it gets.

    keeps: whether the function gets tensors of a type of device as they are stored.
    """

    def __init__(self, keeps: Callable[[str], bool]) -> None:
        self.keeps = keeps
        # functions of torch.func allow no hooks on what the backward pass keeps
        has_hooks = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
        self.hooks = torch.is_grad_enabled() and has_hooks()
        # by the address of float32 values, what they were made from
        self._sources: dict[int, Tensor] = {}

    def __call__(self, func: Callable[..., Any], args: Iterable[Any], named: dict[str, Any]) -> Any:
        """Call the function."""
        args, named = self._given(tuple(args)), self._given(named)
        with graph.saved_tensors_hooks(self._kept, _made_again) if self._sources else contextlib.nullcontext():
            return func(*args, **named)

    def _given(self, value: Any) -> Any:
        """Return a function's argument without narrow tensors."""
        if isinstance(value, (list, tuple)):
            made = [self._given(item) for item in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        if isinstance(value, dict):
            return {key: self._given(item) for key, item in value.items()}
        if not isinstance(value, NarrowTensor):
            return value
        stored: Tensor = plain(value)
        if self.keeps(stored.device.type):
            return stored
        wide = stored.float()
        if self.hooks:
            self._sources[wide.untyped_storage().data_ptr()] = stored
        return wide

    def _kept(self, saved: Tensor) -> Any:
        """Return what the backward pass keeps of a tensor."""
        source = self._sources.get(saved.untyped_storage().data_ptr()) if saved.layout == torch.strided else None
        return saved if source is None else (source, saved.size(), saved.stride(), saved.storage_offset())


def _made_again(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    source, *place = kept
    made: Tensor = source.float().as_strided(*place)
    return made
