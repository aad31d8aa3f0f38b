"""What a network holds beside its tensors and parts, and what a pass changes of it.

A client's network starts every message as its factory made it. What a pass leaves in attributes of layers is taken back. A
network whose contents cannot be taken back is built anew. What is written into a tensor that must stay is refused.
"""

from __future__ import annotations

import types
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import nn

# values without contents
PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
# what nothing changes, by its type
_FIXED = (
    *(type, types.BuiltinFunctionType, types.ModuleType, types.CodeType, types.GenericAlias),
    *(type(Ellipsis), slice, property, Enum, np.dtype, np.generic, np.ufunc),
)
_OF_TORCH = {("torch", name) for name in ("dtype", "device", "layout", "memory_format")}
# modules whose objects lead to what is a whole process's
_LIBRARIES = ("torch._", "logging", "threading", "asyncio")
# a flag of classes (Py_TPFLAGS_HEAPTYPE)
_WRITTEN_IN_PYTHON = 1 << 9
# how deep the contents of layers are compared
_DEPTH = 8
_MARK = "_corolla_effects"
_PARTS = ("_parameters", "_buffers", "_modules")


def content(cell: types.CellType) -> object:
    """Return what a function keeps of a variable of a function around it; None if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def fingerprint(
    value: Any, depth: int, opaque: Callable[[Any], object] = id, known: dict[int, Any] | None = None
) -> object:
    """Return what equals itself as long as a value stays as it is, and hardly ever otherwise.

    depth: how deep values within values are compared. opaque: gives the fingerprint of what lies deeper, and of what
    cannot be looked into. known: by id, values whose contents do not count; all that is met here is added.
    """
    known = {} if known is None else known
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, _FIXED) or id(value) in known or (type(value).__module__, type(value).__name__) in _OF_TORCH:
        return id(value)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.ravel().tolist()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, zlib.adler32(np.ascontiguousarray(value).view(np.uint8).data)
    if hasattr(value, "_version"):  # a tensor's counter of changes in place
        return id(value), value._version
    if not depth:
        return opaque(value)
    if isinstance(value, bytearray | memoryview | range):
        return bytes(value) if not isinstance(value, range) else repr(value)
    # kept, or an id might become another value's
    known[id(value)] = value
    inner = partial(fingerprint, depth=depth - 1, opaque=opaque, known=known)
    if isinstance(value, Set):
        return sorted(map(repr, value))
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, Mapping):
        return [(repr(name), inner(one)) for name, one in value.items()], inner(held) if held else ()
    if isinstance(value, Sequence):
        return [inner(one) for one in value], inner(held) if held else ()
    if isinstance(value, types.FunctionType):
        return id(value), inner([content(cell) for cell in value.__closure__ or ()]), inner(value.__defaults__)
    if isinstance(value, types.MethodType | partial):
        names = ("__func__", "__self__", "func", "args", "keywords")
        return inner([getattr(value, name) for name in names if hasattr(value, name)])
    classes = type(value).__mro__[:-1]
    if any(cls.__module__.startswith(_LIBRARIES) for cls in classes):
        return opaque(value)
    declared = [vars(cls).get("__slots__", ()) for cls in classes]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    held |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    whole = all(cls.__flags__ & _WRITTEN_IN_PYTHON for cls in classes) and (slots or hasattr(value, "__dict__"))
    return id(value), [(name, inner(one)) for name, one in held.items()], None if whole else opaque(value)


class Contents:
    """What the layers of a network hold by name, and what is within that, at one time.

    Values of parameters and buffers do not count.
    """

    def __init__(self, module: nn.Module, opaque: Callable[[Any], object] = id) -> None:
        """Look at a network. opaque: gives the fingerprint of what Python cannot look into."""
        self._opaque = opaque
        # by the name of a layer and of its attribute, tables and what they held
        self._tables: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []
        self._sets: list[tuple[str, set[Any], set[Any]]] = []
        held: list[tuple[str, object]] = []
        for path, layer in module.named_modules():
            own = vars(layer)
            within = {_joined(path, name): value for name, value in own.items() if type(value) in (dict, OrderedDict)}
            for name, table in ({path: own} | within).items():
                held += [(self._name(name, table, key), value) for key, value in table.items()]
                self._tables.append((name, table, dict(table)))
            self._sets += [
                (_joined(path, name), value, set(value)) for name, value in own.items() if type(value) is set
            ]
        named = [*module.modules(), *module.parameters(), *module.buffers(), *(table for _, table, _ in self._tables)]
        self._known = {id(value): value for value in named}
        self._held = [(name, value) for name, value in held if id(value) not in self._known and not _is_fixed(value)]
        self._prints = self._fingerprints()

    @staticmethod
    def _name(table_name: str, table: Mapping[Any, Any], key: object) -> str:
        """Return the name of an attribute in a layer's table, of a tensor or part, or of the table itself."""
        path, _, last = table_name.rpartition(".")
        if last in _PARTS:
            return _joined(path, str(key))
        return _joined(table_name, str(key)) if "_modules" in table else table_name

    def _fingerprints(self) -> list[object]:
        """Return a fingerprint of what each attribute holds. It equals no other if `opaque` gives none that does."""
        known = dict(self._known)
        return [fingerprint(value, _DEPTH, self._opaque, known) for _, value in self._held]

    @property
    def is_restorable(self) -> bool:
        """Whether what attributes hold is as it was, so that `restore` gives everything back."""
        return self._fingerprints() == self._prints

    def restore(self) -> None:
        """Give every attribute the value that it had. What is within a value stays."""
        for _, table, first in self._tables:
            if table or first:
                table.clear()
                table.update(first)
        for _, values, held in self._sets:
            values.clear()
            values.update(held)

    def changed(self) -> list[str]:
        """Return the names of attributes that have another value, or whose value holds something else."""
        found = dict[str, None]()
        for name, table, first in self._tables:
            for key in first.keys() | table.keys():
                if key != "training" and not _is_same(first.get(key, found), table.get(key, found)):
                    found[self._name(name, table, key)] = None
        found |= {name: None for name, values, first in self._sets if values != first}
        after = self._fingerprints()
        found |= {
            name: None for (name, _), one, other in zip(self._held, self._prints, after, strict=True) if one != other
        }
        return sorted(found)


@contextmanager
def trial(module: nn.Module) -> Iterator[Contents]:
    """Take back what happens inside to attributes of a network, unless it makes parameters or parts, as lazy ones do.

    Yields the contents as they were.
    """
    before, parts = Contents(module), _parts(module)
    yield before
    if parts == _parts(module):
        before.restore()


def _parts(module: nn.Module) -> list[object]:
    """Return the kinds of layers, and the names of their parameters, buffers and parts."""
    layers = module.named_modules()
    return [(path, type(layer), *(list(vars(layer).get(part, ())) for part in _PARTS)) for path, layer in layers]


class Effects(NamedTuple):
    """What a pass of a trial batch changes in a network.

    written: names of parameters and floating-point buffers, without BatchNorm's statistics. changed: names of attributes.
    """

    written: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()

    def mark(self, module: nn.Module) -> None:
        """Write these effects into a network, for `of`, beside those that it has."""
        module.__dict__[_MARK] = Effects(*(one | other for one, other in zip(self, Effects.of(module), strict=True)))

    @classmethod
    def of(cls, module: nn.Module) -> Effects:
        """Return the effects that a network was marked with, and those of the networks inside it."""
        marked = [(path, part.__dict__[_MARK]) for path, part in module.named_modules() if _MARK in part.__dict__]
        every = [[{_joined(path, name) for name in names} for names in effects] for path, effects in marked]
        return cls(*(frozenset[str]().union(*names) for names in zip(*every, strict=True))) if every else cls()


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_fixed(value: object) -> bool:
    """Return whether nothing can change within a value."""
    return isinstance(value, (*PLAIN, frozenset)) or isinstance(value, tuple) and all(map(_is_fixed, value))


def _is_same(one: object, other: object) -> bool:
    """Return whether two values are one, or equal ones in which nothing can change."""
    return one is other or (type(one) is type(other) and _is_fixed(one) and repr(one) == repr(other))
