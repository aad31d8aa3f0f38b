"""One attempt at a round: the one object that carries its state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fl_app.errors import said
from fl_app.keys import Scalar
from fl_app.metrics import Metric, Reports
from fl_app.server import record as records
from fl_app.server.exchange import Reply
from fl_app.server.record import Record
from fl_app.wire import WireError
from strategies.base.uploads import Intake

log = logging.getLogger("corolla")


@dataclass
class Attempt:
    """One attempt at a round, or an evaluation: all that is true of it and of nothing after it.

    generation: tells the client states of attempts apart. declared: what clients said about their data when they connected.
    sent: bytes per client. failures: causes by client. earlier: attempts at the round that do not count; spoilt_by: why this one
    does not. without: whom a private round's repetition does not ask.
    """

    round: int = 0
    generation: int = 0
    intake: Intake | None = None
    declared: dict[int, Mapping[str, Scalar]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    failures: list[Record] = field(default_factory=list)
    client_notes: dict[int, Record] = field(default_factory=dict)
    round_notes: Record = field(default_factory=dict)
    clients: dict[int, Record] = field(default_factory=dict)  # of an evaluation
    earlier: list[Attempt] = field(default_factory=list)
    without: frozenset[int] = frozenset()
    spoilt_by: str = ""

    def fail(self, reply: Reply, step: str, became: str, error: Exception) -> None:
        """Note and log why a client's reply to a step is not used."""
        if not isinstance(error, WireError):  # something that no check knew of
            log.debug("client %d", reply.client_id, exc_info=error)
            error = WireError(f"malformed reply: {said(error)}")
        cause = str(error).removeprefix(f"client {reply.client_id}: ")  # a client's own errors may begin with its name
        self.failures.append({"client": reply.client_id, "cause": cause})
        log.error("%s: client %d %s: %s", step, reply.client_id, became, cause)

    def told(self) -> list[str]:
        """Return the failures, a line each."""
        return [f"client {f['client']}: {f['cause']}" for f in self.failures]

    def record(self, headline: Metric, own: Reports) -> Record:
        """The round's record; earlier attempts count with their failures and their downloads. own: the method's metrics."""
        assert self.intake is not None
        used = self.intake.metrics
        rows = {
            i: records.client_row(
                used[i], self.intake.samples(i), self.intake.upload_bytes[i], sent, self.client_notes.get(i, {})
            )
            for i, sent in self.sent.items()
            if i in used
        }
        failures = [{**f, "attempt": k} for k, attempt in enumerate(self.earlier, 1) for f in attempt.failures]
        sent_bytes = sum(sum(attempt.sent.values()) for attempt in (*self.earlier, self))
        failures += self.failures
        return records.round_record(self.round, rows, sent_bytes, self.round_notes, failures, headline, own)


class TooFewResults(Exception):
    """An attempt that does not count. absent: without whom it is to be repeated."""

    def __init__(self, text: str, absent: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.absent = frozenset(absent)
