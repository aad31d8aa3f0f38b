"""The hooks and functions of methods as they were called before `update`: methods of users may have them for one release."""

from __future__ import annotations

import dataclasses
from typing import Any

from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.layout import Model
from strategies.base.state import State
from strategies.base.turn import Turn, averaging
from strategies.base.uploads import Sums, Uploads
from strategies.kernels.robust import Averaging


class EarlierHooks:
    """The earlier form of a server half: `personalize` changes `global_model`, `personal` and `memory` in place."""

    config: RunConfig
    state: State
    attempt: Turn

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """See ServerHalf.update."""
        raise NotImplementedError

    def update_sums(self, state: State, sums: Sums, turn: Turn) -> State:
        """See ServerHalf.update_sums."""
        raise NotImplementedError

    def updated(self, uploads: Uploads, turn: Turn) -> State:
        """Return the next state: by `update`, or by `personalize` if a class overrides that one later."""
        return self._next("update", "personalize", uploads, turn)

    def updated_by_sums(self, sums: Sums, turn: Turn) -> State:
        """Return the next state: by `update_sums`, or by `personalize_sums` if a class overrides that one later."""
        return self._next("update_sums", "personalize_sums", sums, turn)

    def _next(self, hook: str, earlier: str, result: Any, turn: Turn) -> State:
        order = type(self).__mro__
        newest = next(name for each in order for name in (hook, earlier) if name in vars(each))
        if newest == hook:
            state: State = getattr(self, hook)(self.state, result, turn)
            return state
        self.state = State(self.state.model, dict(self.state.clients), dict(self.state.memory), turn.round)
        getattr(self, earlier)(turn.round, result)
        return self.state

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
        return averaging(Averaging(self.config.robust, self.config.robust_liars), uploads)

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
