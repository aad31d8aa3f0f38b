"""The hooks and functions of methods as they were called before `update`: methods of users may have them for one release."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import MethodError
from fl_app.layout import Model
from fl_app.transport.wire import Expected
from strategies.base.declared import CHANGE_MODEL, CHANGE_SUMS, Holds, Late, Means, Outliers, declares_means
from strategies.base.state import Sent, State
from strategies.base.turn import Turn, averaging
from strategies.base.uploads import Sums, Uploads
from strategies.kernels.robust import Averaging

_EARLIER = ("sample", "expected", "model_for", "download_extras", "personalize", "personalize_sums")


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
    return dataclasses.replace(
        inherited,
        streams=inherited.streams and declares_means(cls, *CHANGE_SUMS),
        sets_model=inherited.sets_model and declares_means(cls, *CHANGE_MODEL),
    )


@functools.cache
def _is_earlier(half: Any, hook: str, *earlier: str) -> bool:
    """Return whether a class overrides an earlier form of a hook, and no class derived from it the hook itself."""
    return next(name for each in half.__mro__ for name in (hook, *earlier) if name in vars(each)) != hook


class EarlierHooks:
    """The earlier form of a server half: `personalize` changes `global_model`, `personal` and `memory` in place."""

    config: RunConfig
    state: State
    attempt: Turn
    means: ClassVar[Means]
    late: ClassVar[Late]
    outliers: ClassVar[Outliers]
    holds: Holds

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Declare what a class says by earlier flags. Raises UserError for hooks that no declaration can replace."""
        super().__init_subclass__(**keywords)
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
                setattr(cls, name, dataclasses.replace(_valid(cls, name), **found))

    def begin(self, turn: Turn) -> None:
        """Begin a round: the earlier hooks, which are given none, work in it until the next one begins."""
        self.attempt = turn

    def earlier_hooks(self) -> list[str]:
        """Return the earlier names of hooks that the method's class has."""
        return [name for name in _EARLIER if getattr(type(self), name) is not getattr(EarlierHooks, name)]

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """See ServerHalf.update."""
        raise NotImplementedError

    def update_sums(self, state: State, sums: Sums, turn: Turn) -> State:
        """See ServerHalf.update_sums."""
        raise NotImplementedError

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """See ServerHalf.download."""
        raise NotImplementedError

    def sample_clients(self, state: State, client_ids: list[int], turn: Turn) -> list[int]:
        """See ServerHalf.sample_clients."""
        raise NotImplementedError

    def form(self, state: State, turn: Turn) -> Expected:
        """See ServerHalf.form."""
        raise NotImplementedError

    # What the engine calls: a hook, or its earlier form if a class overrides that one later

    def updated(self, uploads: Uploads, turn: Turn) -> State:
        """Return the next state by `update`."""
        if not self._overrides_later("update", "personalize"):
            return self.update(self.state, uploads, turn)
        self._copy_state(turn)
        self.personalize(turn.round, uploads)
        return self.state

    def updated_by_sums(self, sums: Sums, turn: Turn) -> State:
        """Return the next state by `update_sums`."""
        if not self._overrides_later("update_sums", "personalize_sums"):
            return self.update_sums(self.state, sums, turn)
        self._copy_state(turn)
        self.personalize_sums(turn.round, sums)
        return self.state

    def downloaded(self, client_id: int, turn: Turn) -> Sent:
        """Return what a client is sent by `download`."""
        if self._overrides_later("download", "model_for", "download_extras"):
            return Sent(self.model_for(client_id), self.download_extras(client_id))
        return self.download(self.state, client_id, turn)

    def chosen(self, client_ids: list[int], turn: Turn) -> list[int]:
        """Return the round's clients by `sample_clients`."""
        if self._overrides_later("sample_clients", "sample"):
            return self.sample(client_ids, turn.round)
        return self.sample_clients(self.state, client_ids, turn)

    def formed(self, turn: Turn) -> Expected:
        """Return the form of uploads by `form`."""
        return self.expected() if self._overrides_later("form", "expected") else self.form(self.state, turn)

    def _overrides_later(self, hook: str, *earlier: str) -> bool:
        half: Any = type(self)
        return _is_earlier(half, hook, *earlier)

    def _copy_state(self, turn: Turn) -> None:
        # the earlier forms change it in place
        self.state = State(self.state.model, dict(self.state.clients), dict(self.state.memory), turn.round)

    # The earlier forms

    def model_for(self, client_id: int) -> Model:
        """Return the model of `download`."""
        return self.download(self.state, client_id, self.attempt).model

    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of `download`."""
        return self.download(self.state, client_id, self.attempt).extras

    def sample(self, client_ids: list[int], round: int) -> list[int]:
        """Return the clients of `sample_clients`."""
        return self.sample_clients(
            self.state, client_ids, Turn(self.config, round, self.attempt.declared, self.attempt.connected)
        )

    def expected(self) -> Expected:
        """Return the form of `form`."""
        return self.form(self.state, self.attempt)

    def sent_to(self, client_id: int) -> Model:
        """Return the model of Turn.sent_to."""
        return self.attempt.sent_to(client_id).model

    def extras_sent_to(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of Turn.sent_to."""
        return self.attempt.sent_to(client_id).extras

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Set the state that `update` returns."""
        self.attempt.round = round
        self.state = dataclasses.replace(self.update(self.state, uploads, self.attempt), round=round)

    def personalize_sums(self, round: int, sums: Sums) -> None:
        """Set the state that `update_sums` returns."""
        self.attempt.round = round
        self.state = dataclasses.replace(self.update_sums(self.state, sums, self.attempt), round=round)

    @property
    def global_model(self) -> Model:
        """The state's model."""
        return self.state.model

    @global_model.setter
    def global_model(self, model: Model) -> None:
        self.state = dataclasses.replace(self.state, model=model)

    @property
    def personal(self) -> dict[int, Any]:
        """The state's arrays by client."""
        return self.state.clients

    @personal.setter
    def personal(self, clients: dict[int, Any]) -> None:
        self.state = dataclasses.replace(self.state, clients=clients)

    @property
    def memory(self) -> dict[str, NDArray[Any]]:
        """The state's arrays that belong to no client."""
        return self.state.memory

    @memory.setter
    def memory(self, memory: dict[str, NDArray[Any]]) -> None:
        self.state = dataclasses.replace(self.state, memory=memory)

    @property
    def round(self) -> int:
        """The state's round."""
        return self.state.round

    @round.setter
    def round(self, round: int) -> None:
        self.state = dataclasses.replace(self.state, round=round)

    @property
    def averaging(self) -> Averaging:
        """See Turn.average."""
        return self.attempt.average

    def averaging_of(self, uploads: Uploads) -> Averaging:
        """Return the mean of the key `robust`, with one choice of clients for all arrays of these uploads."""
        return averaging(Averaging(self.config.robust, self.config.byzantine_ratio), uploads)

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
