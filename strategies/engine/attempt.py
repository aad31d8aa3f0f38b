"""One attempt at a round: the one object that carries its state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fl_app.errors import DIVERGED, describe
from fl_app.figures import Figure
from fl_app.keys import Scalar
from fl_app.layout import NO_TENSORS
from fl_app.metrics import Metric, Reports
from fl_app.server import matrices
from fl_app.server import record as records
from fl_app.server.matrices import Between
from fl_app.server.record import Record
from fl_app.server.run_folder import called
from fl_app.transport.wire import Expected, WireError
from strategies.base.server_half import Turn
from strategies.base.state import UploadBuffer
from strategies.engine.late import PendingUpload

if TYPE_CHECKING:
    from fl_app.privacy.keyring import Statements

log = logging.getLogger("corolla")

Numbers = Mapping[str, Scalar]
Questions = tuple[str, Mapping[int, Numbers]]
"""A task, and by client the scalars of its question."""


@dataclass
class RoundAttempt(Turn):
    """One attempt at a round, or one step that asks clients about their models: all state that ends with it.

    - `name`: in the display of progress.
    - `generation`: distinguishes the client states of different attempts.
    - `began`: second of the monotonic clock.
    - `buffer`: the stacks or sums that uploads are decoded into.
    - `sent`: bytes sent to each client that is asked. `received`: bytes of each client's upload, dropped ones included.
    - `failures`: all failures. `causes`: each client's last cause. `heads`: how the logged causes begin.
    - `outliers`: far uploads that are used.
    - `arrivals`: when each client's work ended.
    - `states`: by client, the state that it is told to continue from.
    - `working`: clients that still worked for an earlier round when it began. `held`: bytes of the models that wait to arrive.
    - `pending`: by client, its upload of the round. `ended`: clients that have answered or failed. `missed`: pending uploads
      of the others, when the round closed.
    - `clients`: an evaluation's entries. `hashes`: of the arrays it sent, where clients send no hashes of their models.
    - `between`: the method's notes between clients, after `record`.
    - `earlier`: attempts at the same round that do not count. `spoilt_by`: why this one does not count.
    - `without`: clients that a private round does not ask. `absent`: those that its repetition leaves out as well.
    - `statements`: tells whether clients of a private run have signed something.
    - `may_close`: returns whether the attempt has enough answers. None: it waits for all.
    """

    name: str = ""
    generation: int = 0
    began: float = field(default_factory=time.monotonic)
    buffer: UploadBuffer = field(default_factory=lambda: UploadBuffer.of([], Expected.of(NO_TENSORS)))
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    failures: list[Record] = field(default_factory=list)
    causes: dict[int, str] = field(default_factory=dict)
    heads: set[str] = field(default_factory=set)
    outliers: list[Record] = field(default_factory=list)
    arrivals: list[Record] = field(default_factory=list)
    states: dict[int, dict[str, Scalar]] = field(default_factory=dict)
    working: frozenset[int] = frozenset()
    held: int = 0
    ended: set[int] = field(default_factory=set)
    missed: dict[int, PendingUpload] = field(default_factory=dict)
    pending: dict[int, PendingUpload] = field(default_factory=dict)
    clients: dict[int, Record] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    between: dict[str, Between] = field(default_factory=dict)
    earlier: list[RoundAttempt] = field(default_factory=list)
    without: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    statements: Statements | None = None
    may_close: Callable[[], bool] | None = None
    spoilt_by: str = ""

    def fail(self, client_id: int, step: str, became: str, error: Exception) -> None:
        """Note and log why a client's reply to a step is not used."""
        cause = cause_of(client_id, error)
        self.failures.append({"client": client_id, "cause": cause})
        # an attempt that is repeated fails for the same causes as a rule
        known = any(attempt.causes.get(client_id) == cause for attempt in self.earlier)
        self.causes[client_id] = cause
        if known:
            log.debug("%s: client %d %s again: %s", step, client_id, became, cause)
            return
        # when training diverges, many clients need the same long advice: the log has it once, the record for each
        head = cause.partition("; ")[0]
        shown = head if head in self.heads and head.startswith(DIVERGED) else cause
        self.heads.add(head)
        log.error("%s: client %s %s: %s", step, self.called(client_id), became, shown)

    def called(self, client_id: int) -> str:
        """Return a client's number, with its name if it has one: `3 (Bern)`."""
        return called(client_id, self.declared)

    def record(self, table: Sequence[Metric], own: Reports, figures: Sequence[Figure] = ()) -> Record:
        """Return the round's record. It includes the failures and the bytes of earlier attempts.

        table: the metrics of the run (fl_app.metrics.of_training). own: the method's. figures: those that the method
        declares. Its notes between clients are in `between` afterwards, and not in the record.
        """
        buffer = self.buffer
        used = [i for i in buffer.ids if i in buffer.metrics]
        notes = matrices.divided(self.round_notes, self.client_notes, used, figures)
        self.between = notes.between
        # with many clients their lists of others take long to walk through, at each collection of garbage
        self.round_notes, self.client_notes = {}, {}
        samples = dict(zip(buffer.ids, map(int, buffer.sizes), strict=True))
        rows = {
            i: records.client_row(
                buffer.metrics[i], samples[i], buffer.upload_bytes[i], self.sent.get(i, 0), notes.clients[i]
            )
            for i in used
        }
        failures = [{**f, "attempt": k} for k, attempt in enumerate(self.earlier, 1) for f in attempt.failures]
        attempts = (*self.earlier, self)
        sent_bytes = sum(sum(attempt.sent.values()) for attempt in attempts)
        received_bytes = sum(sum(attempt.received.values()) for attempt in attempts)
        failures += self.failures
        record = records.round_record(self.round, rows, sent_bytes, received_bytes, notes.round, failures, table, own)
        return record | {"far": self.outliers} if self.outliers else record


def cause_of(client_id: int, error: Exception) -> str:
    """Return why a client's reply is not used, in words."""
    # Any other exception comes from a fault that no check covers.
    if not isinstance(error, WireError):
        log.debug("client %d", client_id, exc_info=error)
        error = WireError(f"malformed reply: {describe(error)}")
    # A client's own errors may begin with its name.
    return str(error).removeprefix(f"client {client_id}: ")


class TooFewResults(Exception):
    """An attempt that does not count. absent: clients that its repetition leaves out."""

    def __init__(self, text: str, absent: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.absent = frozenset(absent)


def failure_lines(attempts: list[RoundAttempt]) -> list[str]:
    """Return one line for each failure in the attempts at a round, sorted by client. Equal lines appear once."""
    failures = [(attempt, failure) for attempt in attempts for failure in attempt.failures]
    failures.sort(key=lambda found: int(found[1]["client"]))
    return list(
        dict.fromkeys(
            f"client {attempt.called(failure['client'])}: {failure['cause']}" for attempt, failure in failures
        )
    )
