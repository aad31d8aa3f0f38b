"""The registry of methods: the built-in ones by name, and the user's own, which are imported and checked when requested."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_app import plugins
from fl_app.config import RunConfig
from fl_app.errors import MethodError, UserError
from fl_app.keys import specs, table_of
from strategies.base import LocalUpdate, Method, PersonalizedStrategy

PAPERS = ("fedcac", "feddac", "fedpake", "fedobp")
"""The methods that lie in `strategies` itself. All others are in `strategies.baselines`."""


class Methods(Mapping[str, Method[Any]]):
    """The methods by name. `module:NAME` is one of the user's own.

    A method is imported when it is requested, because a client needs only one. Length and iteration are over the
    built-in methods only. names: of the built-in methods, each in a file of that name with underscores.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Method[Any]:
        """Return a method. Raises KeyError for an unknown name, UserError for a reference to an object that is no method."""
        if name in self._names:
            method: Method[Any] = importlib.import_module(_module(name)).METHOD
            return method
        if plugins.is_reference(name):
            return self._from_outside(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the built-in methods' names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of built-in methods."""
        return len(self._names)

    def doc(self, name: str) -> str:
        """Return the docstring of a method's module, "" if it has none."""
        method = self[name]
        module = sys.modules[name.partition(":")[0] if plugins.is_reference(name) else _module(method.name)]
        return inspect.getdoc(module) or ""

    def summary(self, name: str) -> str:
        """Return the first line of a method's docstring."""
        return self.doc(name).partition("\n")[0]

    def title(self, name: str) -> str:
        """Return a built-in method's name as its paper writes it; any other name unchanged."""
        return self.summary(name).partition(":")[0].partition(" (")[0] if name in self._names else name

    def _from_outside(self, name: str) -> Method[Any]:
        method, table = plugins.load("method", name), table_of(name)
        try:
            if not isinstance(method, Method):
                raise MethodError(f"must be a strategies.base.Method, got {type(method).__name__}")
            if table in self or table in {key.name for key in specs(RunConfig)}:
                what = "method" if table in self else "key"
                raise MethodError(
                    f"{table}, its file's name, exists already: Corolla has a {what} of that name; choose another"
                )
            _check(method, table)
        except UserError as error:
            raise MethodError(key=f"method {name}", rule=error) from None
        return method


def _module(name: str) -> str:
    folder = "strategies" if name in PAPERS else "strategies.baselines"
    return f"{folder}.{name.replace('-', '_')}"


@functools.cache
def _check(method: Method[Any], table: str) -> None:
    """Check all parts of a user's method. Raises UserError naming the part that is wrong."""
    if method.name != table:
        raise MethodError(f"its name must be its file's, {table}, got {method.name!r}")
    for part, base in (("strategy", PersonalizedStrategy), ("local_update", LocalUpdate)):
        half = getattr(method, part)
        made_of = getattr(half, "__origin__", half)  # FedAvg[Params] is FedAvg
        if not isinstance(made_of, type) or not issubclass(made_of, base):
            raise MethodError(f"{part} must be a class made of {base.__name__}, got {half!r}")
        if misfits := list(_misfits(made_of, base)):
            raise MethodError("; ".join(misfits))
    if hasattr(method.strategy, "counts_alike"):
        raise MethodError(
            key="strategy", rule="counts_alike is never called; weights(uploads) returns the uploads' weights"
        )
    _check_params(method.params, table)


def _misfits(half: type, base: type) -> Iterator[str]:
    """Yield a line for each hook of a half that cannot be called with the arguments of the base's: its place, and these."""
    for name, declared in inspect.getmembers(base, inspect.isfunction):
        hook = inspect.getattr_static(half, name)
        # hooks.checked wraps a hook
        own = getattr(hook, "__wrapped__", hook) if inspect.isfunction(hook) else hook
        if name.startswith("_") or own is declared or not (inspect.isfunction(own) or isinstance(own, staticmethod)):
            continue
        _, *parameters = inspect.signature(declared).parameters.values()
        needed = [
            p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        given = [None] * (len(needed) + (not isinstance(own, staticmethod)))
        function = own.__func__ if isinstance(own, staticmethod) else own
        try:
            inspect.signature(function).bind(*given)
        except TypeError:
            code = inspect.unwrap(function).__code__
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            yield f"{where}: {name}() must take ({', '.join(p.name for p in needed)})"


def _check_params(params: type, table: str) -> None:
    if not dataclasses.is_dataclass(params):
        raise MethodError(f"params must be a dataclass of declared keys, got {params!r}")
    try:
        declared = specs(params, table)
    except (TypeError, NameError) as error:
        raise MethodError(key="params", rule=error) from None
    undeclared = {field.name for field in dataclasses.fields(params)} - {spec.field for spec in declared}
    as_in = "must be declared, as in `{}: float = key(0.5, ...)`"
    problems = [UserError(key=name, rule=as_in.format(name)) for name in sorted(undeclared)]

    def refuse(key: str, rule: str, value: object) -> None:
        problems.append(UserError(key=key, rule=rule, value=value))

    for spec in declared:
        if spec.type not in (bool, int, float, str):
            kind = getattr(spec.type, "__name__", spec.type)
            refuse(spec.name, "must be a bool, int, float, str or Literal of words", kind)
        elif spec.about != "training":
            refuse(spec.name, "`about` of key() must be 'training'", spec.about)
        elif not isinstance(spec.doc, str) or not spec.doc.strip():
            refuse(spec.name, "the second value of key() must be its sentence", spec.doc)
        elif spec.rule is not None and not hasattr(spec.rule, "admits"):
            refuse(spec.name, "the third value of key() must be a Rule", spec.rule)
        else:
            spec.read(spec.default, problems)
    if problems:
        raise MethodError(f"params: {'; '.join(map(str, problems))}", key="params")


class Params(Mapping[str, type]):
    """The parameter dataclass of each method."""

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def __getitem__(self, name: str) -> type:
        """Return a method's dataclass. Raises as `Methods` does."""
        return self._methods[name].params

    def of(self, name: str) -> Mapping[str, type]:
        """Return the dataclass of this method alone; of all methods if none has this name. Raises UserError as `Methods` does."""
        return {name: self[name]} if name in self else self

    def __iter__(self) -> Iterator[str]:
        """Yield the built-in methods' names."""
        return iter(self._methods)

    def __len__(self) -> int:
        """Return the number of built-in methods."""
        return len(self._methods)
