"""A round as a method sees it: its number, facts about the clients, the mean over clients, and the method's notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fl_app.config import RunConfig
from fl_app.keys import Scalar
from fl_app.server.record import Record
from fl_app.transport.wire import Expected
from strategies.base import hooks
from strategies.base.state import Sent
from strategies.base.uploads import Uploads
from strategies.kernels.robust import Averaging


@dataclass
class Turn:
    """One round of a method's server half.

    - `config`: the run's.
    - `round`: the round's number, from 1.
    - `declared`: by client, the facts about its data that it sent when it connected or was first drawn (key
      `discover`).
    - `connected`: the clients that could be asked, sorted.
    - `expected`: the form that every upload of the round must have.
    - `uploads`: the uploads that `update` works on, while it runs.
    - `client_notes`, `round_notes`: values that the method adds to the round's record.
    - `started_from`: by client, what it was sent, if its upload is a late one that counts from there.
    - `downloaded`: returns what another client was sent.
    """

    config: RunConfig
    round: int = 0
    declared: Mapping[int, Mapping[str, Scalar]] = field(default_factory=dict)
    connected: list[int] = field(default_factory=list)
    expected: Expected | None = None
    uploads: Uploads | None = None
    client_notes: dict[int, Record] = field(default_factory=dict)
    round_notes: Record = field(default_factory=dict)
    started_from: dict[int, Sent] = field(default_factory=dict)
    downloaded: Callable[[int], Sent] | None = None

    def sent_to(self, client_id: int) -> Sent:
        """Return what a client's upload of this round counts from."""
        if (late := self.started_from.get(client_id)) is not None:
            return late
        assert self.downloaded is not None, "nothing has been sent"
        return self.downloaded(client_id)

    @property
    def average(self) -> Averaging:
        """The mean over clients that the key `robust` selects.

        Its choice of clients is the same for all float arrays in the round's uploads. Read it before you write into the
        stacks. In a private round each mean chooses by its own rows.
        """
        rule = Averaging(self.config.robust, self.config.byzantine_ratio)
        return rule if self.uploads is None else averaging(rule, self.uploads)

    def note(self, client_id: int, name: str, value: object) -> None:
        """Add a value to the client's entry in this round's metrics: a number, a text, or a list, table or array of numbers."""
        self.client_notes.setdefault(client_id, {})[name] = hooks.noted(self, "note", name, value)

    def note_round(self, name: str, value: object) -> None:
        """Add a value to this round's metrics: a number, a text, or a list, table or array of numbers."""
        self.round_notes[name] = hooks.noted(self, "note_round", name, value)


def averaging(rule: Averaging, uploads: Uploads) -> Averaging:
    """Return a rule whose choice of clients is made by all float arrays of these uploads."""
    extras = [stack for stack in uploads.extras.values() if stack.dtype.kind == "f"]
    return rule.of([uploads.W, uploads.B, *extras])
