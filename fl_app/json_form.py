"""The check of JSON from elsewhere against a type, so that code after it meets no other form."""

from __future__ import annotations

import math
import reprlib
import types
import typing
from typing import Any, get_args, get_origin, get_type_hints

_WORDS = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false", type(None): "null"}


def problem(value: object, form: Any, name: str) -> str:
    """Return the first difference between a JSON value and a type as `NAME must be ..., got ...`; empty if there is none.

    form: a TypedDict, whose other keys are free, `list[T]`, `dict[str, T]`, a Literal, a union, or one of str, int, float,
    bool, None and Any. A whole number has at most 63 bits. name: of the value, in the message.
    """
    if form is Any:
        return ""
    if typing.is_typeddict(form):
        return _of_keys(value, form, name) if isinstance(value, dict) else _differs(value, "an object", name)
    origin, inside = get_origin(form), get_args(form)
    if origin in (types.UnionType, typing.Union):
        whys = [problem(value, one, name) for one in inside]
        return whys[-1] if all(whys) else ""
    if origin is typing.Literal:
        return "" if type(value) is str and value in inside else _differs(value, f"one of {', '.join(inside)}", name)
    if origin in (list, dict):
        if not isinstance(value, origin):
            return _differs(value, "a list" if origin is list else "an object", name)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next((why for key, one in items if (why := problem(one, inside[-1], f"{name}[{key!r:.40}]"))), "")
    return "" if _is(value, form) else _differs(value, _WORDS[form], name)


def _of_keys(value: dict[str, Any], form: Any, name: str) -> str:
    for key, hint in get_type_hints(form).items():
        within = f"{name}.{key}" if name else key
        if key not in value and key in form.__required_keys__:
            return f"{within} is missing"
        if key in value and (why := problem(value[key], hint, within)):
            return why
    return ""


def _is(value: object, form: type) -> bool:
    if form is float and type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return form in (int, float) and abs(value) < 2**63
    return type(value) is form


def _differs(value: object, rule: str, name: str) -> str:
    return f"{name} must be {rule}, got {reprlib.repr(value)}"
