"""The steps of a round that depend on what arrives: models, or masked sums of them (key `private`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fl_app.keys import Scalar
from fl_app.transport.wire import Expected, Upload
from strategies.base import hooks
from strategies.base.server_half import ServerHalf
from strategies.base.state import State
from strategies.base.turn import Turn
from strategies.base.uploads import UploadBuffer
from strategies.engine import steps
from strategies.engine.attempt import Numbers, Questions, RoundAttempt


class RoundProtocol:
    """The steps in which plain rounds (plain.py) and private rounds (private.py) differ: the buffer, and what is asked beside it.

    turn: the round whose uploads are collected.
    """

    def __init__(self, server: ServerHalf[Any]) -> None:
        self.server, self.config = server, server.config
        self.turn = Turn(server.config)
        self._moves = steps.after(server.config)

    def announcements(self) -> list[str]:
        """Return log lines for the start of the run: the facts that the server learns."""
        return []

    def sample(self, attempt: RoundAttempt, connected: list[int]) -> list[int]:
        """Return the clients that an attempt asks, sorted. Raises TooFewResults if there can be none."""
        return self.server.sample_clients(self.server.state, connected, attempt)

    def expected(self) -> Expected:
        """Return the form that an upload must have as it travels."""
        return self.server.form(self.server.state, self.turn)

    def open(self, attempt: RoundAttempt, ids: list[int]) -> UploadBuffer:
        """Return the stacks or sums that the uploads of an attempt's clients are decoded into."""
        raise NotImplementedError

    def before(self, attempt: RoundAttempt) -> Iterator[Questions]:
        """Yield the questions that precede an attempt's messages. When it goes on, the clients have answered."""
        return iter(())

    def after(self, attempt: RoundAttempt) -> Iterator[Questions]:
        """Yield the questions that follow once all uploads have come. Raises TooFewResults."""
        return iter(())

    def answer(self, attempt: RoundAttempt, client_id: int, entries: Numbers) -> bool:
        """Take a client's answer to a question. Return whether no more are needed. Raises WireError to drop it."""
        return True

    def scalars(self, attempt: RoundAttempt, client_id: int) -> Mapping[str, Scalar]:
        """Return the scalars that a client is sent beside the model it trains."""
        return {}

    def expected_from(self, client_id: int) -> Expected:
        """Return the form that one client's upload must have as it travels."""
        return self.turn.expected or self.expected()

    def check(self, client_id: int, upload: Upload) -> Upload:
        """Return a decoded upload in the form in which it is taken in. Raises WireError to drop it."""
        return upload

    def screen(self, attempt: RoundAttempt) -> Any:
        """Return the argument of `update`, made from all uploads. Raises TooFewResults, and has changed nothing then."""
        raise NotImplementedError

    def update(self, attempt: RoundAttempt, accepted: Any) -> State:
        """Let the method make its next state."""
        raise NotImplementedError

    def advance(self, attempt: RoundAttempt, accepted: Any) -> None:
        """Let the method make its next state and the steps after it change that. The server half has it from then on."""
        before = self.server.state
        after = hooks.checked_state(self.config.method, self.update(attempt, accepted))
        for step in self._moves:
            after = step(before, after)
        self.server.state = dataclasses.replace(after, round=attempt.round)

    def suspects(self) -> list[str]:
        """Return a line for each upload of the last round that may be why no client can train on its models."""
        return []

    def saved(self) -> Mapping[str, Any]:
        """Return the protocol's state, as JSON can hold it."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `saved` returned, from a checkpoint. {}: there is none."""
