"""Checks of a method's results: a wrong one is refused where it is made, by the names of the method and of its hook.

`checked` wraps the hooks that a class overrides. So every call is covered, also the method's own (`self.weights`).
"""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import MethodFault, listed
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.transport.wire import Expected, Upload
from strategies.base import attributes
from strategies.base.state import OnDemand, Sent, State

if TYPE_CHECKING:
    from torch import nn

Rule = Callable[[tuple[Any, ...], Any], Any]
"""A rule: (the call's arguments, its result) -> the result, in the form that the caller needs. Raises Wrong."""

# names of a message's own arrays; names travel as one text with commas
_TAKEN = frozenset({"params", "buffers", "mask", ""})
# arrays of more numbers are shown as their type and shape
_SHOWN = 8


class Wrong(Exception):
    """A result breaks its rule. Its arguments: the rule in words, and the part that breaks it."""


def fault(name: str, what: str, rule: str, got: object) -> MethodFault:
    """Return the error of a method whose hook has a wrong result. name: as errors call the method."""
    return MethodFault(key=name, rule=f"{what} {rule}, got {shown(got)}")


def checked(cls: type, half: type, rules: Mapping[str, Rule]) -> None:
    """Let the hooks that a class adds to a half check their results: its own, and those of classes that are no halves.

    rules: by hook. The hooks of a user's class also name the attributes that they set.
    """
    for hook, rule in rules.items():
        owner = next((each for each in cls.__mro__ if hook in vars(each)), None)
        if owner is cls or not (owner is None or owner in half.__mro__ or issubclass(owner, half)):
            setattr(cls, hook, _checking(vars(owner)[hook], hook, rule, rules is CLIENT))


def _checking(own: Any, hook: str, rule: Rule, client: bool) -> Callable[..., Any]:
    """Return a hook that checks its result. own: the hook as a class holds it: a function, or a static method."""
    binds = hasattr(own, "__get__")

    @functools.wraps(own)
    def called(self: Any, *args: Any, **keywords: Any) -> Any:
        before = attributes.attributes(self) if attributes.is_own(type(self)) else None
        result = (own.__get__(self, type(self)) if binds else own)(*args, **keywords)
        given = (*args, *keywords.values())
        if before is not None:
            attributes.warn_of_changed(before, self, f"{_name(self, given)}: {hook}()", client)
        try:
            return rule(given, result)
        except Wrong as wrong:
            must, got = wrong.args
        raise fault(_name(self, given), f"{hook}()", f"must return {must}", got)

    return called


def _name(half: object, given: tuple[Any, ...]) -> str:
    """Return how errors call the method of a half. The client half finds its name in a hook's arguments."""
    for one in (half, *given):
        if found := getattr(getattr(one, "config", None), "method", ""):
            return f"method {found}"
    return f"method class {type(half).__name__}"


def shown(value: object) -> str:
    """Return a value as an error prints it. Large arrays appear with their type and shape."""
    if isinstance(value, Model):
        return f"params {shown(value.params)}, buffers {shown(value.buffers)}"
    if isinstance(value, np.ndarray):
        small = value.size <= _SHOWN and value.ndim == 1
        return str(value.tolist()) if small else f"{value.dtype} {list(value.shape)}"
    return reprlib.repr(value)


# Parts of results -----------------------------------------------------------------------------------------------------


def is_numeric(value: object) -> bool:
    """Return whether a value is a NumPy array of integers, of floating-point numbers, or of True and False."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def check_kept(method: str, where: str, arrays: Mapping[str, object], *, converts: bool = False) -> None:
    """Raise MethodFault if a value that a method keeps between rounds is no array of numbers, or its name is no text.

    where: the dictionary of the arrays, as the method's author writes it. converts: numbers, lists and tensors that
    NumPy takes for such arrays are allowed too.
    """
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise MethodFault(key=f"method {method}", rule=f"{where}: names must be texts, got {shown(name)}")
        if not is_numeric(value) and not (converts and is_numeric(_converted(value))):
            got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise MethodFault(
                key=f"method {method}", rule=f"{where}[{name!r}] must be a NumPy array of numbers, got {got}"
            )


def checked_state(method: str, state: object) -> State:
    """Return the state that a method made. Raises MethodFault if it is none, or if it keeps a value that is no array of numbers."""
    if not isinstance(state, State):
        raise fault(f"method {method}", "update()", "must return a State", state)
    check_kept(method, "memory", state.memory)
    for client_id, own in state.clients.items():
        check_kept(method, f"personal[{client_id}]", own)
    return state


def _converted(value: object) -> object:
    try:
        return np.asarray(value)
    # RuntimeError: a tensor with a gradient
    except (RuntimeError, TypeError, ValueError):
        return None


def noted(half: object, hook: str, name: object, value: object) -> Any:
    """Return a note in the form that JSON can hold. NumPy's numbers become Python's.

    Raises MethodFault for a name that is no text, and for a value that is neither a number, a text, True, False or
    None, nor a list, table or array of them.
    """
    try:
        if not isinstance(name, str):
            raise Wrong("a text as its name", name)
        return _plain(value)
    except Wrong as wrong:
        must, got = wrong.args
    raise fault(_name(half, ()), f"{hook}({shown(name)}, ...)", f"needs {must}", got)


def _plain(value: object) -> Any:
    kind = type(value)
    if kind is float or kind is int or kind is str or value is None or kind is bool or is_numeric(value):
        return value
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, Mapping):
        return {_key(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, int | float | str):
        return value
    raise Wrong("a number, a text, or a list, table or array of numbers", value)


def _key(name: object) -> Any:
    if isinstance(name, np.integer):
        return name.item()
    if isinstance(name, str | int):
        return name
    raise Wrong("texts or integers as the names in a table", name)


# Rules ----------------------------------------------------------------------------------------------------------------


def _clients(given: tuple[Any, ...], result: Any) -> list[int]:
    """Return the chosen clients' ids, sorted."""
    connected: list[int] = given[0]
    try:
        no_ids = any(isinstance(i, bool) for i in result)
        ids = [] if no_ids else [operator.index(i) for i in result]
    except TypeError:
        no_ids, ids = True, []
    chosen = set(ids)
    if no_ids or len(chosen) < len(ids) or not chosen <= set(connected) or (connected and not ids):
        raise Wrong(f"some of the connected clients {listed([str(i) for i in connected])}, each once", result)
    return sorted(ids)


def _weights(given: tuple[Any, ...], result: Any) -> NDArray[np.float64]:
    n = len(given[0].sizes)
    rule = f"a number >= 0 for each of the {n} uploads, with a positive sum"
    try:
        weights = np.asarray(result, np.float64)
    except (TypeError, ValueError):
        raise Wrong(rule, result) from None
    # a single upload that is added to others (streams) may count for nothing
    has_sum = n == 1 or weights.sum() > 0
    if weights.shape != (n,) or not (weights >= 0).all() or not np.isfinite(weights).all() or not has_sum:
        raise Wrong(rule, weights)
    return weights


def _extras(given: tuple[Any, ...], result: Any) -> Mapping[str, NDArray[Any]]:
    rule = "NumPy arrays of numbers by name"
    if not isinstance(result, Mapping):
        raise Wrong(rule, result)
    for name, array in result.items():
        if not isinstance(name, str) or name in _TAKEN or "," in name:
            raise Wrong("arrays by names without commas, other than params, buffers and mask", name)
        if not is_numeric(array):
            raise Wrong(rule, {name: array})
    return result


def _sent(given: tuple[Any, ...], result: Any) -> Any:
    if not isinstance(result, Sent):
        raise Wrong("a Sent with a Model", result)
    if not isinstance(result.extras, OnDemand):
        _extras((), result.extras)
    return result


def _any(given: tuple[Any, ...], result: Any) -> Any:
    """Return the result: the engine checks it, or does not use it."""
    return result


def _of(kind: type) -> Rule:
    def rule(given: tuple[Any, ...], result: Any) -> Any:
        if not isinstance(result, kind):
            raise Wrong(f"{'an' if kind.__name__[0] in 'EU' else 'a'} {kind.__name__}", result)
        return result

    return rule


def _model(given: tuple[Any, ...], result: Any) -> Model:
    """Return a model of a client half's hook, whose last argument before `epochs` is the context."""
    layout = next((layout for one in given if (layout := getattr(one, "layout", None)) is not None), None)
    rule = "a Model" + (f" of float32 [{layout.d}] and [{layout.b}]" if layout is not None else "")
    if not isinstance(result, Model):
        raise Wrong(rule, result)
    for vector, length in ((result.params, layout and layout.d), (result.buffers, layout and layout.b)):
        if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or length not in (None, vector.size):
            raise Wrong(rule, result)
    return result


def _upload(given: tuple[Any, ...], result: Any) -> Upload:
    if not isinstance(result, Upload) or not isinstance(result.model, Model):
        raise Wrong("an Upload with a Model", result)
    try:
        _extras((), result.extras)
    except Wrong as wrong:
        raise Wrong(f"an Upload whose extras are {wrong.args[0]}", wrong.args[1]) from None
    metrics: Mapping[str, Scalar] = result.metrics
    for name, value in metrics.items():
        if not isinstance(value, bool | int | float | str):
            raise Wrong("an Upload whose metrics are numbers or texts by name", {name: value})
    return result


SERVER: Mapping[str, Rule] = {
    "sample_clients": lambda given, result: _clients(given[1:], result),
    "sample": _clients,
    "weights": _weights,
    "download": _sent,
    "download_extras": _extras,
    "form": _of(Expected),
    "expected": _of(Expected),
    **dict.fromkeys(
        (
            "summary",
            "check",
            "update",
            "sum_groups",
            "update_sums",
            "exported",
            "personalize",
            "personalize_sums",
            "model_for",
        ),
        _any,
    ),
}
"""Rules of the server half's hooks."""

CLIENT: Mapping[str, Rule] = {
    **dict.fromkeys(("merge", "global_model", "train", "personal", "finetune"), _model),
    "upload": _upload,
    "keep_local": _any,
}
"""Rules of the client half's hooks."""


def tensor_names(method: str, names: object, known: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors that a method shares. Raises MethodFault unless they are names of the model's tensors."""
    every = sorted(known)
    rule = f"must return names of the model's tensors, {listed(every)}"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise fault(f"method {method}", "shared()", rule, names)
    found = list(names)
    if unknown := [name for name in found if name not in every]:
        raise fault(f"method {method}", "shared()", rule, unknown[0])
    return frozenset(found)


def network(method: str, hook: str, made: object) -> nn.Module:
    """Return the network that a method makes around the user's model. Raises MethodFault if it is no torch.nn.Module."""
    from torch import nn

    if not isinstance(made, nn.Module):
        raise fault(f"method {method}", f"{hook}()", "must return a torch.nn.Module", made)
    return made
