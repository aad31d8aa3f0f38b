"""What an own method keeps in attributes is lost: a hook that sets one is named, once, before the next round.

A client has a new object of its half in every turn. A resumed run has a new server half. A class attribute, and a variable of
a module, belong to one process. None of this is an error: a hook may hand a value to a later hook of the same round in this way.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from fl_app.contents import PLAIN, content, fingerprint

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
_told: set[tuple[type | str, str]] = set()


class _Variable(NamedTuple):
    """A variable outside of objects and classes: the name of its module or function, its own, and what reads it."""

    owner: str
    name: str
    read: Callable[[], object]


Attributes = Mapping[tuple[type | str | None, str], object]
"""A value's fingerprint by (owner, name): a class, the name of a module or function, or None for the object itself."""


def is_own(cls: type) -> bool:
    """Return whether a class is a user's, and not one of this package's methods."""
    return cls.__module__.partition(".")[0] != __name__.partition(".")[0]


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of attributes and functions that code uses, and code inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def words_in(code: types.CodeType) -> set[str]:
    """Return the names that code uses, and its texts, which may be names of entries and attributes."""
    words, constants = names_in(code), list(code.co_consts)
    for constant in constants:
        if isinstance(constant, types.CodeType):
            words |= words_in(constant)
        elif isinstance(constant, tuple):
            constants += constant
        elif isinstance(constant, str):
            words.add(constant)
    return words


def functions_of(classes: Iterable[type]) -> list[types.FunctionType]:
    """Return the functions that classes define."""
    values = (getattr(value, "__func__", value) for cls in classes for value in vars(cls).values())
    return [inner for value in values if callable(value) and inspect.isfunction(inner := inspect.unwrap(value))]


def called_by(classes: Iterable[type]) -> list[types.FunctionType]:
    """Return the functions that classes define, and those of their modules that these call."""
    functions = functions_of(classes)
    for function in functions:
        values = function.__globals__
        for name in names_in(function.__code__) & values.keys():
            value = values[name]
            if isinstance(value, types.FunctionType) and value.__globals__ is values and value not in functions:
                functions.append(value)
    return functions


@cache
def _own(half: type) -> tuple[list[type], frozenset[str], frozenset[str], list[_Variable]]:
    """Return the user's classes that a half consists of, the names that their code and the package's use, and variables.

    The variables are those of modules that the user's functions name, and those that the functions keep by themselves.
    """
    classes = [cls for cls in half.__mro__[:-1] if is_own(cls)]
    used, variables = set[str](), list[_Variable]()
    functions = called_by(classes)
    for function in functions:
        names, values = names_in(function.__code__), function.__globals__
        used |= names
        variables += [_Variable(values["__name__"], name, partial(values.get, name)) for name in names & values.keys()]
        variables += _kept_by(function)
    engines = functions_of(cls for cls in half.__mro__[:-1] if not is_own(cls))
    others = set[str]().union(*(names_in(function.__code__) for function in engines))
    return (
        classes,
        frozenset(used) - _ENGINES,
        frozenset(others - used) | _ENGINES,
        [*{each[:2]: each for each in variables}.values()],
    )


def _kept_by(function: types.FunctionType) -> Iterator[_Variable]:
    """Yield what a function keeps from call to call: attributes, values of parameters, and those of a function around it."""
    owner = function.__qualname__
    for name in vars(function).keys() - {"__wrapped__"}:
        yield _Variable(owner, name, partial(vars(function).get, name))
    for name, parameter in inspect.signature(function).parameters.items():
        yield _Variable(owner, name, partial(getattr, parameter, "default"))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _Variable(owner, name, partial(content, cell))


def attributes(half: object) -> Attributes:
    """Return what a user's code may have set: attributes of a half and of its own classes, and variables of its modules."""
    kind: Any = type(half)
    classes, used, others, variables = _own(kind)
    found: dict[tuple[type | str | None, str], object] = {}
    # names that setattr makes are in no code
    for owner, values in ((None, vars(half)), *((cls, vars(cls)) for cls in classes)):
        for name in (used & values.keys()) if owner else values.keys() - others:
            if not _is_code(values[name]) and not _is_code(getattr(kind, name, None)):
                found[owner, name] = fingerprint(values[name], _DEPTH)
    for place, name, read in variables:
        if _is_plain(value := read()):
            found[place, name] = fingerprint(value, _DEPTH)
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
            owner = "self" if cls is None else getattr(cls, "__name__", cls)
            print(
                f"warning: {hook} sets {owner}.{name}, which is lost: between rounds only {kept} is "
                "kept (docs/methods-howto.md)"
            )


def _is_plain(value: object) -> bool:
    """Return whether a module's variable holds data, and not a logger or a lock, which change by themselves."""
    return isinstance(value, (*PLAIN, np.ndarray, Mapping, Sequence, Set)) or hasattr(value, "_version")


def _is_code(value: object) -> bool:
    known = isinstance(value, type | staticmethod | classmethod | property | cached_property | partial)
    return known or inspect.isroutine(value) or hasattr(value, "__wrapped__")
