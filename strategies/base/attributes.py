"""What an own method keeps in attributes is lost: a hook that sets one is named, once, before the next round.

A client has a new object of its half in every turn. A resumed run has a new server half. A class attribute belongs to one
process. None of this is an error: a hook may hand a value to a later hook of the same round in this way.
"""

from __future__ import annotations

import functools
import inspect
import types
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# attributes that the engine sets
_ENGINES = frozenset(
    (
        "aggregation_groups",
        "attempt",
        "config",
        "folder",
        "form_of_exports",
        "full_layout",
        "layout",
        "params",
        "reports",
    )
) | {"sender", "shared", "state", "submodel", "told"}
# how deep values within values are compared
_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_told: set[tuple[type, str]] = set()

Attributes = Mapping[tuple[type | None, str], object]
"""A value's fingerprint by (class, name); None stands for the object itself."""


def is_own(cls: type) -> bool:
    """Return whether a class is a user's, and not one of this package's methods."""
    return cls.__module__.partition(".")[0] != __name__.partition(".")[0]


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of attributes and functions that code uses, and code inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def functions_of(classes: Iterable[type]) -> list[types.FunctionType]:
    """Return the functions that classes define."""
    values = (getattr(value, "__func__", value) for cls in classes for value in vars(cls).values())
    return [inner for value in values if callable(value) and inspect.isfunction(inner := inspect.unwrap(value))]


@functools.cache
def _own(half: type) -> tuple[list[type], frozenset[str]]:
    """Return the user's classes that a half consists of, and the names that their code uses and the engine does not set."""
    classes = [cls for cls in half.__mro__[:-1] if is_own(cls)]
    used = set[str]().union(*(names_in(function.__code__) for function in functions_of(classes)))
    return classes, frozenset(used) - _ENGINES


def attributes(half: object) -> Attributes:
    """Return what the attributes that a user's code names hold: those of a half, and those of its own classes."""
    kind: Any = type(half)
    classes, names = _own(kind)
    found: dict[tuple[type | None, str], object] = {}
    for owner, values in ((None, vars(half)), *((cls, vars(cls)) for cls in classes)):
        for name in names & values.keys():
            if not _is_code(values[name]) and not _is_code(getattr(kind, name, None)):
                found[owner, name] = _fingerprint(values[name], _DEPTH)
    return found


def warn_of_changed(before: Attributes, half: object, hook: str, client: bool) -> None:
    """Print a warning for each attribute that a hook has changed, once in this process.

    hook: as the warning calls it. client: whether the half is a client's.
    """
    kept = "`state.arrays`" if client else "the State that update() returns"
    for (cls, name), value in attributes(half).items():
        known = cls or type(half), name
        if before.get((cls, name), _told) != value and known not in _told:
            _told.add(known)
            print(
                f"warning: {hook} sets {cls.__name__ if cls else 'self'}.{name}, which is lost: between rounds only {kept} is "
                "kept (docs/methods-howto.md)"
            )


def _is_code(value: object) -> bool:
    return isinstance(value, type | staticmethod | classmethod | property | functools.cached_property) or callable(
        value
    )


def _fingerprint(value: Any, depth: int) -> object:
    """Return what equals itself as long as a value stays as it is, and hardly ever otherwise."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.shape, value.dtype.str, zlib.adler32(np.ascontiguousarray(value).view(np.uint8).data)
    if hasattr(value, "_version"):  # a tensor's counter of changes in place
        return id(value), value._version
    if not depth:
        return id(value)
    if isinstance(value, Mapping):
        return [(repr(name), _fingerprint(inner, depth - 1)) for name, inner in value.items()]
    if isinstance(value, list | tuple):
        return [_fingerprint(inner, depth - 1) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    inside = getattr(value, "__dict__", {})
    return id(value), [(name, _fingerprint(inner, depth - 1)) for name, inner in inside.items()]
