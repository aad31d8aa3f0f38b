"""All that a network holds besides the values that training sets: lists, dicts, objects, constants, tensors of no name.

A network that serves several clients in turn gets back the contents that it was built with. What cannot be given back is
found out, and then the network is built again.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_UNCHANGEABLE = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type, Enum),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout, np.dtype, np.generic, np.ufunc),
    *(types.BuiltinFunctionType, types.ModuleType, types.CodeType, types.GenericAlias, property),
)
_CONTAINERS = (list, set, dict, OrderedDict, defaultdict)
_HEAP_TYPE = 1 << 9
_LIBRARY = ("torch._", "logging", "threading", "asyncio")
"""Modules whose objects lead to what is a whole process's."""


class _Plain:
    """An object whose contents are all in its `__dict__`."""


class Versioned:
    """A tensor, and whether something has written into it since."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version

    @property
    def is_written(self) -> bool:
        """Whether its counter of writes has moved."""
        return self.tensor._version != self._version


def written(tensors: Iterable[tuple[str, Versioned]]) -> str:
    """Return the name of the first tensor that something has written into, "" if there is none."""
    return next((name for name, one in tensors if one.is_written), "")


class Contents:
    """What a module holds now. known: tensors that something else gives back."""

    def __init__(self, module: nn.Module, known: Iterable[Tensor]) -> None:
        self.unknown = ""
        """The name and kind of the first value that cannot be given back, "" if there is none."""
        # of layers, and of all that these hold
        self._layers: list[Callable[[], object]] = []
        self._restore: list[Callable[[], object]] = []
        self._tensors: list[tuple[str, Versioned]] = []
        # kept, or an id might become another value's
        seen = {id(tensor): tensor for tensor in known}
        todo: list[tuple[str, Any]] = [("", module)]
        while todo:
            name, value = todo.pop()
            if isinstance(value, _UNCHANGEABLE) or id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, Tensor):
                self._tensors.append((name, Versioned(value)))
            elif (inside := self._inside(value)) is not None:
                todo += [(".".join(filter(None, (name, key))), inner) for key, inner in inside]
            else:
                self.unknown = self.unknown or f"{name} ({type(value).__name__})"
        self._seen = seen

    def restore(self) -> None:
        """Give back what layers held, and the contents of their lists, dicts, sets, arrays, objects and functions' variables.

        Where something is unknown, layers alone get back what they held: their contents may be those of a whole library.
        """
        for restore in (*self._layers, *(() if self.unknown else self._restore)):
            restore()

    def written(self) -> str:
        """Return the name of a tensor that something has written into, "" if there is none."""
        return written(self._tensors)

    def _inside(self, value: Any) -> list[tuple[str, Any]] | None:
        """Return the values in a value, by name, and note how it is restored. Return None for a kind that is not known."""
        kind: Any = type(value)
        match value:
            case np.ndarray() if value.dtype != object:
                if value.flags.writeable:
                    self._restore.append(functools.partial(np.copyto, value, value.copy()))
                return []
            case nn.Module():
                return self._layer(value)
            case tuple() | frozenset():
                return [*_unnamed(value), *self._attributes(value)]
            case functools.partial():
                return [*_unnamed((value.func, value.args, value.keywords)), *self._attributes(value)]
            case types.MethodType():
                return _unnamed((value.__func__, value.__self__))
            case types.FunctionType():
                variables = value.__closure__ or ()
                try:
                    held = [cell.cell_contents for cell in variables]
                # not set yet
                except ValueError:
                    return None
                self._restore += [
                    functools.partial(setattr, *one)
                    for one in zip(variables, ["cell_contents"] * len(held), held, strict=True)
                ]
                return [*_unnamed((*held, value.__defaults__, value.__kwdefaults__)), *self._attributes(value)]
            case list() | set() | dict() if isinstance(value, _CONTAINERS) and _is_plain(kind):
                return [*self._container(value), *self._attributes(value)]
        return self._attributes(value) if _is_plain(kind) else None

    def _container(self, value: Any) -> list[tuple[str, Any]]:
        if isinstance(value, list):
            first = value[:]
            self._restore.append(functools.partial(list.__setitem__, value, slice(None), first))
            return [(str(k), inner) for k, inner in enumerate(first)]
        if isinstance(value, set):
            self._restore.append(functools.partial(_refill, value, set(value)))
            return _unnamed(value)
        self._restore.append(functools.partial(_refill, value, dict(value)))
        return [(str(key), inner) for key, inner in value.items()]

    def _layer(self, value: nn.Module) -> list[tuple[str, Any]]:
        held = value.__dict__
        tables = [table for table in held.values() if type(table) in (dict, OrderedDict)]
        self._layers += [functools.partial(_refill, table, dict(table)) for table in (held, *tables)]
        # parts and tensors are called by their own names alone
        return [("" if name in _TABLES else name, inner) for name, inner in held.items()]

    def _attributes(self, value: Any) -> list[tuple[str, Any]]:
        held: dict[str, Any] | None = getattr(value, "__dict__", None)
        if held is None:
            return []
        self._restore.append(functools.partial(_refill, held, dict(held)))
        return list(held.items())


_TABLES = ("_modules", "_parameters", "_buffers")


def _unnamed(values: Iterable[Any]) -> list[tuple[str, Any]]:
    return [("", value) for value in values]


def _refill(value: Any, first: Any) -> None:
    """Give a dict or a set its first contents, in their first order."""
    if value or first:
        value.clear()
        value.update(first)


@functools.cache
def _is_plain(kind: type) -> bool:
    """Return whether a class and its bases are Python's containers or written in Python, with all they hold in `__dict__`."""
    bases = [base for base in kind.__mro__ if base is not object]
    written = [base for base in bases if base not in _CONTAINERS]
    if any(not base.__flags__ & _HEAP_TYPE or base.__module__.startswith(_LIBRARY) for base in written):
        return False
    return kind.__basicsize__ <= _Plain.__basicsize__ or len(written) < len(bases)
