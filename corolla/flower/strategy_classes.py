"""The strategy class of each method, under its paper's name."""

from __future__ import annotations

import functools
import inspect

from corolla.flower.method_strategy import OF_FLOWER, MethodStrategy
from fl_app.keys import specs
from fl_app.transport.flower import FedAvg
from strategies import METHODS


@functools.cache
def strategy_class(name: str) -> type[MethodStrategy]:
    """Return the class of a method by its paper's name without hyphens. Raises AttributeError for a name that none has."""
    for method in METHODS:
        if method.replace("-", "") == name.lower() and name_of(method) == name:
            return _made(method, name)
    raise AttributeError(
        f"corolla.flower has no {name}; its classes have the papers' names of the methods {', '.join(METHODS)}"
    )


def name_of(method: str) -> str:
    """Return the name of a method's class: the first word of its file, without hyphens."""
    word: str = METHODS.summary(method).replace(":", " ").split()[0]
    return word.replace("-", "")


def _made(method: str, name: str) -> type[MethodStrategy]:
    params = METHODS[method].params
    keys = [
        inspect.Parameter(spec.field, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=spec.type)
        for spec in specs(params)
    ]
    of_flower = inspect.signature(FedAvg.__init__).parameters
    others = [of_flower[each].replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in OF_FLOWER]
    lines = "\n".join(f"- `{spec.field}`: {spec.doc}" for spec in specs(params))
    doc = (
        f"{METHODS.summary(method)}\n\nBeside the arguments of MethodStrategy:\n\n{lines}\n"
        if lines
        else METHODS.summary(method)
    )
    made = type(name, (MethodStrategy,), {"method": method, "__doc__": doc, "__module__": "corolla.flower"})
    made.__signature__ = inspect.Signature([*keys, *others])  # type: ignore[attr-defined]
    return made
