"""One attempt at a round: the one object that carries its state."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from fl_app.errors import describe
from fl_app.layout import NO_TENSORS
from fl_app.metrics import Metric, Reports
from fl_app.server import record as records
from fl_app.server.record import Record
from fl_app.wire import Expected, WireError
from strategies.base.server_half import RoundState
from strategies.base.uploads import Intake

log = logging.getLogger("corolla")


@dataclass
class Attempt(RoundState):
    """One attempt at a round, or an evaluation: all that is true of it and of nothing after it.

    generation: tells the client states of attempts apart. intake: what its uploads are decoded into. sent: bytes per client;
    received: bytes per client of its upload, of a dropped one too. failures: causes by client. far: uploads that
    are used though they lie far from the others'. clients: an evaluation's entries.
    earlier: attempts at the round that do not count; spoilt_by: why this one does not. without: whom a private round's repetition
    does not ask.
    """

    generation: int = 0
    intake: Intake = field(default_factory=lambda: Intake.of([], Expected.of(NO_TENSORS)))
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    failures: list[Record] = field(default_factory=list)
    far: list[Record] = field(default_factory=list)
    clients: dict[int, Record] = field(default_factory=dict)
    earlier: list[Attempt] = field(default_factory=list)
    without: frozenset[int] = frozenset()
    spoilt_by: str = ""

    def fail(self, client_id: int, step: str, became: str, error: Exception) -> None:
        """Note and log why a client's reply to a step is not used."""
        # Anything but a WireError is something that no check knew of.
        if not isinstance(error, WireError):
            log.debug("client %d", client_id, exc_info=error)
            error = WireError(f"malformed reply: {describe(error)}")
        # A client's own errors may begin with its name.
        cause = str(error).removeprefix(f"client {client_id}: ")
        self.failures.append({"client": client_id, "cause": cause})
        log.error("%s: client %d %s: %s", step, client_id, became, cause)

    def failure_lines(self) -> list[str]:
        """Return the failures, a line each."""
        return [f"client {f['client']}: {f['cause']}" for f in self.failures]

    def record(self, headline: Metric, own: Reports) -> Record:
        """Return the round's record; earlier attempts count with their failures and with what travelled.

        own: the method's metrics.
        """
        intake = self.intake
        samples = dict(zip(intake.ids, map(int, intake.sizes), strict=True))
        rows = {
            i: records.client_row(
                intake.metrics[i], samples[i], intake.upload_bytes[i], sent, self.client_notes.get(i, {})
            )
            for i, sent in self.sent.items()
            if i in intake.metrics
        }
        failures = [{**f, "attempt": k} for k, attempt in enumerate(self.earlier, 1) for f in attempt.failures]
        attempts = (*self.earlier, self)
        sent_bytes = sum(sum(attempt.sent.values()) for attempt in attempts)
        received_bytes = sum(sum(attempt.received.values()) for attempt in attempts)
        failures += self.failures
        record = records.round_record(
            self.round, rows, sent_bytes, received_bytes, self.round_notes, failures, headline, own
        )
        return record | {"far": self.far} if self.far else record


class TooFewResults(Exception):
    """An attempt that does not count. absent: without whom it is to be repeated."""

    def __init__(self, text: str, absent: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.absent = frozenset(absent)
