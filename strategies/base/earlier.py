"""The hooks and functions of methods as they were called before `update`: methods of users may have them for one release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import MethodError
from fl_app.layout import Model
from strategies.base.declared import CHANGE_MODEL, CHANGE_SUMS, Means, declares_means
from strategies.base.state import Sent, State, Sums, Uploads

# by declaration: the earlier flags and hooks, and what they are called in it
_FLAGS: dict[str, dict[str, str]] = {
    "means": {"robust": "rules", "streams": "streams", "summed": "summed", "averages": "sets_model"},
    "late": {"reads_moves": "reads_moves"},
    "outliers": {"compared_extras": "extras", "spread": "tolerance"},
    "holds": {"keeps_models": "models", "made_stacks": "made", "kept_stacks": "kept", "memory_bytes": "memory"},
}
_GONE_SERVER = {
    **dict.fromkeys(("compared", "compared_with"), "outliers = Outliers(...) in the class"),
    **dict.fromkeys(("held_by", "sends_parts"), "submodel=Submodel(...) of the Method"),
    **dict.fromkeys(("held_models", "exported_layout"), "exported=Exported(...) of the Method"),
}
_GONE_CLIENT = {"held": "submodel=Submodel(...) of the Method", "export": "exported=Exported(...) of the Method"}
AGE, LATE, MOVED = "aged", "never", "moved"
"""The names in the earlier flag `not_late`."""


def refuse_gone(cls: type, gone: Mapping[str, str]) -> None:
    """Raise UserError for a hook or a flag that is gone, by the name of the declaration that replaces it."""
    for name, now in gone.items():
        if name in vars(cls):
            raise MethodError(f"method class {cls.__name__}: {name}: {now} declares it (docs/methods-howto.md)")


def declarations_of(update: type) -> dict[str, Any]:
    """Return what a client half says by earlier flags and hooks, as the fields of its Method. Raises UserError for gone ones."""
    refuse_gone(update, _GONE_CLIENT)
    names = ("reports", "tested", "local_from_file")
    return {name: getattr(update, name) for name in names if hasattr(update, name)}


def _valid(cls: type, name: str) -> Any:
    """Return a declaration that a class inherits, without what its overrides make void."""
    inherited = getattr(cls, name)
    if not isinstance(inherited, Means):
        return inherited
    return replace(
        inherited,
        streams=inherited.streams and declares_means(cls, *CHANGE_SUMS),
        sets_model=inherited.sets_model and declares_means(cls, *CHANGE_MODEL),
    )


def adapt(cls: type) -> None:
    """Declare what a class says by earlier flags, and let each hook of which it has the earlier form call that one.

    Raises UserError for hooks that no declaration can replace.
    """
    own: dict[str, Any] = dict(vars(cls))
    refuse_gone(cls, _GONE_SERVER)
    if "model_for" in own and not own.get("makes_models", False):
        own.setdefault("keeps_models", True)
    if "summed" in own:
        own["summed"] = lambda server, upload, turn: server.summed(upload)
    if "memory_bytes" in own:
        own["memory_bytes"] = lambda server: server.memory_bytes()
    for name, flags in _FLAGS.items():
        found = {new: own[old] for old, new in flags.items() if old in own}
        if name == "late":
            found |= own.get("not_late", {})
        if found and name not in own:
            setattr(cls, name, replace(_valid(cls, name), **found))
    for hook, (adapter, *names) in _ADAPTERS.items():
        if next(name for each in cls.__mro__ for name in (hook, *names) if name in vars(each)) != hook:
            setattr(cls, hook, adapter)


def _changing(earlier: str) -> Any:
    """Return a hook that lets its earlier form change a copy of the state in place."""

    def hook(half: Any, state: State, came: Uploads | Sums, turn: Any) -> State:
        half.state = State(state.model, dict(state.clients), dict(state.memory), turn.round)
        getattr(half, earlier)(turn.round, came)
        return cast(State, half.state)

    return hook


_ADAPTERS: dict[str, tuple[Any, ...]] = {
    "update": (_changing("personalize"), "personalize"),
    "update_sums": (_changing("personalize_sums"), "personalize_sums"),
    "download": (
        lambda half, state, client_id, turn: Sent(half.model_for(client_id), half.download_extras(client_id)),
        "model_for",
        "download_extras",
    ),
    "sample_clients": (lambda half, state, client_ids, turn: half.sample(client_ids, turn.round), "sample"),
    "form": (lambda half, state, turn: half.expected(), "expected"),
}
"""By hook, what calls its earlier forms, and their names."""
NAMES = tuple(name for _, *names in _ADAPTERS.values() for name in names)
"""The earlier names of hooks."""


class _OfState:
    """A field of the state under its earlier name: it may be set."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __get__(self, half: Any, owner: type) -> Any:
        return self if half is None else getattr(half.state, self.field)

    def __set__(self, half: Any, value: Any) -> None:
        half.state = replace(half.state, **{self.field: value})


class EarlierHooks:
    """The earlier form of a server half: `personalize` changes `global_model`, `personal` and `memory` in place."""

    config: RunConfig
    state: State
    # the round in which the earlier hooks work, which are given none
    attempt: Any
    global_model, personal, memory, round = map(_OfState, ("model", "clients", "memory", "round"))

    def _hook(self, name: str) -> Any:
        """Return a hook as it is below the classes that have an earlier form of it."""
        half: Any = type(self)
        adapted = [each for each in half.__mro__ if vars(each).get(name) is _ADAPTERS[name][0]]
        return getattr(super(adapted[-1], self) if adapted else self, name)

    # The earlier forms

    def model_for(self, client_id: int) -> Any:
        """Return the model of `download`."""
        return self._hook("download")(self.state, client_id, self.attempt).model

    def download_extras(self, client_id: int) -> Any:
        """Return the arrays of `download`."""
        return self._hook("download")(self.state, client_id, self.attempt).extras

    def sample(self, client_ids: list[int], round: int) -> Any:
        """Return the clients of `sample_clients`."""
        return self._hook("sample_clients")(self.state, client_ids, replace(self.attempt, round=round))

    def expected(self) -> Any:
        """Return the form of `form`."""
        return self._hook("form")(self.state, self.attempt)

    def sent_to(self, client_id: int) -> Any:
        """Return the model of Turn.sent_to."""
        return self.attempt.sent_to(client_id).model

    def extras_sent_to(self, client_id: int) -> Any:
        """Return the arrays of Turn.sent_to."""
        return self.attempt.sent_to(client_id).extras

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Set the state that `update` returns."""
        self.attempt.round = round
        self.state = replace(self._hook("update")(self.state, uploads, self.attempt), round=round)

    def personalize_sums(self, round: int, sums: Sums) -> None:
        """Set the state that `update_sums` returns."""
        self.attempt.round = round
        self.state = replace(self._hook("update_sums")(self.state, sums, self.attempt), round=round)

    @property
    def averaging(self) -> Any:
        """See Turn.average."""
        return self.attempt.average

    def averaging_of(self, uploads: Uploads) -> Any:
        """Return the mean of the key `robust`, with one choice of clients for all arrays of these uploads."""
        return replace(self.attempt, uploads=uploads).average

    def keep_for(self, client_id: int, **arrays: NDArray[Any]) -> None:
        """Keep a client's arrays in `personal`."""
        self.personal[client_id] = arrays

    def last_personal(self, client_id: int) -> Model:
        """See State.model_of."""
        return self.state.model_of(client_id)

    def note(self, client_id: int, name: str, value: object) -> None:
        """See Turn.note."""
        self.attempt.note(client_id, name, value)

    def note_round(self, name: str, value: object) -> None:
        """See Turn.note_round."""
        self.attempt.note_round(name, value)
